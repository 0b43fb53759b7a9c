"""Counts the divisors of losses in each pack, stored so that they are known before reading it.

A loss over a whole optimizer step is a sum over its pairs, or over its supervised tokens, divided
by their number. That number depends only on the stored data, so the writer counts it once, and a
loader that plans a step has it on every rank without communication.
"""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Float32, Int64, Packs

COUNTS = ("best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent")
"""The columns: supervised tokens of each example's best sequence, and numbers of pairs.

The best sequence is the first one; for kind ``ranked`` the first of highest reward. Pairs are
counted for the three choices of kind ``ranked``, where sequences of equal reward are never
compared; 1 per example for kind ``preference``; 0 for kind ``sft``.
"""


def count_packs(packs: Packs, kind: str) -> Int64:
    """Counts the columns of :data:`COUNTS` for each pack: int64 `[P, 4]`."""
    supervised = np.add.reduceat(packs.supervised, _segment_starts(packs), dtype=np.int64)
    starts = np.cumsum(packs.num_responses, dtype=np.int64) - packs.num_responses
    of_examples = count_examples(supervised, packs.reward, starts, kind)
    return np.add.reduceat(of_examples, packs.example_offsets[:-1], axis=0)


def count_examples(supervised: Int64, rewards: Float32, starts: Int64, kind: str) -> Int64:
    """Counts them for each example, int64 `[E, 4]`; `starts`: its first sequence, int64 `[E]`."""
    if kind != "ranked":
        pairs = np.full(len(starts), int(kind == "preference"), np.int64)
        return np.stack([supervised[starts], pairs, pairs, pairs], axis=1)
    sequences = np.arange(len(rewards))
    example = np.searchsorted(starts, sequences, side="right") - 1
    order = np.lexsort((-rewards, example))
    ranked, first = rewards[order], starts[example]
    falls = (sequences > first) & (ranked < np.roll(ranked, 1))
    # Start of each rank's run of equal rewards: all before it are better.
    runs = np.maximum.accumulate(np.where(falls | (sequences == first), sequences, 0))
    of_places = np.stack([ranked < ranked[first], runs - first, falls], axis=1).astype(np.int64)
    best = supervised[order[starts]]
    return np.column_stack([best, np.add.reduceat(of_places, starts, axis=0)])


def _segment_starts(packs: Packs) -> Int64:
    """Start of each segment in the tokens of all packs, int64 `[S]`."""
    lengths = packs.segment_lengths.astype(np.int64)
    return np.cumsum(lengths) - lengths
