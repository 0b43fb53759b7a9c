"""Divides the remaining packs into optimizer steps, and those into batches and ranks;
plans.

A pure function of the packs' sizes, the settings and the number of ranks. It reads the
epoch in windows, so that it starts at once and uses little memory for any number of
packs.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise

import numpy as np

from packstore.config import BatchConfig
from packstore.config.reading import large_steps_warning
from packstore.errors import ConfigError
from packstore.format.arrays import COUNTS, Int64, PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.steps import cut_by_examples, limit_shortfall
from packstore.torch.batch.batch import StepInfo
from packstore.torch.data.position import Position, Unseen, stale_state_error
from packstore.torch.data.stream import PackStream

logger = logging.getLogger("packstore")

WINDOW = 4096
"""Approximate number of packs whose sizes are looked up at once."""


class Step:
    """One optimizer step, as positions among the packs not yet yielded; see
    :class:`Unseen`.

    Batch ``g``, over all ranks, has the positions ``edges[g] .. edges[g + 1]``. The
    shortfalls, in examples, are those of :attr:`Position.shortfall` before and after
    the step.
    """

    def __init__(
        self,
        edges: list[int],
        look_up: Callable[[], PackSizes],
        first: int,
        shortfall_before: int,
        shortfall_after: int,
    ) -> None:
        self.edges, self.start, self.stop = edges, edges[0], edges[-1]
        self._look_up, self._first = (
            look_up,
            first,
        )  # of a window, and its first position
        self.shortfall_before = shortfall_before
        self.shortfall_after = shortfall_after

    @cached_property
    def sizes(self) -> PackSizes:
        """Sizes of the packs of the step."""
        return self._look_up().take(
            slice(self.start - self._first, self.stop - self._first)
        )

    @cached_property
    def examples(self) -> int:
        """Number of examples of the step."""
        return int(self.sizes.examples.sum())

    def info(self, index: int, batch: int, ranks: int) -> StepInfo:
        """Describes the step for one of its batches."""
        batches, counts = len(self.edges) - 1, None
        if self.sizes.counts is not None:
            counts = dict(zip(COUNTS, self.sizes.counts.sum(0).tolist(), strict=True))
        return StepInfo(
            index, batch, batches, self.examples, ranks, len(self.sizes), counts
        )


class StepCutter:
    """Yields the optimizer steps of the packs not yet yielded from a position on."""

    def __init__(
        self, stream: PackStream, start: Position, config: BatchConfig, world_size: int
    ) -> None:
        self.stream, self.unseen = stream, Unseen(len(stream), start)
        self.config, self.world_size = config, world_size
        self._shortfall = 0
        if (
            config.examples_per_step is not None
        ):  # of the state, which may be of other settings
            self._shortfall = limit_shortfall(start.shortfall, config.examples_per_step)
        self._width = world_size * config.width
        fixed = config.tokens_per_batch is None and config.examples_per_step is None
        self.fixed = self._width * config.gradient_accumulation_steps if fixed else None
        """Packs of every full step, if that number is fixed."""
        self._unit = self.fixed or (world_size if config.tokens_per_batch else 1)
        whole = len(self.unseen) // self._unit * self._unit
        self.end = whole if config.drop_last else len(self.unseen)
        """Position where the last step ends at the latest."""

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps in order."""
        start, size, shortfall = 0, WINDOW, self._shortfall
        while start < self.end:
            stop = min(start + max(size // self._unit, 1) * self._unit, self.end)
            look_up = cache(
                partial(self.stream.sizes, self.unseen[np.arange(start, stop)])
            )
            begin = start
            for edges, shortfall_after in self._cut(start, stop, look_up, shortfall):
                step = Step(edges, look_up, begin, shortfall, shortfall_after)
                if self._is_cut_short(step):
                    return
                start = step.stop
                shortfall = shortfall_after
                yield step
            size = WINDOW if start > begin else 2 * size

    def _cut(
        self, start: int, stop: int, look_up: Callable[[], PackSizes], shortfall: int
    ) -> Iterator[tuple[list[int], int]]:
        """Yield edges of each step that the packs from `start` to `stop` determine, and
        shortfall.

        `shortfall` is that before the first of these steps; yielded are those after
        each.
        """
        is_end = stop == self.end
        if self.config.examples_per_step is not None:
            sizes = look_up()
            requested, begin = self.config.examples_per_step, 0
            steps = cut_by_examples(
                sizes.examples, requested, self.world_size, shortfall, is_end=is_end
            )
            for end, shortfall_after in steps:
                yield (
                    self._batches(sizes.tokens[begin:end], start + begin),
                    shortfall_after,
                )
                begin = end
        elif self.fixed is not None:
            ends = [*range(start, stop, self.fixed), stop]
            for begin, end in pairwise(ends):
                yield [*range(begin, end, self._width), end], 0
        else:
            for edges in self._cut_by_tokens(look_up(), start, is_end):
                yield edges, 0

    def _cut_by_tokens(
        self, sizes: PackSizes, start: int, closed: bool
    ) -> Iterator[list[int]]:
        jumps = self._jumps(sizes.tokens, start)
        row, rows, packs = 0, len(jumps), len(sizes)
        while row < rows:
            edges = [row]
            while (
                len(edges) <= self.config.gradient_accumulation_steps
                and edges[-1] < rows
            ):
                edges.append(jumps[edges[-1]])
            if edges[-1] == rows and not closed:
                return
            yield [start + min(edge * self.world_size, packs) for edge in edges]
            row = edges[-1]

    def _batches(self, tokens: Int64, start: int) -> list[int]:
        """Edges of the batches of a step, from the tokens of its packs."""
        stop = start + len(tokens)
        if self.config.tokens_per_batch is None:
            return [*range(start, stop, self._width), stop]
        jumps, edges = self._jumps(tokens, start), [0]
        while edges[-1] < len(jumps):
            edges.append(jumps[edges[-1]])
        return [min(start + edge * self.world_size, stop) for edge in edges]

    def _jumps(self, tokens: Int64, start: int) -> list[int]:
        """For each row of one pack per rank: the row where a batch that starts here
        ends.
        """
        budget = self.config.tokens_per_batch
        assert budget is not None
        ranks = self.world_size
        rows = -(-len(tokens) // ranks)
        sums = np.zeros((rows + 1, ranks), np.int64)
        sums[1:].flat[: len(tokens)] = tokens
        np.cumsum(sums, axis=0, out=sums)
        jumps = np.full(rows, rows)
        for of_rank in sums.T:
            fits = np.searchsorted(of_rank, of_rank[:-1] + budget, side="right") - 1
            np.minimum(jumps, fits, out=jumps)
        if (tokens > budget).any():
            places = np.arange(start, start + len(tokens))
            check_fits(tokens, self.unseen[places], budget)
        return jumps.tolist()

    def _is_cut_short(self, step: Step) -> bool:
        """Returns True for an incomplete last step, which `drop_last` omits."""
        if not self.config.drop_last or step.stop < self.end or self.fixed is not None:
            return False
        if self.config.examples_per_step is None:
            return len(step.edges) <= self.config.gradient_accumulation_steps
        return step.examples < self.config.examples_per_step + step.shortfall_before


Share = tuple[Int64, int]
"""Positions of a batch's packs, and how many at the end are fillers of weight 0."""


def assign_ranks(
    step: Step, rank: int, world_size: int, config: BatchConfig
) -> list[Share]:
    """Returns the batches of `rank`; in one without a pack for it, a filler of weight
    0.
    """
    if config.balance and world_size > 1:
        batches = [ranks[rank] for ranks in _balanced(step, world_size, config)]
    else:
        batches = [np.arange(a + rank, b, world_size) for a, b in pairwise(step.edges)]
    spare = next((batch[:1] for batch in batches if len(batch)), None)
    if spare is None:
        spare = np.array([step.start + rank % (step.stop - step.start)])
    return [(batch, 0) if len(batch) else (spare, 1) for batch in batches]


def _balanced(step: Step, world_size: int, config: BatchConfig) -> list[list[Int64]]:
    """The positions of each rank in each batch, with sums of squared lengths as even as
    possible.

    With packs per batch the whole step is balanced at once, largest packs first. With a
    token budget each batch is balanced alone, and round-robin where some rank would
    exceed the budget.
    """
    sizes, start = step.sizes, step.start
    if config.tokens_per_batch is None:
        ranks = [start + part for part in spread(sizes.squares, world_size)]
        batches, width = len(step.edges) - 1, config.width
        return [
            [part[g * width : (g + 1) * width] for part in ranks]
            for g in range(batches)
        ]
    out = []
    for a, b in pairwise(step.edges):
        parts = spread(sizes.squares[a - start : b - start], world_size)
        tokens = sizes.tokens[a - start : b - start]
        if max(int(tokens[part].sum()) for part in parts) <= config.tokens_per_batch:
            out.append([a + part for part in parts])
        else:
            out.append(
                [np.arange(a + rank, b, world_size) for rank in range(world_size)]
            )
    return out


def spread(work: Int64, ranks: int) -> list[Int64]:
    """Assigns indices of `work` to `ranks`, equally many each: largest first, to the
    smallest sum.

    Graham, "Bounds on multiprocessing timing anomalies", 1969, with equal counts.
    """
    each, extra = divmod(len(work), ranks)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for item in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        while len(parts[rank]) > each or (len(parts[rank]) == each and not extra):
            load, rank = heapq.heappop(heap)
        extra -= len(parts[rank]) == each
        parts[rank].append(item)
        heapq.heappush(heap, (load + int(work[item]), rank))
    return [np.array(part, np.int64) for part in parts]


def to_resumable_position(stream: PackStream, position: Position) -> Position:
    """Converts `position` to the set of yielded packs, from which any settings can
    resume.
    """
    if not position.batches:
        return position
    settings = dict(position.cut)
    world_size = settings.pop("world_size", None)
    try:
        config = BatchConfig.of(**settings)
    except ConfigError as error:
        raise stale_state_error(
            "cut must be the settings of a loader", str(error)
        ) from error
    if not isinstance(world_size, int) or world_size < 1:
        raise stale_state_error("cut must name the number of ranks", repr(world_size))
    cutter = StepCutter(stream, position, config, world_size)
    step = next(iter(cutter), None)
    if step is None or position.batches >= len(step.edges):
        raise stale_state_error(
            "batches must be fewer than its step has", str(position.batches)
        )
    out = [np.empty(0, np.int64)]
    for rank in range(world_size):
        shares = assign_ranks(step, rank, world_size, config)[: position.batches]
        out += [batch[: len(batch) - filled] for batch, filled in shares]
    return cutter.unseen.without(np.concatenate(out), position.step, position.shortfall)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Exact counts of a loader's output; an example is a pair for kind ``preference``.

    Attributes:
        epochs: number of epochs planned.
        steps: optimizer steps in all epochs.
        batches: batches on each rank.
        packs: packs yielded with full weight, over all ranks.
        examples: examples in these packs.
        examples_per_step: fewest, mean and most.
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
    """Plans `epochs`, the first from `start` on; leaves the stream at the last one."""
    examples: list[int] = []
    batches = packs = dropped_packs = dropped_examples = fillers = 0
    for epoch in epochs:
        stream.set_epoch(epoch)
        cutter = StepCutter(stream, start, config, world_size)
        unseen, start, end = cutter.unseen, Position(), 0
        for step in cutter:
            examples.append(step.examples)
            batches += len(step.edges) - 1
            fillers += sum(
                max(world_size - (b - a), 0) for a, b in pairwise(step.edges)
            )
            end = step.stop
        packs += end
        dropped_packs += len(unseen) - end
        for first in range(end, len(unseen), WINDOW):
            left = unseen[np.arange(first, min(first + WINDOW, len(unseen)))]
            dropped_examples += int(stream.sizes(left).examples.sum())
    steps, sizes = len(examples), examples or [0]
    return StepPlan(
        epochs=len(epochs),
        steps=steps,
        batches=batches,
        packs=packs,
        examples=sum(examples),
        examples_per_step=(min(sizes), sum(examples) / max(steps, 1), max(sizes)),
        dropped_packs=dropped_packs,
        dropped_examples=dropped_examples,
        filler_packs=fillers,
    )


def log_steps(
    plan: StepPlan, stream: PackStream, config: BatchConfig, world_size: int
) -> None:
    """Logs how large the steps are, if the settings limit them, and what they leave
    out.
    """
    fewest, mean, largest = plan.examples_per_step
    if requested := config.examples_per_step:
        text = (
            "%d examples in %d steps of %.1f on average, %d to %d "
            "(examples_per_step=%d)"
        )
        logger.info(text, plan.examples, plan.steps, mean, fewest, largest, requested)
        pack_size = min(
            (data.manifest.pack_size for data in stream.datasets), default=0
        )
        longest = max((longest_example(data) for data in stream.datasets), default=0)
        text = large_steps_warning(
            requested, mean, largest, world_size, pack_size, longest
        )
        if text:
            logger.warning(text)
    if plan.dropped_examples:
        text = (
            "drop_last leaves out %d of %d examples of the epoch, in its last %d packs"
        )
        whole = plan.examples + plan.dropped_examples
        logger.warning(text, plan.dropped_examples, whole, plan.dropped_packs)


def longest_example(dataset: Dataset) -> int:
    """Return a number of tokens that no example exceeds; a manifest knows the longest
    sequence.
    """
    statistics = dataset.manifest.statistics
    if dataset.manifest.kind == "scored":  # any number of answers
        return statistics.longest_sequence * statistics.most_segments
    return statistics.longest_sequence * (
        2 if dataset.manifest.kind == "preference" else 1
    )


def check_fits(tokens: Int64, indices: Int64, budget: int) -> None:
    """Refuses packs longer than `budget`: tokens and place in the global order, int64
    `[n]`.
    """
    if len(tokens) and tokens.max() > budget:
        which = int(tokens.argmax())
        raise ConfigError(
            f"batches: every pack must fit tokens_per_batch={budget}; found "
            f"{tokens[which]} "
            f"tokens in pack {indices[which]} of the epoch's order. Raise "
            "tokens_per_batch."
        )
