"""Log-probs of segments or tokens, from logits, or from hidden states without making
the logits.

The logits of 8192 tokens over a vocabulary of 128k are 4 GiB in float32, and autograd
keeps about three times that; ``fused_head.py`` holds a tile of them, for one product
more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packstore.errors import ConfigError, sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.logprobs.fused_head import HeadLogProbs, exact_dtype
from packstore.torch.logprobs.tiles import Projection, default_chunk
from packstore.torch.metrics import wide_dtype
from packstore.torch.parallel.context import ContextShard


def segment_logps(
    batch: PackedBatch | ContextShard,
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    keep_logits: bool = False,
    backend: str = "auto",
    per_token: bool = False,
) -> Tensor:
    """Sums the log-probs of the supervised tokens of each segment, in nats.

    Takes either the model's `logits`, or `hidden` and the output head.

    Args:
        batch: the batch, or a rank's share of one; token t predicts token t + 1 of its
            segment.
        logits: `[T, V]` or `[1, T, V]`; or those of the rows ``batch.targets.rows``
            alone.
        hidden: `[T, H]` or `[1, T, H]`, the last hidden states.
        weight: `[V, H]`, the output head.
        bias: `[V]`, its bias, if it has one.
        logit_scale: factor on the head's output (Cohere; one over Granite's
            `logits_scaling`).
        softcap: ``c`` of a final ``c * tanh(logits / c)`` (Gemma's
            `final_logit_softcapping`), or None.
        chunk_size: with `hidden`, number of logits held at once; default: 2^21 (8 MiB)
            on a CPU, 2^26 (256 MiB) elsewhere.
        keep_logits: with `hidden`, keep the float32 logits of the supervised tokens for
            the backward pass: three head products, not four, and 4 bytes a logit; a
            frozen head takes two anyhow.
        backend: with `hidden`, what computes the elementwise passes: `eager` (torch),
            or `triton` on CUDA devices, one kernel a pass; float64 inputs always take
            `eager`. ``auto`` is `triton` where it is installed and agrees with `eager`
            on the first tokens.
        per_token: return the log-prob of each token of ``batch.target_index`` instead,
            `[n]`.

    Returns:
        `[S]` or `[n]`, float32 (float64 from float64 inputs). Computed and summed in at
        least float32; a GPU multiplies half-precision operands, under autocast also for
        float32 weights.

    Raises:
        ConfigError: not exactly one of `logits` and `hidden` with `weight` is given, or
            shapes do not fit.
        UnknownNameError: `backend` is none of these.
        MissingExtraError: `backend` is `triton`, which is not installed.
        BackendError: `backend` is `triton`, and the tensors are not on a CUDA device.
    """
    if (logits is None) == (hidden is None) or (hidden is None) != (weight is None):
        raise ConfigError("segment_logps takes either logits, or hidden and weight.")
    values, targets, tokens = (
        hidden if logits is None else logits,
        batch.targets,
        batch.num_tokens,
    )
    assert values is not None
    shape, n = tuple(values.shape), len(targets.ids)
    kept = logits is not None and n != tokens and shape[:-1] in ((n,), (1, n))
    if not kept and shape[:-1] not in ((tokens,), (1, tokens)):
        where = f"segment_logps({'hidden' if logits is None else 'logits'}=…)"
        rule = f"its shape must be [T, …] or [1, T, …] with T = {tokens}"
        remedy = "Padded outputs become flat with batch.unpad(…)"
        raise ConfigError(sentence(where, rule, str(shape), remedy))
    width = shape[-1]
    rows = (
        values.reshape(n, width)
        if kept
        else values.reshape(tokens, width)[targets.rows]
    )
    logps: Tensor
    if logits is None:
        shapes = [tuple(x.shape) for x in (weight, bias) if x is not None]
        if (
            len(shapes[0]) != 2
            or shapes[0][1] != width
            or shapes[1:] not in ([], [shapes[0][:1]])
        ):
            rule = (
                f"weight must be [V, {width}], as hidden is [T, {width}], and bias [V]"
            )
            raise ConfigError(
                sentence("segment_logps", rule, " and ".join(map(str, shapes)))
            )
        size = (
            default_chunk(values.device) if chunk_size is None else max(1, chunk_size)
        )
        keep = keep_logits and torch.is_grad_enabled()
        how = Projection(logit_scale, softcap, size, backend, keep)
        logps = HeadLogProbs.apply(rows, weight, bias, targets.ids, how)  # type: ignore[no-untyped-call]
    else:
        of_head = (bias, logit_scale, softcap, keep_logits, backend)
        if of_head != (None, 1.0, None, False, "auto"):
            names = "bias, logit_scale, softcap, keep_logits, backend"
            raise ConfigError(f"segment_logps: {names} go with hidden only.")
        exact = rows.to(exact_dtype(rows))
        logps = exact.log_softmax(-1).gather(-1, targets.ids[:, None]).squeeze(-1)
    if per_token:
        return logps
    # In float32 the sum of 1024 tokens is off by 2e-3; float64 costs nothing at this
    # size.
    sums = by_segment(batch, logps.to(wide_dtype(logps.device)))
    return sums.to(logps.dtype, copy=True)  # FSDP warns of views


def segment_token_counts(batch: PackedBatch | ContextShard) -> Tensor:
    """Counts the supervised tokens of each segment, int64 `[S]`: the divisor of
    averaged losses.
    """
    return by_segment(batch, torch.ones_like(batch.targets.segments))


def by_segment(batch: PackedBatch | ContextShard, values: Tensor) -> Tensor:
    """Sums values of the targets, `[n]`, by segment, `[S]`."""
    zeros = values.new_zeros(batch.num_segments + 1)
    return zeros.index_add(0, batch.targets.segments, values)[:-1]
