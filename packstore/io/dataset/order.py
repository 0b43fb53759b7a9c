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
With `strata`, step 4 instead sorts the rows of each row group by stratum, and its
positions by ``i * phi mod 1``, with the index ``i`` of the position and the golden
ratio phi: the k-th row goes to the k-th position. The values at any section of indices
are spread evenly over 0 to 1, so the packs there are spread about evenly over the
strata.

Names: an *index* is a position in the global order; a *place* is a position in the
sequence of step 2; a *slot* is the position of a row group in it.
"""

from __future__ import annotations

import numpy as np

from packstore.errors import ConfigError
from packstore.format.arrays import Int64, range_indices, to_offsets
from packstore.format.seeds import GOLDEN, U64, keys_at, mixed, permutation

LANES = 64
"""Row groups open at once, over all ranks; mixes as well as a full shuffle."""

_ROUNDS = 4
"""Rounds of mixing in :func:`permuted`."""


class PackOrder:
    """Maps the i-th pack of an epoch to its row group and row.

    Takes the memory of four integers per row group.

    Args:
        group_rows: int64 `[G]`, packs of each row group, in file order.
        seed: seed of the permutations.
        epoch: another epoch has another order.
        lanes: row groups that are mixed.
        shuffle: False for file order.
        strata: int64 `[P]`, a value of each pack, such as its number of examples, in
            file order; any section of packs gets low and high values alike.

    Raises:
        ConfigError: `lanes` is less than 1, or `strata` are of other packs.
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
        num_packs = int(group_rows.sum())
        if strata is not None and len(strata) != num_packs:
            raise ConfigError(
                f"strata must be those of {num_packs} packs; found {len(strata)}."
            )
        self.seed = seed
        self.epoch = epoch
        self.lanes = lanes
        self.shuffle = shuffle
        self._strata = strata
        self._group_rows = group_rows
        self._first_packs = to_offsets(group_rows)  # of row groups, in file order
        if shuffle:
            self._groups = permutation(len(group_rows), seed, "row groups", epoch)
        else:
            self._groups = np.arange(len(group_rows))
        self._first_places = to_offsets(group_rows[self._groups])  # of slots

    def __len__(self) -> int:
        return int(self._first_places[-1])

    def lane(self, indices: Int64) -> Int64:
        """Return int64 `[n]`, the lanes of the packs at `indices`; 0 in file order."""
        if self.shuffle:
            return indices % self.lanes
        return np.zeros_like(indices)

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """Return row groups and rows in them, int64 `[n]` each, of the packs at
        `indices`, int64 `[n]`.

        Raises:
            IndexError: there is no such pack.
        """
        indices = np.asarray(indices, np.int64)
        if not len(indices):
            return indices, indices
        if indices.min() < 0 or indices.max() >= len(self):
            raise IndexError(f"pack indices must lie in 0..{len(self) - 1}")

        places = self._places(indices) if self.shuffle else indices
        slots = self._slots(places)
        groups = self._groups[slots]
        positions = places - self._first_places[slots]  # in the row group
        if not self.shuffle:
            return groups, positions
        if self._strata is not None:
            return groups, self._stratified_rows(slots, positions, self._strata)
        keys = self._keys("rows", groups)
        return groups, permuted(positions, self._group_rows[groups], keys)

    def _places(self, indices: Int64) -> Int64:
        """Return the places of `indices`; in an uneven cut the first lanes are one
        longer.
        """
        length, num_longer = divmod(len(self), self.lanes)
        lanes = indices % self.lanes
        steps = indices // self.lanes
        return lanes * length + np.minimum(lanes, num_longer) + steps

    def _indices(self, places: Int64) -> Int64:
        """Return the indices of `places`: the inverse of `_places`."""
        length, num_longer = divmod(len(self), self.lanes)
        first_shorter = num_longer * (length + 1)  # the first place of a shorter lane
        is_shorter = places >= first_shorter
        lengths = np.where(is_shorter, length, length + 1)
        # With fewer packs than lanes `length` is 0: 1 avoids a division by zero.
        lengths = np.maximum(lengths, 1)
        base = np.where(is_shorter, first_shorter, 0)
        lanes, steps = np.divmod(places - base, lengths)
        lanes += np.where(is_shorter, num_longer, 0)
        return steps * self.lanes + lanes

    def _slots(self, places: Int64) -> Int64:
        return np.searchsorted(self._first_places[1:], places, side="right")

    def _keys(self, purpose: str, groups: Int64) -> U64:
        return keys_at(groups.astype(np.uint64), self.seed, purpose, self.epoch)

    def _stratified_rows(self, slots: Int64, positions: Int64, strata: Int64) -> Int64:
        """Return the row at each position of a slot.

        In each row group, the row with the k-th lowest stratum goes to the position
        with the k-th lowest ``index * phi mod 1``.

        Args:
            slots: int64 `[n]`.
            positions: int64 `[n]`, a position in each slot.
            strata: int64 `[P]`, of all packs, in file order.

        Returns:
            int64 `[n]`, rows in the row groups of the slots.
        """
        # All rows of the distinct row groups get a position, not only the requested
        # ones. Arrays from here to the last line are `[all these rows]`, concatenated
        # group by group; `owners` has the number of the group of each.
        distinct_slots, index_of_slot = np.unique(slots, return_inverse=True)
        groups = self._groups[distinct_slots]
        sizes = self._group_rows[groups]
        owners = np.repeat(np.arange(len(groups)), sizes)

        first_packs = self._first_packs[groups]
        packs = range_indices(first_packs, sizes)  # of one group after another
        rows = packs - first_packs[owners]
        tie_breakers = mixed(
            self._keys("ties", groups)[owners] + rows.astype(np.uint64)
        )
        by_stratum = np.lexsort((tie_breakers, strata[packs], owners))

        places = range_indices(self._first_places[distinct_slots], sizes)
        # `GOLDEN` is the fraction of phi in units of 2^-64, and products of uint64 are
        # taken modulo 2^64: this is `index * phi mod 1`.
        fractions = self._indices(places).astype(np.uint64) * GOLDEN
        by_fraction = np.lexsort((fractions, owners))

        # Both orders go group by group: the k-th position by fraction gets the k-th row
        # by stratum of the same group.
        row_at_position = np.empty(len(rows), np.int64)
        row_at_position[by_fraction] = rows[by_stratum]
        first_positions = to_offsets(sizes)[index_of_slot]
        requested_rows: Int64 = row_at_position[first_positions + positions]
        return requested_rows


def permuted(values: Int64, sizes: Int64, keys: U64) -> Int64:
    """Map each value by a permutation of its own, without a table.

    A permutation of ``0 .. 2^bits - 1``, the next power of two, is applied until the
    result is below the size (cycle walking: Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002).

    Args:
        values: int64 `[n]`, each in ``0 .. size - 1``.
        sizes: int64 `[n]`, sizes of the permutations.
        keys: uint64 `[n]`, a permutation for each key and size.

    Returns:
        int64 `[n]`, each in ``0 .. size - 1``.
    """
    unit = np.uint64(1)
    _, exponents = np.frexp(sizes - 1)  # number of bits of the largest value
    bits = exponents.astype(np.uint64)
    masks = (unit << bits) - unit
    shifts = (bits + unit) >> unit
    limits = sizes.astype(np.uint64)

    results = values.astype(np.uint64)
    pending = np.arange(len(results))
    while len(pending):
        value = results[pending]
        mask = masks[pending]
        shift = shifts[pending]
        key_of_value = keys[pending]
        for round_number in range(_ROUNDS):
            key = mixed(key_of_value + np.uint64(round_number))
            # Each step is invertible: an odd factor, an addition, a shifted xor.
            value = (value * (key | unit) + (key >> np.uint64(32))) & mask
            value ^= value >> shift
        results[pending] = value
        pending = pending[value >= limits[pending]]
    return results.astype(np.int64)
