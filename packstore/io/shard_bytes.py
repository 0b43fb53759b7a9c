"""A shard read once, from its beginning to its end, and hashed on the way."""

from __future__ import annotations

import hashlib

from packstore.errors import IntegrityError
from packstore.io.shard import ShardInfo
from packstore.io.storage import Location

WINDOW_BYTES = 16 << 20
"""Bytes of a shard that are read at once."""


class ShardBytes:
    """The bytes of a shard, for a reader that takes its row groups in their order.

    Two windows of it are in memory. Nothing is mapped: a file that gets shorter while it is read
    would end the process.

    Args:
        location: the dataset.
        shard: one of its shards; no more bytes are read than the manifest says it has.
    """

    def __init__(self, location: Location, shard: ShardInfo) -> None:
        self._location, self._shard = location, shard
        self._digest = hashlib.sha256()
        self._start, self._window = 0, b""
        self._footer: bytes | None = None

    def __getitem__(self, part: slice) -> bytes:
        """Bytes `start` to `stop`; none that lie before those that were asked for last."""
        size, length = self._shard.bytes, self._shard.footer_bytes
        start, stop = part.start, part.stop
        if (start, stop) == (size - length, size):  # is read first
            self._footer = self._location.read_bytes(self._shard.path, start, stop)
            return self._footer
        while self._end < stop and self._advance(keep=start):
            pass
        if start < self._start:
            raise IntegrityError("its row groups must lie one after another")
        return self._window[start - self._start : stop - self._start]

    def hashes(self) -> dict[str, str]:
        """sha256 of the file, of which the rest is read, and of its footer."""
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
        """Reads the next window; lets go of what lies before `keep`. False at the end."""
        end = self._end
        data = (
            self._location.read_bytes(
                self._shard.path, end, min(end + WINDOW_BYTES, self._shard.bytes)
            )
            if end < self._shard.bytes
            else b""
        )
        self._digest.update(data)
        cut = min(max(keep - self._start, 0), len(self._window))
        self._start, self._window = self._start + cut, self._window[cut:] + data
        return bool(data)
