"""Helpers of the loops in this folder: the decorators, and a sorted set of small
integers.

numba's cache notices edits of a function's own file only: after changing this one,
delete the ``__pycache__`` folders of the callers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

NONE, ONE = np.uint64(0), np.uint64(1)
SHIFT, SHIFT2, LOW = np.uint64(6), np.uint64(12), np.uint64(63)
F = TypeVar("F", bound=Callable[..., Any])
Bits = npt.NDArray[np.uint64]

FEW = 50_000
"""Rows that Python loops over in less time than numba takes to load: those of 6000
examples.
"""

_rows = 0  # of all calls
_lock = threading.Lock()
_parts: list[Callable[..., Any]] = []  # that numba does not know yet
_compiled: dict[Callable[..., Any], Any] = {}


def jit(function: F) -> F:
    """Makes a loop over the rows of its first argument; Python runs it until there were
    many.

    Then it is compiled: serial, without the GIL, cached on disk if a folder is
        writable.
    """

    @functools.wraps(function)
    def loop(rows: Any, *others: Any) -> Any:
        global _rows
        _rows += len(rows)
        return (function if _rows <= FEW else _compile(function))(rows, *others)

    return cast(F, loop)


def inlined(function: F) -> F:
    """Marks a small part of such loops, which allocates no arrays."""
    _parts.append(function)
    return function


def load() -> None:
    """Makes all loops compiled ones from now on."""
    global _rows
    _rows += FEW


def compiles() -> bool:
    """Returns True if this process had to compile a loop, or is doing so: the cache
    lacks it.
    """
    stats = [loop.stats for loop in list(_compiled.values())]
    return any(one.cache_misses or not one.cache_path for one in stats)


def _compile(function: Callable[..., Any]) -> Any:
    from numba import njit
    from numba.extending import register_jitable

    with _lock:
        if not _compiled:
            _count_zeros()
        while _parts:
            register_jitable(_nrt=False)(_parts.pop())
        if function not in _compiled:
            try:
                _compiled[function] = njit(cache=True, nogil=True)(function)
            except (
                RuntimeError
            ):  # neither __pycache__ nor the user's cache folder is writable
                _compiled[function] = njit(nogil=True)(function)
        return _compiled[function]


def _count_zeros() -> None:
    """Makes compiled loops count zeros by one instruction."""
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba import types
    from numba.extending import intrinsic, overload

    def add(function: Callable[[np.uint64], int], instruction: str) -> None:
        def typed(context: Any, word: Any) -> Any:
            def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return getattr(builder, instruction)(
                    args[0], ir.Constant(ir.IntType(1), 1)
                )

            return types.int64(types.uint64), build

        zeros = intrinsic(typed)
        overload(function)(lambda word: lambda word: zeros(word))

    add(zeros_below, "cttz")
    add(zeros_above, "ctlz")


def zeros_below(word: np.uint64) -> int:
    """Returns the number of zeros below the lowest bit of a word that is not 0."""
    return (int(word) & -int(word)).bit_length() - 1


def zeros_above(word: np.uint64) -> int:
    """Returns the number of zeros above the highest bit of a word that is not 0."""
    return 64 - int(word).bit_length()


def new_set(limit: int) -> Bits:
    """Makes an empty set of integers in 0..limit: uint64 words with one bit per
    integer, then words with one bit per such word, and last the number of the former.
    """
    words = limit // 64 + 1
    bits = np.zeros(words + words // 64 + 2, np.uint64)
    bits[-1] = words
    return bits


@inlined
def add(bits: Bits, i: int) -> None:
    """Adds `i` to the set."""
    at = np.uint64(i)
    bits[at >> SHIFT] |= ONE << (at & LOW)
    bits[bits[-1] + (at >> SHIFT2)] |= ONE << ((at >> SHIFT) & LOW)


@inlined
def remove(bits: Bits, i: int) -> None:
    """Removes `i` from the set."""
    at = np.uint64(i)
    left = bits[at >> SHIFT] & ~(ONE << (at & LOW))
    bits[at >> SHIFT] = left
    if left == NONE:
        bits[bits[-1] + (at >> SHIFT2)] &= ~(ONE << ((at >> SHIFT) & LOW))


@inlined
def at_least(bits: Bits, i: int) -> int:
    """Returns the smallest member >= `i` (in 0..limit), or -1."""
    word, words, end = np.uint64(i) >> SHIFT, bits[-1], np.uint64(len(bits) - 1)
    rest = bits[word] >> (np.uint64(i) & LOW)
    if rest != NONE:
        return i + zeros_below(rest)
    word += ONE
    top = words + (word >> SHIFT)
    if top == end:
        return -1
    rest = bits[top] & (~NONE << (word & LOW))
    while rest == NONE:
        top += ONE
        if top == end:
            return -1
        rest = bits[top]
    full = np.uint64(np.int64((top - words) << SHIFT) + zeros_below(rest))
    return int(np.int64(full << SHIFT)) + zeros_below(bits[full])


@inlined
def at_most(bits: Bits, i: int) -> int:
    """Returns the largest member <= `i` (in 0..limit), or -1."""
    word, words = np.uint64(i) >> SHIFT, bits[-1]
    rest = bits[word] << (LOW - (np.uint64(i) & LOW))
    if rest != NONE:
        return i - zeros_above(rest)
    top = words + (word >> SHIFT)
    rest = bits[top] & ((ONE << (word & LOW)) - ONE)
    while rest == NONE:
        if top == words:
            return -1
        top -= ONE
        rest = bits[top]
    full = np.uint64(np.int64((top - words) << SHIFT) + 63 - zeros_above(rest))
    return int(np.int64(full << SHIFT)) + 63 - zeros_above(bits[full])
