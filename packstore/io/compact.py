"""Row groups that wait in memory until their rows are wanted."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from packstore.records import IGNORE_INDEX, Bool, Column, Float32, Int32, Int64, Packs

TOKEN_BYTES = 4
"""Of a token that waits: its id, whose sign tells whether it is supervised."""


@dataclass(frozen=True, slots=True, eq=False)
class CompactPacks:
    """Packs whose ids and labels are one column; a row gets both.

    By the format a label is the id at its place, or -100.

    Attributes:
        packs: whose `input_ids` are signed, see :func:`packstore.schema.signed_packs`, and whose
            labels are empty.
        cuts: where the tokens, sequences and examples of each pack start and end.
        sequences: int32 `[3, S]`: lengths, where segments end in their pack, and rewards (float32).
        examples: int64 `[2, E]`: ids, and numbers of responses.
    """

    packs: Packs
    cuts: list[list[int]]
    sequences: Int32
    examples: Int64

    @classmethod
    def of(cls, packs: Packs) -> CompactPacks:
        """Those of signed `packs`, with copies of all columns but the ids, which are one.

        What a decoder allocated, or a file that is mapped, is so given back at once, and by the
        thread that took it. Kept in place it costs about half as much again: allocators hold on to
        the room between such buffers.
        """
        sequences = np.empty((3, len(packs.lengths)), np.int32)
        sequences[0] = packs.lengths
        inside = np.ones(len(packs.seq_boundaries), np.bool_)
        inside[packs.boundary_offsets[:-1]] = False
        sequences[1] = packs.seq_boundaries[inside]
        sequences[2] = packs.reward.view(np.int32)
        examples = np.stack([packs.example_ids, packs.num_responses.astype(np.int64)])
        columns = {name: column.copy() for name, column in packs.columns.items()}
        own = replace(
            packs,
            reward=sequences[2].view(np.float32),
            lengths=sequences[0],
            seq_boundaries=packs.seq_boundaries.copy(),
            example_ids=examples[0],
            num_responses=packs.num_responses.copy(),
            columns=columns,
        )
        offsets = np.stack([packs.token_offsets, packs.sequence_offsets, packs.example_offsets])
        cuts = np.concatenate([offsets[:, :-1], offsets[:, 1:]]).T.tolist()
        return cls(own, cuts, sequences, examples)

    @property
    def supervised(self) -> Bool:
        """bool `[N]`."""
        return self.packs.input_ids >= 0

    @property
    def plain(self) -> Packs:
        """All of them, with ids and labels."""
        signed = self.packs.input_ids
        return replace(self.packs, input_ids=unsigned(signed), labels=labels_of(signed))

    def row(self, i: int, stand_in: bool = False) -> CompactRow:
        """Pack `i` alone."""
        row: Any = _new(CompactRow)
        row.group, row.index, row.stand_in, row.ref_logps, row.joined = (
            self,
            i,
            stand_in,
            None,
            None,
        )
        found: CompactRow = row
        return found


class CompactRow(Packs):
    """One pack of :class:`CompactPacks`: looks its columns up when they are asked for.

    Pickles, and is replaced, as the :class:`Packs` of this one row, without those beside it.
    """

    __slots__ = ("group", "index", "joined")

    group: CompactPacks
    index: int
    joined: dict[str, Column] | None
    __setattr__ = object.__setattr__

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """What ``dataclasses.replace`` makes of a row: plain packs."""
        return Packs(*values, **named)  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return Packs, tuple(getattr(self, f.name) for f in fields(Packs))

    def __len__(self) -> int:
        return 1

    @property
    def signed(self) -> Int32:
        """int32 `[N]`, a view: ids where supervised, else ``~id``."""
        cut = self.group.cuts[self.index]
        return self.group.packs.input_ids[cut[0] : cut[3]]

    @property
    def input_ids(self) -> Int32:
        """See :class:`Packs`."""
        return unsigned(self.signed)

    @property
    def labels(self) -> Int32:
        """See :class:`Packs`."""
        return labels_of(self.signed)

    @property
    def reward(self) -> Float32:
        """See :class:`Packs`."""
        cut = self.group.cuts[self.index]
        return self.group.packs.reward[cut[1] : cut[4]]

    @property
    def lengths(self) -> Int32:
        """See :class:`Packs`."""
        cut = self.group.cuts[self.index]
        return self.group.packs.lengths[cut[1] : cut[4]]

    @property
    def seq_boundaries(self) -> Int32:
        """See :class:`Packs`."""
        cut, i = self.group.cuts[self.index], self.index
        return self.group.packs.seq_boundaries[cut[1] + i : cut[4] + i + 1]

    @property
    def example_ids(self) -> Int64:
        """See :class:`Packs`."""
        cut = self.group.cuts[self.index]
        return self.group.packs.example_ids[cut[2] : cut[5]]

    @property
    def num_responses(self) -> Int32:
        """See :class:`Packs`."""
        cut = self.group.cuts[self.index]
        return self.group.packs.num_responses[cut[2] : cut[5]]

    @property
    def token_offsets(self) -> Int64:
        """See :class:`Packs`."""
        cut = self.group.cuts[self.index]
        return np.array((0, cut[3] - cut[0]))

    @property
    def sequence_offsets(self) -> Int64:
        """See :class:`Packs`."""
        cut = self.group.cuts[self.index]
        return np.array((0, cut[4] - cut[1]))

    @property
    def example_offsets(self) -> Int64:
        """See :class:`Packs`."""
        cut = self.group.cuts[self.index]
        return np.array((0, cut[5] - cut[2]))

    @property
    def columns(self) -> dict[str, Column]:
        """See :class:`Packs`."""
        cut = self.group.cuts[self.index]
        own = {n: column[cut[2] : cut[5]] for n, column in self.group.packs.columns.items()}
        return own | self.joined if self.joined else own


def with_side(packs: Packs, name: str, values: Column, of_sequences: bool) -> Packs:
    """The packs with joined side data: a column, or, of sequences, log-probs of a reference."""
    if not isinstance(packs, CompactRow):
        changed = {"ref_logps": values} if of_sequences else {}
        columns = packs.columns if of_sequences else {**packs.columns, name: values}
        return replace(packs, columns=columns, **changed)  # type: ignore[arg-type]
    row: Any = packs.group.row(packs.index, packs.stand_in)
    row.ref_logps, row.joined = packs.ref_logps, packs.joined
    if of_sequences:
        row.ref_logps = values
    else:
        row.joined = {**(packs.joined or {}), name: values}
    found: Packs = row
    return found


def signed(input_ids: Int32, labels: Int32) -> Int32:
    """int32 `[N]`: ids where a label is there, else ``~id``."""
    out: Int32 = labels >> 31
    out ^= input_ids
    return out


def unsigned(signed: Int32) -> Int32:
    """The ids of signed ids."""
    ids: Int32 = signed >> 31
    ids ^= signed
    return ids


def labels_of(signed: Int32) -> Int32:
    """The labels of signed ids."""
    labels: Int32 = signed >> 31
    labels &= signed ^ IGNORE_INDEX  # where below 0, what turns it into -100
    labels ^= signed
    return labels


_new = object.__new__
