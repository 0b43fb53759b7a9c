"""Estimates the results of packing from a sample of the records; writes nothing.

The sample is tokenized once; then each combination of pack size, layout and strategy is planned
from lengths alone. Counts are scaled to all records with ratio estimates, whose errors come from
the differences of neighbouring places of the sample.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packstore.config import BatchConfig, PackConfig
from packstore.config.reading import large_steps_warning
from packstore.errors import ConfigError, InputError, sentence
from packstore.etl.sources import RecordExampleReader, open_examples
from packstore.format import seeds
from packstore.format.arrays import Bool, Examples, Int32, Int64, Tally, to_offsets
from packstore.format.schema import LAYOUTS
from packstore.io.inputs.sampling import SAMPLE_BLOCK_BYTES, Sampling
from packstore.pack.algorithms import STRATEGIES as KNOWN
from packstore.pack.layout import sizes
from packstore.pack.plan import MAX_PACK_SIZE, plan
from packstore.progress import Progress

log = logging.getLogger("packstore")

PACK_SIZES = (2048, 4096, 8192, 16384, 32768)
STRATEGIES = ("pool",)

SAMPLE = 20_000
"""Default maximum of sampled records; the error of the fill rate is then about 0.1 %."""

ENOUGH_FILL = 0.99
ENOUGH_RECORDS = 0.999
"""Minimum fill rate of a recommended pack size, and the minimum fraction of records that it keeps,
relative to the combination that keeps most."""

STEPS_TRIED = 10_000
"""Packs, of those of the sample in turn, that are cut into steps."""

UNSEEN = 3
"""95 % upper limit of hits in a sample without any (rule of three); scaled to all records."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A combination of settings with its estimated results; counts are scaled to all records."""

    pack_size: int
    layout: str
    strategy: str
    packs: int
    examples: int
    overlong: int  # examples that do not fit
    # two standard errors; 0 if all records were read, None if only the first ones were
    packs_error: int | None
    overlong_error: int | None
    fill_rate: float  # tokens / (packs * pack_size)
    fill_but_emptiest: float  # without the emptiest pack, which a small sample leaves open
    aligned_fill_rate: float  # with sequences padded to `pad_to_multiple`
    examples_per_pack: float  # mean
    tokens_saved: float  # fraction of the tokens of layout ``concat`` that this layout saves
    steps: int  # optimizer steps of an epoch
    examples_per_step: float  # mean
    largest_step: int  # examples


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """The result of :func:`estimate`."""

    kind: str  # ``preference``, ``sft`` or ``scored``
    tally: Tally  # of the sample's records, without those too long
    sample: Sampling
    scale: float  # number of all records, divided by those of the sample
    choices: tuple[Choice, ...]  # all combinations
    recommended: Choice | None  # the smallest pack size that drops few records, if any
    example_tokens: Mapping[str, Int32]  # layout -> `[E]`, tokens of each example of the sample
    sequence_tokens: Int32  # `[S]`, logical tokens of each sequence of the sample

    @property
    def best(self) -> Choice:
        """The recommended choice, or else the fullest."""
        return self.recommended or max(self.choices, key=lambda choice: choice.fill_rate)


def estimate(
    source: Any,
    tokenizer: Any = None,
    *,
    pack_sizes: Sequence[int] | None = None,
    layouts: Sequence[Literal["concat", "shared_prefix"]] | None = None,
    strategies: Sequence[str] | None = None,
    sample: int = SAMPLE,
    records: int | None = None,
    world_size: int = 1,
    packs_per_batch: int | None = None,
    accumulation: int = 1,
    examples_per_step: int | None = None,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Estimate:
    """Tokenizes a sample of the records of `source` and plans every combination of settings.

    Reads the whole input; of an iterable of unknown length, only the first records.

    Args:
        source, tokenizer, storage_options: see :func:`packstore.pack`.
        pack_sizes, layouts, strategies: values to combine. None: the settings `pack_size`,
            `layout` and `strategy` if given, else `PACK_SIZES`, `LAYOUTS` and `STRATEGIES`.
        sample: maximum number of sampled records.
        records: total number of records to scale counts to, if larger than the input.
        world_size: ranks of a training run, for the steps of an epoch.
        packs_per_batch, accumulation, examples_per_step: see :class:`packstore.config.BatchConfig`;
            logs a warning where steps are far larger.
        config: other settings of :func:`packstore.pack`. Its `pack_size`, `layout` and `strategy`
            are not used; `seed` also decides the sample.
        progress: called with the number of records read.
        settings: fields of :class:`packstore.PackConfig`, which override `config`.

    Raises:
        ConfigError: a setting is not supported here, is out of range, or is given twice.
        InputError: no record could be used.
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    batching = BatchConfig(
        packs_per_batch=packs_per_batch,
        accumulation=accumulation,
        examples_per_step=examples_per_step,
    )
    for name, value in (("sample", sample), ("world_size", world_size)):
        if value < 1:
            raise ConfigError(sentence(f"setting {name}", "must be at least 1", str(value)))
    axes = (
        sorted(set(_tried("pack_size", pack_sizes, settings, PACK_SIZES))),
        _tried("layout", layouts, settings, LAYOUTS),
        _tried("strategy", strategies, settings, STRATEGIES),
    )
    base = PackConfig.of(config, **settings)
    if base.selects:
        rule = "must not be set, as an estimate counts all records"
        raise ConfigError(sentence("settings dedup and validation_fraction", rule))
    combinations = [
        replace(base, pack_size=pack_size, layout=layout, strategy=KNOWN.check(strategy))
        for pack_size, layout, strategy in itertools.product(*axes)
    ]
    truncates = base.on["overlong"].startswith("truncate")
    limitless = base
    if not truncates:  # no record is too long for all combinations
        on = {**base.on, "overlong": "drop"}
        limitless = replace(base, pack_size=MAX_PACK_SIZE, max_length=None, on=on)
    options = dict(storage_options or {})
    reader = open_examples(source, tokenizer, limitless, options, SAMPLE_BLOCK_BYTES)
    report = None if progress is None else lambda n: progress("read", n, None, "records")
    drawn = reader.sample(sample, base.seed, report)
    measured = Measured(("concat", *axes[1]), base.pad_to_multiple, reader)

    @functools.cache
    def measured_for(pack_size: int, layout: Any) -> Measured:
        """Measures the examples, truncated for a pack size and layout."""
        if not (truncates and isinstance(reader, RecordExampleReader)):
            return measured
        truncated = reader.sized(pack_size, layout)
        return Measured(("concat", layout), base.pad_to_multiple, truncated)

    result = estimate_of(
        reader.kind,
        measured,
        drawn,
        [(c, measured_for(c.pack_size, c.layout)) for c in combinations],
        total=max(drawn.records, records or drawn.total or 0),
        batching=batching,
        world_size=world_size,
    )
    if examples_per_step is not None:
        _warn_of_large_steps(result, examples_per_step, world_size)
    return result


def _warn_of_large_steps(result: Estimate, wanted: int, world_size: int) -> None:
    best = result.best
    tokens = result.example_tokens[best.layout]
    longest = int(tokens[tokens <= best.pack_size].max(initial=0))
    steps = best.examples_per_step, best.largest_step
    if text := large_steps_warning(wanted, *steps, world_size, best.pack_size, longest):
        log.warning("pack size %d, layout %s: %s", best.pack_size, best.layout, text)


def estimate_of(
    kind: str,
    measured: Measured,
    drawn: Sampling,
    combinations: Iterable[tuple[PackConfig, Measured]],
    *,
    total: int,
    batching: BatchConfig | None = None,
    world_size: int = 1,
) -> Estimate:
    """Plans all combinations; recommends the smallest pack size that fills well and keeps most."""
    tally = measured.tally
    tally.dropped.pop("overlong", None)
    if not tally.kept:
        raise InputError("no record of the sample could be used: run `packstore doctor` on it.")
    choices = [
        _Projection(sample, drawn, total).choice(config, batching or BatchConfig(), world_size)
        for config, sample in combinations
    ]
    enough = ENOUGH_RECORDS * max(c.examples for c in choices)
    # Without the emptiest pack: that of a sample stays open, unlike the last one of a dataset.
    good = [c for c in choices if c.fill_but_emptiest >= ENOUGH_FILL and c.examples >= enough]
    return Estimate(
        kind=kind,
        tally=tally,
        sample=drawn,
        scale=total / drawn.records,
        choices=tuple(choices),
        recommended=min(
            good, key=lambda c: (c.pack_size, -c.tokens_saved, -c.fill_rate), default=None
        ),
        example_tokens={layout: measured.values(layout) for layout in measured.layouts},
        sequence_tokens=measured.values("sequence"),
    )


class Measured:
    """Sizes of the examples of a sample, added place by place."""

    def __init__(
        self, layouts: Iterable[str], multiple: int, parts: Iterable[tuple[Examples, Tally]] = ()
    ) -> None:
        self.tally = Tally()
        self.read: list[int] = []  # records of each place
        self.overlong: list[int] = []  # of them, those too long even after truncation
        self.layouts, self._multiple = tuple(dict.fromkeys(layouts)), multiple
        self._parts: dict[str, list[Int32]] = defaultdict(list)
        for examples, tally in parts:
            self.add(examples, tally)

    def add(self, examples: Examples, tally: Tally) -> None:
        """Adds the examples of the next place."""
        self._parts["place"].append(np.full(examples.num_examples, len(self.read), np.int32))
        self._parts["sequence"].append(examples.lengths)
        starts = examples.example_offsets[:-1]
        if len(starts):
            self._parts["longest"].append(np.maximum.reduceat(examples.lengths, starts))
        for layout in self.layouts:
            self._parts[layout].append(sizes(examples, layout))
            self._parts[f"padded {layout}"].append(sizes(examples, layout, self._multiple))
        self.read.append(tally.read)
        self.overlong.append(tally.dropped["overlong"])
        self.tally.add(tally)

    def values(self, name: str) -> Int32:
        """Returns int32 `[E]` (place, longest, tokens in a layout, padded) or `[S]` (sequence)."""
        return np.concatenate([np.empty(0, np.int32), *self._parts[name]])


class _Projection:
    """Scales sums over a sample to all records."""

    def __init__(self, measured: Measured, drawn: Sampling, total: int) -> None:
        self._measured, self._drawn, self._scale = measured, drawn, total / drawn.records
        self._place, self._read = measured.values("place"), np.array(measured.read)
        self._known = self._read.sum() / total
        weights = np.full(len(self._read), float(drawn.run))
        weights[-1] = drawn.last_run
        self._weights = weights / (weights @ self._read / total)

    def choice(self, config: PackConfig, batching: BatchConfig, world_size: int) -> Choice:
        """Plans one combination."""
        measured, layout = self._measured, config.layout
        tokens, padded = measured.values(layout), measured.values(f"padded {layout}")
        longest = measured.values("longest")
        fits: Bool = (padded <= config.pack_size) & (longest <= config.sequence_limit)
        packing = plan(padded[fits], config=config)
        packing = replace(packing, tokens=int(tokens[fits].sum()))
        examples, _ = self._total(fits)
        overlong, overlong_error = self._total(~fits, np.array(measured.overlong))
        stored, stored_error = self._total(tokens * fits)
        packs_per_token = packing.num_packs / max(packing.tokens, 1)
        packs = round(stored * packs_per_token)
        # The plan of all records may have fewer packs over the tokens than that of a few.
        spare = max(packing.num_packs - packing.aligned_tokens // packing.pack_size, 1)
        packs_error = round(stored_error * packs_per_token + spare * (self._scale - 1))
        most_overlong = round(max(overlong_error, UNSEEN * (self._scale - 1)))
        from_all = self._drawn.total is not None
        fullest = packing.fill_rate
        if packing.num_packs > 1:
            by_pack = np.add.reduceat(
                tokens[fits][packing.order], packing.offsets[:-1], dtype=np.int64
            )
            room = (packing.num_packs - 1) * packing.pack_size
            fullest = float((by_pack.sum() - by_pack.min()) / room)
        steps, step_mean, largest = _steps(np.diff(packing.offsets), packs, batching, world_size)
        return Choice(
            pack_size=packing.pack_size,
            layout=layout,
            strategy=packing.strategy,
            packs=packs,
            examples=round(examples),
            overlong=round(overlong),
            packs_error=packs_error if from_all else None,
            overlong_error=most_overlong if from_all else None,
            fill_rate=packing.fill_rate,
            fill_but_emptiest=fullest,
            aligned_fill_rate=packing.aligned_fill_rate,
            examples_per_pack=packing.examples_per_pack[1],
            tokens_saved=float(1 - tokens.sum() / max(measured.values("concat").sum(), 1)),
            steps=steps,
            examples_per_step=step_mean,
            largest_step=largest,
        )

    def _total(self, values: npt.NDArray[Any], more: Any = 0) -> tuple[float, float]:
        """Estimates a sum over all records of `values` `[E]` and `more` `[B]`; two errors of it."""
        by_place = np.bincount(self._place, values, len(self._read)) + more
        weights, total = self._weights, float(self._weights @ by_place)
        if self._known >= 1:
            return total, 0.0
        if len(by_place) < 2:
            return total, 2 * total
        off = weights * (by_place - total / (weights @ self._read) * self._read)
        variance = np.sum(np.diff(off) ** 2) / (2 * (len(off) - 1))
        return total, 2 * float(np.sqrt((1 - self._known) * len(off) * variance))


def _steps(
    examples: Int64, packs: int, batching: BatchConfig, world_size: int
) -> tuple[int, float, int]:
    """Steps of `packs` packs like those of the sample, and their mean and most examples."""
    wanted = batching.examples_per_step or 0
    least = world_size * (1 if wanted else batching.width * batching.accumulation)
    tried = min(packs, max(STEPS_TRIED, 10 * least))
    if not tried or not len(examples):
        return 0, 0.0, 0
    offsets = to_offsets(np.resize(examples[seeds.permutation(len(examples), 0, "steps")], tried))
    most = np.searchsorted(offsets, offsets[:-1] + wanted, side="right") - 1
    ends = np.minimum(np.maximum(most, np.arange(tried) + least), tried).tolist()
    edges = [0]
    while edges[-1] < tried:
        edges.append(ends[edges[-1]])
    sizes_of_steps, steps = np.diff(offsets[edges]), len(edges) - 1
    return -(-steps * packs // tried), float(sizes_of_steps.mean()), int(sizes_of_steps.max())


def _tried(
    name: str, asked: Sequence[Any] | None, settings: Mapping[str, Any], usual: Sequence[Any]
) -> Sequence[Any]:
    """Returns the values of a setting to combine."""
    if asked is not None and not asked:
        raise ConfigError(sentence(f"values of {name}", "must be at least one", "none"))
    if name not in settings:
        return usual if asked is None else asked
    if asked is not None:
        found = f"{settings[name]!r}, and {list(asked)} to try"
        raise ConfigError(sentence(f"setting {name}", "must be given once", found))
    return (settings[name],)
