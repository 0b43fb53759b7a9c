"""A stream from a store that retries reads and raises only storage errors."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def retried_stream(
    raw: Any,
    request: Callable[[Callable[[], int]], int],
    guard: Callable[[], AbstractContextManager[None]],
) -> io.BufferedReader:
    """Returns a stream over a raw file of a filesystem.

    Args:
        raw: the file.
        request: makes one request to it, with retries and storage errors.
        guard: returns a context that turns errors into storage errors.
    """
    return io.BufferedReader(_RetriedFile(raw, request, guard), 1 << 20)


class _RetriedFile(io.RawIOBase):
    def __init__(self, raw: Any, request: Any, guard: Any) -> None:
        self._raw, self._request, self._guard = raw, request, guard

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:  # the response of a plain web server may not be
        return bool(self._raw.seekable())

    def readinto(self, buffer: Any) -> int:
        if not self.seekable():
            with self._guard():
                return int(self._raw.readinto(buffer) or 0)
        place = self._raw.tell()

        def read() -> int:
            self._raw.seek(place)  # a failed read may have moved the position
            return int(self._raw.readinto(buffer) or 0)

        return int(self._request(read))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._request(lambda: int(self._raw.seek(offset, whence))))

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
