"""Keeps open readers of a dataset's shards."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from packstore.io.dataset.cache import Cache
from packstore.io.dataset.reader import ShardReader
from packstore.io.manifest.manifest import Manifest
from packstore.io.store.location import Location

OPEN_SHARDS = 64
"""Number of shards whose footers are kept."""


class ShardReaders:
    """The most recently used readers of a dataset's shards; not shared between processes.

    A reader holds the parsed footer of its shard, some kB for each row group.
    """

    def __init__(self, location: Location, manifest: Manifest, cache: Cache | None = None) -> None:
        self._location, self._manifest, self._cache = location, manifest, cache
        self._begin()

    def __getitem__(self, number: int) -> ShardReader:
        if os.getpid() != self._pid:  # forked: locks may be held by threads of the parent
            self._begin()
        with self._lock:
            reader = self._recent.pop(number, None)
            if reader is None:
                shard = self._manifest.shards[number]
                reader = ShardReader(self._location, self._manifest, shard, cache=self._cache)
            self._recent[number] = reader
            while len(self._recent) > OPEN_SHARDS:
                self._recent.popitem(last=False)
        return reader

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._recent: OrderedDict[int, ShardReader] = OrderedDict()
