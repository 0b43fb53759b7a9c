"""A stream of packs in memory, for tests of what stands above it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from packstore.format import Int64, Packs, PackSizes
from packstore.testing import random_examples

N, LONGEST = 41, 200
"""Packs of the stream, and the most tokens that one may have."""

BATCHES = st.one_of(
    st.fixed_dictionaries({"packs_per_batch": st.integers(1, 5)}),
    st.fixed_dictionaries({"tokens_per_batch": st.integers(LONGEST, 4 * LONGEST)}),
)
STEPS = st.one_of(
    st.fixed_dictionaries({"gradient_accumulation_steps": st.integers(1, 4)}),
    st.fixed_dictionaries({"examples_per_step": st.integers(5, 60)}),
)
MODES = st.builds(
    lambda batches, steps, balance: {**batches, **steps, "balance": balance},
    BATCHES,
    STEPS,
    st.booleans(),
)
"""Settings of a loader, all of which give every pack once."""


class MemoryPacks:
    """A :class:`PackStream`."""

    def __init__(self, packs: Packs, kind: str = "sft", seed: int = 0) -> None:
        self.packs, self.kind, self.seed = packs, kind, seed
        self.rows = [packs.row(i) for i in range(len(packs))]
        squares = [
            int((row.segment_lengths.astype(np.int64) ** 2).sum()) for row in self.rows
        ]
        tokens, examples = np.diff(packs.token_offsets), np.diff(packs.example_offsets)
        self.pack_sizes = PackSizes(tokens, examples, np.array(squares, np.int64))
        self.set_epoch(0)

    @classmethod
    def of_examples(cls, packed: Any) -> MemoryPacks:
        """Packs of 1 to 7 examples; `packed` is that of the kit."""
        sizes = np.random.default_rng(0).integers(1, 8, N)
        stream = cls(
            packed(random_examples(int(sizes.sum()), kind="sft"), sizes, "concat")
        )
        assert stream.pack_sizes.tokens.max() <= LONGEST
        return stream

    @property
    def identity(self) -> dict[str, int | str | bool]:
        return {"dataset": "memory", "seed": self.seed}

    datasets: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.order = np.random.default_rng([self.seed, epoch]).permutation(len(self))

    def sources(self, indices: Int64) -> Int64:
        return self.order[indices] % 3

    def sizes(self, indices: Int64) -> PackSizes:
        return self.pack_sizes.take(self.order[indices])

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        for indices in batches:
            yield [self.rows[i] for i in self.order[indices]]
