"""Plans the rows of an export anew, for datasets whose sequences share tokens.

A pack that stores shared tokens once holds sequences of many more tokens than its size,
so it cannot become a row. The sequences are rebuilt, and assigned to rows one example
after another: each to the row with the least room that still holds it (best fit), among
a bounded number of rows. So memory does not grow with the dataset, and the rows depend
on nothing but the order of the examples.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packstore.format.arrays import Examples, Int64

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.progress import Progress

PART_TOKENS = 1 << 22
"""Tokens of the sequences that are rebuilt at a time, and of the open rows."""

MIN_OPEN_ROWS = 16
MAX_OPEN_ROWS = 512
"""More would not fill rows better, and each example is compared with them."""


class PlannedRows(NamedTuple):
    """Complete rows, and the examples in them.

    Attributes:
        examples: the examples, among others.
        sizes: int64 `[E]`, tokens that each example occupies in a row.
        rows: positions in `examples`, row by row; at least one row.
    """

    examples: Examples
    sizes: Int64
    rows: list[list[int]]


class RowPlanner:
    """Assigns examples to rows.

    Args:
        row_size: maximum tokens per row. A larger example gets a row of its own.
    """

    def __init__(self, row_size: int) -> None:
        self._row_size = row_size
        fitting_rows = PART_TOKENS // row_size
        self._max_open_rows = min(max(fitting_rows, MIN_OPEN_ROWS), MAX_OPEN_ROWS)
        self._open_rows: dict[int, list[int]] = {}  # by number, the oldest first
        self._rooms: list[tuple[int, int]] = []  # of open rows: room, number; sorted
        self._next_number = 0

    def add(self, first: int, sizes: Sequence[int]) -> list[list[int]]:
        """Assign the examples `first`, `first` + 1, …

        Args:
            first: the first example.
            sizes: tokens that each example occupies.

        Returns:
            The rows that are complete now.
        """
        complete_rows = []
        for example, size in enumerate(sizes, first):
            if size > self._row_size:
                complete_rows.append([example])
                continue
            number, room = self._take_row(size)
            self._open_rows[number].append(example)
            bisect.insort(self._rooms, (room - size, number))

            # The fullest row goes: it has the least use for further examples.
            is_full = room == size
            if is_full or len(self._open_rows) > self._max_open_rows:
                _, fullest = self._rooms.pop(0)
                complete_rows.append(self._open_rows.pop(fullest))
        return complete_rows

    def finish(self) -> list[list[int]]:
        """Return the rows that are still open."""
        rows = list(self._open_rows.values())
        self._open_rows = {}
        self._rooms = []
        return rows

    def renumber(self) -> list[int]:
        """Return the examples of the open rows, which are called 0, 1, … from now on,
        in this order.
        """
        examples: list[int] = []
        for number, row in self._open_rows.items():
            first = len(examples)
            examples += row
            self._open_rows[number] = list(range(first, len(examples)))
        return examples

    def _take_row(self, size: int) -> tuple[int, int]:
        """Return the number of the row for an example, and its room.

        It is the open row with the least room that suffices, of several the oldest;
        else a new one. Its entry is removed from the rooms.
        """
        place = bisect.bisect_left(self._rooms, (size, 0))
        if place < len(self._rooms):
            room, number = self._rooms.pop(place)
            return number, room
        number = self._next_number
        self._next_number += 1
        self._open_rows[number] = []
        return number, self._row_size


def plan_rows(
    parts: Iterable[Examples], row_size: int, sizes_of: Callable[[Examples], Int64]
) -> Iterator[PlannedRows]:
    """Yield rows as they are complete, and at last those that are not full.

    Args:
        parts: the examples, see :func:`rebuilt_examples`.
        row_size: maximum tokens per row, see :class:`RowPlanner`.
        sizes_of: returns the tokens that examples occupy in a row: int64 `[E]`.
    """
    planner = RowPlanner(row_size)
    waiting = Examples.empty()
    for part in parts:
        examples = Examples.concat([waiting, part])
        sizes = sizes_of(examples)
        first = waiting.num_examples
        rows = planner.add(first, sizes[first:].tolist())
        if rows:
            yield PlannedRows(examples, sizes, rows)
        waiting = examples.take(np.array(planner.renumber(), np.int64))

    rows = planner.finish()
    if rows:
        yield PlannedRows(waiting, sizes_of(waiting), rows)


def count_rows(parts: Iterable[Int64], row_size: int) -> int:
    """Return the number of rows that :func:`plan_rows` makes.

    Args:
        parts: int64 `[E]` each, tokens that examples occupy, in their order.
        row_size: maximum tokens per row.
    """
    planner = RowPlanner(row_size)
    num_rows = 0
    for sizes in parts:
        num_rows += len(planner.add(0, sizes.tolist()))
    return num_rows + len(planner.finish())


def rebuilt_examples(dataset: Dataset, progress: Progress) -> Iterator[Examples]:
    """Yield the examples of a dataset in file order, with whole sequences, without
    carried columns.

    They are rebuilt pack by pack: a row group of small packs can hold sequences of many
    times its tokens. Raises like
    :meth:`packstore.io.dataset.dataset.Dataset.read_packs`.
    """
    from packstore.pack.fill import unpack

    parts: list[Examples] = []
    num_tokens = 0
    for number, packs in enumerate(dataset.iter_packs(), 1):
        for i in range(len(packs)):
            examples = replace(unpack(packs.row(i)), columns={})
            parts.append(examples)
            num_tokens += examples.num_tokens
            if num_tokens >= PART_TOKENS:
                yield Examples.concat(parts)
                parts = []
                num_tokens = 0
        progress("export", number, len(dataset.row_groups), "row groups")
    if parts:
        yield Examples.concat(parts)
