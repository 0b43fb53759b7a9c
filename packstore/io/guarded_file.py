"""A stream from a store: every error is named, and what may pass is read again."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class GuardedFile(io.RawIOBase):
    """A raw file of a filesystem.

    Args:
        raw: the file.
        ask: makes one request to it, names its errors, and asks again.
        guard: makes a context that names errors.
    """

    def __init__(
        self,
        raw: Any,
        ask: Callable[[Callable[[], int]], int],
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._raw, self._ask, self._guard = raw, ask, guard

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Whether the file is; the answer of a plain web server may be not."""
        return bool(self._raw.seekable())

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer`, or as much of it as there are bytes."""
        if not self.seekable():
            with self._guard():
                return int(self._raw.readinto(buffer) or 0)
        place = self._raw.tell()

        def read() -> int:
            self._raw.seek(place)  # a read that failed may have moved on
            return int(self._raw.readinto(buffer) or 0)

        return self._ask(read)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a place in the file."""
        return self._ask(lambda: int(self._raw.seek(offset, whence)))

    def close(self) -> None:
        """Closes the file of the filesystem too."""
        if not self.closed:
            self._raw.close()
        super().close()
