"""Row groups that wait in memory until their rows are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.records import IGNORE_INDEX, Bool, Int64, Packs

TOKEN_BYTES = 4.125
"""Of a token that waits: its id, and one bit for whether it is supervised."""


@dataclass(frozen=True, slots=True, eq=False)
class CompactPacks:
    """Packs whose labels take one bit a token; a row gets them back.

    By the format a label is the id at its place, or -100.

    Attributes:
        packs: whose labels are the rest: empty.
        bits: uint8 `[N / 8]`, one bit for each token: whether its label is its id.
        cuts: where the tokens, sequences and examples of each pack start and end.
        ends: int64 `[3, P, 2]`, offsets of each pack alone: 0, and its tokens, sequences, examples.
    """

    packs: Packs
    bits: npt.NDArray[np.uint8]
    cuts: list[list[int]]
    ends: Int64

    @classmethod
    def copied(cls, packs: Packs, supervised: Bool) -> CompactPacks:
        """With copies of all columns.

        What a decoder allocated, or a file that is mapped, is so given back at once, and by the
        thread that took it. Kept in place it costs about half as much again: allocators hold on to
        the room between such buffers.
        """
        flat: dict[str, Any] = {name: getattr(packs, name).copy() for name in _FLAT}
        columns = {name: column.copy() for name, column in packs.columns.items()}
        offsets = np.stack([packs.token_offsets, packs.sequence_offsets, packs.example_offsets])
        ends = np.zeros((3, len(packs), 2), np.int64)
        ends[..., 1] = np.diff(offsets)
        cuts = np.concatenate([offsets[:, :-1], offsets[:, 1:]]).T.tolist()
        return cls(Packs(**flat, columns=columns), np.packbits(supervised), cuts, ends)

    def row(self, i: int, stand_in: bool = False) -> Packs:
        """Pack `i` alone; all but its labels are views."""
        packs, ends = self.packs, self.ends
        token, sequence, example, tokens, sequences, examples = self.cuts[i]
        input_ids = packs.input_ids[token:tokens]
        labels = np.full(tokens - token, IGNORE_INDEX, np.int32)
        byte = token // 8
        supervised = np.unpackbits(self.bits[byte : -(-tokens // 8)]).view(np.bool_)
        start = token - 8 * byte
        np.copyto(labels, input_ids, where=supervised[start : start + len(labels)])
        return Packs(
            input_ids=input_ids,
            labels=labels,
            reward=packs.reward[sequence:sequences],
            lengths=packs.lengths[sequence:sequences],
            seq_boundaries=packs.seq_boundaries[sequence + i : sequences + i + 1],
            example_ids=packs.example_ids[example:examples],
            num_responses=packs.num_responses[example:examples],
            token_offsets=ends[0, i],
            sequence_offsets=ends[1, i],
            example_offsets=ends[2, i],
            columns={name: column[example:examples] for name, column in packs.columns.items()},
            stand_in=stand_in,
        )


_FLAT = tuple(n for n in Packs.__slots__ if n not in ("columns", "ref_logps", "stand_in"))
