"""Helpers of the compiled loops in this folder: the decorator, and a sorted set of small integers.

numba's cache notices edits of a function's own file only: after changing this one, delete the
``__pycache__`` folders of the callers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

NONE, ONE = np.uint64(0), np.uint64(1)
SHIFT, SHIFT2, LOW = np.uint64(6), np.uint64(12), np.uint64(63)
F = TypeVar("F", bound=Callable[..., Any])
Bits = npt.NDArray[np.uint64]


_LOOPS: list[Any] = []


def jit(function: F) -> F:
    """Compiles `function`: serial, without the GIL, cached on disk if a folder is writable."""
    return _compiled(function)


def inlined(function: F) -> F:
    """Compiles like :func:`jit`, for a small part of a hot loop that allocates no arrays."""
    return _compiled(function, _nrt=False)


def _compiled(function: F, **options: bool) -> F:
    try:
        made = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # neither __pycache__ nor the user's cache folder is writable
        made = njit(nogil=True, **options)(function)
    _LOOPS.append(made)
    return cast(F, made)


def compiles() -> bool:
    """Returns True if this process had to compile a loop, or is doing so: the cache lacks it."""
    return any(loop.stats.cache_misses or not loop.stats.cache_path for loop in _LOOPS)


def _lowest_bit(context: Any, word: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), build


lowest_bit: Callable[[np.uint64], int] = intrinsic(_lowest_bit)
"""Position of the lowest set bit of a uint64 that is not 0."""


def _highest_bit(context: Any, word: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return types.int64(types.uint64), build


highest_bit: Callable[[np.uint64], int] = intrinsic(_highest_bit)
"""Position of the highest set bit of a uint64 that is not 0."""


@jit
def new_set(limit: int) -> Bits:
    """Makes an empty set of integers in 0..limit: uint64 words with one bit per integer, then words
    with one bit per such word, and last the number of the former.
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
        return i + lowest_bit(rest)
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
    full = np.uint64(np.int64((top - words) << SHIFT) + lowest_bit(rest))
    return int(np.int64(full << SHIFT)) + lowest_bit(bits[full])


@inlined
def at_most(bits: Bits, i: int) -> int:
    """Returns the largest member <= `i` (in 0..limit), or -1."""
    word, words = np.uint64(i) >> SHIFT, bits[-1]
    rest = bits[word] << (LOW - (np.uint64(i) & LOW))
    if rest != NONE:
        return i - 63 + highest_bit(rest)
    top = words + (word >> SHIFT)
    rest = bits[top] & ((ONE << (word & LOW)) - ONE)
    while rest == NONE:
        if top == words:
            return -1
        top -= ONE
        rest = bits[top]
    full = np.uint64(np.int64((top - words) << SHIFT) + highest_bit(rest))
    return int(np.int64(full << SHIFT)) + highest_bit(bits[full])
