"""The heads of Hugging Face models: log-probs without logits, and scores of reward
models.

The step from the last hidden states to the logits differs by model family: a bias, a
scale, a softcap. It is read from the model's public interface and verified once against
the model's own logits; a head that does anything else is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from packstore.config.settings import check_class
from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.logprobs.fused_head import exact_dtype
from packstore.torch.logprobs.logprobs import segment_logps
from packstore.torch.logprobs.tiles import HEAD_BACKENDS
from packstore.torch.models.probe import few_tokens, ieee_products
from packstore.torch.models.routers import (
    carry,
    check_gradient,
    router_losses,
    router_settings,
)
from packstore.torch.models.unwrap import (
    SCORE,
    backbone_of,
    check_direct_call,
    check_not_compiled,
    check_parts,
    check_prepared,
    evaluating,
    is_reward_model,
    text_config,
    uncompiled,
    unwrapped,
)

USE_LOGITS = (
    "Use logits: segment_logps(batch, logits=model(**batch.model_inputs()).logits)"
)

CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
"""Names of a final softcap in configs: of Gemma, xLSTM and RecurrentGemma."""

PROBE_LOGIT = 20.0
"""The probe's largest logit: hidden states are scaled up to it, so that a softcap takes
effect.
"""

PROBE_BLOCK = 2**24
"""Weights of the head that the probe has in float64 at once, 128 MiB."""


@dataclass(frozen=True, eq=False)
class Head:
    """An output head: logits are ``cap(logit_scale * (hidden @ weight.T + bias))``.

    Attributes:
        backbone: the model without its head; called with ``**batch.model_inputs()`` it
            returns `last_hidden_state`.
        output: the module that holds the weight.
        logit_scale: factor on the product.
        softcap: ``c`` of a final ``c * tanh(logits / c)``, or None.
    """

    backbone: nn.Module
    output: nn.Module
    logit_scale: float
    softcap: float | None

    @property
    def weight(self) -> Tensor:
        """`[V, H]`; with PEFT, that of the active adapter."""
        return self.output.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """`[V]`, or None."""
        return getattr(self.output, "bias", None)


def find_head(model: nn.Module) -> Head:
    """Returns the head of a causal LM, verified on the model at the first call.

    It is verified anew where the head's module, its scale or softcap, or a hook of it
    or of the model has changed since.

    Handles tied weights, biases (Phi), `final_logit_softcapping` (Gemma),
    `logits_scaling` (Granite), `logit_scale` (Cohere), and wrappers of DDP,
    torch.compile and PEFT, also with the head among PEFT's `modules_to_save`.

    Args:
        model: a Hugging Face causal LM, or a wrapper of one.

    Raises:
        CompatibilityError: there is no head; it is not a plain matrix (adapted by LoRA,
            quantized, sharded); it does something that its config does not declare; an
            adapter reads the row; or Accelerate prepared the model for mixed precision.
    """
    check_parts(model)
    base: Any = unwrapped(model)
    # On the model: a table would keep it, as its parts refer to it, and their memory
    # with them.
    proved: tuple[Head | None, Any] = getattr(base, "_proved_head", (None, None))
    head, premises = proved
    # A compiled call reads them once, when it is traced.
    if head is None or (
        not torch.compiler.is_compiling() and premises != _premises(base)
    ):
        head = _prove(base, _read_heads(base))
        base._proved_head = head, _premises(base)
    return head


def _premises(model: Any) -> tuple[Any, ...]:
    """Premises of a proof: the head's module and factors, and what else runs in its
    call.

    Adding an adapter or resizing the vocabulary replaces the module. FSDP's hooks
    gather weights.
    """
    output = model.get_output_embeddings()
    hooks = [
        hook
        for module in (model, output)
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
        if not str(getattr(hook, "__module__", "")).startswith("torch.distributed")
    ]
    return (output, vars(output).get("forward"), *_factors(model), *hooks)


def _factors(model: Any) -> tuple[float, float | None]:
    """The scale and softcap of the logits, as the model or its config declares them."""
    config = model.config.get_text_config()
    scale = getattr(model, "logit_scale", None)
    if scale is None:
        scale = 1 / (getattr(config, "logits_scaling", None) or 1.0)
    caps = (getattr(config, name, None) for name in CAPS)
    return float(scale), next((cap for cap in caps if cap is not None), None)


def packed_logps(model: nn.Module, batch: PackedBatch, **settings: Any) -> Tensor:
    """Computes the log-probs of a batch's segments, `[S]` in nats, without making the
    logits.

    With `per_token`, those of its supervised tokens, `[n]`, in the order of
    ``batch.target_index``.

    With gradients enabled, those of a model whose config asks for a load-balancing loss
    of its experts carry that loss to :class:`~packstore.torch.PreferenceLoss`.

    Args:
        model: a Hugging Face causal LM prepared by :func:`use_packed_attention`.
        batch: the batch, on the model's device.
        settings: `chunk_size`, `keep_logits`, `backend`, `per_token` of
            :func:`segment_logps`.

    Raises:
        CompatibilityError: the head is not a plain one, see :func:`find_head`; the
            routers do not give the load-balancing loss that the config asks for; the
            model is compiled; or gradients are enabled and the model is inside DDP or
            FSDP, which would not reduce them.
    """
    check_direct_call(model, "packed_logps")
    check_class("argument batch", batch, PackedBatch)
    return _logps(model, batch, **settings)


def segment_scores(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Computes the scores of a batch's sequences by a reward model, `[S]`.

    A score is the head's output at the last token, as transformers computes it: at the
    last one that is not the config's `pad_token_id`, also where that is the end token.

    Args:
        model: a Hugging Face ``AutoModelForSequenceClassification`` with
            ``num_labels=1``, prepared by :func:`use_packed_attention`.
        batch: the batch, on the model's device.

    Returns:
        `[S]`, float32 (float64 from float64 weights); of padding segments any finite
        number.

    Raises:
        CompatibilityError: the model has no such head of one output; it is compiled; or
            gradients are enabled and it is inside DDP or FSDP, see
            :class:`~packstore.torch.PackedPolicy`.
    """
    check_direct_call(model, "segment_scores")
    check_class("argument batch", batch, PackedBatch)
    _check_score(model)
    return _scores(model, batch)


class PackedPolicy(nn.Module):
    """A model whose forward call takes a batch and returns what :func:`packed_logps`
    does.

    Of a reward model, it returns what :func:`segment_scores` does. Wrap this module in
    DDP or FSDP, or pass it to Accelerate: the head then runs inside the forward call
    that the wrapper sees, and gradients are reduced as for any other module.

    Args:
        model: a Hugging Face causal LM, or a sequence-classification model of one
            label, prepared by :func:`use_packed_attention`.
        settings: `chunk_size`, `keep_logits`, `backend`, `per_token` of
            :func:`segment_logps`, for a causal LM.

    Raises:
        CompatibilityError: as :func:`packed_logps`; compile this module, not the model.
        UnknownNameError: `backend` is unknown.
        MissingExtraError: `backend` is `triton`, which is not installed.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        check_not_compiled(model)
        if settings.get("backend", "auto") != "auto":
            HEAD_BACKENDS.load(settings["backend"])
        self.model, self.settings = model, settings
        if is_reward_model(model):
            _check_score(model)
            if given := settings.keys() - {"backend"}:
                raise ConfigError(
                    f"PackedPolicy: {', '.join(given)} go with a causal LM only."
                )
        else:
            find_head(model)
            router_settings(model)

    def tie_weights(self) -> None:
        """Ties embedding and head again, if the model does; Accelerate calls it when it
        shards.
        """
        unwrapped(self.model).tie_weights()

    def forward(self, batch: PackedBatch) -> Tensor:
        """Computes the log-probs in nats, or scores; the batch may be on any device."""
        return policy_output(self.model, batch, **self.settings)


def policy_output(model: Any, batch: PackedBatch, **settings: Any) -> Tensor:
    """Computes what :class:`PackedPolicy` returns, inside the forward call of a wrapped
    model.
    """
    check_class("argument batch", batch, PackedBatch)
    batch = batch.to(next(model.parameters()).device)
    if is_reward_model(model):
        return _scores(model, batch)
    return _logps(model, batch, **settings)


def _logps(model: nn.Module, batch: PackedBatch, **settings: Any) -> Tensor:
    routers = router_settings(model) if torch.is_grad_enabled() else None
    head = find_head(model)
    check_prepared(model)
    extra = {} if routers is None else {"output_router_logits": True}
    outputs = head.backbone(**batch.model_inputs(), **extra)
    hidden, losses = outputs.last_hidden_state, None
    if routers is not None:
        # Before the head: in the backward pass its hooks then run first, as FSDP
        # expects.
        losses = router_losses(batch, getattr(outputs, "router_logits", None), routers)
        check_gradient(head.backbone, hidden, losses)
    logps = segment_logps(
        batch,
        hidden=hidden,
        weight=head.weight,
        bias=head.bias,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        **settings,
    )
    return logps if losses is None else carry(logps, losses)


def _read_heads(model: Any) -> list[Head]:
    """Candidate heads: after the base model, and after its decoder, which some families
    call.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    backbone = backbone_of(model)
    if output is None or backbone is model or not hasattr(model, "config"):
        rule = "it must be a causal LM with get_output_embeddings() and a base model"
        raise _unfit(model, rule, "none")
    inner = getattr(
        output, "original_module", output
    )  # PEFT's copy for modules_to_save
    weight = getattr(inner, "weight", None)
    plain = isinstance(inner, nn.Linear) and type(weight) is nn.Parameter
    if weight is None or not plain or not weight.is_floating_point():
        kind = f"{type(inner).__name__} of {type(weight).__name__}"
        if hasattr(inner, "base_layer"):
            kind = (
                f"an adapter over it ({type(inner).__module__}.{type(inner).__name__})"
            )
        rule = (
            "its head must be a matrix of its own, which LoRA, quantization and "
            "shards are not"
        )
        raise _unfit(model, rule, kind)
    backbones = {backbone: None, getattr(backbone, "decoder", backbone): None}
    return [Head(each, output, *_factors(model)) for each in backbones]


@torch.no_grad()
def _prove(model: Any, heads: list[Head]) -> Head:
    """Returns the first head whose logits of a few tokens are the model's own.

    Hidden states are scaled up for both. Autocast is off, as it would round only one of
    them, and so is TF32, whose rounding is larger than the tolerance of float32.
    """
    weight = heads[0].weight
    with torch.autocast(weight.device.type, enabled=False), ieee_products():
        gaps = [_gap(model, head) for head in heads]
    known = [gap for gap in gaps if gap is not None]
    if any(map(math.isnan, known)):
        remedy = "Look at its weights: a training that diverged leaves such ones"
        raise _unfit(model, "its logits must be finite", "nan", remedy)
    limit = PROBE_LOGIT * (2e-2 if torch.finfo(weight.dtype).bits < 32 else 1e-4)
    for head, gap in zip(heads, gaps, strict=True):
        if gap is not None and gap <= limit:
            return head
    if known:
        rule = (
            "its logits must be its hidden states times its head, scaled and "
            "capped "
            "by config"
        )
        raise _unfit(model, rule, f"logits off by {min(known):.2g}")
    rule = (
        "its base model must give the head hidden states of its width, "
        f"{weight.shape[1]}"
    )
    raise _unfit(
        model, rule, "layers between the two, or a base model that is not called"
    )


def _gap(model: Any, head: Head) -> float | None:
    """The largest difference of the logits; None: the backbone's output does not fit
    the head.
    """
    seen: list[Tensor] = []
    factors: list[Tensor] = []

    def enlarge(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != head.weight.shape[1]:
            return output
        if (
            not seen
        ):  # one factor for every call: models that run whole have probes of their own
            plain = linear(hidden, head.weight, head.bias).abs().max() * abs(
                head.logit_scale
            )
            factors.append(PROBE_LOGIT / plain.clamp(min=1e-9))
        output.last_hidden_state = hidden * factors[0]
        seen.append(output.last_hidden_state)
        return output

    with (
        evaluating(model),
        uncompiled(model),
        head.backbone.register_forward_hook(enlarge),
    ):
        expected = model(
            **few_tokens(head.weight.device).model_inputs()
        ).logits.double()
    if not seen:
        return None
    # Some rows of the weight at a time, as a float64 copy of all of them is large.
    blocks = torch.split(head.weight, max(1, PROBE_BLOCK // head.weight.shape[1]))
    logits = torch.cat(
        [linear(seen[-1].double(), rows.double()) for rows in blocks], -1
    )
    logits = head.logit_scale * (logits if head.bias is None else logits + head.bias)
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    if expected.shape != logits.shape:
        return math.inf
    return float((expected - logits).abs().max())


def _unfit(
    model: Any, rule: str, found: str, remedy: str = USE_LOGITS
) -> CompatibilityError:
    return CompatibilityError(
        sentence(f"head of {type(model).__name__}", rule, found, remedy)
    )


def _check_score(model: nn.Module) -> None:
    """Refuses a model that has no scalar head."""
    check_parts(model)
    weight = getattr(getattr(unwrapped(model), SCORE, None), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or len(weight) != 1:
        found = "none" if weight is None else f"one of shape {tuple(weight.shape)}"
        rule = (
            f"it must be a sequence-classification model, whose {SCORE} is a "
            "matrix "
            "of one row"
        )
        remedy = "Load it by AutoModelForSequenceClassification with num_labels=1"
        raise CompatibilityError(
            sentence(
                f"scores of {type(unwrapped(model)).__name__}", rule, found, remedy
            )
        )


def _scores(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Computes what :func:`segment_scores` does, without its checks."""
    inner = unwrapped(model)
    check_prepared(model)
    hidden = backbone_of(inner)(**batch.model_inputs()).last_hidden_state
    last = _last_tokens(batch, getattr(text_config(inner), "pad_token_id", None))
    rows, head = hidden.reshape(batch.num_tokens, -1)[last], getattr(inner, SCORE)
    wide, bias = exact_dtype(rows), getattr(head, "bias", None)
    with torch.autocast(rows.device.type, enabled=False):
        weight = head.weight.to(wide)
        return linear(rows.to(wide), weight, None if bias is None else bias.to(wide))[
            :, 0
        ]


def _last_tokens(batch: PackedBatch, pad_token_id: int | None) -> Tensor:
    """Returns the row of each sequence's last token other than `pad_token_id`, int64
    `[S]`.

    Without any it is the first token, as in transformers. A token of a shared prefix is
    that of the example's first segment.
    """
    (sequence, place), rows = batch.key_places, batch.kv_index
    if rows is None:
        rows = torch.arange(batch.num_tokens, device=place.device)
    counts = place < batch.lengths[sequence]
    if pad_token_id is not None:
        counts = counts & (batch.input_ids[rows] != pad_token_id)
    last = place.new_zeros(batch.num_segments)
    last = last.scatter_reduce(0, sequence, place.masked_fill(~counts, 0), "amax")
    return rows[(batch.cu_seqlens_k[:-1] + last).clamp(max=len(rows) - 1)]
