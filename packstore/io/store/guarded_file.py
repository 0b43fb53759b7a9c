"""A stream from a store that retries reads and raises only storage errors."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class GuardedFile(io.RawIOBase):
    """Wraps a raw file of a filesystem.

    Args:
        raw: the file.
        ask: makes one request to it, with retries and storage errors.
        guard: returns a context that turns errors into storage errors.
    """

    def __init__(
        self,
        raw: Any,
        ask: Callable[[Callable[[], int]], int],
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._raw, self._ask, self._guard = raw, ask, guard

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True if the file is; the response of a plain web server may not be."""
        return bool(self._raw.seekable())

    def readinto(self, buffer: Any) -> int:
        """Reads up to the length of `buffer` into it; returns the number of bytes."""
        if not self.seekable():
            with self._guard():
                return int(self._raw.readinto(buffer) or 0)
        place = self._raw.tell()

        def read() -> int:
            self._raw.seek(place)  # a failed read may have moved the position
            return int(self._raw.readinto(buffer) or 0)

        return self._ask(read)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a position in the file; returns it."""
        return self._ask(lambda: int(self._raw.seek(offset, whence)))

    def close(self) -> None:
        """Also closes the filesystem's file."""
        if not self.closed:
            self._raw.close()
        super().close()
