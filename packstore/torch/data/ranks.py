"""Distributes the packs of an optimizer step over ranks and batches, and fills short batches."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Any

import numpy as np

from packstore.config import BatchConfig
from packstore.errors import ConfigError
from packstore.format.arrays import Int64
from packstore.torch.data.position import Position, Unseen, stale
from packstore.torch.data.steps import Step, StepCutter
from packstore.torch.data.stream import PackStream

Share = tuple[Int64, int]
"""Positions of a batch's packs, and how many at the end are fillers of weight 0."""


def assign_ranks(step: Step, rank: int, world_size: int, config: BatchConfig) -> list[Share]:
    """Returns the batches of `rank` in `step`.

    Pack ``i`` of a batch goes to rank ``i % world_size``, unless the ranks are balanced. A rank
    without a pack in some batch repeats one of its packs of the step with weight 0, so that all
    ranks run equally many batches.
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
    """The positions of each rank in each batch, with sums of squared lengths as even as possible.

    With packs per batch the whole step is balanced at once, largest packs first. With a token
    budget each batch is balanced alone, and round-robin where some rank would exceed the budget.
    """
    sizes, start = step.sizes, step.start
    if config.tokens_per_batch is None:
        ranks = [start + part for part in spread(sizes.squares, world_size)]
        batches, width = len(step.edges) - 1, config.width
        return [[part[g * width : (g + 1) * width] for part in ranks] for g in range(batches)]
    out = []
    for a, b in pairwise(step.edges):
        parts = spread(sizes.squares[a - start : b - start], world_size)
        tokens = sizes.tokens[a - start : b - start]
        if max(int(tokens[part].sum()) for part in parts) <= config.tokens_per_batch:
            out.append([a + part for part in parts])
        else:
            out.append([np.arange(a + rank, b, world_size) for rank in range(world_size)])
    return out


def spread(work: Int64, ranks: int) -> list[Int64]:
    """Assigns indices of `work` to `ranks`, equally many each, with sums as even as possible.

    Largest first, each to the rank with the smallest sum that has a free slot (Graham, "Bounds on
    multiprocessing timing anomalies", 1969, with equal counts).
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


def cut_of(config: BatchConfig, world_size: int) -> dict[str, Any]:
    """Returns the settings that decide step boundaries and distribution, as JSON values."""
    return {"world_size": world_size, **config.changed()}


def settled(stream: PackStream, position: Position) -> Position:
    """Converts `position` to the set of yielded packs, from which any settings can resume."""
    if not position.batches:
        return position
    settings = dict(position.cut)
    world_size = settings.pop("world_size", None)
    try:
        config = BatchConfig.of(**settings)
    except ConfigError as error:
        raise stale("cut must be the settings of a loader", str(error)) from error
    if not isinstance(world_size, int) or world_size < 1:
        raise stale("cut must name the number of ranks", repr(world_size))
    unseen = Unseen(len(stream), position)
    step = next(iter(StepCutter(stream, unseen, config, world_size)), None)
    if step is None or position.batches >= len(step.edges):
        raise stale("batches must be fewer than its step has", str(position.batches))
    out = [np.empty(0, np.int64)]
    for rank in range(world_size):
        shares = assign_ranks(step, rank, world_size, config)[: position.batches]
        out += [batch[: len(batch) - filled] for batch, filled in shares]
    return unseen.without(np.concatenate(out), position.step)
