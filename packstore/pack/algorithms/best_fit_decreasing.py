"""Best-fit decreasing over the histogram of lengths: tight, and the fastest global plan."""

from __future__ import annotations

from packstore.format.arrays import Int32, Int64
from packstore.pack.histogram import best_fit, count_lengths, group_by_length, new_steps, place


def best_fit_decreasing(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Packs the longest example first, each into the fullest pack that it fits.

    Makes as many packs as the plain algorithm on sorted lengths. Packs hold examples of similar
    length: use pack order ``stratified`` or ``shuffled``.
    """
    counts = count_lengths(lengths, capacity)
    steps, used, packs = best_fit(counts, capacity, new_steps(), 0, 0)
    return place(steps[:used], packs, group_by_length(lengths, counts, seed), counts)
