"""The bytes of a pickle, and in them whole numbers that follow one another."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from packstore.pack.kernels import jit
from packstore.records import Int64

INT1, INT2, INT4 = 0x4B, 0x4D, 0x4A
"""Instructions with an unsigned byte, two of them, and a signed number of four bytes."""

LONGEST = 5
"""Bytes of the longest of them."""

WINDOW = 1 << 20
"""Bytes of the file that are looked at together."""


class Window:
    """Reads a stream; :class:`EOFError` where it ends too early."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._before = self._at = self._end = 0
        self._data = bytes(LONGEST)
        self._numbers = np.empty(WINDOW, np.int64)

    @property
    def position(self) -> int:
        """Bytes that were taken."""
        return self._before + self._at

    def at_end(self) -> bool:
        """Whether nothing is left."""
        if self._at == self._end:
            self._fill()
        return self._at == self._end

    def peek(self) -> int:
        """The next byte, which stays the next."""
        if self.at_end():
            raise EOFError
        return self._data[self._at]

    def take(self, count: int) -> bytes:
        """The next bytes; less than a window."""
        if self._at + count > self._end:
            self._fill()
            if count > self._end:
                raise EOFError
        self._at += count
        return self._data[self._at - count : self._at]

    def run(self) -> Int64:
        """The whole numbers that come next: at least one, and not more than a window of them."""
        if self._at + LONGEST > self._end:
            self._fill()
        data = np.frombuffer(self._data, np.uint8)
        count, at = _decode_run(data, self._at, self._end, self._numbers)
        if at > self._end:
            raise EOFError
        self._at = at
        return self._numbers[:count].copy()

    def _fill(self) -> None:
        """Moves on, so that the window begins at the next byte."""
        data = self._data[self._at : self._end] + self._stream.read(WINDOW)
        self._before, self._at, self._end = self._before + self._at, 0, len(data)
        self._data = data + bytes(LONGEST)


@jit
def _decode_run(data: npt.NDArray[np.uint8], at: int, end: int, out: Int64) -> tuple[int, int]:
    """Decodes whole numbers from ``data[at]`` on, up to `end` or another instruction.

    Args:
        data: `LONGEST` bytes longer than `end`, as the last number may not be all there.
        at: where to begin.
        end: where the bytes of the file end.
        out: written; one number for two bytes, at least.

    Returns:
        how many numbers; where it stopped, which lies behind `end` if the only one is cut off.
    """
    count = 0
    while at < end:
        code = data[at]
        if code == INT1:
            value, size = np.int64(data[at + 1]), 2
        elif code == INT2:
            value, size = np.int64(data[at + 1]) | (np.int64(data[at + 2]) << 8), 3
        elif code == INT4:
            low = np.int64(data[at + 1]) | (np.int64(data[at + 2]) << 8)
            high = np.int64(data[at + 3]) | (np.int64(data[at + 4]) << 8)
            value, size = ((low | (high << 16)) ^ 0x80000000) - 0x80000000, 5
        else:
            break
        if at + size > end and count:
            break
        out[count] = value
        count += 1
        at += size
    return count, at
