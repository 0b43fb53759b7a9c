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

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 15


def derive(seed: int, *purpose: str | int) -> int:
    """An independent 64-bit seed for one purpose, e.g. ``derive(seed, "pack order")``."""
    text = "\x1f".join([str(int(seed)), *(str(p) for p in purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keys(n: int, seed: int, *purpose: str | int) -> U64:
    """`n` pseudo-random 64-bit integers: splitmix64 at counter positions 0..n-1.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    out = np.empty(n, np.uint64)
    offset = np.uint64(derive(seed, *purpose))
    for start in range(0, n, _BLOCK):  # in the cache: several times faster than whole arrays
        block = out[start : start + _BLOCK]
        counters = np.arange(start + 1, start + 1 + len(block), dtype=np.uint64)
        block[:] = mixed(counters * _GOLDEN + offset)
    return out


def keys_at(places: U64, seed: int, *purpose: str | int) -> U64:
    """The numbers that :func:`keys` has at these places."""
    return mixed((places + np.uint64(1)) * _GOLDEN + np.uint64(derive(seed, *purpose)))


def mixed(values: U64) -> U64:
    """The finalizer of splitmix64: each value as a pseudo-random one; a bijection."""
    z = values ^ (values >> np.uint64(30))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def permutation(n: int, seed: int, *purpose: str | int) -> npt.NDArray[np.int64]:
    """A uniformly random permutation of 0..n-1, int64 `[n]`.

    Sorts distinct numbers, each a hash above and its index below, which is several times faster
    than an indirect sort and the same with every algorithm. The hash keeps so many bits that two
    are equal, and in order, at most about once for 1e6 numbers.
    """
    table = permutation_keys(n, seed, *purpose)
    table.sort()
    table &= (np.uint64(1) << np.uint64(_index_bits(n))) - np.uint64(1)
    return table.view(np.int64)


def permutation_keys(n: int, seed: int, *purpose: str | int) -> U64:
    """What :func:`permutation` sorts, uint64 `[n]`: a hash above, 0..n-1 below."""
    below = np.uint64(_index_bits(n))
    table = keys(n, seed, *purpose)
    table >>= below
    table <<= below
    table |= np.arange(n, dtype=np.uint64)
    return table


def _index_bits(n: int) -> int:
    return max(n - 1, 0).bit_length()
