"""First-fit decreasing, as NeMo-Aligner and Megatron-Bridge define it."""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Int32, Int64
from packstore.pack.first_fit import first_fit
from packstore.pack.histogram import count_lengths, group_by_length


def first_fit_decreasing(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Packs the longest example first, each into the first pack that it fits.

    Makes as many packs as the strategy of this name in NeMo-Aligner and Megatron-Bridge
    (``create_packing_strategy``). Short examples end up together: use pack order ``stratified``.
    """
    grouped = group_by_length(lengths, count_lengths(lengths, capacity), seed)
    return first_fit(lengths, capacity, np.ascontiguousarray(grouped[::-1]))
