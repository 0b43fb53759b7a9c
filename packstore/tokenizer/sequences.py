"""Sequences as ids: one alone, or those of a block side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from packstore.records import Bool, Int32, Int64, to_offsets
from packstore.tokenizer.refusals import Refused

NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence as ids.

    Attributes:
        ids: int32 `[n]`.
        supervised: bool `[n]`.
        head: leading tokens (BOS, system turn) that truncation keeps.
        events: what there is to note.
    """

    ids: Int32
    supervised: Bool
    head: int = 0
    events: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of some drafts, in order.

    Attributes:
        ids: int32 `[N]`.
        supervised: bool `[N]`.
        offsets: int64 `[S + 1]`, where each sequence starts.
        heads: int64 `[S]`, leading tokens (BOS, system turn) that truncation keeps.
        events: what there is to note of a sequence.
        refused: why a sequence cannot be used.
    """

    ids: Int32
    supervised: Bool
    offsets: Int64
    heads: Int64
    events: dict[int, list[str]]
    refused: dict[int, Refused]

    def row(self, i: int) -> Tokens:
        """Sequence `i` alone."""
        start, end = self.offsets[i : i + 2]
        events = self.events.get(i, [])
        return Tokens(self.ids[start:end], self.supervised[start:end], int(self.heads[i]), events)

    @classmethod
    def of(cls, rows: Sequence[Tokens]) -> Sequences:
        """Some sequences side by side."""
        return cls(
            ids=np.concatenate([NO_IDS, *(t.ids for t in rows)]).astype(np.int32, copy=False),
            supervised=np.concatenate([NO_IDS.astype(np.bool_), *(t.supervised for t in rows)]),
            offsets=to_offsets(np.array([len(t.ids) for t in rows], np.int64)),
            heads=np.array([t.head for t in rows], np.int64),
            events={i: t.events for i, t in enumerate(rows) if t.events},
            refused={},
        )

    def with_rows(self, rows: Mapping[int, Tokens], *, insert: bool = False) -> Sequences:
        """With `rows` at their places, instead of what is there or in between."""
        if not rows:
            return self
        own = map(self.row, range(len(self.heads)))
        number = len(self.heads) + insert * len(rows)
        out: list[Tokens] = []
        moved: list[int] = []
        for i in range(number):
            row = rows.get(i)
            if row is None or not insert:
                moved.append(i)
                mine = next(own)
            out.append(mine if row is None else row)
        refused = {moved[i]: why for i, why in self.refused.items()}
        return replace(Sequences.of(out), refused=refused)

    def kept(self, keep: Bool) -> tuple[Int32, Bool, Int64]:
        """Ids, supervised and lengths of the sequences for which `keep` (bool `[S]`) is true."""
        lengths = np.diff(self.offsets)
        if keep.all():
            return self.ids, self.supervised, lengths
        tokens = np.repeat(keep, lengths)
        return self.ids[tokens], self.supervised[tokens], lengths[keep]


def common_prefix(a: Int32, b: Int32) -> int:
    """Number of leading ids that agree."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(np.argmax(differ)) if differ.any() else n


def starts_with(ids: Int32, token: int | None) -> bool:
    """Whether the first id is `token`."""
    return len(ids) > 0 and int(ids[0]) == token
