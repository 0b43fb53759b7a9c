"""Random numbers that are a pure function of a seed and a purpose.

Every random choice of packstore is drawn here, so that the same seed means the same bytes on every
machine, with every number of workers, and with every release of numpy (whose generators may change
their streams between releases; a hash does not).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


def derive(seed: int, *purpose: str | int) -> int:
    """An independent 64-bit seed for one purpose, e.g. ``derive(seed, "pack order")``."""
    text = "\x1f".join([str(int(seed)), *(str(p) for p in purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keys(n: int, seed: int, *purpose: str | int) -> U64:
    """`n` pseudo-random 64-bit integers: splitmix64 at counter positions 0..n-1.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        z = np.uint64(derive(seed, *purpose)) + golden * np.arange(1, n + 1, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def permutation(n: int, seed: int, *purpose: str | int) -> npt.NDArray[np.int64]:
    """A uniformly random permutation of 0..n-1, int64 `[n]`."""
    return np.argsort(keys(n, seed, *purpose), kind="stable")
