"""The packers on one set of lengths, by turns, beside a counting argsort."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from packstore.format.arrays import Int32, to_offsets
from packstore.pack.algorithms import STRATEGIES
from peers_packing import Packer, Trl
from peers_packing.figures import Memory, Result, figures
from peers_packing.goals import FLOOR
from peers_packing.lengths import PAIRS, draw

LARGEST = 100_000_000

RUNS, SECONDS = 15, 1.0
"""A packer runs so often, or until it took so long in all (a quarter of it for few examples)."""


@numba.njit
def counting_argsort(lengths: Int32, capacity: int) -> Int32:
    """The floor: what it costs to sort the examples by length, and nothing else."""
    starts = np.zeros(capacity + 2, np.int64)
    for length in lengths:
        starts[length + 1] += 1
    starts = np.cumsum(starts)
    order = np.empty(len(lengths), np.int32)
    for i in range(len(lengths)):
        order[starts[lengths[i]]] = i
        starts[lengths[i]] += 1
    return order


def thorough(name: str, capacity: int) -> bool:
    """Returns True for sets that are measured in all respects, however long that takes."""
    return name in PAIRS and capacity == 4096


class Case:
    """The lengths of one set, and the packers that run on them by turns."""

    def __init__(self, name: str, n: int, capacity: int, seed: int) -> None:
        self.name, self.n, self.capacity = name, n, capacity
        self.lengths = draw(name, n, capacity, seed)
        self.thorough = thorough(name, capacity)
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        self.bound = -(-self.tokens // capacity)
        self._as_list: list[int] = []
        self._again: dict[str, Callable[[], Any]] = {}
        self._spent: dict[str, float] = {}
        self.rows: dict[str, dict[str, Any]] = {}

    def first(self, packer: str, other: Packer | None) -> None:
        """One run, with figures and memory."""
        if packer == FLOOR:
            work = self._own(counting_argsort)
        elif other is None:
            strategy = STRATEGIES.load(packer)
            work = self._own(lambda lengths, capacity: strategy(lengths, capacity, 0))
        else:
            self._as_list = self._as_list or self.lengths.tolist()
            given = other.prepare(self._as_list) if isinstance(other, Trl) else self._as_list
            work = lambda: other(given, self.capacity)  # noqa: E731
        memory = Memory() if self.n >= 100_000 else None
        seconds, result = timed(work)
        peak = memory.peak() if memory else None
        self._spent[packer], self._again[packer] = seconds, work
        row = self.rows[packer] = {"ns_per_example": 1e9 * seconds / self.n}
        if packer == FLOOR:
            return
        if peak is not None:
            row["peak_bytes_per_example"] = round(peak / self.n, 1)
        if other is not None:
            result = from_lists(other.packs(result) if isinstance(other, Trl) else result)
        row.update(figures(self.lengths, self.capacity, self.bound, result))

    def repeat(self) -> None:
        """Further runs, by turns."""
        for _ in range(RUNS - 1):
            for packer, work in self._again.items():
                if self._spent[packer] < (SECONDS if self.n >= 1_000_000 else SECONDS / 4):
                    seconds, _ = timed(work)
                    self._spent[packer] += seconds
                    row = self.rows[packer]
                    row["ns_per_example"] = min(row["ns_per_example"], 1e9 * seconds / self.n)

    def _own(self, pack: Callable[[Int32, int], Any]) -> Callable[[], Any]:
        pack(self.lengths[:9].copy(), self.capacity)  # compiled code warm
        return lambda: pack(self.lengths, self.capacity)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and the result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def from_lists(packs: list[list[int]]) -> Result:
    order = np.fromiter(itertools.chain.from_iterable(packs), np.int64)
    return order, to_offsets(np.fromiter(map(len, packs), np.int64, len(packs)))
