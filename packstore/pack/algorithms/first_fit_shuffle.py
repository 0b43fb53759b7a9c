"""First fit of shuffled examples, as NeMo-Aligner and Megatron-Bridge define it."""

from __future__ import annotations

import numpy as np

from packstore.format import seeds
from packstore.format.arrays import Int32, Int64
from packstore.pack.first_fit import first_fit


def first_fit_shuffle(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Packs the examples in random order, each into the first pack that it fits.

    The strategy of this name in NeMo-Aligner and Megatron-Bridge draws its order from numpy, this
    one from the seed: the same order gives the same packs, another order about as many.
    """
    queue = seeds.permutation(len(lengths), seed, "first_fit_shuffle").astype(np.int32)
    return first_fit(lengths, capacity, queue)
