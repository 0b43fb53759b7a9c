"""A stream of packs in memory, for tests of what stands above it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from packstore.format import Int64, Packs, PackSizes


class MemoryPacks:
    """A :class:`PackStream`; counts the packs whose sizes it was asked for."""

    def __init__(self, packs: Packs, kind: str = "sft", seed: int = 0) -> None:
        self.packs, self.kind, self.seed = packs, kind, seed
        self.rows = [packs.row(i) for i in range(len(packs))]
        squares = [int((row.segment_lengths.astype(np.int64) ** 2).sum()) for row in self.rows]
        tokens, examples = np.diff(packs.token_offsets), np.diff(packs.example_offsets)
        self.pack_sizes = PackSizes(tokens, examples, np.array(squares, np.int64))
        self.asked = 0
        self.set_epoch(0)

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
        self.asked += len(indices)
        return self.pack_sizes.take(self.order[indices])

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        for indices in batches:
            yield [self.rows[i] for i in self.order[indices]]
