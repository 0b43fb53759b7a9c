"""Finds row groups in a shuffled order by position.

With many row groups, only those around the first requested positions are sorted at first, so that
a training run starts or resumes without sorting millions.
"""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Bool, Int64, to_offsets
from packstore.format.seeds import U64, permutation, permutation_keys

MANY = 1 << 17
"""Number of row groups from which on they are sorted in two steps."""

_BITS = 12
_BUCKETS = 1 << _BITS


class GroupOrder:
    """The permutation of row groups by ``permutation(len(rows), seed, *purpose)``.

    Args:
        rows: int64 `[G]`, rows of each row group, in file order.
        seed, purpose: arguments of the permutation; no `purpose`: file order.
    """

    def __init__(self, rows: Int64, seed: int, *purpose: str | int) -> None:
        self._rows, self._seed, self._purpose = rows, seed, purpose
        self._whole: tuple[Int64, Int64] | None = None
        self._known = np.zeros(_BUCKETS, np.bool_)
        self._edges: Int64 | None = None
        self._groups = self._firsts = np.empty(0, np.int64)

    @property
    def whole(self) -> tuple[Int64, Int64]:
        """Returns the row groups in order, int64 `[G]`, and their positions, int64 `[G + 1]`."""
        if self._whole is None:
            groups = np.arange(len(self._rows))
            if self._purpose:
                groups = permutation(len(self._rows), self._seed, *self._purpose)
            self._whole = groups, to_offsets(self._rows[groups])
            self._groups, self._firsts = groups, self._whole[1][:-1]
        return self._whole

    @property
    def is_new(self) -> bool:
        """True before the first call of :meth:`find`, which decides what is sorted first."""
        return self._whole is None and self._edges is None

    def find(self, places: Int64) -> tuple[Int64, Int64]:
        """Returns the row groups at row positions `places`, int64 `[n]`, and their first rows."""
        if self._whole is None and not self._knows(places):
            _ = self.whole
        slots = np.searchsorted(self._firsts, places, side="right") - 1
        return self._groups[slots], self._firsts[slots]

    def _knows(self, places: Int64) -> bool:
        """Returns True if `places` are sorted; on the first call, sorts around them."""
        if not self._purpose or len(self._rows) < MANY:
            return False
        first = self._edges is None
        keys = permutation_keys(len(self._rows), self._seed, *self._purpose) if first else None
        if keys is not None:
            # The full sort is by key too, so sorting by the highest bits first is consistent.
            bucket = (keys >> np.uint64(64 - _BITS)).astype(np.int16)
            rows = np.bincount(bucket, weights=self._rows, minlength=_BUCKETS)
            self._edges = to_offsets(rows.astype(np.int64))
        assert self._edges is not None
        wanted = np.searchsorted(self._edges, places, side="right") - 1
        if keys is not None:
            self._known[wanted] = True
            self._known[np.minimum(wanted + 1, _BUCKETS - 1)] = True  # the buckets read next
            self._learn(keys, self._known[bucket])
        return bool(self._known[wanted].all())

    def _learn(self, keys: U64, chosen: Bool) -> None:
        """Sorts the `chosen` row groups, bool `[G]`: all of some buckets."""
        assert self._edges is not None
        found = np.sort(keys[chosen])
        below = np.uint64(max(len(self._rows) - 1, 0).bit_length())
        self._groups = (found & ((np.uint64(1) << below) - np.uint64(1))).view(np.int64)
        bucket = (found >> np.uint64(64 - _BITS)).astype(np.int64)
        ends = np.cumsum(self._rows[self._groups])
        starts = ends - self._rows[self._groups]
        heads = np.searchsorted(bucket, bucket)  # the first of the same bucket
        self._firsts = starts - starts[heads] + self._edges[bucket]
