"""The global order of packs: a pure function of (row groups, seed, epoch), the same for
all ranks.

1. Permute the row groups over the whole dataset.
2. Concatenate their rows, and cut the sequence into `lanes` contiguous lanes of equal
   length.
3. Take packs from the lanes in turn: pack ``i`` is number ``i // lanes`` of lane ``i %
   lanes``.
4. Permute the rows inside each row group.

A batch thus mixes as many row groups as there are lanes, while each lane reads whole
row groups one after another. Rank ``r`` of ``w`` takes the indices ``r, r + w, …``, so
the sequence does not depend on the number of ranks, and the position is one number.
With `strata`, step 4 instead sorts the rows of each row group by stratum and assigns
them to positions in the order of ``i * phi mod 1`` (golden ratio phi). Every section of
that sequence is spread evenly over 0 to 1, so every section of packs is spread about
evenly over the strata.
"""

from __future__ import annotations

import numpy as np

from packstore.errors import ConfigError
from packstore.format.arrays import Int64, range_indices, to_offsets
from packstore.format.seeds import GOLDEN, U64, keys_at, mixed, permutation

LANES = 64
"""Row groups open at once, over all ranks; mixes as well as a full shuffle."""

_ROUNDS = 4


class PackOrder:
    """Maps the i-th pack of an epoch to its row group and row; four integers per row
    group.

    Without `shuffle` the order is that of the files; `group_rows` and `strata`, a value
    for each pack such as its examples, are in that order.
    """

    def __init__(
        self,
        group_rows: Int64,
        *,
        seed: int = 0,
        epoch: int = 0,
        lanes: int = LANES,
        shuffle: bool = True,
        strata: Int64 | None = None,
    ) -> None:
        if lanes < 1:
            raise ConfigError(f"lanes must be at least 1; found {lanes}.")
        self.seed, self.epoch, self.lanes, self.shuffle = seed, epoch, lanes, shuffle
        self._rows, self._groups = group_rows, np.arange(len(group_rows))
        if shuffle:
            self._groups = permutation(len(group_rows), seed, "row groups", epoch)
        self._offsets = to_offsets(group_rows[self._groups])
        self._strata, self._first_rows = strata, to_offsets(group_rows)
        if strata is not None and len(strata) != len(self):
            raise ConfigError(
                f"strata must be those of {len(self)} packs; found {len(strata)}."
            )

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def lane(self, indices: Int64) -> Int64:
        """Returns int64 `[n]`, the lanes of the packs at global `indices`; 0 in file
        order.
        """
        return indices % self.lanes if self.shuffle else np.zeros_like(indices)

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """Returns row groups, and rows in them, of the packs at `indices`, int64 `[n]`
        each.
        """
        indices = np.asarray(indices, np.int64)
        if not len(indices):
            return indices, indices
        if indices.min() < 0 or indices.max() >= len(self):
            raise IndexError(f"pack indices must lie in 0..{len(self) - 1}")
        places = self._places(indices) if self.shuffle else indices
        slots = self._slots(places)
        groups, rows = self._groups[slots], places - self._offsets[slots]
        if not self.shuffle:
            return groups, rows
        if self._strata is not None:
            return groups, self._stratified(places, rows, self._strata)
        return groups, permuted(rows, self._rows[groups], self._keys("rows", groups))

    def _places(self, indices: Int64) -> Int64:
        """Returns positions in the row sequence; with an uneven cut, first lanes are
        one longer.
        """
        length, longer = divmod(len(self), self.lanes)
        lane, step = indices % self.lanes, indices // self.lanes
        return lane * length + np.minimum(lane, longer) + step

    def _slots(self, places: Int64) -> Int64:
        return np.searchsorted(self._offsets[1:], places, side="right")

    def _indices(self, places: Int64) -> Int64:
        """Returns the indices of the packs at `places`."""
        length, longer = divmod(len(self), self.lanes)
        border = longer * (length + 1)
        late = places >= border
        width = np.maximum(np.where(late, length, length + 1), 1)
        lane, step = np.divmod(places - np.where(late, border, 0), width)
        return step * self.lanes + lane + np.where(late, longer, 0)

    def _keys(self, purpose: str, groups: Int64) -> U64:
        return keys_at(groups.astype(np.uint64), self.seed, purpose, self.epoch)

    def _stratified(self, places: Int64, rows: Int64, strata: Int64) -> Int64:
        """Returns the row at each of `places`, given positions `rows` in their row
        groups.
        """
        distinct, which = np.unique(self._slots(places), return_inverse=True)
        groups, firsts = self._groups[distinct], self._offsets[distinct]
        sizes = self._rows[groups]
        owner = np.repeat(np.arange(len(distinct)), sizes)
        wanted = self._indices(range_indices(firsts, sizes)).astype(np.uint64) * GOLDEN
        packs = range_indices(self._first_rows[groups], sizes)
        row = packs - self._first_rows[groups][owner]
        ties = mixed(self._keys("ties", groups)[owner] + row.astype(np.uint64))
        table = np.empty(len(row), np.int64)
        by_stratum = np.lexsort((ties, strata[packs], owner))
        table[np.lexsort((wanted, owner))] = row[by_stratum]
        chosen: Int64 = table[to_offsets(sizes)[which] + rows]
        return chosen


def permuted(values: Int64, sizes: Int64, keys: U64) -> Int64:
    """Maps ``values[i]`` by the permutation of ``0 .. sizes[i] - 1`` with key
    ``keys[i]``.
    """
    bits = np.frexp(sizes - 1)[1].astype(np.uint64)
    out = values.astype(np.uint64)
    limit = sizes.astype(np.uint64)
    todo = np.arange(len(out))
    one = np.uint64(1)
    mask, half = (one << bits) - one, (bits + one) >> one
    while len(todo):
        moved, low, shift, base = (column[todo] for column in (out, mask, half, keys))
        for number in range(_ROUNDS):
            key = mixed(base + np.uint64(number))
            moved = (moved * (key | one) + (key >> np.uint64(32))) & low
            moved ^= moved >> shift
        out[todo] = moved
        todo = todo[moved >= limit[todo]]
    return out.astype(np.int64)
