"""The heads of Hugging Face models: log-probs without logits, and scores of reward
models.

The head is the step from the last hidden states to the logits: a matrix, and by model
family a bias, a scale or a softcap. It is read from the model's public interface. A
probe then runs a few tokens through the model, and compares the model's own logits with
the head's; a head that does anything else is refused. Letters: T tokens of a batch, S
segments, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.format.arrays import TopK
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.inputs import hf
from packstore.torch.logprobs.logprobs import (
    exact_dtype,
    rows_of_hidden,
    segment_logps,
)
from packstore.torch.logprobs.tiles import HEAD_BACKENDS, Projection, default_chunk
from packstore.torch.logprobs.top_k import head_top_k
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

SOFTCAP_NAMES = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
"""Names of a final softcap in configs of Gemma, xLSTM and RecurrentGemma."""

PROBE_LOGIT = 20.0
"""Largest logit of the probe: hidden states are scaled to give it, as a softcap hardly
changes small logits.
"""

PROBE_BLOCK = 2**24
"""Number of the head's weights that the probe holds in float64 at once: 128 MiB."""


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
        """`[V, H]`; with PEFT, the weight of the active adapter."""
        return self.output.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """`[V]`, or None."""
        return getattr(self.output, "bias", None)


@dataclass(frozen=True, eq=False)
class HeadProof:
    """A head that the probe has verified.

    Attributes:
        head: the head.
        premises: the result of `_premises` at that time; if it differs later, the model
            has changed, and is probed again.
    """

    head: Head
    premises: tuple[Any, ...]


def find_head(model: nn.Module) -> Head:
    """Return the head of a causal LM, verified on the model at the first call.

    It is verified again if the head's module, its scale or softcap, or a hook of the
    head or the model has changed since.

    Handles tied weights, biases (Phi), `final_logit_softcapping` (Gemma),
    `logits_scaling` (Granite), `logit_scale` (Cohere), and wrappers of DDP,
    torch.compile and PEFT, also with the head among PEFT's `modules_to_save`.

    Args:
        model: a Hugging Face causal LM, or a wrapper of one.

    Raises:
        CompatibilityError: there is no head; it is not a plain matrix (adapted by LoRA,
            quantized, sharded); its logits are not as its config declares; an adapter
            reads the row; or Accelerate prepared the model for mixed precision.
    """
    check_parts(model)
    base: Any = unwrapped(model)
    # Stored on the model: a global table would keep its memory alive, as the head
    # refers to the model's modules.
    proof: HeadProof | None = getattr(base, "_packstore_head_proof", None)
    # A compiled call would compare the premises only once, when it is traced.
    if proof is not None and torch.compiler.is_compiling():
        return proof.head
    if proof is None or proof.premises != _premises(base):
        head = _prove(base, _candidate_heads(base))
        proof = HeadProof(head, _premises(base))
        base._packstore_head_proof = proof
    return proof.head


def _premises(model: Any) -> tuple[Any, ...]:
    """Return the objects that a proof depends on: the head's module and factors, and
    hooks of its call.

    Adding an adapter or resizing the vocabulary replaces the module. FSDP's hooks
    gather weights, and change no logits.
    """
    output = model.get_output_embeddings()
    scale, softcap = _scale_and_softcap(model)
    premises = [output, vars(output).get("forward"), scale, softcap]
    for module in (model, output):
        hooks = [
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
        ]
        for hook in hooks:
            module_name = str(getattr(hook, "__module__", ""))
            if not module_name.startswith("torch.distributed"):
                premises.append(hook)
    return tuple(premises)


def _scale_and_softcap(model: Any) -> tuple[float, float | None]:
    """Return the scale and softcap of the logits that the model or its config
    declares.
    """
    config = model.config.get_text_config()
    scale = getattr(model, "logit_scale", None)
    if scale is None:
        scale = 1 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = None
    for name in SOFTCAP_NAMES:
        if softcap is None:
            softcap = getattr(config, name, None)
    return float(scale), softcap


def packed_logps(model: nn.Module, batch: PackedBatch, **settings: Any) -> Tensor:
    """Compute the log-probs of a batch's segments, `[S]` in nats, without making the
    logits.

    With `per_token`, the log-probs of its supervised tokens, `[n]`, in the order of
    ``batch.target_index``. With `ids_of`, those of k ids in place of each, `[n, k]`.

    If the model's config asks for a load-balancing loss of experts, log-probs with
    gradients carry that loss to :class:`~packstore.torch.PreferenceLoss`.

    Args:
        model: a Hugging Face causal LM prepared by :func:`use_packed_attention`.
        batch: the batch, on the model's device.
        settings: `chunk_size`, `keep_logits`, `backend`, `per_token` of
            :func:`segment_logps`. `ids_of`: name of a column of
            ``batch.token_columns`` with the top k of each token, whose ids are
            :func:`segment_logps`' `ids`.

    Raises:
        CompatibilityError: the head is not a plain one, see :func:`find_head`; the
            routers do not give the load-balancing loss that the config asks for; the
            model is compiled; gradients are enabled and the model is inside DDP or
            FSDP, which would not reduce them; or ids are not below the vocabulary.
        ConfigError: the batch has no top k of the name `ids_of`.
    """
    check_direct_call(model, "packed_logps")
    return _compute_logps(model, batch, **settings)


@torch.no_grad()
def packed_top_k(model: nn.Module, batch: PackedBatch, k: int, **settings: Any) -> TopK:
    """Compute the k most probable ids in place of each supervised token, and their
    log-probs, without making all logits and without gradients.

    Args:
        model: a Hugging Face causal LM prepared by :func:`use_packed_attention`.
        batch: the batch, on the model's device.
        k: number of ids for each token.
        settings: `chunk_size`, `backend` of :func:`segment_logps`.

    Returns:
        ids int32 and log-probs float32 in nats, `[n, k]` each, in the order of
        ``batch.target_index``: from the highest log-prob to the lowest; where these are
        equal in float32, the lowest id comes first.

    Raises:
        CompatibilityError: the head is not a plain one, see :func:`find_head`; or the
            model is compiled.
        ConfigError: `k` is below 1, or above the vocabulary of the head.
    """
    check_direct_call(model, "packed_top_k")
    _, top = logps_and_top_k(model, batch, k, **settings)
    return top


@torch.no_grad()
def logps_and_top_k(
    model: nn.Module,
    batch: PackedBatch,
    k: int,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, TopK]:
    """Return the log-probs of the supervised tokens, `[n]`, and the result of
    :func:`packed_top_k`, from one call of the model.

    The log-probs are those of :func:`packed_logps`, to the bit.
    """
    head = find_head(model)
    check_prepared(model)
    hidden = head.backbone(**hf(batch)).last_hidden_state
    projection = Projection(
        scale=head.logit_scale,
        softcap=head.softcap,
        chunk_size=chunk_size or default_chunk(hidden.device),
        backend=backend,
    )
    rows = rows_of_hidden(batch, hidden, head.weight, head.bias)
    targets = batch.targets.ids
    return head_top_k(rows, head.weight, head.bias, targets, projection, k)


def segment_scores(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Compute the scores of a batch's sequences by a reward model, `[S]`.

    A score is the head's output at the last token that is not the config's
    `pad_token_id`, as transformers computes it, even if that is also the end token.

    Args:
        model: a Hugging Face ``AutoModelForSequenceClassification`` with
            ``num_labels=1``, prepared by :func:`use_packed_attention`.
        batch: the batch, on the model's device.

    Returns:
        `[S]`, float32 (float64 from float64 weights). Padding segments have any finite
        number.

    Raises:
        CompatibilityError: the model has no such head of one output; it is compiled; or
            gradients are enabled and it is inside DDP or FSDP, see
            :class:`~packstore.torch.PackedPolicy`.
    """
    check_direct_call(model, "segment_scores")
    _check_score_head(model)
    return _compute_scores(model, batch)


class PackedPolicy(nn.Module):
    """A model with a forward call that takes a batch and returns its log-probs.

    It returns the result of :func:`packed_logps`, or for a reward model of
    :func:`segment_scores`. Wrap this module in DDP or FSDP, or pass it to Accelerate:
    the head then runs inside the forward call that the wrapper sees, and gradients are
    reduced as for any other module.

    Args:
        model: a Hugging Face causal LM, or a sequence-classification model of one
            label, prepared by :func:`use_packed_attention`.
        settings: `chunk_size`, `keep_logits`, `backend`, `per_token`, `ids_of` of
            :func:`packed_logps`, for a causal LM.

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
        self.model = model
        self.settings = settings
        if is_reward_model(model):
            _check_score_head(model)
            unsupported = settings.keys() - {"backend"}
            if unsupported:
                raise ConfigError(
                    f"PackedPolicy: {', '.join(unsupported)} go with a causal LM only."
                )
        else:
            find_head(model)
            router_settings(model)

    def tie_weights(self) -> None:
        """Tie embedding and head again, if the model does; Accelerate calls it when it
        shards.
        """
        unwrapped(self.model).tie_weights()

    def forward(self, batch: PackedBatch) -> Tensor:
        """Compute the log-probs in nats, or scores; the batch may be on any device."""
        return policy_output(self.model, batch, **self.settings)


def policy_output(model: Any, batch: PackedBatch, **settings: Any) -> Tensor:
    """Compute the result of :class:`PackedPolicy`, inside the forward call of a wrapped
    model.
    """
    batch = batch.to(next(model.parameters()).device)
    if is_reward_model(model):
        return _compute_scores(model, batch)
    return _compute_logps(model, batch, **settings)


def _compute_logps(
    model: nn.Module, batch: PackedBatch, ids_of: str | None = None, **settings: Any
) -> Tensor:
    """Compute log-probs, which carry the router losses that the model's config asks
    for.
    """
    ids = None if ids_of is None else _ids_of_column(batch, ids_of)
    routers = router_settings(model) if torch.is_grad_enabled() else None
    head = find_head(model)
    check_prepared(model)
    inputs = hf(batch)
    if routers is not None:
        inputs["output_router_logits"] = True
    outputs = head.backbone(**inputs)
    hidden = outputs.last_hidden_state

    losses = None
    if routers is not None:
        # Before the head: in the backward pass its hooks then run first, as FSDP
        # expects.
        router_logits = getattr(outputs, "router_logits", None)
        losses = router_losses(batch, router_logits, routers)
        check_gradient(head.backbone, hidden, losses)
    logps = segment_logps(
        batch,
        hidden=hidden,
        weight=head.weight,
        bias=head.bias,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        ids=ids,
        **settings,
    )
    return logps if losses is None else carry(logps, losses)


def _ids_of_column(batch: PackedBatch, name: str) -> Tensor:
    """Return the ids of a column with the top k of each token, int32 `[n, k]`."""
    column = batch.token_columns.get(name)
    if isinstance(column, TopK):
        ids: Tensor = column.ids
        return ids
    columns = [
        other
        for other, values in batch.token_columns.items()
        if isinstance(values, TopK)
    ]
    text = sentence(
        where=f"ids_of={quote(name)}",
        rule="the batch must have such a column with the top k of each token",
        found=", ".join(columns) or "none",
        remedy="Join the side dataset that has it: PackedDataset(…, side=[…])",
    )
    raise ConfigError(text)


def _candidate_heads(model: Any) -> list[Head]:
    """Return the heads that the model may have, for the probe to choose from.

    They differ in the backbone: the base model, or, where that has one, its decoder,
    which some families call directly.
    """
    output = None
    if hasattr(model, "get_output_embeddings"):
        output = model.get_output_embeddings()
    backbone = backbone_of(model)
    if output is None or backbone is model or not hasattr(model, "config"):
        rule = "it must be a causal LM with get_output_embeddings() and a base model"
        raise _head_error(model, rule, "none")
    _check_output_module(model, output)

    scale, softcap = _scale_and_softcap(model)
    heads = [Head(backbone, output, scale, softcap)]
    decoder = getattr(backbone, "decoder", backbone)
    if decoder is not backbone:
        heads.append(Head(decoder, output, scale, softcap))
    return heads


def _check_output_module(model: Any, output: nn.Module) -> None:
    """Raise CompatibilityError unless the output module is a plain matrix."""
    # With PEFT's modules_to_save, `output` wraps the original and its trained copies.
    linear_layer = getattr(output, "original_module", output)
    weight = getattr(linear_layer, "weight", None)
    is_linear = isinstance(linear_layer, nn.Linear)
    if is_linear and type(weight) is nn.Parameter and weight.is_floating_point():
        return
    kind = type(linear_layer)
    actual = f"{kind.__name__} of {type(weight).__name__}"
    if hasattr(linear_layer, "base_layer"):
        actual = f"an adapter over it ({kind.__module__}.{kind.__name__})"
    rule = (
        "its head must be a matrix of its own, which LoRA, quantization and shards are "
        "not"
    )
    raise _head_error(model, rule, actual)


@torch.no_grad()
def _prove(model: Any, heads: list[Head]) -> Head:
    """Return the first head with the same logits of a few tokens as the model.

    Hidden states are scaled up for both. Autocast is off, as it would round only one of
    them; so is TF32, as its rounding exceeds the tolerance of float32.
    """
    weight = heads[0].weight
    with torch.autocast(weight.device.type, enabled=False), ieee_products():
        gaps = [_largest_gap(model, head) for head in heads]
    comparable_gaps = [gap for gap in gaps if gap is not None]
    if any(math.isnan(gap) for gap in comparable_gaps):
        remedy = "Look at its weights: a training that diverged leaves such ones"
        raise _head_error(model, "its logits must be finite", "nan", remedy)

    is_half = torch.finfo(weight.dtype).bits < 32
    limit = PROBE_LOGIT * (2e-2 if is_half else 1e-4)
    for head, gap in zip(heads, gaps, strict=True):
        if gap is not None and gap <= limit:
            return head
    if comparable_gaps:
        raise _head_error(
            model,
            rule=(
                "its logits must be its hidden states times its head, scaled and "
                "capped by config"
            ),
            actual=f"logits off by {min(comparable_gaps):.2g}",
        )
    raise _head_error(
        model,
        rule=(
            "its base model must give the head hidden states of its width, "
            f"{weight.shape[1]}"
        ),
        actual="layers between the two, or a base model that is not called",
    )


def _largest_gap(model: Any, head: Head) -> float | None:
    """Return the largest difference between the logits of model and head.

    None if the backbone's hidden states do not have the head's width, or if the model
    does not call the backbone.
    """
    batch = few_tokens(head.weight.device)
    with (
        evaluating(model),
        uncompiled(model),
        _enlarged_hidden_states(head) as hidden_states,
    ):
        expected = model(**batch.model_inputs()).logits.double()
    if not hidden_states:
        return None

    hidden = hidden_states[-1].double()
    # Some rows of the weight at a time, as a float64 copy of all of them is large.
    rows_at_once = max(1, PROBE_BLOCK // head.weight.shape[1])
    blocks = torch.split(head.weight, rows_at_once)
    logits = torch.cat([linear(hidden, rows.double()) for rows in blocks], -1)
    if head.bias is not None:
        logits = logits + head.bias
    logits = head.logit_scale * logits
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    if expected.shape != logits.shape:
        return math.inf
    return float((expected - logits).abs().max())


@contextmanager
def _enlarged_hidden_states(head: Head) -> Iterator[list[Tensor]]:
    """Scale up the backbone's hidden states, and collect them in the yielded list.

    The first call determines the factor, by which the largest logit is
    :data:`PROBE_LOGIT`. All calls of the backbone get the same factor.
    """
    hidden_states: list[Tensor] = []
    factor = torch.ones(())

    def enlarge(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        nonlocal factor
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != head.weight.shape[1]:
            return output
        if not hidden_states:
            logits = linear(hidden, head.weight, head.bias)
            largest = logits.abs().max() * abs(head.logit_scale)
            factor = PROBE_LOGIT / largest.clamp(min=1e-9)
        output.last_hidden_state = hidden * factor
        hidden_states.append(output.last_hidden_state)
        return output

    with head.backbone.register_forward_hook(enlarge):
        yield hidden_states


def _head_error(
    model: Any, rule: str, actual: str, remedy: str = USE_LOGITS
) -> CompatibilityError:
    """Return the error for a model without such a head."""
    where = f"head of {type(model).__name__}"
    return CompatibilityError(
        sentence(where=where, rule=rule, found=actual, remedy=remedy)
    )


def _check_score_head(model: nn.Module) -> None:
    """Raise CompatibilityError for a model without a head of one output."""
    check_parts(model)
    inner = unwrapped(model)
    weight = getattr(getattr(inner, SCORE, None), "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == 1:
        return
    actual = "none"
    if weight is not None:
        actual = f"one of shape {tuple(weight.shape)}"
    raise CompatibilityError(
        sentence(
            where=f"scores of {type(inner).__name__}",
            rule=(
                "it must be a sequence-classification model with a matrix of one row "
                f"as {SCORE}"
            ),
            found=actual,
            remedy="Load it by AutoModelForSequenceClassification with num_labels=1",
        )
    )


def _compute_scores(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Compute the scores of a model whose head was checked before, `[S]`."""
    inner = unwrapped(model)
    check_prepared(model)
    hidden = backbone_of(inner)(**hf(batch)).last_hidden_state
    pad_token_id = getattr(text_config(inner), "pad_token_id", None)
    last_tokens = _last_tokens(batch, pad_token_id)
    rows = hidden.reshape(batch.num_tokens, -1)[last_tokens]

    head = getattr(inner, SCORE)
    bias = getattr(head, "bias", None)
    exact = exact_dtype(rows)
    if bias is not None:
        bias = bias.to(exact)
    with torch.autocast(rows.device.type, enabled=False):
        return linear(rows.to(exact), head.weight.to(exact), bias)[:, 0]


def _last_tokens(batch: PackedBatch, pad_token_id: int | None) -> Tensor:
    """Return the row of each sequence's last token that is not padding, int64 `[S]`.

    Padding is `pad_token_id`. If a sequence has nothing else, its first token counts,
    as in transformers. Tokens that a segment omits have their row in an earlier
    segment.
    """
    sequence, place = batch.key_places
    rows = batch.kv_index
    if rows is None:
        rows = torch.arange(batch.num_tokens, device=place.device)
    is_candidate = place < batch.lengths[sequence]
    if pad_token_id is not None:
        is_candidate = is_candidate & (batch.input_ids[rows] != pad_token_id)
    candidates = place.masked_fill(~is_candidate, 0)
    first = place.new_zeros(batch.num_segments)
    last = first.scatter_reduce(0, sequence, candidates, "amax")
    return rows[(batch.cu_seqlens_k[:-1] + last).clamp(max=len(rows) - 1)]
