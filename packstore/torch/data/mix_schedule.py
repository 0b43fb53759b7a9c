"""A low-discrepancy sequence over several sources: each has its share of every prefix.

Of the first `n` packs, a source has ::

    count(n) = f(f(… f(n)))        f(n) = floor((n * step + add) / 2**BITS)

with constants `step` and `add` for each level. The sources are the leaves of a Huffman tree: of `n`
packs that reach a node, ``round(n * share)`` go left and the rest goes right, which is `f` for both
children. So what each source has before any pack, and the place of any of its packs (the inverse),
need no earlier packs. No inner node has over two thirds of its parent's weight, and each rounds by
at most half a pack, so a source stays within two packs of its exact share. A large mix interleaves
eight such sequences, whose rounding errors partly cancel: it stays within about four packs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from packstore.format.arrays import Int64

BITS = 22
"""MixSchedule are multiples of 2^-BITS; packs are numbered below 2^(63 - BITS)."""

_ONE, _HALF = 1 << BITS, 1 << (BITS - 1)
_NEVER = 1 << (63 - BITS)


class MixSchedule:
    """The formula: maps each item of a sequence to a source and an index in that source.

    Args:
        weights: weight of each of the S sources; 0 leaves one out.
        turn: index of this sequence among `turns` interleaved ones, which round differently so
            that their combination rounds as one sequence.
        turns: number of interleaved sequences, a power of two.
    """

    def __init__(self, weights: Sequence[float], turn: int = 0, turns: int = 1) -> None:
        self._num_sources = len(weights)
        # Nodes: the sources, which have themselves below them, then those made here.
        self._below = [(source, source) for source in range(len(weights))]
        self._rounding = [(_ONE, 0) for _ in weights]
        heap = [(float(w), source) for source, w in enumerate(weights) if w]
        leaves = {source: [source] for _, source in heap}
        self._paths: dict[int, list[tuple[int, int]]] = {source: [] for source in leaves}
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, left), (heavy, right) = heapq.heappop(heap), heapq.heappop(heap)
            share = min(max(round(light / (light + heavy) * _ONE), 1), _ONE - 1)
            node = len(self._below)
            place = _reversed_bits(turn, turns) * (2 * (node - len(weights)) + 1) % turns
            shift = (2 * place + 1) * _HALF // turns
            for source in leaves[left]:
                self._paths[source].append((share, shift))
            for source in leaves[right]:
                self._paths[source].append((_ONE - share, _ONE - 1 - shift))
            leaves[node] = leaves[left] + leaves[right]
            self._below.append((left, right))
            self._rounding.append((share, shift))
            heapq.heappush(heap, (light + heavy, node))
        self._root = heap[0][1]

    def counts(self, items: int) -> Int64:
        """Counts the items of each source among the first `items`: int64 `[S]`."""
        counts = np.zeros(self._num_sources, np.int64)
        for source, path in self._paths.items():
            count = items
            for step, add in reversed(path):
                count = (count * step + add) >> BITS
            counts[source] = count
        return counts

    def locate(self, items: Int64) -> tuple[Int64, Int64]:
        """Returns the source of each item, int64 `[n]`, and its index in that source, the same."""
        below, rounding = np.array(self._below), np.array(self._rounding)
        nodes = np.full_like(items, self._root)
        for _ in range(max(map(len, self._paths.values()))):
            share, shift = rounding[nodes].T
            scaled = items * share + shift
            before = scaled >> BITS
            goes_left = (scaled + share) >> BITS > before
            items = np.where(goes_left, before, items - before)
            nodes = below[nodes, np.where(goes_left, 0, 1)]
        return nodes, items

    def find(self, source: int, number: int) -> int:
        """Returns the item with index `number` (from 0) in `source`: the inverse of `locate`."""
        for step, add in self._paths[source]:
            number = -((add - (number + 1) * _ONE) // step) - 1
        return number


@dataclass(frozen=True, eq=False)
class _Part:
    """Packs of a turn with the same active sources: from `start` on, after `before` [S] of each."""

    start: int
    before: Int64
    shares: MixSchedule

    def find(self, source: int, number: int) -> int:
        """Returns the place of a source's pack, if this part lasted that long."""
        return self.start + self.shares.find(source, number - int(self.before[source]))

    def counts(self, index: int) -> Int64:
        return self.before + self.shares.counts(index - self.start)

    def locate(self, items: Int64) -> tuple[Int64, Int64]:
        sources, numbers = self.shares.locate(items - self.start)
        return sources, self.before[sources] + numbers


class Schedule:
    """Maps each pack of a mixed epoch to a source. A source at its cap is dropped.

    Pack i belongs to turn ``i % turns``, which uses the packs of each source with the same
    remainder. So if the number of ranks divides `turns`, each rank reads separate lanes of every
    source. At the end of the epoch, turns may differ by two packs in a source.

    Args:
        weights: relative number of packs of each of the S sources, above 0.
        goals: number of packs after which each source is exhausted.
        caps: most packs of each source; None: no limit.
        until: ``first``: ends when an exhausted source would repeat; ``all``: ends when all sources
            are exhausted or capped; a number: that many packs.
        turns: number of interleaved sequences, a power of two.
    """

    def __init__(
        self,
        weights: Sequence[float],
        goals: Sequence[int],
        caps: Sequence[int | None],
        until: Literal["first", "all"] | int,
        turns: int = 1,
    ) -> None:
        self._turns, self._parts, self._keys = turns, list[_Part](), list[int]()
        ends, overs = [], []
        for turn in range(turns):  # numbers its packs, and those of each source, from 0
            most = [_NEVER if cap is None else _share(cap, turn, turns) for cap in caps]
            least = [_share(goal, turn, turns) for goal in goals]
            end, over, before = _NEVER, 0, np.zeros(len(weights), np.int64)
            left = list(range(len(weights)))
            while left and over < _NEVER:
                active = [w if s in left else 0 for s, w in enumerate(weights)]
                part = _Part(over, before, MixSchedule(active, turn, turns))
                self._parts.append(part)
                self._keys.append(turn * _NEVER + over)
                leaves = {s: part.find(s, most[s]) if most[s] < _NEVER else _NEVER for s in left}
                over = min(leaves.values())
                if until == "first":
                    used_up = [part.find(s, least[s]) for s in left if least[s] < most[s]]
                    here = min(used_up, default=_NEVER)
                elif until == "all":
                    last = [part.find(s, min(least[s], most[s]) - 1) + 1 for s in left]
                    here = max(part.start, *last)
                else:
                    here = _share(until, turn, turns)
                if end == _NEVER and here <= over:  # later parts extrapolate from behind it
                    end = here
                if over < _NEVER:
                    before = part.counts(over)
                    left = [s for s in left if leaves[s] > over]
            ends.append(min(end, over) * turns + turn)
            overs.append(over * turns + turn)
        if until == "all":
            self.length = min(max(ends) - turns + 1, *overs, _NEVER)
        else:
            self.length = min(*ends, until if isinstance(until, int) else _NEVER, _NEVER)

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """Source of the packs at `indices`, int64 `[n]`, and their number among its packs."""
        items, turns = np.divmod(indices, self._turns)
        parts = np.searchsorted(self._keys, turns * _NEVER + items, side="right") - 1
        sources, numbers = np.empty_like(indices), np.empty_like(indices)
        for part in np.unique(parts):
            here = parts == part
            sources[here], numbers[here] = self._parts[part].locate(items[here])
        return sources, numbers * self._turns + turns

    def counts(self, index: int) -> Int64:
        """int64 `[S]`: packs of each source before `index`."""
        items = [_share(index, turn, self._turns) for turn in range(self._turns)]
        keys = [turn * _NEVER + n for turn, n in enumerate(items)]
        parts = np.searchsorted(self._keys, keys, side="right") - 1
        counts = [self._parts[p].counts(n) for p, n in zip(parts, items, strict=True)]
        total: Int64 = np.sum(counts, axis=0)
        return total


def _share(number: int, turn: int, turns: int) -> int:
    """Counts the items of `turn` among the first `number`."""
    return len(range(turn, number, turns))


def _reversed_bits(turn: int, turns: int) -> int:
    """Bit-reversed order, 0, 4, 2, 6, 1, 5, 3, 7 for 8 turns: neighbours get distant values."""
    bits = turns.bit_length() - 1
    return sum((turn >> i & 1) << (bits - 1 - i) for i in range(bits))
