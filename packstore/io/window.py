"""A part of a file that stands for the whole."""

from __future__ import annotations

import io
import os
from collections.abc import Callable

from packstore.errors import IntegrityError


class Window(io.RawIOBase):
    """A part of a file, at its place: what the Parquet reader sees as the whole file.

    Args:
        data: the part.
        start: where it lies.
        size: of the whole file.
    """

    def __init__(self, data: bytes, start: int, size: int) -> None:
        self._data, self._start, self._size = memoryview(data), start, size
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position in the whole file."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a position in the whole file; returns it."""
        base: Callable[[], int] = {
            os.SEEK_SET: lambda: 0,
            os.SEEK_CUR: self.tell,
            os.SEEK_END: lambda: self._size,
        }[whence]
        self._position = base() + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """The next bytes, which must lie in the part."""
        start = self._position - self._start
        stop = len(self._data) if size < 0 else start + size
        if start < 0 or stop > len(self._data):
            raise IntegrityError("a column must lie in the bytes of its row group")
        self._position += stop - start
        return bytes(self._data[start:stop])
