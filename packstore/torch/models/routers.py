"""The load-balancing loss of experts, for each sequence of a packed row.

transformers computes ``load_balancing_loss_func`` (Fedus et al., Switch Transformers,
2021, equations 4 to 6) over all tokens of a call, so its value depends on the sequences
that share the call. Here it is that of each logical sequence in a call of its own::

    L_s = E sum_e f_e P_e
    f_e = times that a token of the sequence selects expert e, over tokens and layers
    P_e = mean probability of expert e, over tokens and layers

with E experts. Padding does not count; a shared prefix counts for each of its
sequences. The formula is verified once on each model, against the model's own
`aux_loss`. A policy's log-probs carry these values through the autograd graph to the
loss, which adds their mean.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from packstore.errors import CompatibilityError, sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.models.probe import few_tokens
from packstore.torch.models.unwrap import evaluating, text_config, unwrapped

logger = logging.getLogger("packstore")

WITHOUT = "Train without that loss: set router_aux_loss_coef to 0 in the model's config"

_PROVED: WeakSet[nn.Module] = WeakSet()

_NEAR = 64
"""Nodes of the autograd graph between a policy's log-probs and a loss, at most."""

_WARNED: set[str] = set()
"""Model classes of which a warning was logged."""


@dataclass(frozen=True)
class RouterSettings:
    """Of a model: its class, the factor on its loss, E, and the experts that a token
    selects.
    """

    model: str
    coefficient: float
    experts: int
    top_k: int


@dataclass(frozen=True, eq=False)
class RouterLosses:
    """The loss of each sequence `[S]`, 0 for an empty one; `uses` has an entry for each
    taker.
    """

    values: Tensor
    settings: RouterSettings
    uses: list[bool] = field(default_factory=list)


def router_settings(model: Any) -> RouterSettings | None:
    """Returns the settings of the loss that the model's config asks for, as TRL reads
    it; or None.

    A model that computes no such loss itself, or another one, is refused.
    """
    model = unwrapped(model)
    text = text_config(model)
    if not hasattr(text, "output_router_logits"):
        return None
    name, coefficient = (
        type(model).__name__,
        getattr(text, "router_aux_loss_coef", None),
    )
    if coefficient is None and text.output_router_logits:
        rule = "a config with output_router_logits must name router_aux_loss_coef"
        remedy = "Set output_router_logits to false in the model's config"
        raise _unfit(name, rule, "none", remedy)
    if not coefficient or not any(p.requires_grad for p in model.parameters()):
        return None
    names = ("num_experts", "num_experts_per_tok")
    sizes: Any = [getattr(model, size, getattr(text, size, None)) for size in names]
    settings = RouterSettings(name, float(coefficient), *sizes)
    if model not in _PROVED:
        _prove(model, settings)
        _PROVED.add(model)
        message = (
            "experts of %s: log-probs carry their load-balancing loss, with "
            "coefficient %g"
        )
        logger.info(message, name, coefficient)
    return settings


@torch.no_grad()
def _prove(model: Any, settings: RouterSettings) -> None:
    """Compares the model's own load-balancing loss of a few tokens with ours."""
    device = next(model.parameters()).device
    batch = few_tokens(device)
    try:
        with evaluating(model), torch.autocast(device.type, enabled=False):
            outputs = model(**batch.model_inputs(), output_router_logits=True)
    except (
        IndexError
    ) as error:  # of transformers' function, which takes the first layer's
        raise _unfit(
            settings.model, "a layer must return router_logits", "none"
        ) from error
    expected = getattr(outputs, "aux_loss", None)
    if not isinstance(expected, Tensor):
        raise _unfit(
            settings.model,
            "its forward call must return the load-balancing loss as aux_loss, as its "
            "config has "
            f"router_aux_loss_coef {settings.coefficient:g}",
            "a model that computes none",
            "Set router_aux_loss_coef to 0 in the model's config: transformers, too, "
            "trains it "
            "without that loss",
        )
    ours = float(
        router_losses(batch, outputs.router_logits, settings, rounded=True).values[0]
    )
    if not abs(ours - float(expected)) <= 1e-2 * abs(ours):
        rule = (
            f"its load-balancing loss must be that of Switch Transformers, {ours:.4g}"
        )
        raise _unfit(settings.model, rule, f"{float(expected):.4g}")


def router_losses(
    batch: PackedBatch,
    logits: Sequence[Tensor] | None,
    settings: RouterSettings,
    *,
    rounded: bool = False,
) -> RouterLosses:
    """Computes the loss of each sequence from the logits `[T, E]` of each layer with
    experts.

    With `rounded`, probabilities have the dtype of the logits, as in transformers: a
    tie in 16 bits may select another expert.
    """
    shape = (batch.num_tokens, settings.experts)
    if (
        not logits
        or settings.top_k is None
        or any(each.shape != shape for each in logits)
    ):
        raise _unfit(
            settings.model,
            f"the base model must return router_logits of shape {shape} for each layer",
            f"shape {tuple(logits[0].shape)}" if logits else "none",
        )
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    chances_TE, choices_TE = logits[0].new_zeros((2, *shape), dtype=dtype)
    for each in logits:
        each = each.to(chances_TE.device)
        chance = (each if rounded else each.to(dtype)).softmax(-1)
        chosen = chance.detach().topk(settings.top_k).indices
        choices_TE.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=dtype))
        chances_TE = chances_TE + chance.to(dtype)
    sequence, place = batch.key_places
    # Padding is at the end of a sequence; it goes to one row more.
    sequence = torch.where(
        place < batch.lengths[sequence], sequence, batch.num_segments
    )
    tokens_S1 = len(logits) * batch.lengths.clamp(min=1)[:, None].to(dtype)

    def mean(values_TE: Tensor) -> Tensor:
        rows = values_TE if batch.kv_index is None else values_TE[batch.kv_index]
        zeros = rows.new_zeros(batch.num_segments + 1, rows.shape[1])
        return zeros.index_add(0, sequence, rows)[:-1] / tokens_S1

    losses_S = settings.experts * (mean(choices_TE) * mean(chances_TE)).sum(-1)
    return RouterLosses(losses_S, settings)


def check_gradient(backbone: Any, hidden: Tensor, losses: RouterLosses) -> None:
    """Refuses losses without gradient, as reentrant gradient checkpointing
    gives them.
    """
    if losses.values.requires_grad or not hidden.requires_grad:
        return
    if any(
        getattr(module, "gradient_checkpointing", False)
        for module in backbone.modules()
    ):
        rule = "gradient checkpointing must keep the gradient of router_logits"
        remedy = 'Enable it with {"use_reentrant": False}'
        raise _unfit(losses.settings.model, rule, "none", remedy)


class _Carry(torch.autograd.Function):
    """Returns its first argument; the node in the autograd graph holds the second."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, losses: RouterLosses) -> Tensor:
        ctx.router_losses = losses
        return logps.clone()  # FSDP warns of views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def carry(logps: Tensor, losses: RouterLosses) -> Tensor:
    """Returns log-probs `[S]` that carry these losses, and warn once if no loss took
    them.
    """
    # Not decorated: that would load torch's compiler, which takes a second, with this
    # module.
    untraced: Callable[..., Tensor] = torch.compiler.disable(_carry)  # type: ignore[no-untyped-call]
    return untraced(logps, losses)


def _carry(logps: Tensor, losses: RouterLosses) -> Tensor:
    weakref.finalize(
        losses, _warn_unused, losses.uses, losses.settings.model
    ).atexit = False
    return _Carry.apply(logps, losses)  # type: ignore[no-untyped-call, no-any-return]


def take_carried_losses(logps: Tensor) -> RouterLosses | None:
    """Returns the losses that log-probs carry, or None; marks them as taken."""
    nodes = [logps.grad_fn]
    for _ in range(_NEAR):
        node = nodes.pop(0) if nodes else None
        losses: RouterLosses | None = getattr(node, "router_losses", None)
        if losses is not None:
            losses.uses.append(True)
            return losses
        nodes += [n for n, _ in getattr(node, "next_functions", ()) if n is not None]
    return None


def _warn_unused(uses: list[bool], model: str) -> None:
    if not uses and model not in _WARNED:
        _WARNED.add(model)
        logger.warning(
            "experts of %s: their load-balancing loss, which the config asks for, was "
            "added to no "
            "loss; pass the log-probs to a PreferenceLoss, or set router_aux_loss_coef "
            "to 0 in the "
            "config",
            model,
        )


def _unfit(
    model: str, rule: str, found: str, remedy: str = WITHOUT
) -> CompatibilityError:
    return CompatibilityError(sentence(f"experts of {model}", rule, found, remedy))
