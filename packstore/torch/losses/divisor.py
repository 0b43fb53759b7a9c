"""The divisor of an optimizer step's losses: counts over its batches and all ranks.

A loss is a sum. Every pair weighs the same in the gradient of a step if all its sums are divided
by one number: the pairs of the whole step, which a loader's batch carries on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch

from packstore.errors import ConfigError, sentence
from packstore.torch.batch.collate import PackedBatch
from packstore.torch.metrics import all_reduce_sums, distributed


@dataclass(frozen=True)
class StepDivisor:
    """Divisors of the sums of a :class:`~packstore.torch.LossOutput`.

    Attributes:
        count: divides `loss_sum`; for a step, the sum of `count` over its batches.
        sft_count: divides `sft_sum`, or None.
        examples: divides `router_sum`; None: `count` does, if it counts examples.
    """

    count: float
    sft_count: float | None = None
    examples: float | None = None

    def averaged(self, times: int) -> StepDivisor:
        """Returns the divisor for a trainer that averages over `times` parts instead of summing.

        DDP and FSDP average gradients over the ranks; Accelerate also divides each loss by
        `gradient_accumulation_steps`.
        """
        sft_count, examples = (
            None if value is None else value / times for value in (self.sft_count, self.examples)
        )
        return StepDivisor(self.count / times, sft_count, examples)


class CountedLoss(Protocol):
    """The part of a :class:`~packstore.torch.PreferenceLoss` that decides its divisor."""

    pairs: Any
    reduction: Any
    gradients: Any
    sft_weight: float
    sft_average: Any
    only_sft: bool

    def count(self, batch: PackedBatch) -> StepDivisor:
        """Returns the count of one batch."""


def planned_divisor(batch: PackedBatch, loss_fn: CountedLoss) -> StepDivisor | None:
    """Returns the divisor of the batch's step; None if the loader did not count it."""
    step = batch.step
    if step is None:
        return None
    counts = step.counts or {}
    examples = float(max(step.examples, 1))
    sft_count = counts.get("best_tokens") if loss_fn.sft_average == "token" else step.examples
    if loss_fn.only_sft:
        if sft_count is None:
            return None
        return StepDivisor(float(max(sft_count, 1)), examples=examples)
    count = step.examples if batch.kind == "preference" else counts.get(f"pairs_{loss_fn.pairs}")
    if loss_fn.reduction == "pack_mean":
        count = sft_count = step.packs if batch.kind == "preference" else None
    if count is None or (loss_fn.sft_weight and sft_count is None):
        return None
    sft = float(max(sft_count or 1, 1)) if loss_fn.sft_weight else None
    return StepDivisor(float(max(count, 1)), sft, examples)


def own_divisor(batch: PackedBatch, loss_fn: CountedLoss) -> StepDivisor:
    """Returns the count of this batch alone; at least 1, as it may consist of fillers."""
    counted = loss_fn.count(batch)
    sft = None if counted.sft_count is None else max(counted.sft_count, 1.0)
    return StepDivisor(max(counted.count, 1.0), sft, max(counted.examples or 0.0, 1.0))


def default_divisor(batch: PackedBatch, loss_fn: CountedLoss) -> StepDivisor | None:
    """Returns the divisor used by default; None: the batch's own count."""
    step = batch.step
    if step is None:
        return None
    if (planned := planned_divisor(batch, loss_fn)) is not None:
        return planned.averaged(step.ranks if loss_fn.gradients == "mean" else 1)
    if step.batches * step.ranks == 1:
        return None
    raise ConfigError(
        sentence(
            repr(loss_fn),
            "a loss must be divided by the count of its whole optimizer step",
            f"a step of {step.batches} batches on {step.ranks} ranks that nobody counted",
            "Pass divisor=count_step(batches, loss_fn).averaged(ranks) with all batches of the "
            "step, or pack the data anew: the pack index then counts what losses divide by",
        )
    )


def count_step(
    batches: Sequence[PackedBatch],
    loss_fn: CountedLoss,
    *,
    group: Any = None,
    device: torch.device | None = None,
) -> StepDivisor:
    """Counts an optimizer step, over its batches and all ranks; a collective call.

    Args:
        batches: this rank's batches of the step; one suffices if its loader counted the step.
            An empty list is fine on a rank without work in an uneven step, as long as the ranks
            with batches call this too.
        loss_fn: the loss.
        group: the data-parallel process group; default: all ranks, if torch.distributed runs.
        device: device that the group communicates from, which with NCCL is the rank's GPU;
            default: that of the batches. Counting batches on the CPU waits for no device.

    Raises:
        ConfigError: the batches belong to different steps, or some of an uncounted step are
            missing.
    """
    steps = [batch.step for batch in batches if batch.step is not None]
    if len(indices := {step.index for step in steps}) > 1:
        raise ConfigError(
            f"count_step: batches must be of one optimizer step; found steps {sorted(indices)}."
        )
    known = planned_divisor(batches[0], loss_fn) if batches else None
    if known is not None:
        return known
    numbers = {step.batch for step in steps}
    if steps and numbers != set(range(steps[0].batches)):
        raise ConfigError(
            sentence(
                "count_step",
                f"it must get all {steps[0].batches} batches of the step, which nobody counted",
                str(len(numbers)),
                "Collect them until step.last",
            )
        )
    counts = [loss_fn.count(batch) for batch in batches]
    if not distributed():
        device = None  # the counts are numbers already
    elif device is None and batches:
        device = batches[0].weights.device
    sums = [sum(x or 0 for x in each) for each in zip(*map(astuple, counts), strict=True)]
    count, sft_count, examples = all_reduce_sums(sums or [0, 0, 0], group, device)
    sft = max(sft_count, 1) if loss_fn.sft_weight else None
    return StepDivisor(max(count, 1), sft, max(examples, 1))


def check_accumulation(batch: PackedBatch, *, given: bool) -> None:
    """Refuses a planned batch while Accelerate accumulates gradients by its own count.

    A given divisor accounts for Accelerate's division, if its steps are those of the loader.
    """
    accelerate: Any = sys.modules.get("accelerate.state")
    if batch.step is None or accelerate is None or not accelerate.GradientState._shared_state:
        return
    state = accelerate.GradientState()
    if state.num_steps == 1 or (given and state.sync_gradients == batch.step.last):
        return
    raise ConfigError(
        sentence(
            "Accelerate",
            "optimizer steps and the division of losses must be those of the loader",
            f"gradient_accumulation_steps={state.num_steps}, by which it does both",
            "Make the Accelerator without it, use no_sync until batch.step.last, and step there",
        )
    )
