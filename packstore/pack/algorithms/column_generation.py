"""Linear programming over the histogram of lengths: the tightest plan, where others waste most.

The number of uses of each pattern (lengths that fit a pack together) is a linear program with one
row per length. Patterns are generated as needed: a knapsack over the dual prices finds those that
improve the solution. Rounded down, it leaves less than one pack per pattern, placed by best fit.
Source: Gilmore, Gomory, "A linear programming approach to the cutting-stock problem", Operations
Research 9, 1961.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.format.arrays import Int32, Int64
from packstore.pack.algorithms.exact_fill import exact_fill, plan_exactly
from packstore.pack.bounds import lower_bound
from packstore.pack.histogram import add_step, count_lengths, group_by_length, new_steps, place
from packstore.pack.kernels import jit
from packstore.registry import missing_extra

Float64 = npt.NDArray[np.float64]

MAX_SIZES = 512
"""Largest number of distinct lengths, to which lengths are rounded up: half as many take a third of
the time and make 0.1 % more packs, twice as many take six times as long for 0.05 % fewer."""

TOLERANCE = 2e-5
"""Relative gap to the bound of the dual prices at which the program counts as solved."""

MAX_ROUNDS = 300
"""Largest number of rounds of pattern generation."""

BATCH = 64
"""Largest number of new patterns per round."""


def column_generation(lengths: Int32, capacity: int, seed: int) -> tuple[Int32, Int64]:
    """Packs by linear programming: a few packs over its bound, never more than exact_fill.

    Raises:
        MissingExtraError: HiGHS (`highspy`) is not installed.
    """
    exact = exact_fill(lengths, capacity, seed)
    if len(exact[1]) - 1 == lower_bound(lengths, capacity):
        return exact
    grid = _grid(lengths)
    capacity //= grid
    # An example that rounding makes longer than a pack fills one alone.
    rounded = np.minimum(-(-lengths // grid), capacity).astype(np.int32)
    counts = count_lengths(rounded, capacity)
    sizes = np.flatnonzero(counts)
    patterns, uses = _solve(sizes, counts[sizes], capacity)
    steps, used, packs = new_steps(), 0, 0
    left = counts.copy()
    for pattern, number in zip(patterns, uses.tolist(), strict=True):
        if not number:
            continue
        for kind in np.flatnonzero(pattern).tolist():
            size, each = int(sizes[kind]), int(pattern[kind])
            steps = add_step(steps, used, packs, number, size, each)
            left[size] -= number * each
            used += 1
        packs += number
    steps, used, packs = plan_exactly(left, capacity, steps, used, packs)
    if packs >= len(exact[1]) - 1:
        return exact
    return place(steps[:used], packs, group_by_length(rounded, counts, seed), counts)


def _grid(lengths: Int32) -> int:
    """The smallest rounding step that leaves at most MAX_SIZES distinct lengths."""
    sizes = np.flatnonzero(np.bincount(lengths))
    grid = 1
    while len(np.unique(-(-sizes // grid))) > MAX_SIZES:
        grid += 1
    return grid


def _solve(sizes: Int64, counts: Int64, capacity: int) -> tuple[list[Int64], Int64]:
    """Patterns, each int64 `[sizes]`, and their numbers of uses, rounded down."""
    program = _Program(counts)
    program.extend(list(np.diag(capacity // sizes)))
    for _ in range(MAX_ROUNDS):
        prices = program.solve()
        best, last = _knapsack(sizes, prices, capacity)
        # No pattern is worth more than best[-1], so the scaled prices are a lower bound.
        if best[-1] <= 1 / (1 - TOLERANCE):
            break
        worth = prices + best[capacity - sizes]
        first = np.argsort(-worth, kind="stable")[:BATCH]
        program.extend(_patterns(first[worth[first] > 1 + 1e-9], last, sizes, capacity))
    uses = program.uses()
    # The solver's rounding errors must not use an example twice.
    number = np.floor(uses + 1e-6).astype(np.int64)
    while (over := number @ np.array(program.patterns) > counts).any():
        involved = np.array(program.patterns)[:, over].any(axis=1) & (number > 0)
        number[involved] -= 1
    return program.patterns, number


class _Program:
    """The linear program min sum(x) with A x >= counts and x >= 0, extended by columns."""

    def __init__(self, counts: Int64) -> None:
        try:
            import highspy
        except ImportError as error:
            raise missing_extra("strategy 'column_generation'", "lp", error) from error
        self.patterns: list[Int64] = []
        self._known: set[bytes] = set()
        self._infinity = highspy.kHighsInf
        self._solver: Any = highspy.Highs()
        settings = {"output_flag": False, "threads": 1, "random_seed": 0}
        for option, value in settings.items():
            self._solver.setOptionValue(option, value)
        for count in counts.tolist():
            self._solver.addRow(float(count), self._infinity, 0, [], [])

    def extend(self, patterns: list[Int64]) -> None:
        """Adds new patterns as columns."""
        for pattern in patterns:
            if pattern.tobytes() in self._known:
                continue
            self._known.add(pattern.tobytes())
            self.patterns.append(pattern)
            rows = np.flatnonzero(pattern)
            values = pattern[rows].astype(np.float64)
            self._solver.addCol(1.0, 0.0, self._infinity, len(rows), rows.astype(np.int32), values)

    def solve(self) -> Float64:
        """Solves the program; returns the dual price of each row, at least 0."""
        self._solver.run()
        prices: Float64 = np.maximum(np.array(self._solver.getSolution().row_dual), 0.0)
        return prices

    def uses(self) -> Float64:
        """Returns x of the last solution; 0 for columns added since."""
        found = np.array(self._solver.getSolution().col_value)
        uses: Float64 = np.pad(found, (0, len(self.patterns) - len(found)))
        return uses


@jit
def _knapsack(sizes: Int64, prices: Float64, capacity: int) -> tuple[Float64, Int64]:
    """The best value for each capacity 0..capacity, and one size of that solution (-1: none)."""
    best, last = np.zeros(capacity + 1), np.full(capacity + 1, -1, np.int64)
    for room in range(1, capacity + 1):
        best[room], last[room] = best[room - 1], -2
        for kind in range(len(sizes)):
            if sizes[kind] > room:
                break
            worth = best[room - sizes[kind]] + prices[kind]
            if worth > best[room]:
                best[room], last[room] = worth, kind
    return best, last


def _patterns(first: Int64, last: Int64, sizes: Int64, capacity: int) -> list[Int64]:
    """The best pattern that contains each of the lengths `first`."""
    found = []
    for kind in first.tolist():
        pattern = np.zeros(len(sizes), np.int64)
        room = capacity
        while kind != -1:
            if kind >= 0:
                pattern[kind] += 1
                room -= int(sizes[kind])
            else:
                room -= 1
            kind = int(last[room])
        found.append(pattern)
    return found
