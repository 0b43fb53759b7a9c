"""Reads and hashes a shard in one pass, from start to end."""

from __future__ import annotations

import hashlib

from packstore.errors import IntegrityError
from packstore.io.shards.shard import ShardInfo
from packstore.io.store.location import Location

WINDOW_BYTES = 16 << 20
"""Bytes read at once."""


class ShardBytes:
    """The bytes of a shard, for a reader of its row groups in order; keeps two windows of them.

    Does not map the file: if it were truncated meanwhile, the process would crash.
    """

    def __init__(self, location: Location, shard: ShardInfo) -> None:
        self._location, self._shard = location, shard
        self._digest = hashlib.sha256()
        self._start, self._window = 0, b""
        self._footer: bytes | None = None

    def __getitem__(self, part: slice) -> bytes:
        """Returns bytes `start` to `stop`; `start` must not decrease between calls."""
        size, length = self._shard.bytes, self._shard.footer_bytes
        start, stop = part.start, part.stop
        if (start, stop) == (size - length, size):  # the footer, read first
            self._footer = self._location.read_bytes(self._shard.path, start, stop)
            return self._footer
        while self._end < stop and self._advance(keep=start):
            pass
        if start < self._start:
            raise IntegrityError("its row groups must lie one after another")
        return self._window[start - self._start : stop - self._start]

    def hashes(self) -> dict[str, str]:
        """Reads the rest of the file; returns the sha256 of the file and of its footer."""
        while self._advance(keep=self._end):
            pass
        found = {"sha256": self._digest.hexdigest()}
        if self._footer is not None:
            found["footer_sha256"] = hashlib.sha256(self._footer).hexdigest()
        return found

    @property
    def _end(self) -> int:
        return self._start + len(self._window)

    def _advance(self, keep: int) -> bool:
        """Reads the next window; drops bytes before `keep`. Returns False at the end."""
        start, stop = self._end, min(self._end + WINDOW_BYTES, self._shard.bytes)
        data = b""
        if start < stop:
            data = self._location.read_bytes(self._shard.path, start, stop)
        self._digest.update(data)
        cut = min(max(keep - self._start, 0), len(self._window))
        self._start, self._window = self._start + cut, self._window[cut:] + data
        return bool(data)
