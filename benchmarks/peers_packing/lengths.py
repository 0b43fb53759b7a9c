"""Nine sets of lengths: two like preference pairs, and seven that are hard in some way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from packstore.format.arrays import Int32

Float64 = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], "Float64 | Int32"]

_AT_ONCE = 1 << 20


def _pairs(median: float, sigma: float, rng: np.random.Generator, n: int, c: int) -> Float64:
    return rng.lognormal(np.log(median), sigma, n)


def _bimodal(rng: np.random.Generator, n: int, c: int) -> Float64:
    short = rng.random(n) < 0.7
    return np.where(short, rng.normal(250, 80, n), rng.normal(0.635 * c, 0.12 * c, n))


SETS: dict[str, Draw] = {
    "dpo": partial(_pairs, 600, 0.8),
    "dpolong": partial(_pairs, 1300, 0.4),
    "bimodal": _bimodal,
    "uniform": lambda rng, n, c: rng.integers(1, c + 1, n),
    "nearuni": lambda rng, n, c: rng.normal(0.3 * c, 0.02 * c, n),
    "narrow": lambda rng, n, c: rng.uniform(0.26 * c, 0.48 * c, n),
    "manyeq": lambda rng, n, c: rng.choice([0.11, 0.23, 0.31, 0.47, 0.64], n) * c,
    "half": lambda rng, n, c: rng.integers(c // 2 + 1, c + 1, n),
    "third": lambda rng, n, c: np.full(n, c // 3 + 1),
}
"""Name -> function of a generator, the number of lengths and the pack size."""


def draw(name: str, n: int, capacity: int, seed: int) -> Int32:
    """int32 `[n]`, each 1..capacity; a part at a time, so that 1e8 need no more than their own."""
    rng = np.random.default_rng([seed, list(SETS).index(name)])
    lengths = np.empty(n, np.int32)
    for start in range(0, n, _AT_ONCE):
        part = lengths[start : start + _AT_ONCE]
        part[:] = np.clip(np.rint(SETS[name](rng, len(part), capacity)), 1, capacity)
    return lengths
