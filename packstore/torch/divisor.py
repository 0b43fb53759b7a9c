"""What the losses of one optimizer step are divided by: counts over its batches and all ranks.

A loss is a sum; the gradient of a step is fair to every pair if all its sums are divided by one
number, the pairs of the whole step. Whoever averages gradients afterwards has to be told::

    divisor = count_step(batches, loss_fn)                    # one process, or own all-reduce (sum)
    divisor = count_step(batches, loss_fn).averaged(world)    # DDP, FSDP: mean over ranks
    divisor = count_step(batches, loss_fn).averaged(world * accumulation)   # Accelerate: both
    for batch in batches:
        loss_fn(logps, batch, divisor=divisor).loss.backward()

With a loader that plans steps, every batch knows the pairs of its step, so ``count_step([batch],
loss_fn)`` does without the other batches and without communication, unless the SFT term counts
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packstore.errors import ConfigError
from packstore.torch.collate import PackedBatch
from packstore.torch.metrics import all_reduce_sums

if TYPE_CHECKING:
    from packstore.torch.loss import PreferenceLoss


@dataclass(frozen=True)
class StepDivisor:
    """What the sums of a :class:`~packstore.torch.LossOutput` are divided by.

    Attributes:
        count: for `loss_sum`; of a step, the sum of all its `count`.
        sft_count: for `sft_sum`, or None.
    """

    count: float
    sft_count: float | None = None

    def averaged(self, times: int) -> StepDivisor:
        """For a trainer that averages what should be summed, over `times` parts.

        DDP and FSDP average gradients over the ranks; Accelerate also divides each loss by
        `gradient_accumulation_steps`.
        """
        sft = None if self.sft_count is None else self.sft_count / times
        return StepDivisor(self.count / times, sft)


def count_step(
    batches: Sequence[PackedBatch], loss_fn: PreferenceLoss, *, group: Any = None
) -> StepDivisor:
    """The divisor of an optimizer step.

    Args:
        batches: this rank's batches of the step; one is enough if it knows its step. None at all
            is fine on a rank that has nothing to do in an uneven step.
        loss_fn: the loss.
        group: the data-parallel process group; default: all ranks, if torch.distributed runs.
            With NCCL the batches must be on their GPU.

    Raises:
        ConfigError: the batches belong to different steps.
    """
    planned = {batch.step.index for batch in batches if batch.step is not None}
    if len(planned) > 1:
        raise ConfigError(
            f"count_step: batches must be of one optimizer step; found steps {sorted(planned)}."
        )
    known = loss_fn.planned_count(batches[0]) if batches else None
    if known is not None:
        return known
    counts = [loss_fn.count(batch) for batch in batches]
    device = batches[0].weights.device if batches else None
    sums = [sum(c.count for c in counts), sum(c.sft_count or 0 for c in counts)]
    count, sft_count = all_reduce_sums(sums, group, device)
    return StepDivisor(max(count, 1), max(sft_count, 1) if loss_fn.sft_weight else None)
