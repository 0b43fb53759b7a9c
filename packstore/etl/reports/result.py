"""What reports say: findings, and the packs to expect of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from packstore.format.arrays import Int32, Tally
from packstore.io.inputs.sampling import Sampling

ENOUGH_FILL = 0.99
ENOUGH_RECORDS = 0.999
"""Minimum fill rate of a recommended pack size, and the minimum fraction of records that it keeps,
relative to the combination that keeps most."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Of records, a `problem` harms training or drops them, a `remark` may be fine; checks without a
    hit are left out. Of a place, a `problem` stops a job, a `remark` was not tried.
    """

    check: str
    level: Literal["ok", "remark", "problem"]
    text: str = ""  # what it means or measured; of a place, with the remedy of a problem
    records: int | None = None  # with a hit; None: not of records
    examples: tuple[str, ...] = ()  # places of a few of them

    @property
    def ok(self) -> bool:
        """True if it is no problem."""
        return self.level != "problem"


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
class Report:
    """What one pass over records, or a sample of them, shows."""

    kind: str  # ``preference``, ``sft`` or ``scored``
    tally: Tally  # of the records that were read
    sample: Sampling | None = None  # None: all records were read
    findings: Sequence[Finding] = ()  # of :func:`doctor`, problems first
    # of :func:`estimate`:
    scale: float = 1.0  # number of all records, divided by those of the sample
    choices: Sequence[Choice] = ()  # all combinations
    example_tokens: Mapping[str, Int32] = field(default_factory=dict)  # layout -> `[E]`, tokens
    sequence_tokens: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # `[S]`

    @property
    def ok(self) -> bool:
        """True if no finding is a problem."""
        return all(finding.ok for finding in self.findings)

    @property
    def records(self) -> int:
        """Records that were read."""
        return self.tally.read

    @property
    def shapes(self) -> dict[str, int]:
        """Named shape -> records that have it, the most frequent first."""
        return dict(self.tally.shapes.most_common())

    @property
    def recommended(self) -> Choice | None:
        """The smallest pack size that fills well and drops few records, if any."""
        enough = ENOUGH_RECORDS * max((c.examples for c in self.choices), default=0)
        # Without the emptiest pack: that of a sample stays open, unlike the last one of a dataset.
        good = [c for c in self.choices if c.fill_but_emptiest >= ENOUGH_FILL]
        return min(
            (c for c in good if c.examples >= enough),
            key=lambda c: (c.pack_size, -c.tokens_saved, -c.fill_rate),
            default=None,
        )

    @property
    def best(self) -> Choice:
        """The recommended choice, or else the fullest."""
        return self.recommended or max(self.choices, key=lambda choice: choice.fill_rate)
