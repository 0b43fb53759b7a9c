"""A shard read once, from its beginning to its end, and hashed on the way."""

from __future__ import annotations

import hashlib

import pyarrow as pa

from packstore.errors import IntegrityError
from packstore.io.manifest import Manifest
from packstore.io.shard import ShardInfo
from packstore.io.storage import Location

WINDOW_BYTES = 16 << 20
"""Bytes of a shard that are read at once."""


class ShardBytes:
    """The bytes of a shard, for a reader that takes its row groups in their order.

    Of a Parquet file two windows are in memory. The whole of an Arrow file is, or it is mapped if
    it lies on the local disk, as its batches are views of it.

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


class MappedShard(ShardBytes):
    """The whole of an Arrow shard."""

    def __init__(self, location: Location, shard: ShardInfo) -> None:
        super().__init__(location, shard)
        path = location.join(shard.path).local_path
        if path is not None:
            with location.guard("read", shard.path), pa.memory_map(path) as file:
                self.whole = file.read_buffer(shard.bytes)
        else:
            self.whole = pa.py_buffer(location.read_bytes(shard.path, 0, shard.bytes))

    def __getitem__(self, part: slice) -> bytes:
        """Any bytes of it."""
        return bytes(self.whole.slice(part.start, part.stop - part.start))

    def hashes(self) -> dict[str, str]:
        """As those of :class:`ShardBytes`."""
        view = memoryview(self.whole)
        footer = view[max(len(view) - self._shard.footer_bytes, 0) :]
        return {
            "sha256": hashlib.sha256(view).hexdigest(),
            "footer_sha256": hashlib.sha256(footer).hexdigest(),
        }


def open_shard(location: Location, manifest: Manifest, shard: ShardInfo) -> ShardBytes:
    """The bytes of a shard.

    Raises:
        StorageError: it is missing, or the store refuses.
    """
    arrow = manifest.file_format == "arrow"
    return (MappedShard if arrow else ShardBytes)(location, shard)
