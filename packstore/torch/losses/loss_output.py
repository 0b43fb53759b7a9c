"""The result of a loss: the loss, and sums and counts to add over batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from packstore.torch.metrics import SumAndCount


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The part of an optimizer step's loss that a batch contributes; all tensors are scalars.

    Attributes:
        loss: ``loss_sum`` plus the weighted SFT term and router losses, each divided by its count
            over the whole optimizer step, or by the given divisor. Call ``backward()`` on it.
        loss_sum: sum of the losses of all pairs.
        count: number of pairs.
        sft_sum: sum of the SFT term, or None.
        sft_count: count of the SFT term, or None.
        metrics: name -> (sum, count), without gradient; :class:`~packstore.torch.Metrics` adds
            them over batches and ranks.
        router_sum: sum over examples of the load-balancing loss of experts, which of an example is
            the mean over its sequences; or None.
        router_count: number of examples, or None.
    """

    loss: Tensor
    loss_sum: Tensor
    count: Tensor
    sft_sum: Tensor | None
    sft_count: Tensor | None
    metrics: Mapping[str, SumAndCount]
    router_sum: Tensor | None = None
    router_count: Tensor | None = None


def output(
    loss: Tensor, term: SumAndCount, sft: SumAndCount | None, metrics: Mapping[str, SumAndCount]
) -> LossOutput:
    """Assembles a :class:`LossOutput`."""
    sft_sum, sft_count = sft or (None, None)
    return LossOutput(loss, *term, sft_sum, sft_count, metrics)


def divide(term: SumAndCount, divisor: Tensor | float | None) -> Tensor:
    """Returns sum / count, or sum / divisor; an empty sum gives 0."""
    total, count = term
    return total / (count.clamp(min=1) if divisor is None else divisor)


def detached(term: SumAndCount) -> SumAndCount:
    """Returns the term without gradients."""
    return term[0].detach(), term[1].detach()
