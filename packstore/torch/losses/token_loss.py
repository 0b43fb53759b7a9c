"""The base of losses of tokens: one value for each supervised token, averaged over the
whole optimizer step.

Tensors `[n]` hold a value for each supervised token of a batch, in the order of
``batch.target_index``. Fillers and padding have values of any kind, at weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.logprobs.logprobs import by_segment, segment_token_counts
from packstore.torch.losses.step_loss import (
    Gradients,
    LossOutput,
    StepDivisor,
    StepLoss,
    divide,
    sequence_weights,
)
from packstore.torch.metrics import SumAndCount, weighted_sums

Average = Literal["token", "sequence", "group"]

UNITS = {"token": "tokens", "sequence": "sequences", "group": "examples"}
"""Average -> the unit that the sum of its means is divided by."""


class TokenLoss(StepLoss):
    """A loss of each supervised token, averaged over the whole optimizer step.

    Args:
        average: ``token``: over all tokens of the step; ``sequence``: over the tokens
            of each sequence, then over sequences; ``group``: over the tokens of each
            example's sequences, then over examples.
        router_aux_loss_coef, gradients: as of :class:`StepLoss`.
    """

    def __init__(
        self,
        average: Average,
        router_aux_loss_coef: float | None,
        gradients: Gradients,
    ) -> None:
        super().__init__(router_aux_loss_coef, gradients)
        self.average = choice("average", average, get_args(Average))

    def units(self, batch: PackedBatch) -> tuple[str, str | None]:
        """See :meth:`StepLoss.units`."""
        return UNITS[self.average], None

    def _output(
        self,
        logps: Tensor,
        batch: PackedBatch,
        *,
        losses: Tensor,
        values: Mapping[str, Tensor],
        divisor: StepDivisor | Tensor | float | None,
    ) -> LossOutput:
        """Return the output of a call.

        Args:
            logps: log-probs of the policy, which may carry router losses.
            batch: the batch.
            losses: `[n]`, the loss of each token.
            values: metric -> `[n]`, averaged over all tokens.
            divisor: the argument of the call.
        """
        divisors = self._resolve_divisors(logps, batch, divisor)
        weights = _token_weights(batch)
        loss_sum, count = self._average(losses, weights.to(losses), batch)

        metrics: dict[str, SumAndCount] = {"loss": (loss_sum, count)}
        metrics |= weighted_sums(values, weights)
        output = LossOutput(
            loss=divide((loss_sum, count), divisors.count),
            loss_sum=loss_sum,
            count=count,
            sft_sum=None,
            sft_count=None,
            metrics=metrics,
        )
        return self._add_router_losses(output, logps, batch, divisors)

    def _average(
        self, losses: Tensor, weights: Tensor, batch: PackedBatch
    ) -> SumAndCount:
        """Return sum and count of the averaged units: tokens, sequences or examples.

        `weights` belong to the tokens, 1 or 0.
        """
        if self.average == "token":
            return (losses * weights).sum(), weights.sum()
        if self.average == "group":
            means = example_means(losses, batch)
            unit_weights = batch.weights
        else:
            token_counts = segment_token_counts(batch)
            means = by_segment(batch, losses) / token_counts.clamp(min=1)
            unit_weights = sequence_weights(batch)
        unit_weights = unit_weights.to(means)
        return (means * unit_weights).sum(), unit_weights.sum()


def example_means(losses: Tensor, batch: PackedBatch) -> Tensor:
    """Return the mean of `losses` `[n]` over the tokens of each example, `[E]`."""
    zeros = losses.new_zeros(batch.num_examples)
    sums = zeros.index_add(0, batch.segment_examples, by_segment(batch, losses))
    return sums / batch.num_targets.clamp(min=1)


def _token_weights(batch: PackedBatch) -> Tensor:
    """Return the weight of each supervised token, `[n]`: 1, or 0 of a filler."""
    # Padding of `batch.target_index` belongs to "sequence" S, which weighs 0.
    weights = torch.cat([sequence_weights(batch), batch.weights.new_zeros(1)])
    return weights[batch.targets.segments]
