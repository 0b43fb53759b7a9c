"""Reuses the memory of decoded row groups.

Row groups are freed in another order than they were decoded. An allocator would keep the gaps, so
that the process grows; memory returned to the system is zeroed when it is allocated again, which
costs a fifth of the time of decoding.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from packstore.format.arrays import Int32

KEPT_BYTES = 32 << 20
"""Maximum bytes kept for reuse."""
_UNIT = 64 << 10

_waiting: list[mmap.mmap] = []


def pooled_array(n: int) -> Int32:
    """Returns an uninitialized int32 array `[n]`; its memory is reused after its last view."""
    size = max(-(-4 * n // _UNIT), 1) * _UNIT
    try:
        memory = _waiting.pop()
    except IndexError:
        memory = mmap.mmap(-1, size, **_PRIVATE)
    if len(memory) < size:
        memory = mmap.mmap(-1, size, **_PRIVATE)
    array = np.frombuffer(memory, np.int32, n)
    # The base of all views is `array`, not the mmap, so it is finalized after the last view.
    weakref.finalize(array, _give_back, memory).atexit = False
    return array


def _give_back(memory: mmap.mmap) -> None:
    if (len(_waiting) + 1) * len(memory) <= KEPT_BYTES:
        _waiting.append(memory)


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
