"""The global order of packs: a pure function of (row groups, seed, epoch), the same for all ranks.

1. Permute the row groups over the whole dataset.
2. Lay their rows end to end, and cut that into `lanes` contiguous lanes of equal length.
3. Deal the lanes out in turn: pack ``i`` is number ``i // lanes`` of lane ``i % lanes``.
4. Permute the rows inside each row group.

A batch thus mixes as many row groups as there are lanes, while each lane reads its row groups one
after another, whole. Rank ``r`` of ``w`` takes the indices ``r, r + w, …``, so the sequence does
not depend on how many ranks there are, and position is one number.
"""

from __future__ import annotations

import numpy as np

from packstore.errors import ConfigError
from packstore.records import Int64, to_offsets
from packstore.seeds import permutation

LANES = 64
"""Row groups that are open at once, over all ranks; mixes as well as a full shuffle."""


class PackOrder:
    """Where the i-th pack of an epoch lies. Holds two integers per row group.

    Args:
        group_rows: int64 `[G]`, rows of each row group, in file order.
        seed: source of the shuffle.
        epoch: each epoch has its own order.
        lanes: see above; part of the position, as another number gives another order.
        shuffle: False: file order, with no lanes.

    Raises:
        ConfigError: fewer than one lane.
    """

    def __init__(
        self,
        group_rows: Int64,
        *,
        seed: int = 0,
        epoch: int = 0,
        lanes: int = LANES,
        shuffle: bool = True,
    ) -> None:
        if lanes < 1:
            raise ConfigError(f"lanes must be at least 1; found {lanes}.")
        self.seed, self.epoch, self.lanes, self.shuffle = seed, epoch, lanes, shuffle
        groups = len(group_rows)
        self._groups = (
            permutation(groups, seed, "row groups", epoch) if shuffle else np.arange(groups)
        )
        self._offsets = to_offsets(group_rows[self._groups])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """Row group and row of the packs at global `indices`.

        Args:
            indices: int64 `[n]`, each in ``0 .. len(self) - 1``, in any order.

        Returns:
            int64 `[n]`, row groups; int64 `[n]`, rows in them.

        Raises:
            IndexError: an index out of range.
        """
        indices = np.asarray(indices, np.int64)
        if not len(indices):
            return indices, indices
        if indices.min() < 0 or indices.max() >= len(self):
            raise IndexError(f"pack indices must lie in 0..{len(self) - 1}")
        places = self._places(indices) if self.shuffle else indices
        slots = np.searchsorted(self._offsets, places, side="right") - 1
        groups, rows = self._groups[slots], places - self._offsets[slots]
        return groups, self._permute_rows(slots, rows) if self.shuffle else rows

    def _places(self, indices: Int64) -> Int64:
        """Positions in the row sequence: the first lanes are one longer if the cut is uneven."""
        length, longer = divmod(len(self), self.lanes)
        lane, step = indices % self.lanes, indices // self.lanes
        return lane * length + np.minimum(lane, longer) + step

    def _permute_rows(self, slots: Int64, rows: Int64) -> Int64:
        out = np.empty_like(rows)
        by_slot = np.argsort(slots, kind="stable")
        distinct, starts = np.unique(slots[by_slot], return_index=True)
        for slot, members in zip(distinct, np.split(by_slot, starts[1:]), strict=True):
            size = int(self._offsets[slot + 1] - self._offsets[slot])
            group = int(self._groups[slot])
            out[members] = permutation(size, self.seed, "rows", self.epoch, group)[rows[members]]
        return out
