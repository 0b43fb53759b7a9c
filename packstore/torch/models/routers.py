"""The load-balancing loss of experts, for each sequence of a packed row.

In a mixture of experts, a router selects `top_k` of E experts for each token and layer.
A load-balancing loss keeps it from selecting the same few all the time. transformers
computes it (``load_balancing_loss_func``; Fedus et al., Switch Transformers, 2021,
equations 4 to 6) over all tokens of a call, so its value depends on the sequences that
share the call. Here each logical sequence has the value of a call of its own::

    L_s = E sum_e f_e P_e
    f_e = selections of expert e by tokens of sequence s / (tokens x layers)
    P_e = mean probability of expert e over the same tokens and layers

Padding does not count; a shared prefix counts for each of its sequences. The formula is
verified once on each model, against the model's own `aux_loss`.

The losses reach the preference loss through the autograd graph: :func:`carry` hangs
them on a policy's log-probs, and :func:`take_carried_losses` finds them there.

Suffixes of tensors name their axes: T tokens of the row, S sequences, E experts.
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

TRAIN_WITHOUT = (
    "Train without that loss: set router_aux_loss_coef to 0 in the model's config"
)

_MAX_NODES = 64
"""Nodes of the autograd graph that are searched for carried losses. Between a policy's
log-probs and a loss there are only a few: slices, casts, sums.
"""

_verified_models: WeakSet[nn.Module] = WeakSet()
_warned_classes: set[str] = set()


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a model with experts.

    Attributes:
        model: name of the model's class.
        coefficient: factor of the load-balancing loss.
        experts: number of experts, E.
        top_k: number of experts that a token selects.
    """

    model: str
    coefficient: float
    experts: int
    top_k: int


@dataclass(frozen=True, eq=False)
class RouterLosses:
    """The load-balancing loss of each sequence.

    Attributes:
        values: `[S]`, L_s of each sequence; 0 for an empty one.
        settings: settings of the model.
        uses: True, once for each preference loss that took the values. A list, so that
            it outlives this object: a warning looks at it then.
    """

    values: Tensor
    settings: RouterSettings
    uses: list[bool] = field(default_factory=list)


def router_settings(model: Any) -> RouterSettings | None:
    """Return the settings of the load-balancing loss; None if the model trains without.

    As in TRL, the loss is on if the config has a `router_aux_loss_coef` other than 0.

    Raises:
        CompatibilityError: the model computes no such loss itself, or another one.
    """
    model = unwrapped(model)
    config = text_config(model)
    if not hasattr(config, "output_router_logits"):
        return None
    name = type(model).__name__
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if coefficient is None and config.output_router_logits:
        raise _compatibility_error(
            name,
            rule="a config with output_router_logits must name router_aux_loss_coef",
            found="none",
            remedy="Set output_router_logits to false in the model's config",
        )
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if not coefficient or not is_trained:
        return None
    settings = RouterSettings(
        model=name,
        coefficient=float(coefficient),
        experts=_size(model, config, "num_experts"),
        top_k=_size(model, config, "num_experts_per_tok"),
    )
    if model not in _verified_models:
        _verify_formula(model, settings)
        _verified_models.add(model)
        logger.info(
            "experts of %s: log-probs carry their load-balancing loss, with "
            "coefficient %g",
            name,
            coefficient,
        )
    return settings


def _size(model: Any, config: Any, name: str) -> Any:
    # Some configs use another name, and their models set the usual one.
    return getattr(model, name, getattr(config, name, None))


@torch.no_grad()
def _verify_formula(model: Any, settings: RouterSettings) -> None:
    """Compare the model's own load-balancing loss of a few tokens with ours."""
    device = next(model.parameters()).device
    batch = few_tokens(device)
    try:
        with evaluating(model), torch.autocast(device.type, enabled=False):
            outputs = model(**batch.model_inputs(), output_router_logits=True)
    except IndexError as error:
        # transformers' function looks at the first layer's logits without a check.
        raise _compatibility_error(
            settings.model, rule="a layer must return router_logits", found="none"
        ) from error

    own_loss = getattr(outputs, "aux_loss", None)
    if not isinstance(own_loss, Tensor):
        raise _compatibility_error(
            settings.model,
            rule="its forward call must return the load-balancing loss as aux_loss, as "
            f"its config has router_aux_loss_coef {settings.coefficient:g}",
            found="a model that computes none",
            remedy="Set router_aux_loss_coef to 0 in the model's config: transformers, "
            "too, trains it without that loss",
        )
    losses = router_losses(batch, outputs.router_logits, settings, rounded=True)
    loss = float(losses.values[0])
    # Negated, so that nan is refused.
    if not abs(loss - float(own_loss)) <= 1e-2 * abs(loss):
        raise _compatibility_error(
            settings.model,
            rule="its load-balancing loss must be that of Switch Transformers, "
            f"{loss:.4g}",
            found=f"{float(own_loss):.4g}",
        )


def router_losses(
    batch: PackedBatch,
    logits: Sequence[Tensor] | None,
    settings: RouterSettings,
    *,
    rounded: bool = False,
) -> RouterLosses:
    """Compute the loss of each sequence.

    Args:
        batch: the packed row.
        logits: `[T, E]` of each layer with experts.
        settings: settings of the model.
        rounded: compute probabilities in the dtype of the logits, as transformers does,
            and not in float32. To compare with its loss: in 16 bits two experts may tie
            which differ in float32.
    """
    shape = (batch.num_tokens, settings.experts)
    has_shape = bool(logits) and all(layer.shape == shape for layer in logits or ())
    if not logits or settings.top_k is None or not has_shape:
        raise _compatibility_error(
            settings.model,
            rule="the base model must return router_logits of shape "
            f"{shape} for each layer",
            found=f"shape {tuple(logits[0].shape)}" if logits else "none",
        )
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    probabilities_TE = logits[0].new_zeros(shape, dtype=dtype)
    selections_TE = logits[0].new_zeros(shape, dtype=dtype)
    for layer_logits in logits:
        layer_logits = layer_logits.to(probabilities_TE.device)
        if not rounded:
            layer_logits = layer_logits.to(dtype)
        layer_probabilities = layer_logits.softmax(-1)
        selected = layer_probabilities.detach().topk(settings.top_k).indices
        ones = torch.ones_like(selected, dtype=dtype)
        selections_TE.scatter_add_(1, selected, ones)
        probabilities_TE = probabilities_TE + layer_probabilities.to(dtype)

    # Tokens x layers of each sequence; at least one token, to avoid 0 / 0 if empty.
    counts_S1 = len(logits) * batch.lengths.clamp(min=1)[:, None].to(dtype)
    mean_selections_SE = _sum_by_sequence(batch, selections_TE) / counts_S1
    mean_probabilities_SE = _sum_by_sequence(batch, probabilities_TE) / counts_S1
    products_SE = mean_selections_SE * mean_probabilities_SE
    return RouterLosses(settings.experts * products_SE.sum(-1), settings)


def _sum_by_sequence(batch: PackedBatch, values_TE: Tensor) -> Tensor:
    """Return the sum over the tokens of each logical sequence, `[S, E]`."""
    # Keys are the tokens of logical sequences, with a shared prefix once for each.
    sequences_K, positions_K = batch.key_places
    values_KE = values_TE if batch.kv_index is None else values_TE[batch.kv_index]
    is_padding_K = positions_K >= batch.lengths[sequences_K]
    # Padding is summed up in one more row, which is dropped.
    sequences_K = sequences_K.masked_fill(is_padding_K, batch.num_segments)
    sums = values_KE.new_zeros(batch.num_segments + 1, values_KE.shape[1])
    return sums.index_add(0, sequences_K, values_KE)[:-1]


def check_gradient(backbone: Any, hidden: Tensor, losses: RouterLosses) -> None:
    """Raise if reentrant gradient checkpointing has cut the gradient of the losses.

    Args:
        backbone: the model without its head.
        hidden: hidden states that it returned, with gradient if it is trained.
        losses: losses of the same call.
    """
    if losses.values.requires_grad or not hidden.requires_grad:
        return
    for module in backbone.modules():
        if getattr(module, "gradient_checkpointing", False):
            raise _compatibility_error(
                losses.settings.model,
                rule="gradient checkpointing must keep the gradient of router_logits",
                found="none",
                remedy='Enable it with {"use_reentrant": False}',
            )


class _Carry(torch.autograd.Function):
    """Copy log-probs; the copy's node in the autograd graph holds the losses."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, losses: RouterLosses) -> Tensor:
        ctx.router_losses = losses
        return logps.clone()  # FSDP warns of views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def carry(logps: Tensor, losses: RouterLosses) -> Tensor:
    """Return a copy of log-probs, of any shape, that carries router losses.

    Once per class of model, warn if the losses are deleted before any loss has taken
    them.
    """
    # Not decorated: that would load torch's compiler, which takes a second, with this
    # module.
    untraced: Callable[..., Tensor] = torch.compiler.disable(_carry)  # type: ignore[no-untyped-call]
    return untraced(logps, losses)


def _carry(logps: Tensor, losses: RouterLosses) -> Tensor:
    name = losses.settings.model
    finalizer = weakref.finalize(losses, _warn_if_unused, losses.uses, name)
    finalizer.atexit = False
    return _Carry.apply(logps, losses)  # type: ignore[no-untyped-call, no-any-return]


def take_carried_losses(logps: Tensor) -> RouterLosses | None:
    """Return the losses that log-probs carry, and mark them as used; None if none.

    Searches the autograd graph, breadth first, for the node of :func:`carry`.
    """
    nodes = [logps.grad_fn]
    for _ in range(_MAX_NODES):
        node = nodes.pop(0) if nodes else None
        losses: RouterLosses | None = getattr(node, "router_losses", None)
        if losses is not None:
            losses.uses.append(True)
            return losses
        next_nodes = [inner for inner, _ in getattr(node, "next_functions", ())]
        nodes += [inner for inner in next_nodes if inner is not None]
    return None


def _warn_if_unused(uses: list[bool], model: str) -> None:
    if uses or model in _warned_classes:
        return
    _warned_classes.add(model)
    logger.warning(
        "experts of %s: their load-balancing loss, which the config asks for, was "
        "added to no loss; pass the log-probs to a PreferenceLoss, or set "
        "router_aux_loss_coef to 0 in the config",
        model,
    )


def _compatibility_error(
    model: str, rule: str, found: str, remedy: str = TRAIN_WITHOUT
) -> CompatibilityError:
    return CompatibilityError(
        sentence(f"experts of {model}", rule=rule, found=found, remedy=remedy)
    )
