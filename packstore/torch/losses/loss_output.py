"""The result of a loss: sums and counts, to add over batches and ranks; with router losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from packstore.errors import ConfigError, sentence
from packstore.torch.batch.collate import PackedBatch
from packstore.torch.metrics import SumAndCount
from packstore.torch.models.routers import carried


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


def divide(term: SumAndCount, divisor: Tensor | float | None) -> Tensor:
    """Returns sum / count, or sum / divisor; an empty sum gives 0."""
    total, count = term
    return total / (count.clamp(min=1) if divisor is None else divisor)


def detached(term: SumAndCount) -> SumAndCount:
    """Returns the term without gradients."""
    return term[0].detach(), term[1].detach()


def router_term(
    logps: Tensor, batch: PackedBatch, coefficient: float | None
) -> tuple[float, SumAndCount] | None:
    """Returns weight and term of the router losses that log-probs carry, if they are to be added.

    The term is the sum over examples of the mean over each one's sequences, and their number.

    Args:
        logps: `[S]`, log-probs of the policy.
        batch: the batch.
        coefficient: their weight; None: that of the model's config.

    Raises:
        ConfigError: a coefficient is given and the log-probs of a policy carry none; or they are
            those of another batch.
    """
    losses = carried(logps) if logps.requires_grad else None
    if losses is None:
        if coefficient and logps.requires_grad:
            raise ConfigError(
                sentence(
                    f"router_aux_loss_coef {coefficient}",
                    "log-probs of a policy must carry router losses",
                    "none",
                    "Use packed_logps, with a model whose config has a router_aux_loss_coef "
                    "above 0",
                )
            )
        return None
    if len(losses.values) != batch.num_segments:
        needed = f"must be one number for each of the batch's {batch.num_segments} segments"
        raise ConfigError(sentence("router losses", needed, str(len(losses.values))))
    coefficient = losses.coefficient if coefficient is None else coefficient
    if not coefficient:
        return None
    responses = batch.num_responses.long()
    example = torch.arange(len(responses), device=responses.device)
    example = example.repeat_interleave(responses, output_size=batch.num_segments)
    sums = losses.values.new_zeros(len(responses)).index_add(0, example, losses.values)
    weights = batch.weights.to(sums)
    return coefficient, ((sums / responses * weights).sum(), weights.sum())


def with_routers(
    out: LossOutput,
    routers: tuple[float, SumAndCount],
    count: Tensor | float | None,
    examples: Tensor | float | None,
) -> LossOutput:
    """Adds router losses to a loss.

    Args:
        out: the loss without them.
        routers: their weight and term.
        count: divisor of the loss without them; None: its own count.
        examples: divisor of the router losses; None: their own count.
    """
    coefficient, term = routers
    added = coefficient * divide(term, examples)
    total, number = out.metrics["loss"]
    whole = total + added.detach() * (number.clamp(min=1) if count is None else count)
    metrics = {**out.metrics, "loss": (whole, number), "aux_loss": detached(term)}
    loss = out.loss + added
    return replace(out, loss=loss, router_sum=term[0], router_count=term[1], metrics=metrics)
