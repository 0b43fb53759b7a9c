"""Cuts the remaining packs of an epoch into optimizer steps, and plans them.

A step is a contiguous part of the epoch's order; so is each of its batches, over all
ranks, and `assign_ranks` distributes a batch over the ranks. A rank without a pack in a
batch gets a filler, a pack of weight 0. A place is the index of a pack among the
:class:`RemainingPacks`. With a token budget, packs are counted in rows: a row is one
pack for each rank, and a batch is as many rows as fit.

Steps, their batches and the packs of each rank are a pure function of the packs' sizes,
the settings and the number of ranks. Sizes are read in windows, so cutting starts at
once and uses little memory for any number of packs.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from packstore.config import BatchConfig
from packstore.config.reading import large_steps_warning
from packstore.errors import ConfigError
from packstore.format.arrays import COUNTS, Int64, PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.steps import cut_by_examples, limit_shortfall
from packstore.torch.batch.batch import StepInfo
from packstore.torch.data.position import Position, RemainingPacks, stale_state_error
from packstore.torch.data.stream import PackStream

logger = logging.getLogger("packstore")

WINDOW = 4096
"""Approximate number of packs for which sizes are looked up at once."""


class _Window:
    """The packs at places ``start .. stop``; their sizes are looked up together."""

    def __init__(
        self, stream: PackStream, remaining: RemainingPacks, start: int, stop: int
    ) -> None:
        self.start = start
        self.stop = stop
        self._stream = stream
        self._remaining = remaining

    @cached_property
    def sizes(self) -> PackSizes:
        """Sizes of the packs of the window."""
        places = np.arange(self.start, self.stop)
        return self._stream.sizes(self._remaining[places])


class Step:
    """One optimizer step, as places among the :class:`RemainingPacks`.

    Attributes:
        edges: batch `b`, over all ranks, has the places ``edges[b] .. edges[b + 1]``.
        start: first place of the step.
        stop: place after the step.
        shortfall_before, shortfall_after: :attr:`Position.shortfall` before and after
            the step, in examples.
    """

    def __init__(
        self,
        edges: list[int],
        window: _Window,
        *,
        shortfall_before: int = 0,
        shortfall_after: int = 0,
    ) -> None:
        self.edges = edges
        self.start = edges[0]
        self.stop = edges[-1]
        self.shortfall_before = shortfall_before
        self.shortfall_after = shortfall_after
        self._window = window

    @property
    def num_batches(self) -> int:
        """Number of batches of the step on each rank."""
        return len(self.edges) - 1

    @cached_property
    def sizes(self) -> PackSizes:
        """Sizes of the packs of the step."""
        first = self._window.start
        return self._window.sizes.take(slice(self.start - first, self.stop - first))

    @cached_property
    def examples(self) -> int:
        """Number of examples of the step."""
        return int(self.sizes.examples.sum())

    def count_fillers(self, world_size: int) -> int:
        """Count the fillers: one for each batch and rank without a pack."""
        return sum(
            max(world_size - (stop - start), 0) for start, stop in pairwise(self.edges)
        )

    def info(self, index: int, batch: int, ranks: int) -> StepInfo:
        """Describe the step to one of its batches.

        Args:
            index: index of the step in the epoch.
            batch: index of the batch in the step.
            ranks: number of ranks.
        """
        counts = None
        if self.sizes.counts is not None:
            totals = self.sizes.counts.sum(axis=0).tolist()
            counts = dict(zip(COUNTS, totals, strict=True))
        return StepInfo(
            index=index,
            batch=batch,
            batches=self.num_batches,
            examples=self.examples,
            ranks=ranks,
            packs=len(self.sizes),
            counts=counts,
        )


class StepCutter:
    """Yields the optimizer steps of the packs that remain at a position.

    Attributes:
        remaining: the packs to cut.
        packs_per_step: packs of every full step, over all ranks; None: it varies.
        end: place where the last step ends at the latest.

    Args:
        stream: the packs of the epoch.
        start: the position to start from.
        config: the settings of a loader.
        world_size: number of ranks.
    """

    def __init__(
        self, stream: PackStream, start: Position, config: BatchConfig, world_size: int
    ) -> None:
        self.remaining = RemainingPacks(len(stream), start)
        self._stream = stream
        self._config = config
        self._world_size = world_size

        self._shortfall = 0
        if config.examples_per_step is not None:
            # The state may come from a loader that requested another number.
            self._shortfall = limit_shortfall(start.shortfall, config.examples_per_step)

        self._packs_per_batch = world_size * config.width
        self.packs_per_step: int | None = None
        if config.tokens_per_batch is None and config.examples_per_step is None:
            accumulation = config.gradient_accumulation_steps
            self.packs_per_step = self._packs_per_batch * accumulation

        # Windows hold a multiple of so many packs: whole steps, or at least whole rows.
        self._window_unit = 1
        if self.packs_per_step is not None:
            self._window_unit = self.packs_per_step
        elif config.tokens_per_batch is not None:
            self._window_unit = world_size

        self.end = len(self.remaining)
        if config.drop_last:
            self.end -= self.end % self._window_unit

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps in order."""
        start = 0
        shortfall = self._shortfall
        window_size = WINDOW
        while start < self.end:
            window = self._window(start, window_size)
            for step in self._cut(window, shortfall):
                if self._is_dropped(step):
                    return
                start = step.stop
                shortfall = step.shortfall_after
                yield step
            # A window that does not hold a whole step is widened.
            window_size = WINDOW if start > window.start else 2 * window_size

    def _window(self, start: int, size: int) -> _Window:
        num_units = max(size // self._window_unit, 1)
        stop = min(start + num_units * self._window_unit, self.end)
        return _Window(self._stream, self.remaining, start, stop)

    def _cut(self, window: _Window, shortfall: int) -> Iterator[Step]:
        """Yield the steps that the packs of the window determine.

        `shortfall` is the shortfall before the first of them.
        """
        if self._config.examples_per_step is not None:
            requested = self._config.examples_per_step
            return self._cut_by_examples(window, requested, shortfall)
        if self.packs_per_step is not None:
            return self._cut_by_packs(window, self.packs_per_step)
        return self._cut_by_tokens(window)

    def _cut_by_examples(
        self, window: _Window, requested: int, shortfall: int
    ) -> Iterator[Step]:
        tokens = window.sizes.tokens
        step_ends = cut_by_examples(
            window.sizes.examples,
            requested,
            min_packs=self._world_size,
            shortfall=shortfall,
            is_end=window.stop == self.end,
        )
        start = 0
        for stop, shortfall_after in step_ends:
            edges = self._batch_edges(tokens[start:stop], window.start + start)
            yield Step(
                edges,
                window,
                shortfall_before=shortfall,
                shortfall_after=shortfall_after,
            )
            start = stop
            shortfall = shortfall_after

    def _cut_by_packs(self, window: _Window, packs_per_step: int) -> Iterator[Step]:
        for start in range(window.start, window.stop, packs_per_step):
            stop = min(start + packs_per_step, window.stop)
            yield Step([*range(start, stop, self._packs_per_batch), stop], window)

    def _cut_by_tokens(self, window: _Window) -> Iterator[Step]:
        """Yield steps of `gradient_accumulation_steps` batches each."""
        batch_ends = self._batch_ends(window.sizes.tokens, window.start)
        num_rows = len(batch_ends)
        is_last_window = window.stop == self.end
        first_row = 0
        while first_row < num_rows:
            edge_rows = [first_row]
            while len(edge_rows) <= self._config.gradient_accumulation_steps:
                if edge_rows[-1] == num_rows:
                    break
                edge_rows.append(batch_ends[edge_rows[-1]])
            if edge_rows[-1] == num_rows and not is_last_window:
                return  # the last batch may go on in the next window
            edges = self._rows_to_edges(edge_rows, window.start, window.stop)
            yield Step(edges, window)
            first_row = edge_rows[-1]

    def _batch_edges(self, tokens: Int64, start: int) -> list[int]:
        """Return the edges of the batches of a step.

        Args:
            tokens: int64 `[n]`, tokens of the packs of the step.
            start: place of its first pack.
        """
        stop = start + len(tokens)
        if self._config.tokens_per_batch is None:
            return [*range(start, stop, self._packs_per_batch), stop]
        batch_ends = self._batch_ends(tokens, start)
        edge_rows = [0]
        while edge_rows[-1] < len(batch_ends):
            edge_rows.append(batch_ends[edge_rows[-1]])
        return self._rows_to_edges(edge_rows, start, stop)

    def _rows_to_edges(self, rows: list[int], start: int, stop: int) -> list[int]:
        """Return the places where rows begin; the last row may be incomplete."""
        return [min(start + row * self._world_size, stop) for row in rows]

    def _batch_ends(self, tokens: Int64, start: int) -> list[int]:
        """Return, for each row, the end (exclusive) of a batch that begins with it.

        A batch holds as many rows as fit the token budget of every rank. With two ranks
        and a budget of 5, packs of ``1 1 | 3 2 | 2 2`` tokens, by rows, give
        ``[2, 3, 3]``: in three rows, the first rank would have 6 tokens.

        Args:
            tokens: int64 `[n]`, tokens of packs.
            start: place of the first of them.
        """
        budget = self._config.tokens_per_batch
        assert budget is not None
        num_ranks = self._world_size
        num_rows = math.ceil(len(tokens) / num_ranks)
        # [row, rank]: tokens of the rank in all rows before
        sums = np.zeros((num_rows + 1, num_ranks), np.int64)
        sums[1:].flat[: len(tokens)] = tokens
        np.cumsum(sums, axis=0, out=sums)

        ends = np.full(num_rows, num_rows)
        for rank_sums in sums.T:
            limits = rank_sums[:-1] + budget
            rank_ends = np.searchsorted(rank_sums, limits, side="right") - 1
            np.minimum(ends, rank_ends, out=ends)

        if (tokens > budget).any():
            places = np.arange(start, start + len(tokens))
            check_fits(tokens, self.remaining[places], budget)
        return ends.tolist()

    def _is_dropped(self, step: Step) -> bool:
        """Return True for an incomplete last step, which `drop_last` omits."""
        if not self._config.drop_last or step.stop < self.end:
            return False
        if self.packs_per_step is not None:
            return False  # `end` leaves it out already
        if self._config.examples_per_step is not None:
            target = self._config.examples_per_step + step.shortfall_before
            return step.examples < target
        return step.num_batches < self._config.gradient_accumulation_steps


class Share(NamedTuple):
    """The packs of one rank in a batch.

    Attributes:
        places: int64, their places among the :class:`RemainingPacks`.
        is_filler: True if the batch has no pack for this rank: `places` then has one
            pack of the step, which gets weight 0.
    """

    places: Int64
    is_filler: bool


def assign_ranks(
    step: Step, rank: int, world_size: int, config: BatchConfig
) -> list[Share]:
    """Return the packs of `rank` in each batch of the step."""
    if config.balance and world_size > 1:
        batches = [ranks[rank] for ranks in _balance(step, world_size, config)]
    else:
        batches = [
            _take_in_turn(start, stop, rank, world_size)
            for start, stop in pairwise(step.edges)
        ]

    # A filler repeats the rank's first pack, or another pack of the step.
    filler = np.array([step.start + rank % (step.stop - step.start)])
    for places in batches:
        if len(places):
            filler = places[:1]
            break

    shares = []
    for places in batches:
        is_filler = len(places) == 0
        shares.append(Share(filler if is_filler else places, is_filler))
    return shares


def _take_in_turn(start: int, stop: int, rank: int, world_size: int) -> Int64:
    """Return the places of a rank in a batch whose packs go to the ranks in turn."""
    return np.arange(start + rank, stop, world_size)


def _balance(step: Step, world_size: int, config: BatchConfig) -> list[list[Int64]]:
    """Return the places of each rank in each batch: ``places[batch][rank]``.

    Balances the packs' `squares`, the cost of attention, over the ranks.
    """
    if config.tokens_per_batch is None:
        return _balance_step(step, world_size, config.width)
    return [
        _balance_batch(step, start, stop, world_size, config.tokens_per_batch)
        for start, stop in pairwise(step.edges)
    ]


def _balance_step(step: Step, world_size: int, width: int) -> list[list[Int64]]:
    """Balance all batches of a step at once; `width` packs per batch and rank.

    The first batch has the largest packs of each rank.
    """
    ranks = [step.start + items for items in spread(step.sizes.squares, world_size)]
    return [
        [places[batch * width : (batch + 1) * width] for places in ranks]
        for batch in range(step.num_batches)
    ]


def _balance_batch(
    step: Step, start: int, stop: int, world_size: int, token_budget: int
) -> list[Int64]:
    """Balance one batch; if a rank would then exceed the budget, take packs in turn."""
    batch = slice(start - step.start, stop - step.start)
    tokens = step.sizes.tokens[batch]
    ranks = spread(step.sizes.squares[batch], world_size)
    largest_load = max(int(tokens[items].sum()) for items in ranks)
    if largest_load > token_budget:
        return [
            _take_in_turn(start, stop, rank, world_size) for rank in range(world_size)
        ]
    return [start + items for items in ranks]


def spread(work: Int64, ranks: int) -> list[Int64]:
    """Assign items to ranks, so that the sums of work are even.

    The largest items go first, each to the rank with the smallest sum that has room;
    the numbers of items differ by one at most. Source: Graham 1969, "Bounds on
    multiprocessing timing anomalies", there without a limit on the number of items.

    Args:
        work: int64 `[n]`, work of each item.
        ranks: number of ranks.

    Returns:
        The indices of the items of each rank, largest first.
    """
    min_items, num_longer = divmod(len(work), ranks)
    items_of: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for item in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        while not _has_room(len(items_of[rank]), min_items, num_longer):
            load, rank = heapq.heappop(heap)
        if len(items_of[rank]) == min_items:
            num_longer -= 1
        items_of[rank].append(item)
        heapq.heappush(heap, (load + int(work[item]), rank))
    return [np.array(items, np.int64) for items in items_of]


def _has_room(num_items: int, min_items: int, num_longer: int) -> bool:
    """Return True if a rank may get one more item.

    Args:
        num_items: items of the rank so far.
        min_items: items that every rank gets.
        num_longer: number of ranks that may still get one item more than that.
    """
    if num_items == min_items:
        return num_longer > 0
    return num_items < min_items


def to_resumable_position(stream: PackStream, position: Position) -> Position:
    """Convert a position inside a step to the set of packs that were yielded.

    Any settings and number of ranks can resume from it.

    Raises:
        CompatibilityError: the settings or batches of the position are not valid.
    """
    if not position.batches:
        return position
    settings = dict(position.cut)
    world_size = settings.pop("world_size", None)
    try:
        config = BatchConfig.of(**settings)
    except ConfigError as error:
        rule = "cut must be the settings of a loader"
        raise stale_state_error(rule, str(error)) from error
    if not isinstance(world_size, int) or world_size < 1:
        raise stale_state_error("cut must name the number of ranks", repr(world_size))

    cutter = StepCutter(stream, position, config, world_size)
    step = next(iter(cutter), None)
    if step is None or position.batches >= step.num_batches:
        rule = "batches must be fewer than its step has"
        raise stale_state_error(rule, str(position.batches))

    yielded = [np.empty(0, np.int64)]
    for rank in range(world_size):
        shares = assign_ranks(step, rank, world_size, config)
        for share in shares[: position.batches]:
            if not share.is_filler:
                yielded.append(share.places)
    return cutter.remaining.position_without(
        np.concatenate(yielded), position.step, position.shortfall
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Exact counts of a loader's output; an example is a pair for kind ``preference``.

    Attributes:
        epochs: number of epochs planned.
        steps: optimizer steps in all epochs.
        batches: batches on each rank.
        packs: packs yielded with full weight, over all ranks.
        examples: examples in these packs.
        examples_per_step: minimum, mean and maximum.
        dropped_packs, dropped_examples: omitted by `drop_last`.
        filler_packs: repeated with weight 0.
    """

    epochs: int
    steps: int
    batches: int
    packs: int
    examples: int
    examples_per_step: tuple[int, float, int]
    dropped_packs: int
    dropped_examples: int
    filler_packs: int


def plan_steps(
    stream: PackStream,
    config: BatchConfig,
    world_size: int,
    epochs: Sequence[int],
    start: Position,
) -> StepPlan:
    """Plan `epochs`, the first from `start` on; leave the stream at the last one."""
    examples_of_steps: list[int] = []
    batches = 0
    packs = 0
    fillers = 0
    dropped_packs = 0
    dropped_examples = 0
    for epoch in epochs:
        stream.set_epoch(epoch)
        cutter = StepCutter(stream, start, config, world_size)
        end = 0
        for step in cutter:
            examples_of_steps.append(step.examples)
            batches += step.num_batches
            fillers += step.count_fillers(world_size)
            end = step.stop
        packs += end
        dropped_packs += len(cutter.remaining) - end
        dropped_examples += _count_examples(stream, cutter.remaining, end)
        start = Position()  # of all epochs after the first

    steps = len(examples_of_steps)
    examples = sum(examples_of_steps)
    return StepPlan(
        epochs=len(epochs),
        steps=steps,
        batches=batches,
        packs=packs,
        examples=examples,
        examples_per_step=(
            min(examples_of_steps, default=0),
            examples / max(steps, 1),
            max(examples_of_steps, default=0),
        ),
        dropped_packs=dropped_packs,
        dropped_examples=dropped_examples,
        filler_packs=fillers,
    )


def _count_examples(stream: PackStream, remaining: RemainingPacks, start: int) -> int:
    """Count the examples of the remaining packs from place `start` on."""
    total = 0
    for first in range(start, len(remaining), WINDOW):
        places = np.arange(first, min(first + WINDOW, len(remaining)))
        total += int(stream.sizes(remaining[places]).examples.sum())
    return total


def log_steps(
    plan: StepPlan, stream: PackStream, config: BatchConfig, world_size: int
) -> None:
    """Log the sizes of steps, if settings limit them, and the examples left out."""
    if config.examples_per_step is not None:
        _log_step_sizes(plan, stream, config.examples_per_step, world_size)
    if plan.dropped_examples:
        logger.warning(
            "drop_last leaves out %d of %d examples of the epoch, in its last %d packs",
            plan.dropped_examples,
            plan.examples + plan.dropped_examples,
            plan.dropped_packs,
        )


def _log_step_sizes(
    plan: StepPlan, stream: PackStream, requested: int, world_size: int
) -> None:
    smallest, mean, largest = plan.examples_per_step
    logger.info(
        "%d examples in %d steps of %.1f on average, %d to %d (examples_per_step=%d)",
        plan.examples,
        plan.steps,
        mean,
        smallest,
        largest,
        requested,
    )
    pack_sizes = [dataset.manifest.pack_size for dataset in stream.datasets]
    longest_examples = [longest_example(dataset) for dataset in stream.datasets]
    warning = large_steps_warning(
        requested=requested,
        mean=mean,
        largest=largest,
        ranks=world_size,
        pack_size=min(pack_sizes, default=0),
        longest=max(longest_examples, default=0),
    )
    if warning:
        logger.warning(warning)


def longest_example(dataset: Dataset) -> int:
    """Return a number of tokens that no example exceeds.

    It is a bound: the manifest records the longest sequence, not the longest example.
    """
    statistics = dataset.manifest.statistics
    match dataset.manifest.kind:
        case "scored":  # any number of responses
            return statistics.longest_sequence * statistics.most_segments
        case "preference":
            return statistics.longest_sequence * 2
        case _:
            return statistics.longest_sequence


def check_fits(tokens: Int64, indices: Int64, budget: int) -> None:
    """Raise ConfigError if a pack is longer than a batch may be.

    Args:
        tokens: int64 `[n]`, tokens of each pack.
        indices: int64 `[n]`, index of each pack in the global order.
        budget: `tokens_per_batch`.
    """
    if not len(tokens) or tokens.max() <= budget:
        return
    longest = int(tokens.argmax())
    raise ConfigError(
        f"batches: every pack must fit tokens_per_batch={budget}; found "
        f"{tokens[longest]} tokens in pack {indices[longest]} of the epoch's order. "
        "Raise tokens_per_batch."
    )
