"""Log-probs of segments or tokens, from logits, or from hidden states without making
the logits.

Letters: T tokens of a batch, S segments, L tokens of its logical sequences, n
supervised tokens (targets), H hidden size, V vocabulary.

The logits of 8192 tokens over a vocabulary of 128k are 4 GiB in float32, and autograd
keeps about three times that. ``HeadLogProbs`` computes a tile of them at a time: some
tokens times some columns of the vocabulary, so memory is bounded for any vocabulary.

Its forward pass keeps one number per token, the log-sum-exp of its logits. The backward
pass recomputes the tiles: a loss of pairs gives a token its gradient only after both
responses are computed. With `keep_logits` it takes the tiles that the forward pass
kept. The vocabulary is the outer loop: the gradient of a column is summed over all
tokens in float32 and rounded once to the dtype of the head, so that no float32 copy of
the head or of its gradient exists.

A frozen head (LoRA) needs no second pass: the forward pass also sums the rows of the
head, weighted by the softmax so far, as flash attention sums values. That gives the
derivative by the hidden states, which the backward pass only scales.

``HeadLogProbsOfIds`` returns the log-probs of k ids in place of each target, such as
the most probable ids of a teacher. It takes their logits from the same tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.logprobs.tiles import (
    HALF,
    Projection,
    Tile,
    choose_passes,
    columns_of_ids,
    default_chunk,
    logits_of_ids,
    product,
    tiles,
)
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
    ids: Tensor | None = None,
) -> Tensor:
    """Sum the log-probs of the supervised tokens of each segment, in nats.

    Takes either the model's `logits`, or `hidden` and the output head.

    Args:
        batch: the batch, or a rank's share of one; token t predicts token t + 1 of its
            segment.
        logits: `[T, V]` or `[1, T, V]`; or only of the rows ``batch.targets.rows``,
            `[n, V]` or `[1, n, V]`; or of the row of ``batch.to_concat()``, which
            styles `flash` and `megatron` of ``batch.model_inputs`` take, `[L, V]` or
            `[1, L, V]`.
        hidden: `[T, H]` or `[1, T, H]`, the last hidden states; or `[L, H]` or
            `[1, L, H]`.
        weight: `[V, H]`, the output head.
        bias: `[V]`, the bias of the head, if it has one.
        logit_scale: factor on the head's output (Cohere; one over Granite's
            `logits_scaling`).
        softcap: ``c`` of a final ``c * tanh(logits / c)`` (Gemma's
            `final_logit_softcapping`), or None.
        chunk_size: with `hidden`, number of logits held at once; default: 2^21 (8 MiB)
            on a CPU, 2^26 (256 MiB) elsewhere.
        keep_logits: with `hidden`, keep the float32 logits of the supervised tokens for
            the backward pass, 4 bytes a logit: it takes three products with the head in
            place of four. A frozen head takes two, with or without.
        backend: with `hidden`, the elementwise passes: `eager`, by torch, or `triton`
            on CUDA devices, one kernel a pass; float64 inputs always take `eager`.
            ``auto`` is `triton` where it is installed and agrees with `eager` on the
            first tokens.
        per_token: return the log-prob of each token of ``batch.target_index`` instead,
            `[n]`.
        ids: int32 or int64 `[n, k]`: return the log-probs of these ids in place of each
            token of ``batch.target_index``, `[n, k]`; they may repeat. With `hidden`,
            the backward pass recomputes the tiles also for a frozen head, which takes
            three products in place of two.

    Returns:
        `[S]`, `[n]` or `[n, k]`, float32 (float64 from float64 inputs). Computed and
        summed in at least float32; a GPU multiplies half-precision operands, under
        autocast also for float32 weights.

    Raises:
        CompatibilityError: `ids` on a CPU are not below V. On other devices, where the
            check would wait, such an id has the log-prob NaN with `hidden`.
        ConfigError: not exactly one of `logits` and `hidden` with `weight` is given, or
            shapes do not fit.
        UnknownNameError: `backend` is none of these.
        MissingExtraError: `backend` is `triton`, which is not installed.
        BackendError: `backend` is `triton`, and the tensors are not on a CUDA device.
    """
    has_one_input = (logits is None) != (hidden is None)
    if not has_one_input or (hidden is None) != (weight is None):
        raise ConfigError("segment_logps takes either logits, or hidden and weight.")
    if logits is not None:
        head_settings = (bias, logit_scale, softcap, keep_logits, backend)
        if head_settings != (None, 1.0, None, False, "auto"):
            names = "bias, logit_scale, softcap, keep_logits, backend"
            raise ConfigError(f"segment_logps: {names} go with hidden only.")
        logps = _logps_of_logits(batch, logits, ids)
    else:
        assert hidden is not None
        assert weight is not None
        if chunk_size is None:
            chunk_size = default_chunk(hidden.device)
        projection = Projection(
            scale=logit_scale,
            softcap=softcap,
            chunk_size=max(1, chunk_size),
            backend=backend,
            keep_logits=keep_logits and torch.is_grad_enabled(),
        )
        logps = _logps_of_hidden(batch, hidden, weight, bias, projection, ids)
    if per_token or ids is not None:
        return logps
    return sum_logps(batch, logps)


def sum_logps(batch: PackedBatch | ContextShard, logps: Tensor) -> Tensor:
    """Sum the log-probs of targets, `[n]`, by segment, `[S]`."""
    # In float32 the sum of 1024 tokens is off by 2e-3 nats; float64 costs nothing at
    # this size.
    sums = by_segment(batch, logps.to(wide_dtype(logps.device)))
    return sums.to(logps.dtype, copy=True)  # a copy, as FSDP warns about views


def segment_token_counts(batch: PackedBatch | ContextShard) -> Tensor:
    """Count the supervised tokens of each segment, int64 `[S]`."""
    segments = batch.targets.segments
    return _sum_by_segment(torch.ones_like(segments), segments, batch.num_segments)


def by_segment(batch: PackedBatch | ContextShard, values: Tensor) -> Tensor:
    """Sum values of the targets, `[n]`, by segment, `[S]`."""
    return _sum_by_segment(values, batch.targets.segments, batch.num_segments)


def _sum_by_segment(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    # One more for padding targets, which have segment S.
    zeros = values.new_zeros(num_segments + 1)
    return zeros.index_add(0, segments, values)[:-1]


def _logps_of_logits(
    batch: PackedBatch | ContextShard, logits: Tensor, ids: Tensor | None
) -> Tensor:
    """Return the log-probs of the targets, `[n]`, or of `ids`, `[n, k]`, from logits of
    all tokens, or of the rows that predict targets.
    """
    targets = batch.targets
    n = len(targets.ids)
    is_row = logits.shape[:-1] in _shapes_of_rows(batch)
    if logits.shape[:-1] in ((n,), (1, n)) and not is_row:
        rows = logits.reshape(n, -1)
    else:
        rows = _select_rows(batch, targets.rows, logits, "logits")
    logps = rows.to(exact_dtype(rows)).log_softmax(-1)
    if ids is None:
        return logps.gather(-1, targets.ids[:, None]).squeeze(-1)
    _check_ids(ids, n, vocab_size=logits.shape[-1])
    return logps.gather(-1, ids.long())


def _logps_of_hidden(
    batch: PackedBatch | ContextShard,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Projection,
    ids: Tensor | None,
) -> Tensor:
    """Return the log-probs of the targets, `[n]`, or of `ids`, `[n, k]`, from the
    hidden states of all tokens and the output head.
    """
    rows = rows_of_hidden(batch, hidden, weight, bias)
    targets = batch.targets
    logps: Tensor
    if ids is None:
        logps = HeadLogProbs.apply(rows, weight, bias, targets.ids, projection)  # type: ignore[no-untyped-call]
    else:
        _check_ids(ids, len(targets.ids), vocab_size=len(weight))
        logps = HeadLogProbsOfIds.apply(rows, weight, bias, ids.long(), projection)  # type: ignore[no-untyped-call]
    return logps


def rows_of_hidden(
    batch: PackedBatch | ContextShard,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return the hidden states that predict the targets, `[n, H]`.

    Raises:
        ConfigError: the shapes of `hidden`, `weight` and `bias` do not fit.
    """
    rows = _select_rows(batch, batch.targets.rows, hidden, "hidden")
    width = rows.shape[1]
    weight_fits = weight.ndim == 2 and weight.shape[1] == width
    bias_fits = bias is None or bias.shape == weight.shape[:1]
    if not weight_fits or not bias_fits:
        shapes = [str(tuple(x.shape)) for x in (weight, bias) if x is not None]
        rule = f"weight must be [V, {width}], as hidden is [T, {width}], and bias [V]"
        raise ConfigError(
            sentence(where="segment_logps", rule=rule, found=" and ".join(shapes))
        )
    return rows


def _check_ids(ids: Tensor, num_targets: int, vocab_size: int) -> None:
    """Raise for ids of another shape than `[n, k]`, or outside the vocabulary."""
    if ids.ndim != 2 or len(ids) != num_targets or ids.shape[1] == 0:
        text = sentence(
            where="segment_logps(ids=…)",
            rule=f"its shape must be [{num_targets}, k], a row for each target",
            found=str(tuple(ids.shape)),
        )
        raise ConfigError(text)
    # Reading the ids would wait for a device, and break a compiled graph.
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside) > 0:
        text = sentence(
            where="segment_logps(ids=…)",
            rule=f"ids must be below {vocab_size}, the vocabulary of the head",
            found=str(int(outside[0])),
            remedy="Use a teacher and a model of one tokenizer",
        )
        raise CompatibilityError(text)


def _select_rows(
    batch: PackedBatch | ContextShard, tokens: Tensor, values: Tensor, name: str
) -> Tensor:
    """Return the values of these tokens, `[n, width]`.

    Args:
        batch: the batch, or a rank's share of one.
        tokens: int64 `[n]`, indices in its row.
        values: `[T, width]` or `[1, T, width]`; or for the row of
            :meth:`PackedBatch.to_concat`, `[L, width]` or `[1, L, width]`.
        name: the argument of :func:`segment_logps`, for errors.

    Raises:
        ConfigError: `values` have another shape.
    """
    if values.shape[:-1] not in _shapes_of_rows(batch):
        raise ConfigError(
            sentence(
                where=f"segment_logps({name}=…)",
                rule="its shape must be [T, …] or [1, T, …] with T = "
                f"{batch.num_tokens}",
                found=str(tuple(values.shape)),
                remedy="Padded outputs become flat with batch.unpad(…)",
            )
        )
    rows = values.reshape(-1, values.shape[-1])
    if isinstance(batch, PackedBatch) and len(rows) != batch.num_tokens:
        tokens = batch.places_in_concat(tokens)
    return rows[tokens]


def _shapes_of_rows(batch: PackedBatch | ContextShard) -> list[tuple[int, ...]]:
    """Return the leading shapes of values with one for each token of a row."""
    lengths = [batch.num_tokens]
    if isinstance(batch, PackedBatch):
        lengths.append(batch.num_keys)
    return [shape for length in lengths for shape in ((length,), (1, length))]


class HeadLogProbs(torch.autograd.Function):
    """``log softmax(cap(scale * (hidden @ weight.T + bias)))[target]``, `[n]`, in nats.

    Arguments are hidden `[n, H]`, weight `[V, H]`, bias `[V]` or None, targets int64
    `[n]` and a :class:`Projection`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        projection: Projection,
    ) -> Tensor:
        """Return the log-probs, at least in float32."""
        exact = exact_dtype(hidden, weight)
        operand = operand_dtype(hidden, weight)
        needs_hidden, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        trains_head = needs_weight or needs_bias
        ctx.frozen_head = needs_hidden and not trains_head
        keeps_products = projection.keep_logits and trains_head

        state = initial_state(hidden, exact)
        inputs = hidden.to(operand)
        # `[n, H]`: the sum of all rows of the head but the target's, each times the
        # softmax of the columns so far. For a frozen head only.
        weighted_rows = None
        if ctx.frozen_head:
            weighted_rows = torch.zeros_like(hidden, dtype=exact)
        products: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            passes = choose_passes(inputs, weight, bias, targets, projection)
            for part in head_parts(inputs, weight, projection):
                if keeps_products:
                    products.append(part.product)
                rows = part.rows
                tile = make_tile(part, bias, targets[rows], projection)
                if weighted_rows is None:
                    passes.update_logsumexp(state[:, rows], tile)
                    continue
                weights, factor = passes.update_logsumexp_and_weights(
                    state[:, rows], tile, operand
                )
                # Sums so far are relative to the highest logit before this tile.
                weighted_rows[rows].mul_(factor[:, None])
                _add_product(weighted_rows[rows], weights, part.head)

        log_total = logsumexp_of(state)
        target_logits = state[2]
        logps = target_logits - log_total
        ctx.projection = projection
        ctx.operand = operand
        ctx.passes = passes
        ctx.dtype = hidden.dtype
        if weighted_rows is None:
            ctx.save_for_backward(hidden, weight, bias, targets, log_total, *products)
            return logps

        highest = state[0]
        weighted_rows.mul_((highest - log_total).exp_()[:, None])
        target_rows = weight[targets].to(operand).to(exact)
        d_logps = _derivative_by_hidden(
            logps, target_logits, target_rows, weighted_rows, projection
        )
        ctx.save_for_backward(d_logps)
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs that need one, and None for the others.

        For a frozen head, or frozen layers before it, nothing is computed.
        """
        if ctx.frozen_head:
            (d_logps,) = ctx.saved_tensors
            return (d_logps * grad[:, None]).to(ctx.dtype), None, None, None, None

        hidden, weight, bias, targets, log_total, *products = ctx.saved_tensors
        projection = ctx.projection
        grad = grad * projection.scale
        # The gradient of a bias sums unrounded values.
        needs_bias = ctx.needs_input_grad[2]
        delta_dtype = log_total.dtype if needs_bias else ctx.operand

        def compute_delta(part: HeadPart) -> Tensor:
            rows = part.rows
            tile = make_tile(part, bias, targets[rows], projection)
            delta: Tensor = ctx.passes.grad_logits(
                tile, log_total[rows], grad[rows], delta_dtype
            )
            return delta

        gradients = _sum_gradients(ctx, hidden, weight, bias, products, compute_delta)
        return *gradients, None, None


class HeadLogProbsOfIds(torch.autograd.Function):
    """``log softmax(cap(scale * (hidden @ weight.T + bias)))[id]`` of k ids in place of
    each target, `[n, k]`, in nats.

    Arguments are those of :class:`HeadLogProbs`, with int64 ids `[n, k]` in place of
    the targets.

    The backward pass computes the tiles again, also for a frozen head: the derivatives
    of k log-probs by the hidden states, `[n, k, H]`, are too large to keep.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        projection: Projection,
    ) -> Tensor:
        """Return the log-probs, at least in float32; NaN for ids not below V."""
        operand = operand_dtype(hidden, weight)
        keeps_products = projection.keep_logits and any(ctx.needs_input_grad)
        state = initial_state(hidden, exact_dtype(hidden, weight))
        id_logits = state.new_full(ids.shape, math.nan)
        no_targets = torch.full_like(ids[:, 0], -1)
        inputs = hidden.to(operand)
        products: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            passes = choose_passes(inputs, weight, bias, ids[:, 0], projection)
            for part in head_parts(inputs, weight, projection):
                if keeps_products:
                    products.append(part.product)
                rows = part.rows
                tile = make_tile(part, bias, no_targets[rows], projection)
                logits, is_inside = logits_of_ids(tile, ids[rows] - part.columns.start)
                id_logits[rows] = logits.where(is_inside, id_logits[rows])
                passes.update_logsumexp(state[:, rows], tile)

        log_total = logsumexp_of(state)
        ctx.projection = projection
        ctx.operand = operand
        ctx.passes = passes
        ctx.save_for_backward(
            hidden, weight, bias, ids, id_logits, log_total, *products
        )
        return id_logits - log_total[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs that need one, and None for the others."""
        hidden, weight, bias, ids, id_logits, log_total, *products = ctx.saved_tensors
        projection = ctx.projection
        grad = grad * projection.scale
        # `grad` of the ids, minus its sum times the softmax, is the gradient of the
        # logits; each is then multiplied by the slope of the softcap at its logit.
        grad_sum = grad.sum(-1)
        grad_of_ids = grad
        if projection.softcap is not None:
            grad_of_ids = grad * (1 - (id_logits / projection.softcap).square())
        no_targets = torch.full_like(ids[:, 0], -1)

        def compute_delta(part: HeadPart) -> Tensor:
            rows = part.rows
            tile = make_tile(part, bias, no_targets[rows], projection)
            # Both terms are added in full precision, and rounded together: if one id
            # has nearly all of the softmax, they nearly cancel.
            delta: Tensor = ctx.passes.grad_logits(
                tile, log_total[rows], grad_sum[rows], log_total.dtype
            )
            columns, is_inside = columns_of_ids(
                ids[rows] - part.columns.start, delta.shape[-1]
            )
            # Added, as an id may stand several times in a row.
            addends = grad_of_ids[rows].where(is_inside, 0)
            delta.scatter_add_(-1, columns, addends)
            return delta

        gradients = _sum_gradients(ctx, hidden, weight, bias, products, compute_delta)
        return *gradients, None, None


class HeadPart(NamedTuple):
    """Some rows of the hidden states times some columns of the head.

    Attributes:
        columns: columns of the vocabulary.
        rows: rows of the hidden states.
        head: `[w, H]`, the head of these columns, in the dtype of the operands.
        product: `[n, w]`.
    """

    columns: slice
    rows: slice
    head: Tensor
    product: Tensor


def head_parts(
    inputs: Tensor, weight: Tensor, projection: Projection
) -> Iterator[HeadPart]:
    """Yield the parts of ``inputs @ weight.T``; the vocabulary is the outer loop.

    Args:
        inputs: `[n, H]`, hidden states in the dtype of the operands.
        weight: `[V, H]`, the head.
        projection: has the size of a part.
    """
    slices = tiles(len(inputs), len(weight), projection.chunk_size)
    for columns, row_slices in slices:
        head = weight[columns].to(inputs.dtype)
        for rows in row_slices:
            yield HeadPart(columns, rows, head, product(inputs[rows], head.T))


def _sum_gradients(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    products: Sequence[Tensor],
    compute_delta: Callable[[HeadPart], Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states, weight and bias; None where not needed.

    Args:
        ctx: the context of an autograd function, with `operand` and `projection`.
        hidden: `[n, H]`.
        weight: `[V, H]`.
        bias: `[V]`, or None.
        products: those that the forward pass kept; may be empty.
        compute_delta: returns the gradient of a part's product, `[n, w]`.
    """
    needs_hidden, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
    exact = exact_dtype(hidden, weight)
    d_hidden = torch.zeros_like(hidden, dtype=exact) if needs_hidden else None
    d_weight = torch.empty_like(weight) if needs_weight else None
    d_bias = None
    if bias is not None and needs_bias:
        d_bias = torch.zeros_like(bias, dtype=exact)

    inputs = hidden.to(ctx.operand)
    saved_products = iter(products)
    with torch.autocast(hidden.device.type, enabled=False):
        slices = tiles(len(hidden), len(weight), ctx.projection.chunk_size)
        for columns, row_slices in slices:
            head = weight[columns].to(ctx.operand)
            d_head = None
            # The gradient of these columns, a sum over tiles of rows. A single tile is
            # written to `d_weight` below, without a sum.
            if d_weight is not None and len(row_slices) != 1:
                # A view of `d_weight` if that has the exact dtype, else a copy.
                d_head = d_weight[columns].zero_().to(exact)
            for rows in row_slices:
                if products:
                    tile_product = next(saved_products)
                else:
                    tile_product = product(inputs[rows], head.T)
                delta = compute_delta(HeadPart(columns, rows, head, tile_product))
                if d_bias is not None:
                    d_bias[columns] += delta.sum(0)
                delta = delta.to(ctx.operand)
                if d_hidden is not None:
                    _add_product(d_hidden[rows], delta, head)
                if d_head is not None:
                    _add_product(d_head, delta.T, inputs[rows])
                elif d_weight is not None:
                    _write_product(d_weight[columns], delta.T, inputs[rows])
            if d_head is not None and d_head.dtype != weight.dtype:
                d_weight[columns] = d_head  # type: ignore[index]
    if d_hidden is not None:
        d_hidden = d_hidden.to(hidden.dtype)
    if bias is not None and d_bias is not None:
        d_bias = d_bias.to(bias.dtype)
    return d_hidden, d_weight, d_bias


def initial_state(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the state of :class:`~packstore.torch.logprobs.tiles.Passes`, `[3, n]`:
    highest logit so far, sum of exponentials relative to it, logit of the target.
    """
    state = torch.zeros((3, len(hidden)), dtype=dtype, device=hidden.device)
    # Not -inf: a first tile of -inf logits only would give -inf - -inf = NaN.
    state[0] = torch.finfo(dtype).min
    return state


def logsumexp_of(state: Tensor) -> Tensor:
    """Return the log-sum-exp of all logits, `[n]`, after the last tile."""
    highest = state[0]
    sum_of_exponentials = state[1]
    return highest + sum_of_exponentials.log()


def _derivative_by_hidden(
    logps: Tensor,
    target_logits: Tensor,
    target_rows: Tensor,
    weighted_rows: Tensor,
    projection: Projection,
) -> Tensor:
    """Return the derivatives of log-probs by hidden states, `[n, H]`.

    Args:
        logps: `[n]`, log-probs of the targets.
        target_logits: `[n]`, logits of the targets.
        target_rows: `[n, H]`, the head's rows of the targets; overwritten.
        weighted_rows: `[n, H]`, sum of all other rows, each times its softmax and the
            slope of the softcap.
        projection: scale and softcap.
    """
    target_share = torch.expm1(logps).neg_()  # 1 - softmax of the target
    if projection.softcap is not None:
        target_share *= 1 - (target_logits / projection.softcap).square_()
    derivative = target_rows.mul_(target_share[:, None]).sub_(weighted_rows)
    return derivative.mul_(projection.scale)


def exact_dtype(*values: Tensor) -> torch.dtype:
    """Return the widest dtype of the tensors, at least float32."""
    return reduce(torch.promote_types, (value.dtype for value in values), torch.float32)


def operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the operands of products with the head.

    On a GPU, half precision where weights or autocast have it: it multiplies these
    fast, and sums in float32. Else at least float32.
    """
    device = hidden.device.type
    if device == "cuda":
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        if weight.dtype in HALF:
            return weight.dtype
    return exact_dtype(hidden, weight)


def make_tile(
    part: HeadPart, bias: Tensor | None, targets: Tensor, projection: Projection
) -> Tile:
    """Return a part of the product as a tile of logits.

    Args:
        part: some rows and columns.
        bias: `[V]`, or None.
        targets: int64, the targets of these rows.
        projection: scale and softcap.
    """
    return Tile(
        product=part.product,
        bias=None if bias is None else bias[part.columns],
        targets=targets - part.columns.start,
        projection=projection,
    )


def _write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``out = left @ right``, summed in float32 at least, and rounded once."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(product(left, right))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``total += left @ right``, summed in the dtype of `total`, without a
    temporary.
    """
    if left.dtype in HALF:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left, right)
