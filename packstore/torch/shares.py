"""A low-discrepancy sequence over several sources: each gets its share in every prefix.

The sources are the leaves of a binary tree. At a node, of the first `n` items that reach it
``round(n * share)`` go to the left, where `share` is the left side's part of the node's weight. So
how many items any source has got before item `n` is a formula, and so is its inverse: nothing is
stored for each item. The tree is that of Huffman, in which no inner node has over two thirds of its
parent's weight; with at most half an item of rounding at each node, a source is thus never two
items away from its exact share. A large mix deals out eight such sequences in turn, whose
roundings even out: it stays within some four packs.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from packstore.records import Int64

BITS = 22
"""Shares are multiples of 2^-BITS; items are numbered below 2^(63 - BITS)."""

_ONE, _HALF = 1 << BITS, 1 << (BITS - 1)
_NEVER = 1 << 62


class Shares:
    """Which source each item of the sequence comes from, and which item of that source it is.

    Args:
        weights: above 0, of each of the S sources.
        turn: which of `turns` sequences that differ in how they round, so that all of them
            together, dealt out in turn, round as one.
        turns: a power of two.
    """

    def __init__(self, weights: Sequence[float], turn: int = 0, turns: int = 1) -> None:
        self.num_sources = len(weights)
        # A node is a source (S of them), or S + its place in this list: left, right, left share,
        # and what is added before rounding down.
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
        """The source of each item, and its number among the items of that source.

        Args:
            items: int64 `[n]`, from 0.

        Returns:
            int64 `[n]`, sources; int64 `[n]`, numbers in them.
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
        """int64 `[S]`: how many of the first `items` items come from each source."""
        out = np.zeros(self.num_sources, np.int64)
        for source, path in enumerate(self._paths):
            count = items
            for share, shift, is_left in path:
                left = (count * share + shift) >> BITS
                count = left if is_left else count - left
            out[source] = count
        return out

    def find(self, source: int, number: int) -> int:
        """The item that is number `number` (from 0) of `source`: the inverse of :meth:`locate`."""
        for share, shift, is_left in reversed(self._paths[source]):
            # The left side has floor((n * share + shift) / ONE) of n items, and the right side
            # floor((n * (ONE - share) + ONE - 1 - shift) / ONE).
            step, add = (share, shift) if is_left else (_ONE - share, _ONE - 1 - shift)
            number = -(((number + 1) * -_ONE + add) // step) - 1
        return number


@dataclass(frozen=True, eq=False)
class _Stretch:
    """A part of a mixed epoch in which the same sources take turns.

    Attributes:
        start: its first pack.
        sources: int64, those that take turns.
        shares: of them.
        before: int64 `[S]`, packs that each source gave before it.
    """

    start: int
    sources: Int64
    shares: Shares
    before: Int64

    def find(self, place: int, number: int) -> int:
        """Where number `number` of source ``sources[place]`` would come, if it went on so long."""
        return self.start + self.shares.find(place, number - int(self.before[self.sources[place]]))

    def counts(self, index: int) -> Int64:
        counts = self.before.copy()
        counts[self.sources] += self.shares.counts(index - self.start)
        return counts


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a mixed epoch consists of, in packs.

    Attributes:
        weights: above 0, packs that each of the S sources gives, relative to the others.
        goals: packs after which each source is used up.
        caps: packs that each source gives at most; None: any number.
        until: ``first``: ends where a source that is used up would go on; ``all``: ends when all
            are used up or have left; a number: that many packs.
    """

    weights: Sequence[float]
    goals: Sequence[int]
    caps: Sequence[int | None]
    until: Literal["first", "all"] | int


class Schedule:
    """Which source each pack of a mixed epoch comes from. A source that is at its cap leaves.

    Pack i takes turn ``i % turns``, and of each source the packs whose number has that remainder
    too. So the ranks whose number divides `turns` read lanes of their own from every source. But
    turns may be two packs apart in a source when the epoch ends.

    Args:
        terms: what the epoch consists of.
        turns: a power of two.
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
    """The packs of one turn, numbered on their own; the numbers in a source likewise.

    Attributes:
        length: where the epoch ends, as far as this turn is concerned.
        over: where no source is left.
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
        """Where the epoch ends, if no source leaves before."""
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
    """How many of the first `number` items are of `turn`."""
    return len(range(turn, number, turns))


def _reversed_bits(turn: int, turns: int) -> int:
    """0, 4, 2, 6, 1, 5, 3, 7 for 8 turns: neighbours are far apart, in every part of them."""
    bits = turns.bit_length() - 1
    return sum((turn >> i & 1) << (bits - 1 - i) for i in range(bits))
