"""Converts a batch to the arguments of a model's forward call, one function a style."""

from __future__ import annotations

from typing import Any

import torch

from packstore.torch.batch.batch import PackedBatch


def hf(batch: Any) -> dict[str, Any]:
    """Inputs for a model prepared by :func:`~packstore.torch.use_packed_attention`."""
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "use_cache": False,
        "packed_layout": batch.layout,
    }


def flash(batch: PackedBatch) -> dict[str, Any]:
    """Inputs for an unchanged Hugging Face model with a flash-attention
    implementation: whole sequences, laid end to end.
    """
    batch = batch.to_concat()
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
        "use_cache": False,
    }


def megatron(batch: PackedBatch) -> dict[str, Any]:
    """Inputs with the names that NeMo's and Megatron-Bridge's packed-sequence code
    reads: whole sequences, laid end to end.

    ``cu_seqlens`` are offsets in the row; ``cu_seqlens_unpadded``, only with padded
    segments, exclude the padding. Both end with -1, where that code cuts them:
    ``cu_seqlens_argmin`` and ``cu_seqlens_unpadded_argmin`` hold the index of the -1.
    These and ``max_seqlen`` stay on the CPU, as that code calls ``item()`` on them,
    which would synchronise a GPU.
    """
    batch = batch.to_concat()
    inputs = {
        "tokens": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "attention_mask": None,
        "max_seqlen": torch.tensor([[batch.max_seqlen]], dtype=torch.int32),
    }
    offsets = {"cu_seqlens": batch.cu_seqlens}
    if batch.cu_seqlens_unpadded is not None:
        offsets["cu_seqlens_unpadded"] = batch.cu_seqlens_unpadded
    for name, values in offsets.items():
        end_mark = values.new_full((1,), -1)
        inputs[name] = torch.cat([values, end_mark])[None]
        inputs[f"{name}_argmin"] = torch.tensor([[len(values)]], dtype=torch.int32)
    return inputs


def packed_seq_params(batch: PackedBatch) -> dict[str, Any]:
    """Return keyword arguments of Megatron-Core's `PackedSeqParams`.

    As in Transformer Engine, ``cu_seqlens_q`` and ``cu_seqlens_kv`` exclude padding and
    ``…_padded`` include it; the latter are None without padded segments, as the kernels
    for them are slower. All offsets refer to the full row, also under context
    parallelism. Several packs in a batch are one row, which holds whole sequences: that
    of ``batch.to_concat()`` if segments omit shared prefixes.

    Raises:
        ConfigError: segments that omit shared prefixes are padded.
    """
    batch = batch.to_concat()
    cu_seqlens = batch.cu_seqlens
    cu_seqlens_padded = None
    if batch.cu_seqlens_unpadded is not None:
        cu_seqlens = batch.cu_seqlens_unpadded
        cu_seqlens_padded = batch.cu_seqlens
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens_padded,
        "cu_seqlens_kv_padded": cu_seqlens_padded,
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_kv": batch.max_seqlen,
    }


def padded(batch: PackedBatch) -> dict[str, Any]:
    """Inputs for any model: the logical sequences as padded rows with a mask.

    ``input_ids`` and ``attention_mask`` are `[S, longest]`, 0 at padding.
    """
    ids = batch.input_ids
    if batch.kv_index is not None:
        ids = ids[batch.kv_index]
    positions = torch.arange(batch.max_seqlen_k, device=ids.device)

    # Padding at the ends of segments has ids, too, but the mask leaves it out.
    has_id = positions < batch.cu_seqlens_k.diff()[:, None]
    input_ids = torch.zeros(has_id.shape, dtype=ids.dtype, device=ids.device)
    input_ids[has_id] = ids
    mask = positions < batch.lengths[:, None]
    return {"input_ids": input_ids, "attention_mask": mask.long(), "use_cache": False}
