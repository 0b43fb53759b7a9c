"""A low-discrepancy sequence over several sources: each has its share of every prefix.

The sources are the leaves of a binary tree. Of the first `n` items that reach a node,
``round(n * share)`` go left, where `share` is the left child's fraction of the node's weight. So
the number of items of any source before item `n` is a formula, and so is its inverse: nothing is
stored per item. The tree is a Huffman tree, in which no inner node has over two thirds of its
parent's weight; with a rounding error of at most half an item per node, a source stays within two
items of its exact share. A large mix interleaves eight such sequences, whose rounding errors
partly cancel: it stays within about four packs.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from packstore.format.arrays import Int64

BITS = 22
"""Shares are multiples of 2^-BITS; items are numbered below 2^(63 - BITS)."""

_ONE, _HALF = 1 << BITS, 1 << (BITS - 1)
_NEVER = 1 << 62


class Shares:
    """Maps each item of the sequence to a source and an index in that source.

    Args:
        weights: weight of each of the S sources, above 0.
        turn: index of this sequence among `turns` interleaved ones, which round differently so
            that their combination rounds as one sequence.
        turns: number of interleaved sequences, a power of two.
    """

    def __init__(self, weights: Sequence[float], turn: int = 0, turns: int = 1) -> None:
        self.num_sources = len(weights)
        # A node is a source (0..S-1), or S + its index in this list: left, right, left share, and
        # the offset added before rounding down.
        self._nodes: list[tuple[int, int, int, int]] = []
        heap = [(float(w), source) for source, w in enumerate(weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            light, heavy = heapq.heappop(heap), heapq.heappop(heap)
            both = light[0] + heavy[0]
            share = min(max(round(light[0] / both * _ONE), 1), _ONE - 1)
            place = _reversed_bits(turn, turns) * (2 * len(self._nodes) + 1) % turns
            shift = (2 * place + 1) * _HALF // turns
            self._nodes.append((light[1], heavy[1], share, shift))
            heapq.heappush(heap, (both, self.num_sources + len(self._nodes) - 1))
        self._root = heap[0][1]
        self._paths: list[list[tuple[int, int, bool]]] = [[] for _ in weights]
        self._trace(self._root, [])

    def _trace(self, node: int, path: list[tuple[int, int, bool]]) -> None:
        if node < self.num_sources:
            self._paths[node] = path
            return
        left, right, share, shift = self._nodes[node - self.num_sources]
        self._trace(left, [*path, (share, shift, True)])
        self._trace(right, [*path, (share, shift, False)])

    def locate(self, items: Int64) -> tuple[Int64, Int64]:
        """Returns the source of each item, and its index among the items of that source.

        Args:
            items: int64 `[n]`, from 0.

        Returns:
            int64 `[n]`, sources; int64 `[n]`, indices in them.
        """
        sources, numbers = np.empty_like(items), np.empty_like(items)
        todo = [(self._root, np.arange(len(items)), items)]
        while todo:
            node, places, reached = todo.pop()
            if node < self.num_sources:
                sources[places], numbers[places] = node, reached
                continue
            left, right, share, shift = self._nodes[node - self.num_sources]
            before = (reached * share + shift) >> BITS
            goes_left = (((reached + 1) * share + shift) >> BITS) > before
            todo.append((left, places[goes_left], before[goes_left]))
            todo.append((right, places[~goes_left], (reached - before)[~goes_left]))
        return sources, numbers

    def counts(self, items: int) -> Int64:
        """Counts the items of each source among the first `items`: int64 `[S]`."""
        out = np.zeros(self.num_sources, np.int64)
        for source, path in enumerate(self._paths):
            count = items
            for share, shift, is_left in path:
                left = (count * share + shift) >> BITS
                count = left if is_left else count - left
            out[source] = count
        return out

    def find(self, source: int, number: int) -> int:
        """Returns the item with index `number` (from 0) in `source`: the inverse of `locate`."""
        for share, shift, is_left in reversed(self._paths[source]):
            # The left side has floor((n * share + shift) / ONE) of n items, and the right side
            # floor((n * (ONE - share) + ONE - 1 - shift) / ONE).
            step, add = (share, shift) if is_left else (_ONE - share, _ONE - 1 - shift)
            number = -(((number + 1) * -_ONE + add) // step) - 1
        return number


@dataclass(frozen=True, eq=False)
class _Stretch:
    """A part of a mixed epoch with the same active sources.

    Attributes:
        start: its first pack.
        sources: int64, the active sources.
        shares: sequence over the active sources.
        before: int64 `[S]`, packs of each source before this part.
    """

    start: int
    sources: Int64
    shares: Shares
    before: Int64

    def find(self, place: int, number: int) -> int:
        """Position of pack `number` of source ``sources[place]``, if this part lasted that long."""
        return self.start + self.shares.find(place, number - int(self.before[self.sources[place]]))

    def counts(self, index: int) -> Int64:
        counts = self.before.copy()
        counts[self.sources] += self.shares.counts(index - self.start)
        return counts


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a mixed epoch, in packs.

    Attributes:
        weights: relative number of packs of each of the S sources, above 0.
        goals: number of packs after which each source is exhausted.
        caps: most packs of each source; None: no limit.
        until: ``first``: ends when an exhausted source would repeat; ``all``: ends when all sources
            are exhausted or capped; a number: that many packs.
    """

    weights: Sequence[float]
    goals: Sequence[int]
    caps: Sequence[int | None]
    until: Literal["first", "all"] | int


class Schedule:
    """Maps each pack of a mixed epoch to a source. A source at its cap is dropped.

    Pack i belongs to turn ``i % turns``, which uses the packs of each source with the same
    remainder. So if the number of ranks divides `turns`, each rank reads separate lanes of every
    source. At the end of the epoch, turns may differ by two packs in a source.

    Args:
        terms: the terms of the epoch.
        turns: number of interleaved sequences, a power of two.
    """

    def __init__(self, terms: Terms, turns: int = 1) -> None:
        self._turns = [_Turn(terms, turn, turns) for turn in range(turns)]
        ends = [turn.length * turns + i for i, turn in enumerate(self._turns)]
        if terms.until == "all":
            over = [turn.over * turns + i for i, turn in enumerate(self._turns)]
            self.length = min(max(end - turns + 1 for end in ends), *over, _NEVER)
        else:
            most = terms.until if isinstance(terms.until, int) else _NEVER
            self.length = min(*ends, most)

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """Source of the packs at `indices`, int64 `[n]`, and their number among its packs."""
        turns = len(self._turns)
        sources, numbers = np.empty_like(indices), np.empty_like(indices)
        for i in np.unique(indices % turns):
            here = indices % turns == i
            sources[here], of_turn = self._turns[i].locate(indices[here] // turns)
            numbers[here] = of_turn * turns + i
        return sources, numbers

    def counts(self, index: int) -> Int64:
        """int64 `[S]`: packs of each source before `index`."""
        turns = len(self._turns)
        counts = [t.counts(_share(index, i, turns)) for i, t in enumerate(self._turns)]
        total: Int64 = np.sum(counts, axis=0)
        return total


class _Turn:
    """The packs of one turn, with an own numbering of packs and of indices in each source.

    Attributes:
        length: end of the epoch by this turn's sources.
        over: position after which no source is left.
    """

    def __init__(self, terms: Terms, turn: int, turns: int) -> None:
        weights, until = terms.weights, terms.until
        self._limits = [_NEVER if cap is None else _share(cap, turn, turns) for cap in terms.caps]
        self._goals = [_share(goal, turn, turns) for goal in terms.goals]
        self._until = _share(until, turn, turns) if isinstance(until, int) else until
        self._stretches: list[_Stretch] = []
        self.length, self.over, before = _NEVER, 0, np.zeros(len(weights), np.int64)
        left = list(range(len(weights)))
        while left and self.over < _NEVER:
            shares = Shares([weights[s] for s in left], turn, turns)
            stretch = _Stretch(self.over, np.array(left), shares, before)
            self._stretches.append(stretch)
            leaves = [self._find(stretch, i, self._limits[s]) for i, s in enumerate(left)]
            self.over = min(leaves)
            end = self._end(stretch)
            if end <= self.over:
                self.length = min(self.length, end)
            if self.over < _NEVER:
                before = stretch.counts(self.over)
                left = [s for s, at in zip(left, leaves, strict=True) if at > self.over]
        self.length = min(self.length, self.over)

    def _find(self, stretch: _Stretch, place: int, number: int) -> int:
        return _NEVER if number == _NEVER else stretch.find(place, number)

    def _end(self, stretch: _Stretch) -> int:
        """End of the epoch, if no source is capped before."""
        if isinstance(self._until, int):
            return self._until
        goals = [(i, self._goals[s], self._limits[s]) for i, s in enumerate(stretch.sources)]
        if self._until == "first":
            used_up = [stretch.find(i, goal) for i, goal, limit in goals if goal < limit]
            return min(used_up, default=_NEVER)
        ends = (stretch.find(i, min(goal, limit) - 1) + 1 for i, goal, limit in goals)
        return max(stretch.start, *ends)

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """Source of the packs at `indices`, int64 `[n]`, and their number among its packs."""
        starts = [stretch.start for stretch in self._stretches]
        of_stretch = np.searchsorted(starts, indices, side="right") - 1
        sources, numbers = np.empty_like(indices), np.empty_like(indices)
        for i in np.unique(of_stretch):
            stretch, here = self._stretches[i], of_stretch == i
            places, after = stretch.shares.locate(indices[here] - stretch.start)
            sources[here] = stretch.sources[places]
            numbers[here] = stretch.before[sources[here]] + after
        return sources, numbers

    def counts(self, index: int) -> Int64:
        """int64 `[S]`: packs of each source before `index`."""
        starts = [stretch.start for stretch in self._stretches]
        return self._stretches[bisect.bisect_right(starts, index) - 1].counts(index)


def _share(number: int, turn: int, turns: int) -> int:
    """Counts the items of `turn` among the first `number`."""
    return len(range(turn, number, turns))


def _reversed_bits(turn: int, turns: int) -> int:
    """Bit-reversed order, 0, 4, 2, 6, 1, 5, 3, 7 for 8 turns: neighbours get distant values."""
    bits = turns.bit_length() - 1
    return sum((turn >> i & 1) << (bits - 1 - i) for i in range(bits))
