"""Plans an epoch before training: steps, batches, pairs, and the cost of the tail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from packstore.config import BatchConfig
from packstore.torch.data.position import Position, Unseen
from packstore.torch.data.ranks import assign_ranks, fillers
from packstore.torch.data.steps import WINDOW, Step, StepCutter
from packstore.torch.data.stream import PackStream


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Exact counts of a loader's output; an example is a pair for kind ``preference``.

    Attributes:
        epochs: number of epochs planned.
        steps: optimizer steps in all epochs.
        batches: batches on each rank (with tail ``uneven``: at most).
        packs: packs yielded with full weight, over all ranks.
        examples: examples in these packs.
        examples_per_step: fewest, mean and most.
        dropped_packs, dropped_examples: omitted by tail ``drop``.
        padded_packs, padded_examples: repeated with weight 0.
        repeated_packs, repeated_examples: repeated with full weight.
    """

    epochs: int
    steps: int
    batches: int
    packs: int
    examples: int
    examples_per_step: tuple[int, float, int]
    dropped_packs: int = 0
    dropped_examples: int = 0
    padded_packs: int = 0
    padded_examples: int = 0
    repeated_packs: int = 0
    repeated_examples: int = 0


def plan_steps(
    stream: PackStream, config: BatchConfig, world_size: int, epochs: Iterable[int]
) -> StepPlan:
    """Plans whole `epochs`; leaves the stream at the last one.

    Looks up the sizes of all packs, in windows; holds one number per step.

    Raises:
        ConfigError: a single pack is longer than `tokens_per_batch`.
    """
    examples: list[int] = []
    counts: Counter[str] = Counter(batches=0)
    for epoch in epochs:
        stream.set_epoch(epoch)
        _count_epoch(stream, config, world_size, examples, counts)
    steps = len(examples)
    spread = (min(examples), sum(examples) / steps, max(examples)) if steps else (0, 0.0, 0)
    return StepPlan(
        steps=steps, examples=sum(examples), examples_per_step=spread, **cast(Any, counts)
    )


def _count_epoch(
    stream: PackStream,
    config: BatchConfig,
    world_size: int,
    examples: list[int],
    counts: Counter[str],
) -> None:
    unseen = Unseen(len(stream), Position())
    covered = 0
    for step in StepCutter(stream, unseen, config, world_size):
        examples.append(step.examples)
        counts["batches"] += len(step.edges) - 1
        covered = step.stop
        if filled := fillers(step, world_size, config):
            counts["padded_packs"] += filled
            counts["padded_examples"] += _filler_examples(step, world_size, config)
    ends = sorted((covered, len(unseen)))
    what = "dropped" if covered < len(unseen) else "repeated"
    counts["epochs"] += 1
    counts["packs"] += covered
    counts[f"{what}_packs"] += ends[1] - ends[0]
    counts[f"{what}_examples"] += _examples(stream, unseen, *ends)


def _filler_examples(step: Step, world_size: int, config: BatchConfig) -> int:
    shares = (
        share for r in range(world_size) for share in assign_ranks(step, r, world_size, config)
    )
    places = [batch[len(batch) - filled :] for batch, filled in shares if filled]
    return int(step.sizes.examples[np.concatenate(places) - step.start].sum())


def _examples(stream: PackStream, unseen: Unseen, start: int, stop: int) -> int:
    windows = range(start, stop, WINDOW)
    places = (np.arange(a, min(a + WINDOW, stop)) for a in windows)
    return sum(int(stream.sizes(unseen[p]).examples.sum()) for p in places)
