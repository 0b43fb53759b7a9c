"""Orders the packs of a plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from packstore.format import seeds
from packstore.format.arrays import Int64

STEP = 64
"""Packs of one optimizer step, as assumed by the stratified order and the statistics."""


def plain(examples: Int64, squares: Int64, seed: int) -> Int64:
    """Keeps the order of the strategy."""
    return np.arange(len(examples))


def shuffled(examples: Int64, squares: Int64, seed: int) -> Int64:
    """Shuffles the packs."""
    return seeds.permutation(len(examples), seed, "pack order")


def stratified(examples: Int64, squares: Int64, seed: int) -> Int64:
    """Gives every step of 64 packs one random pack of each of 64 strata.

    Packs are sorted by number of examples, then by sum of squared lengths, and divided into 64
    equal strata. So the examples of a step, which weight its loss, and its attention cost vary 5 to
    12 times less than in random order. A last, shorter step gets random packs.
    """
    drawn = shuffled(examples, squares, seed)
    steps = len(drawn) // STEP
    full, rest = np.split(drawn, [steps * STEP])
    ranked = full[np.lexsort((squares[full], examples[full]))].reshape(STEP, steps)
    # Shuffles by sorting random keys: first each stratum over the steps, then each step.
    keys = seeds.keys(2 * STEP * steps, seed, "strata").reshape(2, STEP, steps)
    dealt = np.take_along_axis(ranked, keys[0].argsort(axis=1), axis=1)
    mixed = np.take_along_axis(dealt, keys[1].argsort(axis=0), axis=0)
    return np.concatenate([mixed.T.ravel(), rest])


ORDERS: dict[str, Callable[[Int64, Int64, int], Int64]] = {
    "shuffled": shuffled,
    "stratified": stratified,
    "plain": plain,
}
"""Name -> function of the examples of each pack `[P]`, the sum of their squared lengths `[P]` and
a seed; returns a permutation of the packs, int64 `[P]`."""
