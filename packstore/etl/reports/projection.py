"""Projects the packs of all records from the lengths of a sample.

A sample consists of *places*: blocks of files (or row groups of a dataset) drawn at
about equal distances. A pack size and layout are planned from the lengths of the sample
alone, without tokens. Counts are then scaled to all records by a ratio estimate (value
per record of the sample, times the number of all records); their errors follow from the
differences between neighbouring places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packstore.config import BatchConfig, PackConfig
from packstore.etl.reports.place import Finding
from packstore.etl.spill import Spill
from packstore.format import seeds
from packstore.format.arrays import Bool, Examples, Int32, Int64
from packstore.io.dataset.steps import cut_by_examples
from packstore.io.inputs.sampling import Sampling
from packstore.pack.layout import count_keys, sizes
from packstore.pack.plan import Plan, plan_examples
from packstore.tokenizer.tally import Tally

MAX_SIMULATED_PACKS = 10_000
"""Maximum packs that are cut into steps; the steps of more are scaled from these."""

INT32_MAX = np.iinfo(np.int32).max

UNSEEN = 3
"""95 % upper limit of the expected number of drops in a sample that has none (rule of
three: ``exp(-3)`` is about 0.05).
"""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings of packs with the estimated result; counts are of all records.

    Attributes:
        pack_size: tokens of a pack.
        layout: ``concat`` or ``shared_prefix``.
        share_prefixes: ``example`` or ``pack``.
        stored_rate: tokens of the packs / tokens of all sequences, 0..1. With
            ``share_prefixes="pack"``, the most that it will be, as more records have
            more in common, and `packs` likewise.
        fill_rate: tokens / (packs * pack_size).
        packs: number of packs.
        steps: optimizer steps of an epoch on one rank.
        examples: examples that are packed.
        dropped: records that are dropped, for any reason.
        packs_error: two standard errors of `packs`; 0 if all records were read, None if
            only the first records were, as these need not be like the others.
        dropped_error: the same for `dropped`.
    """

    pack_size: int
    layout: str
    share_prefixes: str
    stored_rate: float
    fill_rate: float
    packs: int
    steps: int
    examples: int
    dropped: int
    packs_error: int | None
    dropped_error: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """The result of one pass over records, or over a sample of them.

    Attributes:
        kind: ``preference``, ``sft`` or ``scored``.
        tally: counts of the records that were read.
        findings: for dropped and noted records, problems first; ``doctor`` and a dry
            run add the checks of lint.
        sample: how the sample was drawn; None: all records were read.
        scale: number of all records, divided by the number in the sample.
        choices: the estimate for each combination of settings; none from ``doctor``.
    """

    kind: str
    tally: Tally
    findings: Sequence[Finding] = ()
    sample: Sampling | None = None
    scale: float = 1.0
    choices: Sequence[Choice] = ()

    @property
    def ok(self) -> bool:
        """True if no finding is a problem."""
        return all(finding.ok for finding in self.findings)

    @property
    def records(self) -> int:
        """Number of records that were read."""
        return self.tally.read

    @property
    def forms(self) -> dict[str, int]:
        """Form or adapter -> number of its records, most frequent first.

        Records with packstore's field names count as ``none``.
        """
        return {name or "none": count for name, count in self.tally.forms.most_common()}


class _Estimate(NamedTuple):
    """An estimated sum over all records."""

    value: float
    error: float  # two standard errors


class Projection:
    """Lengths of the examples of a sample, and the packs of all records.

    Args:
        sample: how the sample was drawn.
        total: number of all records.
        configs: the settings for which :meth:`choice` is called, of one padding.
    """

    def __init__(
        self, sample: Sampling, total: int, configs: Sequence[PackConfig]
    ) -> None:
        self._sample = sample
        self._total = total
        self._layouts = {config.layout for config in configs}
        self._multiple = configs[0].pad_to_multiple
        # The examples, where they share what they begin with.
        self._spill: Spill | None = None
        for config in configs:
            if config.share_prefixes == "pack" and self._spill is None:
                self._spill = Spill(config)

        # One entry for each place of the sample. Lengths: name -> int32 `[E]`, one
        # number for each of the place's examples, see `add`.
        self._lengths: list[dict[str, Int32]] = []
        self._num_read: list[int] = []
        self._num_dropped: list[int] = []

    def add(self, examples: Examples, tally: Tally) -> None:
        """Add the examples of the next place."""
        first_sequences = examples.example_offsets[:-1]
        lengths = {
            "place": np.full(examples.num_examples, len(self._lengths), np.int32),
            "longest": np.maximum.reduceat(examples.lengths, first_sequences),
            # No setting allows more than fit an int32.
            "keys": np.minimum(count_keys(examples), INT32_MAX).astype(np.int32),
        }
        for layout in self._layouts:
            lengths[layout] = sizes(examples, layout)
            lengths[f"padded {layout}"] = sizes(examples, layout, self._multiple)

        if self._spill is not None:
            self._spill.append(examples)
        self._lengths.append(lengths)
        self._num_read.append(tally.read)
        self._num_dropped.append(tally.dropped.total())

    def close(self) -> None:
        """Remove its files."""
        if self._spill is not None:
            self._spill.close()

    def choice(self, config: PackConfig, batching: BatchConfig) -> Choice:
        """Plan the packs of the sample with `config`, and scale them to all records."""
        tokens = self._columns[config.layout]
        padded = self._columns[f"padded {config.layout}"]
        is_short = self._columns["longest"] <= config.sequence_limit
        keys = self._columns["keys"]
        has_few_keys = keys <= config.key_limit
        fits: Bool = is_short & has_few_keys & (padded <= config.pack_size)

        packing = self._plan(config, padded, fits)
        # Tokens of the examples, each on its own: without padding, with it, and as
        # they are planned, which may share prefixes.
        tokens_alone = int(tokens[fits].sum(dtype=np.int64))
        padded_alone = int(padded[fits].sum(dtype=np.int64))
        saved_tokens = padded_alone - packing.aligned_tokens
        packing = replace(packing, tokens=tokens_alone - saved_tokens)

        packed_examples = self._sum(self._by_place(fits))
        packed_tokens = self._sum(self._by_place(tokens * fits))
        dropped = self._sum(self._by_place(~fits) + np.array(self._num_dropped))

        packs_per_token = packing.num_packs / max(tokens_alone, 1)
        packs = round(packed_tokens.value * packs_per_token)

        # Scaling counts the unfilled packs of the sample `scale` times, but a plan of
        # more examples has hardly more of them.
        full_packs = packing.aligned_tokens // packing.pack_size
        unfilled_packs = max(packing.num_packs - full_packs, 1)
        packs_error = packed_tokens.error * packs_per_token
        packs_error += unfilled_packs * (self.scale - 1)
        dropped_error = max(dropped.error, UNSEEN * (self.scale - 1))

        is_length_known = self._sample.total is not None
        return Choice(
            pack_size=packing.pack_size,
            layout=config.layout,
            share_prefixes=config.share_prefixes,
            stored_rate=packing.tokens / max(int(keys[fits].sum(dtype=np.int64)), 1),
            fill_rate=packing.fill_rate,
            packs=packs,
            steps=_count_steps(np.diff(packing.offsets), packs, batching),
            examples=round(packed_examples.value),
            dropped=round(dropped.value),
            packs_error=round(packs_error) if is_length_known else None,
            dropped_error=round(dropped_error) if is_length_known else None,
        )

    def _plan(self, config: PackConfig, padded: Int32, fits: Bool) -> Plan:
        """Plan the packs of the examples that fit.

        Args:
            config: settings.
            padded: int32 `[E]`, tokens of each example on its own, with padding.
            fits: bool `[E]`.
        """
        if self._spill is None or config.share_prefixes == "example" or not fits.any():
            return plan_examples(padded[fits], self._columns["keys"][fits], config)
        return self._spill.plan(config, chosen=fits)

    @property
    def scale(self) -> float:
        """Number of all records, divided by the number in the sample."""
        return self._total / self._sample.records

    @cached_property
    def _columns(self) -> dict[str, Int32]:
        """Name -> int32 `[E]`, place and lengths in tokens of all E examples."""
        return {
            name: np.concatenate([lengths[name] for lengths in self._lengths])
            for name in self._lengths[0]
        }

    def _by_place(
        self, example_values: npt.NDArray[np.generic]
    ) -> npt.NDArray[np.float64]:
        """Return the sum of `example_values`, `[E]`, over each of B places, `[B]`."""
        sums: npt.NDArray[Any] = np.bincount(
            self._columns["place"],
            weights=example_values.astype(np.float64),
            minlength=len(self._num_read),
        )
        return sums

    def _sum(self, by_place: npt.NDArray[np.float64]) -> _Estimate:
        """Estimate the sum of a value over all records.

        The ratio estimator: each place weighs as many blocks as it was drawn from,
        scaled so that the weighted records are all records. Neighbouring places are
        alike in sorted data, so their successive differences give the variance
        (Wolter, Introduction to Variance Estimation, chapter 8).

        Args:
            by_place: `[B]`, the sum of the value over the records of each place.
        """
        num_read = np.array(self._num_read)
        weights = np.full(len(num_read), float(self._sample.run))
        weights[-1] = self._sample.last_run
        weights *= self._total / (weights @ num_read)
        value = float(weights @ by_place)

        fraction_read = num_read.sum() / self._total
        if fraction_read >= 1:
            return _Estimate(value, error=0.0)
        if len(num_read) < 2:  # no difference: as if the standard error were the value
            return _Estimate(value, error=2 * value)

        mean = value / self._total
        residuals = weights * (by_place - mean * num_read)
        variance = np.sum(np.diff(residuals) ** 2) / (2 * (len(residuals) - 1))
        variance *= (1 - fraction_read) * len(residuals)
        return _Estimate(value, error=2 * math.sqrt(variance))


def _count_steps(examples_per_pack: Int64, packs: int, batching: BatchConfig) -> int:
    """Return the optimizer steps of an epoch of `packs` packs, on one rank.

    Args:
        examples_per_pack: int64 `[P]`, for each pack of the sample.
        packs: number of packs of all records.
        batching: how packs become steps.
    """
    if batching.examples_per_step is None:
        packs_per_step = batching.width * batching.gradient_accumulation_steps
        return math.ceil(packs / packs_per_step)

    num_simulated = min(packs, MAX_SIMULATED_PACKS)
    if not num_simulated or not len(examples_per_pack):
        return 0
    order = seeds.permutation(len(examples_per_pack), 0, "steps")
    simulated = np.resize(examples_per_pack[order], num_simulated)  # repeats the packs
    ends = list(cut_by_examples(simulated, batching.examples_per_step, min_packs=1))
    return math.ceil(len(ends) * packs / num_simulated)
