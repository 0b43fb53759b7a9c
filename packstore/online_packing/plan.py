"""Plans the packs of an epoch: a pure function of sizes, settings and epoch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packstore.config import PackConfig
from packstore.format import seeds
from packstore.format.arrays import Int32, Int64, PackSizes, range_indices, to_offsets
from packstore.online_packing.sizes import ExampleSizes
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.order import ORDERS

WINDOW = 512
"""Approximate number of examples planned together. A lane holds them in memory; larger windows
hardly save packs."""

FULL = 0.998
"""Examples of packs with a lower fill rate move to the next window, once."""

LANES = 16
"""Windows open at once, over all ranks. A window has several row groups, so they mix as well as 64
lanes of row groups."""

LANE_PACKS = 512
"""Approximate least number of packs of a lane, as its last pack is not full; a smaller dataset has
fewer lanes."""


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The packs of an epoch, lane after lane, and in each lane window after window.

    Attributes:
        order: int32 `[n]`, examples (indices in file order), pack by pack.
        offsets: int64 `[P + 1]`; pack p holds ``order[offsets[p]:offsets[p + 1]]``.
        window_offsets: int64 `[W + 1]`, the first pack of each window.
        lane_offsets: int64 `[L + 1]`, the first window of each lane.
        groups: int64, the row groups of each window, window after window.
        group_offsets: int64 `[W + 1]`, offsets of the windows in `groups`.
        sizes: sizes of the examples.
    """

    order: Int32
    offsets: Int64
    window_offsets: Int64
    lane_offsets: Int64
    groups: Int64
    group_offsets: Int64
    sizes: ExampleSizes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def locate(self, indices: Int64) -> Int64:
        """Returns the pack at each position of the epoch, int64 `[n]`.

        Lanes alternate: position i belongs to lane ``i % L`` while all lanes have packs; the last
        packs of longer lanes come at the end.

        Raises:
            IndexError: an index is out of range.
        """
        indices = np.asarray(indices, np.int64)
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"pack indices must lie in 0..{len(self) - 1}")
        lanes = len(self.lane_offsets) - 1
        end = lanes * self._turns
        packs = self._lane_packs[indices % lanes] + indices // lanes
        late = indices >= end
        packs[late] = self._rest[indices[late] - end]
        return packs

    def window_of(self, packs: Int64) -> Int64:
        """Returns the window of each pack, int64 `[n]`."""
        return np.searchsorted(self.window_offsets, packs, side="right") - 1

    def lane_of(self, window: int) -> int:
        """Returns the lane of a window."""
        return int(np.searchsorted(self.lane_offsets, window, side="right")) - 1

    def packs_of(self, window: int) -> int:
        """Returns the number of packs of a window."""
        return int(self.window_offsets[window + 1] - self.window_offsets[window])

    def pack_offsets_of(self, window: int) -> Int64:
        """Returns the offsets in `order` of a window's packs, including the end of the last."""
        return self.offsets[self.window_offsets[window] : self.window_offsets[window + 1] + 1]

    def examples_of(self, window: int) -> Int32:
        """Returns the examples of a window, pack by pack, int32."""
        offsets = self.pack_offsets_of(window)
        return self.order[offsets[0] : offsets[-1]]

    def groups_of(self, window: int, goes_on: bool) -> list[int]:
        """Returns the row groups to read for a window.

        Args:
            window: number of the window.
            goes_on: True if the examples carried over from the previous window are in memory.
        """
        own = self.groups[slice(*self.group_offsets[window : window + 2])]
        if goes_on:
            return list(map(int, own))
        starts = self.sizes.group_offsets
        all_groups = np.searchsorted(starts, self.examples_of(window), side="right") - 1
        return list(map(int, np.union1d(own, all_groups)))

    def numbers_of(self, group: int) -> Int64:
        """Returns the indices of a row group's examples, int64."""
        return np.arange(*self.sizes.group_offsets[group : group + 2])

    @cached_property
    def pack_sizes(self) -> PackSizes:
        """Sizes of all packs, in the order of the plan."""
        starts, counts = self.offsets[:-1], self.sizes.counts
        if counts is not None:
            counts = np.add.reduceat(counts[self.order], starts, axis=0)
        return PackSizes(
            tokens=np.add.reduceat(self.sizes.tokens[self.order], starts, dtype=np.int64),
            examples=np.diff(self.offsets),
            squares=np.add.reduceat(self.sizes.squares[self.order], starts),
            counts=counts,
        )

    @cached_property
    def _lane_packs(self) -> Int64:
        """The first pack of each lane, int64 `[L + 1]`."""
        return self.window_offsets[self.lane_offsets]

    @cached_property
    def _turns(self) -> int:
        """Number of turns in which every lane has a pack."""
        return int(np.diff(self._lane_packs).min())

    @cached_property
    def _rest(self) -> Int64:
        """The packs after these turns, alternating between the remaining lanes, int64."""
        left = np.diff(self._lane_packs) - self._turns
        packs = range_indices(self._lane_packs[:-1] + self._turns, left)
        turn = range_indices(np.zeros_like(left), left)
        return packs[np.argsort(turn, kind="stable")]


def plan_epoch(
    sizes: ExampleSizes, config: PackConfig, *, seed: int, epoch: int, shuffle: bool
) -> EpochPlan:
    """Plans an epoch: 0.2 us of CPU per example.

    Args:
        sizes: sizes of the examples.
        config: pack size, strategy and order of packs; its seed is combined with `seed`.
        seed: seed of the order.
        epoch: the epoch; each has other packs.
        shuffle: False: one lane, in file order; the strategy alone chooses the packs.
    """
    key = seeds.derive(config.seed, "repacking", seed, epoch)
    groups = len(sizes.group_offsets) - 1
    order = seeds.permutation(groups, key, "row groups") if shuffle else np.arange(groups)
    planner = _Planner(sizes, config, key, shuffle)
    tokens = int(sizes.tokens.sum(dtype=np.int64))
    lanes = LANES if shuffle else 1
    while lanes > 1 and tokens < lanes * LANE_PACKS * config.pack_size:
        lanes //= 2
    starts, counts, cuts = _lanes(sizes, order, tokens, lanes)
    windows = [0]
    for first, last in itertools.pairwise(cuts):
        planner.plan_lane(starts, counts, first, last)
        windows.append(len(planner.window_packs))
    return EpochPlan(
        order=np.concatenate(planner.order),
        offsets=to_offsets(np.concatenate(planner.examples)),
        window_offsets=to_offsets(np.array(planner.window_packs)),
        lane_offsets=np.array(windows),
        groups=np.searchsorted(sizes.group_offsets, starts, side="right") - 1,
        group_offsets=np.append(planner.firsts, len(starts)),
        sizes=sizes,
    )


def _lanes(
    sizes: ExampleSizes, order: Int64, tokens: int, lanes: int
) -> tuple[Int64, Int64, list[int]]:
    """Divides the examples of the row groups in `order` into lanes of equal tokens.

    Returns:
        Pieces of row groups as their first example and number of examples, int64 each; and the
        first piece of each lane, `[L + 1]`.
    """
    starts, ends = sizes.group_offsets[:-1][order], sizes.group_offsets[1:][order]
    group_tokens = np.add.reduceat(sizes.tokens, sizes.group_offsets[:-1], dtype=np.int64)
    before = to_offsets(group_tokens[order])
    cuts, splits = [0], []
    for lane in range(1, lanes):
        goal = tokens * lane // lanes
        place = int(np.searchsorted(before, goal, side="right")) - 1
        inside = np.cumsum(sizes.tokens[starts[place] : ends[place]], dtype=np.int64)
        splits.append((place, int(np.searchsorted(inside, goal - before[place]))))
        cuts.append(place + lane)
    places = np.array([place for place, _ in splits], np.int64)
    middle = starts[places] + np.array([inside for _, inside in splits], np.int64)
    starts, ends = np.insert(starts, places + 1, middle), np.insert(ends, places, middle)
    return starts, ends - starts, [*cuts, len(starts)]


class _Planner:
    """Packs lanes, window by window."""

    def __init__(self, sizes: ExampleSizes, config: PackConfig, key: int, shuffle: bool) -> None:
        self._sizes, self._config, self._key, self._shuffle = sizes, config, key, shuffle
        self._choose = STRATEGIES.load(config.strategy)
        self._deliver = ORDERS[config.pack_order if shuffle else "plain"]
        self.order: list[Int32] = []
        self.examples: list[Int64] = []
        self.window_packs: list[int] = []
        self.firsts: list[int] = []

    def plan_lane(self, starts: Int64, counts: Int64, begin: int, end: int) -> None:
        """Plans the windows of a lane, the pieces `begin` to `end`; a window has whole pieces."""
        tokens, before = self._sizes.tokens, to_offsets(counts[begin:end])[:-1]
        firsts = begin + np.flatnonzero(np.diff(before // WINDOW, prepend=-1))
        waiting = np.empty(0, np.int64)
        keys = seeds.keys(int(counts[begin:end].sum()), self._key, "examples", begin)
        for first, last in itertools.pairwise([*firsts.tolist(), end]):
            self.firsts.append(first)
            new = range_indices(starts[first:last], counts[first:last])
            if self._shuffle:
                at = int(before[first - begin])
                new = new[np.argsort(keys[at : at + len(new)])]
            waiting = self._plan_window(waiting, new[tokens[new] > 0], last == end)

    def _plan_window(self, waiting: Int64, new: Int64, is_last: bool) -> Int64:
        """Plans packs of waiting and new examples; returns the examples for the next window."""
        window = len(self.window_packs)
        tokens = self._sizes.tokens
        examples = np.concatenate([waiting, new])
        if not len(examples):
            self.window_packs.append(0)
            return examples
        lengths = tokens[examples]
        capacity = self._config.pack_size
        chosen, offsets = self._choose(lengths, capacity, seeds.derive(self._key, "packs", window))
        filled = np.add.reduceat(lengths[chosen], offsets[:-1])
        waited = np.logical_or.reduceat(chosen < len(waiting), offsets[:-1])
        closed = (filled >= FULL * capacity) | waited | is_last
        if not self._shuffle:
            closed[:-1] = True  # so that a strategy in file order stays in file order
        number = np.diff(offsets)
        by_pack = examples[chosen]
        left = by_pack[np.repeat(~closed, number)]
        kept, kept_number = by_pack[np.repeat(closed, number)], number[closed]
        kept_offsets = to_offsets(kept_number)
        squares = np.add.reduceat(self._sizes.squares[kept], kept_offsets[:-1])
        seed = seeds.derive(self._key, "pack order", window)
        delivery = self._deliver(kept_number, squares, seed)
        places = range_indices(kept_offsets[delivery], kept_number[delivery])
        self.order.append(kept[places].astype(np.int32))
        self.examples.append(kept_number[delivery])
        self.window_packs.append(len(kept_number))
        return left
