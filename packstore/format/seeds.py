"""Random numbers that are a pure function of a seed and a purpose.

All random choices of packstore come from here, so that the same seed gives the same
bytes on every machine, with any number of workers, and with every release of numpy
(its generators may change between releases; a hash does not).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: its multiples are spread evenly."""

_BLOCK = 1 << 15


def derive(seed: int, *purpose: str | int) -> int:
    """Derive an independent 64-bit seed for a purpose, e.g. ``derive(seed, "pack
    order")``.
    """
    parts = [int(seed), *purpose]
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def keys(n: int, seed: int, *purpose: str | int) -> U64:
    """Return `n` pseudo-random 64-bit integers: splitmix64 at counter positions 0..n-1.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
        2014.
    """
    numbers = np.empty(n, np.uint64)
    for start in range(0, n, _BLOCK):  # blocks fit the cache: several times faster
        places = np.arange(start, min(start + _BLOCK, n), dtype=np.uint64)
        numbers[start : start + _BLOCK] = keys_at(places, seed, *purpose)
    return numbers


def keys_at(places: U64, seed: int, *purpose: str | int) -> U64:
    """Return the numbers of :func:`keys` at these places."""
    start = np.uint64(derive(seed, *purpose))
    return mixed((places + np.uint64(1)) * GOLDEN + start)


def mixed(values: U64) -> U64:
    """Map each value to a pseudo-random one, by the finalizer of splitmix64; a
    bijection.
    """
    z = values ^ (values >> np.uint64(30))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def permutation(n: int, seed: int, *purpose: str | int) -> npt.NDArray[np.int64]:
    """Return a uniformly random permutation of 0..n-1, int64 `[n]`.

    Sorts distinct numbers with a hash in the high bits and the index in the low bits,
    which is several times faster than an indirect sort and does not depend on the
    sorting algorithm. The hash has enough bits that for 1e6 numbers about one pair is
    equal, and so in index order.
    """
    index_bits = np.uint64(max(n - 1, 0).bit_length())
    index_mask = (np.uint64(1) << index_bits) - np.uint64(1)

    # In place, as `n` may be large.
    numbers = keys(n, seed, *purpose)
    numbers >>= index_bits
    numbers <<= index_bits
    numbers |= np.arange(n, dtype=np.uint64)
    numbers.sort()
    numbers &= index_mask
    return numbers.view(np.int64)
