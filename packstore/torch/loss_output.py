"""What a loss gives: the loss itself, and sums and counts to add over batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from packstore.torch.metrics import SumAndCount


@dataclass(frozen=True, eq=False)
class LossOutput:
    """What a batch adds to the loss of an optimizer step; all tensors are scalars.

    Attributes:
        loss: ``loss_sum`` plus the weighted SFT term, each divided by its count over the whole
            optimizer step, or by what was given. To be differentiated.
        loss_sum: sum of the losses of all pairs.
        count: number of pairs.
        sft_sum: the SFT term's own sum, or None.
        sft_count: what it is divided by, or None.
        metrics: name -> (sum, count), without gradient; :class:`~packstore.torch.Metrics` adds
            them over batches and ranks.
    """

    loss: Tensor
    loss_sum: Tensor
    count: Tensor
    sft_sum: Tensor | None
    sft_count: Tensor | None
    metrics: Mapping[str, SumAndCount]


def output(
    loss: Tensor, term: SumAndCount, sft: SumAndCount | None, metrics: Mapping[str, SumAndCount]
) -> LossOutput:
    """The parts together."""
    sft_sum, sft_count = sft or (None, None)
    return LossOutput(loss, *term, sft_sum, sft_count, metrics)


def divide(term: SumAndCount, divisor: Tensor | float | None) -> Tensor:
    """Sum over count, or over the divisor; a sum over nothing is 0."""
    total, count = term
    return total / (count.clamp(min=1) if divisor is None else divisor)


def detached(term: SumAndCount) -> SumAndCount:
    """Without gradients."""
    return term[0].detach(), term[1].detach()
