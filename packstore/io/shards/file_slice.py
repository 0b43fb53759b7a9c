"""A file object over a part of a file."""

from __future__ import annotations

import io
import os

from packstore.errors import IntegrityError


class FileSlice(io.RawIOBase):
    """A part of a file with the offsets of the whole file, for pyarrow's Parquet reader.

    `size` is that of the whole file, `start` the offset of the part `data`.
    """

    def __init__(self, size: int, data: bytes = b"", start: int = 0) -> None:
        self._size = size
        self.hold(data, start)

    def hold(self, data: bytes, start: int) -> None:
        """Replaces the part."""
        self._data, self._start, self._position = memoryview(data), start, start

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position in the whole file."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a position in the whole file; returns it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """Returns the next `size` bytes.

        Raises:
            IntegrityError: they are outside of the part.
        """
        start = self._position - self._start
        stop = len(self._data) if size < 0 else start + size
        if start < 0 or stop > len(self._data):
            raise IntegrityError("a column must lie in the bytes of its row group")
        self._position += stop - start
        return self._data[start:stop]
