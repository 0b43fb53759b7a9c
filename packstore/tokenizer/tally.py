"""Counts of records by outcome: packed, dropped, or packed with a remark."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_FIELDS = 100
"""Maximum number of field names that are counted, as names may be data."""

SAMPLES_PER_REASON = 3
"""Records that are kept as samples of each reason or event."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One record that was dropped or noted, with the reason or event and its place."""

    reason: str
    where: str
    detail: str


@dataclass(slots=True)
class Tally:
    """Counts of the records of a part of the input; none is dropped silently."""

    read: int = 0  # records read
    # records dropped, by reason; `read == kept + sum(dropped)`
    dropped: Counter[str] = field(default_factory=Counter)
    # records kept with a change or remark, by event (a record may have several)
    noted: Counter[str] = field(default_factory=Counter)
    # the first few records of each reason or event
    samples: list[Sample] = field(default_factory=list)
    # field name -> packed records that used it
    used: Counter[str] = field(default_factory=Counter)
    # field name -> packed records with a value in it that was not used
    unused: Counter[str] = field(default_factory=Counter)
    # form or adapter -> records kept that it read; own field names: empty text
    forms: Counter[str] = field(default_factory=Counter)
    scored: int = 0  # pairs kept with rewards in the record
    unscored: int = 0  # pairs kept without rewards in the record
    texts: int = 0  # records kept that are plain text
    chats: int = 0  # records kept that are messages
    # every record dropped, of a single block; None: only samples are kept
    rejected: list[Sample] | None = None

    @property
    def kept(self) -> int:
        """Number of records read and not dropped."""
        return self.read - sum(self.dropped.values())

    @property
    def events(self) -> Counter[str]:
        """`noted`, and events of a mixed input: some records lack rewards, or turns."""
        num_default_rewards = self.unscored if self.scored else 0
        num_texts_among_chats = self.texts if self.chats else 0
        return self.noted + Counter(
            reward_default=num_default_rewards, mixed_forms=num_texts_among_chats
        )

    def drop(self, reason: str, where: str, detail: str = "") -> None:
        """Count one record as dropped under `reason`."""
        self.dropped[reason] += 1
        if self.rejected is not None:
            self.rejected.append(Sample(reason, where, detail))
        if self.dropped[reason] <= SAMPLES_PER_REASON:
            self.samples.append(Sample(reason, where, detail))

    def note(self, event: str, where: str, detail: str = "") -> None:
        """Count one record under `event`; the record is packed."""
        self.noted[event] += 1
        if self.noted[event] <= SAMPLES_PER_REASON:
            self.samples.append(Sample(event, where, detail))

    def add(self, later: Tally) -> None:
        """Add the counts of a later part of the input."""
        self.read += later.read
        self.dropped.update(later.dropped)
        self.noted.update(later.noted)
        self.used.update(later.used)
        self.forms.update(later.forms)
        self.scored += later.scored
        self.unscored += later.unscored
        self.texts += later.texts
        self.chats += later.chats
        for name, count in later.unused.items():
            if name in self.unused or len(self.unused) < MAX_FIELDS:
                self.unused[name] += count
        num_samples = Counter(sample.reason for sample in self.samples)
        for sample in later.samples:
            if num_samples[sample.reason] < SAMPLES_PER_REASON:
                num_samples[sample.reason] += 1
                self.samples.append(sample)
