"""Scores of a reward model: its scalar head on the last token of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from packstore.errors import CompatibilityError, sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.layout import segment_ids
from packstore.torch.logprobs.fused_head import exact_dtype
from packstore.torch.models.unwrap import (
    SCORE,
    backbone_of,
    check_direct_call,
    check_parts,
    check_prepared,
    text_config,
    unwrapped,
)


def segment_scores(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Computes the scores of a batch's sequences by a reward model, `[S]`.

    A score is the head's output at the last token, as transformers computes it: at the last one
    that is not the config's `pad_token_id`, also where that is the end token.

    Args:
        model: a Hugging Face ``AutoModelForSequenceClassification`` with ``num_labels=1``, prepared
            by :func:`use_packed_attention`.
        batch: the batch, on the model's device.

    Returns:
        `[S]`, float32 (float64 from float64 weights); of padding segments any finite number.

    Raises:
        CompatibilityError: the model has no such head of one output; it is compiled; or gradients
            are enabled and it is inside DDP or FSDP, see :class:`~packstore.torch.PackedPolicy`.
    """
    check_direct_call(model, "segment_scores")
    check_head(model)
    return scores_of(model, batch)


def check_head(model: nn.Module) -> None:
    """Refuses a model that has no scalar head."""
    check_parts(model)
    weight = getattr(getattr(unwrapped(model), SCORE, None), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or len(weight) != 1:
        found = "none" if weight is None else f"one of shape {tuple(weight.shape)}"
        rule = f"it must be a sequence-classification model, whose {SCORE} is a matrix of one row"
        remedy = "Load it by AutoModelForSequenceClassification with num_labels=1"
        raise CompatibilityError(
            sentence(f"scores of {type(unwrapped(model)).__name__}", rule, found, remedy)
        )


def scores_of(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Computes what :func:`segment_scores` does, without its checks."""
    inner = unwrapped(model)
    check_prepared(model)
    hidden = backbone_of(inner)(**batch.model_inputs()).last_hidden_state
    last = last_tokens(batch, getattr(text_config(inner), "pad_token_id", None))
    rows, head = hidden.reshape(batch.num_tokens, -1)[last], getattr(inner, SCORE)
    wide, bias = exact_dtype(rows), getattr(head, "bias", None)
    with torch.autocast(rows.device.type, enabled=False):
        weight = head.weight.to(wide)
        return linear(rows.to(wide), weight, None if bias is None else bias.to(wide))[:, 0]


def last_tokens(batch: PackedBatch, pad_token_id: int | None) -> Tensor:
    """Returns the row of each sequence's last token other than `pad_token_id`, int64 `[S]`.

    Without any it is the first token, as in transformers. A token of a shared prefix is that of
    the example's first segment.
    """
    starts, kv_index = batch.cu_seqlens_k.long(), batch.kv_index
    rows = torch.arange(batch.num_tokens, device=starts.device) if kv_index is None else kv_index
    sequence = segment_ids(starts.diff(), len(rows))
    place = torch.arange(len(rows), device=starts.device) - starts[sequence]
    counts = place < batch.lengths[sequence]
    if pad_token_id is not None:
        counts = counts & (batch.input_ids[rows] != pad_token_id)
    last = place.new_zeros(batch.num_segments)
    last = last.scatter_reduce(0, sequence, place.masked_fill(~counts, 0), "amax")
    return rows[(starts[:-1] + last).clamp(max=len(rows) - 1)]
