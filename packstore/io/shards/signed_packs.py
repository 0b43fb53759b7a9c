"""Row groups buffered in memory: ids and labels in one column."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from packstore.format.arrays import IGNORE_INDEX, Bool, Column, Float32, Int32, Int64, Packs

TOKEN_BYTES = 4
"""Bytes per buffered token: the id, bit-inverted where unsupervised."""


@dataclass(frozen=True, slots=True, eq=False)
class CompactPacks:
    """Packs with ids and labels in one signed column; rows have both.

    By the format a label is the id at its place, or -100.

    Attributes:
        packs: with signed `input_ids` (:func:`packstore.format.schema.signed_packs`) and empty
            labels.
        cuts: start and end of the tokens, sequences and examples of each pack.
        sequences: int32 `[3, S]`: lengths, ends of segments in their pack, and rewards (float32).
        examples: int64 `[2, E]`: ids, and numbers of responses.
    """

    packs: Packs
    cuts: list[list[int]]
    sequences: Int32
    examples: Int64

    @classmethod
    def of(cls, packs: Packs) -> CompactPacks:
        """Returns signed `packs` in compact form; copies all columns but the ids.

        The copies free the decoder's buffers (or the mapped file) at once, in the thread that
        allocated them. Without them memory is about 1.5 times as large: allocators keep the gaps
        between such buffers.
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
        """Returns bool `[N]`: True for supervised tokens."""
        return self.packs.input_ids >= 0

    @property
    def plain(self) -> Packs:
        """Returns all packs, with ids and labels."""
        signed = self.packs.input_ids
        return replace(self.packs, input_ids=unsigned(signed), labels=labels_of(signed))

    def row(self, i: int, stand_in: bool = False) -> CompactRow:
        """Returns pack `i` alone."""
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
    """One pack of :class:`CompactPacks`, with lazily computed columns.

    Pickle and ``dataclasses.replace`` turn it into a :class:`Packs` of this one row.
    """

    __slots__ = ("group", "index", "joined")

    group: CompactPacks
    index: int
    joined: dict[str, Column] | None
    __setattr__ = object.__setattr__

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Returns plain packs, for ``dataclasses.replace``."""
        return Packs(*values, **named)  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return Packs, tuple(getattr(self, f.name) for f in fields(Packs))

    def __len__(self) -> int:
        return 1

    @property
    def signed(self) -> Int32:
        """Returns int32 `[N]`, a view: ids where supervised, else ``~id``."""
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
    """Returns packs with side data joined: a column, or for sequences reference log-probs."""
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
    """Returns int32 `[N]`: ids where there is a label, else ``~id``."""
    out: Int32 = labels >> 31
    out ^= input_ids
    return out


def unsigned(signed: Int32) -> Int32:
    """Returns the ids of signed ids."""
    ids: Int32 = signed >> 31
    ids ^= signed
    return ids


def labels_of(signed: Int32) -> Int32:
    """Returns the labels of signed ids."""
    labels: Int32 = signed >> 31
    labels &= signed ^ IGNORE_INDEX  # the bits that turn negative ids into -100
    labels ^= signed
    return labels


_new = object.__new__
