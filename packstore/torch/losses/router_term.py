"""The load-balancing loss of experts as a term of a loss: a sum over examples, and their number."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from packstore.errors import ConfigError, sentence
from packstore.torch.batch.collate import PackedBatch
from packstore.torch.losses.loss_output import LossOutput, detached, divide
from packstore.torch.metrics import SumAndCount
from packstore.torch.models.routers import carried


class RouterTerm(NamedTuple):
    """The router losses of a batch.

    Attributes:
        coefficient: their weight.
        term: sum over examples of the mean over each one's sequences; number of examples.
    """

    coefficient: float
    term: SumAndCount


def router_term(logps: Tensor, batch: PackedBatch, coefficient: float | None) -> RouterTerm | None:
    """Returns the router losses that the log-probs of a batch carry, if they are to be added.

    Args:
        logps: `[S]`, log-probs of the policy.
        batch: the batch.
        coefficient: their weight; None: that of the model's config.

    Raises:
        ConfigError: a coefficient is given and the log-probs of a policy carry none; or they are
            those of another batch.
    """
    if not logps.requires_grad:
        return None
    losses = carried(logps)
    if losses is None:
        if coefficient:
            where = f"router_aux_loss_coef {coefficient}"
            must = "log-probs of a policy must carry router losses"
            do = "Use packed_logps, with a model whose config has a router_aux_loss_coef above 0"
            raise ConfigError(sentence(where, must, "none", do))
        return None
    if len(losses.values) != batch.num_segments:
        must = f"must be one number for each of the batch's {batch.num_segments} segments"
        raise ConfigError(sentence("router losses", must, str(len(losses.values))))
    coefficient = losses.coefficient if coefficient is None else coefficient
    if not coefficient:
        return None
    responses = batch.num_responses.long()
    example = torch.arange(len(responses), device=responses.device)
    example = example.repeat_interleave(responses, output_size=batch.num_segments)
    sums = losses.values.new_zeros(len(responses)).index_add(0, example, losses.values)
    weights = batch.weights.to(sums)
    return RouterTerm(coefficient, ((sums / responses * weights).sum(), weights.sum()))


def with_routers(
    out: LossOutput,
    routers: RouterTerm,
    count: Tensor | float | None,
    examples: Tensor | float | None,
) -> LossOutput:
    """Adds router losses to a loss.

    Args:
        out: the loss without them.
        routers: the router losses.
        count: divisor of the loss without them; None: its own count.
        examples: divisor of the router losses; None: their own count.
    """
    added = routers.coefficient * divide(routers.term, examples)
    total, number = out.metrics["loss"]
    whole = total + added.detach() * (number.clamp(min=1) if count is None else count)
    metrics = {**out.metrics, "loss": (whole, number), "aux_loss": detached(routers.term)}
    router_sum, router_count = routers.term
    return replace(
        out,
        loss=out.loss + added,
        router_sum=router_sum,
        router_count=router_count,
        metrics=metrics,
    )
