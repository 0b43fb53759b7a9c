"""Memory of decoded row groups, used again once nothing looks at it.

Row groups go in another order than they came. An allocator keeps the gaps between them, so that a
process would grow; and memory that goes back to the system and is taken again is cleared each time,
which costs a fifth of decoding into it.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from packstore.records import Int32

KEPT_BYTES = 32 << 20
"""Of memory that waits to be used again, at most."""
_UNIT = 64 << 10

_waiting: list[mmap.mmap] = []


def room(n: int) -> Int32:
    """An array of `n` numbers of any value, int32; its memory is used again after its last view."""
    size = max(-(-4 * n // _UNIT), 1) * _UNIT
    try:
        memory = _waiting.pop()
    except IndexError:
        memory = mmap.mmap(-1, size, **_PRIVATE)
    if len(memory) < size:
        memory = mmap.mmap(-1, size, **_PRIVATE)
    array = np.frombuffer(memory, np.int32, n)
    # Views have `array` as their base, not the memory: so it lives until the last of them is gone.
    weakref.finalize(array, _give_back, memory).atexit = False
    return array


def _give_back(memory: mmap.mmap) -> None:
    if (len(_waiting) + 1) * len(memory) <= KEPT_BYTES:
        _waiting.append(memory)


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
