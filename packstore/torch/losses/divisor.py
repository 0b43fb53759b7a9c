"""The divisor of an optimizer step's losses: counts over its batches and all ranks.

A loss is a sum. Every pair weighs the same in the gradient of a step if all its sums are divided
by one number: the pairs of the whole step, which a loader's batch carries on every rank.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from packstore.errors import ConfigError, sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.frameworks import check_steps


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
        rest = (x if x is None else x / times for x in (self.sft_count, self.examples))
        return StepDivisor(self.count / times, *rest)

    def above_zero(self) -> StepDivisor:
        """Returns it with 1 in place of 0, as what was counted may consist of fillers."""
        rest = (x if x is None else x or 1.0 for x in (self.sft_count, self.examples))
        return StepDivisor(self.count or 1.0, *rest)


UNDIVIDED = StepDivisor(1.0, 1.0)
"""For metrics, which are sums and counts that no divisor changes; counting would wait for them."""


def check_accumulation(batch: PackedBatch, *, divided: bool) -> None:
    """Refuses a planned batch while a framework divides by a count that no divisor accounts for."""
    if batch.step is not None:
        check_steps(batch.step.batches, divided=divided)
    accelerate: Any = sys.modules.get("accelerate.state")
    if batch.step is None or accelerate is None or not accelerate.GradientState._shared_state:
        return
    state = accelerate.GradientState()
    if state.num_steps == 1 or (divided and state.sync_gradients == batch.step.last):
        return
    rule = "optimizer steps and the division of losses must be those of the loader"
    found = f"gradient_accumulation_steps={state.num_steps}, by which it does both"
    remedy = "Make the Accelerator without it, use no_sync until batch.step.last, and step there"
    raise ConfigError(sentence("Accelerate", rule, found, remedy))
