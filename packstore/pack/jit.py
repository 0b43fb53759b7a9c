"""Compile loops with numba where the rows are worth the time to load a compiler."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from packstore.registry import require_package

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Any]

MIN_ROWS = 10_000
"""Rows from which on a loop runs compiled.

Python takes 14 µs a row (measured with strategy ``pool``); numba takes 0.4 s to load
the loop from its cache, and 2.5 s to compile it the first time on a machine.
"""

_lock = threading.Lock()
_compiled_loops: dict[Function, Function] = {}
_new_helpers: list[Function] = []


def jit(loop: F) -> F:
    """Decorate a loop over the rows of its first argument, to compile it for many rows.

    The compiled loop is serial, runs without the GIL, and is cached on disk. numba
    notices changes of a loop's own file only: helpers belong into the file of the loops
    that call them.
    """

    @functools.wraps(loop)
    def run(rows: Any, *args: Any) -> Any:
        if len(rows) < MIN_ROWS:
            return loop(rows, *args)
        return _compile(loop)(rows, *args)

    return cast(F, run)


def jit_helper(function: F) -> F:
    """Decorate a function that loops of :func:`jit` call; it allocates no arrays."""
    _new_helpers.append(function)
    return function


def lowest_bit(word: Any) -> int:
    """Return the position of the lowest bit that is set in a uint64 other than 0."""
    return (int(word) & -int(word)).bit_length() - 1


def highest_bit(word: Any) -> int:
    """Return the position of the highest bit that is set in a uint64 other than 0."""
    return int(word).bit_length() - 1


def _compile(loop: Function) -> Function:
    require_package("numba", f"packing {MIN_ROWS:,} rows or more")
    with _lock:
        if loop not in _compiled_loops:
            if not _compiled_loops:
                _register_bit_scans()
            _register_helpers()
            _compiled_loops[loop] = _njit(loop)
        return _compiled_loops[loop]


def _njit(loop: Function) -> Function:
    import numba

    try:
        return cast(Function, numba.njit(loop, cache=True, nogil=True))
    except RuntimeError:
        # "no locator available": neither the folder of the package nor the user's cache
        # folder can be written. So each process compiles for itself.
        return cast(Function, numba.njit(loop, nogil=True))


def _register_helpers() -> None:
    """Let compiled loops call the helpers that were imported since the last call."""
    from numba.extending import register_jitable

    while _new_helpers:
        # A call that counts references to its arrays takes ten times as long as the
        # work inside, and one that is not inlined half as long again (measured).
        register_jitable(_nrt=False, forceinline=True)(_new_helpers.pop())


def _register_bit_scans() -> None:
    """Let compiled loops find bits by one instruction: numba has no `bit_length`."""
    from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros
    from numba.extending import overload

    @overload(lowest_bit)
    def compile_lowest_bit(word: Any) -> Function:
        def scan(word: Any) -> Any:
            return np.int64(trailing_zeros(word))

        return scan

    @overload(highest_bit)
    def compile_highest_bit(word: Any) -> Function:
        def scan(word: Any) -> Any:
            return 63 - np.int64(leading_zeros(word))

        return scan
