"""Projects the packs of all records from the lengths of a sample.

Each combination of settings is planned from lengths alone. Counts are scaled to all
records with ratio estimates, whose errors come from the differences of neighbouring
places of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.config import BatchConfig, PackConfig
from packstore.etl.reports.place import Finding
from packstore.format import seeds
from packstore.format.arrays import Bool, Examples, Int32, Int64, Tally, to_offsets
from packstore.io.dataset.steps import cut_by_examples
from packstore.io.inputs.sampling import Sampling
from packstore.pack.layout import sizes
from packstore.pack.plan import Plan, plan

ENOUGH_FILL = 0.99
ENOUGH_RECORDS = 0.999
"""Minimum fill rate of a recommended pack size, and the minimum fraction of records
that it keeps, relative to the combination that keeps most.
"""

STEPS_TRIED = 10_000
"""Packs, of those of the sample in turn, that are cut into steps."""

UNSEEN = 3
"""95 % upper limit of hits in a sample without any (rule of three); scaled to all
records.
"""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A combination of settings with its estimated results; counts are scaled to all
    records.
    """

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
    fill_but_emptiest: (
        float  # without the emptiest pack, which a small sample leaves open
    )
    aligned_fill_rate: float  # with sequences padded to `pad_to_multiple`
    examples_per_pack: float  # mean
    tokens_saved: (
        float  # fraction of the tokens of layout ``concat`` that this layout saves
    )
    steps: int  # optimizer steps of an epoch
    examples_per_step: float  # mean
    largest_step: int  # examples


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """The result of one pass over records, or a sample of them."""

    kind: str  # ``preference``, ``sft`` or ``scored``
    tally: Tally  # of the records that were read
    sample: Sampling | None = None  # None: all records were read
    findings: Sequence[Finding] = ()  # of :func:`doctor`, problems first
    # of :func:`estimate`:
    scale: float = 1.0  # number of all records, divided by those of the sample
    choices: Sequence[Choice] = ()  # all combinations
    # layout -> tokens of each example of the sample, `[E]`; ``sequence`` -> of each
    # sequence, `[S]`
    lengths: Mapping[str, Int32] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if no finding is a problem."""
        return all(finding.ok for finding in self.findings)

    @property
    def records(self) -> int:
        """Records that were read."""
        return self.tally.read

    @property
    def forms(self) -> dict[str, int]:
        """Form or adapter -> records that it read, the most frequent first; own names:
        ``none``.
        """
        return {name or "none": count for name, count in self.tally.forms.most_common()}

    @property
    def recommended(self) -> Choice | None:
        """The smallest pack size that fills well and drops few records, if any."""
        enough = ENOUGH_RECORDS * max((c.examples for c in self.choices), default=0)
        # Without the emptiest pack: that of a sample stays open, unlike the last one of
        # a dataset.
        good = [c for c in self.choices if c.fill_but_emptiest >= ENOUGH_FILL]
        return min(
            (c for c in good if c.examples >= enough),
            key=lambda c: (c.pack_size, -c.tokens_saved, -c.fill_rate),
            default=None,
        )

    @property
    def best(self) -> Choice:
        """The recommended choice, or else the fullest."""
        return self.recommended or max(
            self.choices, key=lambda choice: choice.fill_rate
        )


class Projection:
    """Lengths of a sample, added place by place, and what follows for all `total`
    records.
    """

    def __init__(
        self,
        sample: Sampling,
        total: int,
        layouts: Iterable[str],
        multiple: int,
        parts: Iterable[tuple[Examples, Tally]] = (),
    ) -> None:
        self._sample, self._total = sample, total
        self._scale = total / sample.records
        self._layouts = tuple(dict.fromkeys(("concat", *layouts)))
        self._multiple = multiple
        self._parts: list[dict[str, Int32]] = []
        self._records: list[
            tuple[int, int]
        ] = []  # of each place: read, too long when tokenized
        for examples, tally in parts:
            self.add(examples, tally)

    def add(self, examples: Examples, tally: Tally) -> None:
        """Adds the examples of the next place."""
        part = {
            "place": np.full(examples.num_examples, len(self._parts), np.int32),
            "sequence": examples.lengths,
            "longest": np.maximum.reduceat(
                examples.lengths, examples.example_offsets[:-1]
            ),
        }
        for layout in self._layouts:
            part[layout] = sizes(examples, layout)
            part[f"padded {layout}"] = sizes(examples, layout, self._multiple)
        self._parts.append(part)
        self._records.append((tally.read, tally.dropped["overlong"]))

    @cached_property
    def _columns(self) -> dict[str, Int32]:
        """The columns of all parts, lengths in tokens: `[S]` for ``sequence``, else
        `[E]`.
        """
        return {
            name: np.concatenate([part[name] for part in self._parts])
            for name in self._parts[0]
        }

    def choice(
        self, config: PackConfig, batching: BatchConfig, world_size: int
    ) -> Choice:
        """Plans one combination."""
        tokens, padded = (
            self._columns[config.layout],
            self._columns[f"padded {config.layout}"],
        )
        longest = self._columns["longest"]
        fits: Bool = (padded <= config.pack_size) & (longest <= config.sequence_limit)
        packing = plan(padded[fits], config=config)
        packing = replace(packing, tokens=int(tokens[fits].sum()))
        examples, _ = self._sum(fits)
        overlong, overlong_error = self._sum(~fits, np.array(self._records)[:, 1])
        stored, stored_error = self._sum(tokens * fits)
        packs_per_token = packing.num_packs / max(packing.tokens, 1)
        packs = round(stored * packs_per_token)
        # The plan of all records may have fewer packs over the tokens than that of a
        # few.
        spare = max(packing.num_packs - packing.aligned_tokens // packing.pack_size, 1)
        packs_error = round(stored_error * packs_per_token + spare * (self._scale - 1))
        most_overlong = round(max(overlong_error, UNSEEN * (self._scale - 1)))
        from_all = self._sample.total is not None
        steps, step_mean, largest = _steps(
            np.diff(packing.offsets), packs, batching, world_size
        )
        return Choice(
            pack_size=packing.pack_size,
            layout=config.layout,
            strategy=packing.strategy,
            packs=packs,
            examples=round(examples),
            overlong=round(overlong),
            packs_error=packs_error if from_all else None,
            overlong_error=most_overlong if from_all else None,
            fill_rate=packing.fill_rate,
            fill_but_emptiest=_fill_but_emptiest(packing, tokens[fits]),
            aligned_fill_rate=packing.aligned_fill_rate,
            examples_per_pack=packing.examples_per_pack[1],
            tokens_saved=float(
                1 - tokens.sum() / max(self._columns["concat"].sum(), 1)
            ),
            steps=steps,
            examples_per_step=step_mean,
            largest_step=largest,
        )

    def planned(self, report: Report, choices: Sequence[Choice]) -> Report:
        """Returns a report on the sample, with choices."""
        lengths = {name: self._columns[name] for name in (*self._layouts, "sequence")}
        return replace(
            report,
            sample=self._sample,
            scale=self._scale,
            choices=choices,
            lengths=lengths,
        )

    def _sum(self, values: npt.NDArray[Any], more: Any = 0) -> tuple[float, float]:
        """Estimates a sum over all records of `values` `[E]` and `more` `[B]`; two
        errors of it.
        """
        read = np.array(self._records)[:, 0]
        weights = np.full(len(read), float(self._sample.run))
        weights[-1] = self._sample.last_run
        weights /= weights @ read / self._total
        by_place = np.bincount(self._columns["place"], values, len(read)) + more
        total, known = float(weights @ by_place), read.sum() / self._total
        if known >= 1:
            return total, 0.0
        if len(read) < 2:
            return total, 2 * total
        off = weights * (by_place - total / (weights @ read) * read)
        variance = np.sum(np.diff(off) ** 2) / (2 * (len(off) - 1))
        return total, 2 * float(np.sqrt((1 - known) * len(off) * variance))


def _fill_but_emptiest(packing: Plan, tokens: Int32) -> float:
    if packing.num_packs < 2:
        return packing.fill_rate
    by_pack = np.add.reduceat(
        tokens[packing.order], packing.offsets[:-1], dtype=np.int64
    )
    return float(
        (by_pack.sum() - by_pack.min()) / ((packing.num_packs - 1) * packing.pack_size)
    )


def _steps(
    examples: Int64, packs: int, batching: BatchConfig, world_size: int
) -> tuple[int, float, int]:
    """Steps of `packs` packs like those of the sample, and their mean and most
    examples.
    """
    requested = batching.examples_per_step
    packs_of_ranks = world_size * batching.width * batching.gradient_accumulation_steps
    min_packs = packs_of_ranks if requested is None else world_size
    tried = min(packs, max(STEPS_TRIED, 10 * min_packs))
    if not tried or not len(examples):
        return 0, 0.0, 0
    shuffled = examples[seeds.permutation(len(examples), 0, "steps")]
    repeated = np.resize(shuffled, tried)
    if requested is None:
        edges = [*range(0, tried, min_packs), tried]
    else:
        edges = [
            0,
            *(end for end, _ in cut_by_examples(repeated, requested, min_packs)),
        ]
    sizes_of_steps, steps = np.diff(to_offsets(repeated)[edges]), len(edges) - 1
    return (
        -(-steps * packs // tried),
        float(sizes_of_steps.mean()),
        int(sizes_of_steps.max()),
    )
