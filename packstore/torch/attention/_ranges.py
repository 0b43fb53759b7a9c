"""Triton kernels of attention over a row by ranges of its keys, without copies of keys.

A query sees the first tokens of its segment's ancestors, and its own segment up to
itself. So each segment has a list of runs of rows (:class:`KeyRanges`), and the kernels
read keys and values where they are. A program computes query heads that share a key
head, so keys are not expanded to the query heads either.

Sums are in float32 and in a fixed order, without atomics: results are the same to the
bit each time. The forward pass is one launch. The backward pass is two, or three where
many segments read the same keys: several programs share these readers, and write
partial sums.

The loops are those of FlashAttention-2 (https://arxiv.org/abs/2307.08691, algorithms 1
and 2), with exponentials of base 2.

Suffixes of tensors are those of :mod:`packstore.torch.attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packstore.torch.attention import flash
from packstore.torch.batch.ranges import TILE, KeyRanges

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)

LOWEST = tl.constexpr(-3.4e38)
"""Below all scores, but finite: a difference of infinities would be NaN."""

VARYING = (
    "offsets", "positions", "runs", "run_offsets", "readers", "tiles", "items",
    "splits", "num_runs", "num_readers", "num_tiles", "num_items", "num_splits",
    "num_tokens", "keys_before",
)  # fmt: skip
"""Arguments that differ between batches: kernels are not compiled again for a size of 1
or a multiple of 16, or an address that is not a multiple of 16.
"""


class Block(NamedTuple):
    """Sizes of a program.

    Attributes:
        rows: queries times heads that are computed at once. With 64 rows, groups of 4
            heads have blocks of 16 queries: these fit short segments, and reach less
            above the diagonal than 64 queries of one head.
        keys: keys that are computed at once.
        warps: warps of 32 threads.
        stages: blocks of a loop that shared memory holds: the next ones are loaded
            while one is computed.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


class Blocks(NamedTuple):
    """Blocks of the kernels.

    Attributes:
        forward: of :func:`forward_kernel`.
        queries: of :func:`queries_kernel`.
        keys: of :func:`keys_kernel`.
        complex_keys: of :func:`keys_kernel` with a window, or with a group of several
            blocks of heads: these take more registers.
    """

    forward: Block
    queries: Block
    keys: Block
    complex_keys: Block


BLOCKS = {
    8: {
        64: Blocks(Block(64, 32), Block(64, 32), Block(64, 32), Block(64, 32)),
        128: Blocks(Block(64, 32), Block(64, 32), Block(64, 64, 8), Block(64, 64, 8)),
        256: Blocks(
            Block(64, 32, 8), Block(32, 32), Block(32, 32, 8), Block(32, 32, 8)
        ),
    },
    9: {
        64: Blocks(Block(64, 32), Block(64, 64), Block(64, 64), Block(32, 64)),
        128: Blocks(Block(64, 32), Block(64, 64), Block(32, 64, 8), Block(32, 64, 8)),
        256: Blocks(
            Block(64, 32, 8), Block(32, 32), Block(32, 32, 8), Block(32, 32, 8)
        ),
    },
    10: {
        64: Blocks(Block(64, 32), Block(32, 64), Block(32, 64), Block(32, 32)),
        128: Blocks(Block(64, 32), Block(64, 32), Block(32, 64, 8), Block(16, 64, 8)),
        256: Blocks(Block(32, 32), Block(32, 32), Block(32, 32, 8), Block(32, 32, 8)),
    },
}
"""Blocks by major compute capability and head size, rounded up.

Chosen by what the compilers of Triton 3.6.0, 3.7.1 and 3.9.0 report: no registers are
spilled, and as many warps as possible fit on a processor, as short segments wait for
loads. Those of 8 also fit in the 99 KB of shared memory of its smaller devices.
"""

LARGEST_GROUP = 16
"""Most heads in a block."""

SUM_ROWS = 16
"""Rows of a program of :func:`sum_kernel`."""


@triton.jit
def block_offsets(  # type: ignore[no-untyped-def]
    stride, head_stride, ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the offsets of a block `[ROWS, WIDTH]` from its first token.

    Row r of a block is head ``r % HEADS`` of token ``r // HEADS``.
    """
    rows = tl.arange(0, ROWS)
    offsets = rows // HEADS * stride
    if HEADS > 1:
        offsets += rows % HEADS * head_stride
    return offsets[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def block_mask(  # type: ignore[no-untyped-def]
    first, end,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the mask of a block: tokens before `end`, columns before SIZE."""
    mask = (first + tl.arange(0, ROWS) // HEADS < end)[:, None]
    if SIZE != WIDTH:
        mask = mask & (tl.arange(0, WIDTH) < SIZE)[None, :]
    return mask


@triton.jit
def load_block(  # type: ignore[no-untyped-def]
    pointer, stride, head_stride, first, end,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load a block of HEADS heads whose first token is `first`; 0 outside the mask."""
    # In int64, as a row may have more than 2^31 elements.
    pointer += tl.cast(first, tl.int64) * stride
    offsets = block_offsets(stride, head_stride, ROWS, HEADS, WIDTH)
    mask = block_mask(first, end, ROWS, HEADS, SIZE, WIDTH)
    return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def store_block(  # type: ignore[no-untyped-def]
    pointer, values, stride, head_stride, first, end,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store a block, see :func:`load_block`."""
    pointer += tl.cast(first, tl.int64) * stride
    offsets = block_offsets(stride, head_stride, ROWS, HEADS, WIDTH)
    mask = block_mask(first, end, ROWS, HEADS, SIZE, WIDTH)
    tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def query_pointers(  # type: ignore[no-untyped-def]
    pointer, head, first, num_tokens, ROWS: tl.constexpr, HEADS: tl.constexpr
):
    """Return pointers `[ROWS]` to the values of a block of queries in `[N, T]`."""
    rows = tl.arange(0, ROWS)
    pointer += tl.cast(head, tl.int64) * num_tokens + first
    return pointer + rows % HEADS * num_tokens + rows // HEADS


@triton.jit
def is_visible(  # type: ignore[no-untyped-def]
    query_positions, key_positions, keys_before,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return True where a query sees a key: not behind it, and inside its window."""
    visible = tl.full([1, 1], True, tl.int1)
    if CAUSAL:
        visible = visible & (key_positions <= query_positions)
    if WINDOW:
        visible = visible & (key_positions >= query_positions - keys_before)
    return visible


@triton.jit
def first_in_window(  # type: ignore[no-untyped-def]
    first, query_position, shift, keys_before, WINDOW: tl.constexpr
):
    """Return the first row, `first` or later, in the window of a query."""
    if WINDOW:
        first = tl.maximum(first, query_position - keys_before - shift)
    return first


@triton.jit
def end_in_window(  # type: ignore[no-untyped-def]
    end, last_position, shift, WINDOW: tl.constexpr
):
    """Return the end, `end` or earlier, of the queries up to a logical position."""
    if WINDOW:
        end = tl.minimum(end, last_position - shift + 1)
    return end


@triton.jit
def load_range(  # type: ignore[no-untyped-def]
    table, num_columns, column, last, offsets, positions
):
    """Load a column of `runs` or `readers`; anything if it is not before `last`.

    Returns the first row of its segment and the row behind the last, the number of
    tokens that are read, and the logical position of a row minus its index.
    """
    inside = column < last
    segment = tl.load(table + column, mask=inside, other=0)
    num_read = tl.load(table + num_columns + column, mask=inside, other=0)
    start = tl.load(offsets + segment)
    end = tl.load(offsets + segment + 1)
    return start, end, num_read, tl.load(positions + segment) - start


@triton.jit
def attend_to_keys(  # type: ignore[no-untyped-def]
    highest, total, output, query, query_positions, k, v, k_stride, v_stride, first,
    end, shift, keys_before, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of rows `first` to `end`, and update the three values.

    Args:
        highest: `[ROWS]`, highest score of each query, times log2(e).
        total: `[ROWS]`, sum of the exponentials relative to it.
        output: `[ROWS, WIDTH]`, sum of the values, times these exponentials.
        shift: logical position of a key minus its row.
        scale: factor on scores, times log2(e).
    """
    for start in range(first, end, KEYS):
        key = load_block(k, k_stride, 0, start, end, KEYS, 1, SIZE, WIDTH)
        value = load_block(v, v_stride, 0, start, end, KEYS, 1, SIZE, WIDTH)
        rows = (start + tl.arange(0, KEYS))[None, :]
        visible = is_visible(
            query_positions[:, None], rows + shift, keys_before, CAUSAL, WINDOW
        )
        if not CAUSAL:  # Keys behind the end are behind the last query as well.
            visible = visible & (rows < end)

        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(highest - higher)
        highest = higher
        total = total * shrink + tl.sum(weights, 1)
        output = tl.dot(
            weights.to(value.dtype),
            value,
            output * shrink[:, None],
            input_precision="ieee",
        )
    return highest, total, output


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, offsets, positions, runs, run_offsets, tiles, num_runs,
    num_tiles, num_tokens, keys_before, scale, q_stride, q_head_stride, k_stride,
    k_head_stride, v_stride, v_head_stride,
    RUNS: tl.constexpr, WINDOW: tl.constexpr, NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of one block of queries."""
    QUERIES: tl.constexpr = ROWS // HEADS
    BLOCKS: tl.constexpr = TILE // QUERIES
    tile = tl.program_id(0) // BLOCKS
    segment = tl.load(tiles + tile)
    if segment < 0:
        return
    first = tl.load(tiles + num_tiles + tile) + tl.program_id(0) % BLOCKS * QUERIES
    segment_start = tl.load(offsets + segment)
    end = tl.load(offsets + segment + 1)
    if first >= end:
        return
    head = tl.program_id(1) * HEADS
    key_head = tl.cast(head // GROUP, tl.int64)
    q += tl.cast(head, tl.int64) * q_head_stride
    k += key_head * k_head_stride
    v += key_head * v_head_stride

    shift = tl.load(positions + segment) - segment_start
    query_positions = first + shift + tl.arange(0, ROWS) // HEADS
    query = load_block(q, q_stride, q_head_stride, first, end, ROWS, HEADS, SIZE, WIDTH)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, WIDTH], tl.float32)
    score_scale = scale * LOG2_E
    if RUNS:
        # Each of these loads waits for the one before it, so they begin before
        # products that do not need them, here and in the loop.
        run = tl.load(run_offsets + segment)
        last_run = tl.load(run_offsets + segment + 1) - 1
        next_start, _, next_size, next_shift = load_range(
            runs, num_runs, run, last_run, offsets, positions
        )
    start = first_in_window(segment_start, first + shift, shift, keys_before, WINDOW)
    highest, total, output = attend_to_keys(
        highest, total, output, query, query_positions, k, v, k_stride, v_stride, start,
        tl.minimum(first + QUERIES, end), shift, keys_before, score_scale, True, WINDOW,
        KEYS, SIZE, WIDTH,
    )  # fmt: skip
    if RUNS:
        for i in range(run, last_run):
            run_end = next_start + next_size
            run_shift = next_shift
            start = first_in_window(
                next_start, first + shift, run_shift, keys_before, WINDOW
            )
            next_start, _, next_size, next_shift = load_range(
                runs, num_runs, i + 1, last_run, offsets, positions
            )
            highest, total, output = attend_to_keys(
                highest, total, output, query, query_positions, k, v, k_stride,
                v_stride, start, run_end, run_shift, keys_before, score_scale, False,
                WINDOW, KEYS, SIZE, WIDTH,
            )  # fmt: skip

    output = output / total[:, None]
    out += head * SIZE
    store_block(
        out, output, NUM_HEADS * SIZE, SIZE, first, end, ROWS, HEADS, SIZE, WIDTH
    )
    lse_pointers = query_pointers(lse, head, first, num_tokens, ROWS, HEADS)
    inside = first + tl.arange(0, ROWS) // HEADS < end
    tl.store(lse_pointers, (highest + tl.log2(total)) * LN_2, mask=inside)


@triton.jit
def add_gradients_of_queries(  # type: ignore[no-untyped-def]
    d_query, query, grad, query_positions, log_sum_exp, delta, k, v, k_stride, v_stride,
    first, end, shift, keys_before, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return `d_query` with the gradients from the keys of rows `first` to `end`.

    The factor on scores is missing in it. See :func:`attend_to_keys`; `log_sum_exp`
    `[ROWS]` has base 2.
    """
    for start in range(first, end, KEYS):
        key = load_block(k, k_stride, 0, start, end, KEYS, 1, SIZE, WIDTH)
        value = load_block(v, v_stride, 0, start, end, KEYS, 1, SIZE, WIDTH)
        rows = (start + tl.arange(0, KEYS))[None, :]
        visible = is_visible(
            query_positions[:, None], rows + shift, keys_before, CAUSAL, WINDOW
        )
        if not CAUSAL:
            visible = visible & (rows < end)

        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        weights = tl.exp2(scores * scale - log_sum_exp[:, None])
        weights = tl.where(visible, weights, 0.0)
        d_weights = tl.dot(grad, tl.trans(value), input_precision="ieee")
        d_scores = weights * (d_weights - delta[:, None])
        d_query = tl.dot(d_scores.to(key.dtype), key, d_query, input_precision="ieee")
    return d_query


@triton.jit(do_not_specialize=VARYING)
def queries_kernel(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, delta, dq, offsets, positions, runs, run_offsets, tiles,
    num_runs, num_tiles, num_tokens, keys_before, scale, grad_stride, grad_head_stride,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    RUNS: tl.constexpr, WINDOW: tl.constexpr, NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of queries, and their `delta`.

    That is the sum of a query's output times its gradient, `[N, T]`.
    """
    QUERIES: tl.constexpr = ROWS // HEADS
    BLOCKS: tl.constexpr = TILE // QUERIES
    tile = tl.program_id(0) // BLOCKS
    segment = tl.load(tiles + tile)
    if segment < 0:
        return
    first = tl.load(tiles + num_tiles + tile) + tl.program_id(0) % BLOCKS * QUERIES
    segment_start = tl.load(offsets + segment)
    end = tl.load(offsets + segment + 1)
    if first >= end:
        return
    head = tl.program_id(1) * HEADS
    key_head = tl.cast(head // GROUP, tl.int64)
    q += tl.cast(head, tl.int64) * q_head_stride
    grad += tl.cast(head, tl.int64) * grad_head_stride
    k += key_head * k_head_stride
    v += key_head * v_head_stride
    out += head * SIZE
    dq += head * SIZE

    shift = tl.load(positions + segment) - segment_start
    query_positions = first + shift + tl.arange(0, ROWS) // HEADS
    inside = first + tl.arange(0, ROWS) // HEADS < end
    lse_pointers = query_pointers(lse, head, first, num_tokens, ROWS, HEADS)
    # Queries behind the end have weights of 0.
    log_sum_exp = tl.load(lse_pointers, mask=inside, other=float("inf")) * LOG2_E
    query = load_block(q, q_stride, q_head_stride, first, end, ROWS, HEADS, SIZE, WIDTH)
    d_output = load_block(
        grad, grad_stride, grad_head_stride, first, end, ROWS, HEADS, SIZE, WIDTH
    )
    output = load_block(
        out, NUM_HEADS * SIZE, SIZE, first, end, ROWS, HEADS, SIZE, WIDTH
    )
    deltas = tl.sum(output.to(tl.float32) * d_output.to(tl.float32), 1)
    delta_pointers = query_pointers(delta, head, first, num_tokens, ROWS, HEADS)
    tl.store(delta_pointers, deltas, mask=inside)

    d_query = tl.zeros([ROWS, WIDTH], tl.float32)
    score_scale = scale * LOG2_E
    if RUNS:  # As in the forward pass.
        run = tl.load(run_offsets + segment)
        last_run = tl.load(run_offsets + segment + 1) - 1
        next_start, _, next_size, next_shift = load_range(
            runs, num_runs, run, last_run, offsets, positions
        )
    start = first_in_window(segment_start, first + shift, shift, keys_before, WINDOW)
    d_query = add_gradients_of_queries(
        d_query, query, d_output, query_positions, log_sum_exp, deltas, k, v, k_stride,
        v_stride, start, tl.minimum(first + QUERIES, end), shift, keys_before,
        score_scale, True, WINDOW, KEYS, SIZE, WIDTH,
    )  # fmt: skip
    if RUNS:
        for i in range(run, last_run):
            run_end = next_start + next_size
            run_shift = next_shift
            start = first_in_window(
                next_start, first + shift, run_shift, keys_before, WINDOW
            )
            next_start, _, next_size, next_shift = load_range(
                runs, num_runs, i + 1, last_run, offsets, positions
            )
            d_query = add_gradients_of_queries(
                d_query, query, d_output, query_positions, log_sum_exp, deltas, k, v,
                k_stride, v_stride, start, run_end, run_shift, keys_before,
                score_scale, False, WINDOW, KEYS, SIZE, WIDTH,
            )  # fmt: skip
    store_block(
        dq,
        d_query * scale,
        NUM_HEADS * SIZE,
        SIZE,
        first,
        end,
        ROWS,
        HEADS,
        SIZE,
        WIDTH,
    )


@triton.jit
def add_gradients_of_keys(  # type: ignore[no-untyped-def]
    d_key, d_value, key, value, key_positions, is_read, q, grad, lse, delta, q_stride,
    q_head_stride, grad_stride, grad_head_stride, num_tokens, head, first, end, shift,
    keys_before, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return `d_key` and `d_value` with the gradients from queries `first` to `end`.

    The factor on scores is missing in the first. They are `[KEYS, WIDTH]`; `is_read`
    `[KEYS]` is true for keys that the queries' segment reads.
    """
    QUERIES: tl.constexpr = ROWS // HEADS
    NUM_BLOCKS: tl.constexpr = GROUP // HEADS
    # One loop over queries and blocks of heads, as two take more registers.
    for step in range(tl.cdiv(end - first, QUERIES) * NUM_BLOCKS):
        start = first + step // NUM_BLOCKS * QUERIES
        block_head = head + step % NUM_BLOCKS * HEADS
        tokens = start + tl.arange(0, ROWS) // HEADS
        inside = tokens < end
        lse_pointers = query_pointers(lse, block_head, start, num_tokens, ROWS, HEADS)
        delta_pointers = query_pointers(
            delta, block_head, start, num_tokens, ROWS, HEADS
        )
        # Queries behind the end have weights of 0.
        log_sum_exp = tl.load(lse_pointers, mask=inside, other=float("inf"))
        deltas = tl.load(delta_pointers, mask=inside, other=0.0)
        head_offset = tl.cast(block_head, tl.int64)
        query = load_block(
            q + head_offset * q_head_stride, q_stride, q_head_stride, start, end,
            ROWS, HEADS, SIZE, WIDTH,
        )  # fmt: skip
        d_output = load_block(
            grad + head_offset * grad_head_stride, grad_stride, grad_head_stride,
            start, end, ROWS, HEADS, SIZE, WIDTH,
        )  # fmt: skip

        scores = tl.dot(key, tl.trans(query), input_precision="ieee")
        weights = tl.exp2(scores * scale - (log_sum_exp * LOG2_E)[None, :])
        visible = is_read[:, None] & is_visible(
            (tokens + shift)[None, :],
            key_positions[:, None],
            keys_before,
            CAUSAL,
            WINDOW,
        )
        weights = tl.where(visible, weights, 0.0)
        d_value = tl.dot(
            weights.to(d_output.dtype), d_output, d_value, input_precision="ieee"
        )
        d_weights = tl.dot(value, tl.trans(d_output), input_precision="ieee")
        d_scores = weights * (d_weights - deltas[None, :])
        d_key = tl.dot(d_scores.to(query.dtype), query, d_key, input_precision="ieee")
    return d_key, d_value


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(  # type: ignore[no-untyped-def]
    grad, q, k, v, lse, delta, dk, dv, dk_sums, dv_sums, offsets, positions, readers,
    tiles, items, num_readers, num_tiles, num_items, num_tokens, keys_before, scale,
    grad_stride, grad_head_stride, q_stride, q_head_stride, k_stride, k_head_stride,
    v_stride, v_head_stride,
    READERS: tl.constexpr, WINDOW: tl.constexpr, NUM_KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values from an item's queries."""
    BLOCKS: tl.constexpr = TILE // KEYS
    item = tl.program_id(0) // BLOCKS
    tile = tl.load(items + item)
    if tile < 0:
        return
    segment = tl.load(tiles + tile)
    tile_start = tl.load(tiles + num_tiles + tile)
    first = tile_start + tl.program_id(0) % BLOCKS * KEYS
    segment_start = tl.load(offsets + segment)
    end = tl.load(offsets + segment + 1)
    if first >= end:
        return
    key_head = tl.cast(tl.program_id(1), tl.int64)
    head = tl.program_id(1) * GROUP
    key = load_block(
        k + key_head * k_head_stride, k_stride, 0, first, end, KEYS, 1, SIZE, WIDTH
    )
    value = load_block(
        v + key_head * v_head_stride, v_stride, 0, first, end, KEYS, 1, SIZE, WIDTH
    )
    d_key = tl.zeros([KEYS, WIDTH], tl.float32)
    d_value = tl.zeros([KEYS, WIDTH], tl.float32)

    shift = tl.load(positions + segment) - segment_start
    keys = first + tl.arange(0, KEYS)
    last_key = tl.minimum(first + KEYS, end) - 1
    last_position = last_key + shift + keys_before
    score_scale = scale * LOG2_E
    if READERS:  # As in the forward pass.
        reader = tl.load(items + 2 * num_items + item)
        last_reader = tl.load(items + 3 * num_items + item)
        next_start, next_end, next_size, next_shift = load_range(
            readers, num_readers, reader, last_reader, offsets, positions
        )
    if tl.load(items + num_items + item) == 0:
        d_key, d_value = add_gradients_of_keys(
            d_key, d_value, key, value, keys + shift, keys < end, q, grad, lse, delta,
            q_stride, q_head_stride, grad_stride, grad_head_stride, num_tokens, head,
            first, end_in_window(end, last_position, shift, WINDOW), shift, keys_before,
            score_scale, True, WINDOW, GROUP, HEADS, ROWS, SIZE, WIDTH,
        )  # fmt: skip
    if READERS:
        for i in range(reader, last_reader):
            start = next_start
            reader_shift = next_shift
            reader_end = end_in_window(next_end, last_position, next_shift, WINDOW)
            end_of_keys = segment_start + next_size
            reader_end = tl.where(first < end_of_keys, reader_end, start)
            next_start, next_end, next_size, next_shift = load_range(
                readers, num_readers, i + 1, last_reader, offsets, positions
            )
            d_key, d_value = add_gradients_of_keys(
                d_key, d_value, key, value, keys + shift, keys < end_of_keys, q, grad,
                lse, delta, q_stride, q_head_stride, grad_stride, grad_head_stride,
                num_tokens, head, start, reader_end, reader_shift, keys_before,
                score_scale, False, WINDOW, GROUP, HEADS, ROWS, SIZE, WIDTH,
            )  # fmt: skip

    d_key *= scale
    row_size: tl.constexpr = NUM_KEY_HEADS * SIZE
    slot = tl.cast(tl.load(items + 4 * num_items + item), tl.int64)
    if slot < 0:
        dk += key_head * SIZE
        dv += key_head * SIZE
        store_block(dk, d_key, row_size, 0, first, end, KEYS, 1, SIZE, WIDTH)
        store_block(dv, d_value, row_size, 0, first, end, KEYS, 1, SIZE, WIDTH)
    else:
        dk_sums += slot * TILE * row_size + key_head * SIZE
        dv_sums += slot * TILE * row_size + key_head * SIZE
        first -= tile_start
        end -= tile_start
        store_block(dk_sums, d_key, row_size, 0, first, end, KEYS, 1, SIZE, WIDTH)
        store_block(dv_sums, d_value, row_size, 0, first, end, KEYS, 1, SIZE, WIDTH)


@triton.jit(do_not_specialize=VARYING)
def sum_kernel(  # type: ignore[no-untyped-def]
    dk_sums, dv_sums, dk, dv, offsets, tiles, splits, num_tiles, num_splits,
    NUM_KEY_HEADS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of some rows of a tile, in the order of their slots."""
    BLOCKS: tl.constexpr = TILE // ROWS
    row_size: tl.constexpr = NUM_KEY_HEADS * SIZE
    split = tl.program_id(0) // BLOCKS
    tile = tl.load(splits + split)
    if tile < 0:
        return
    tile_start = tl.load(tiles + num_tiles + tile)
    segment_end = tl.load(offsets + tl.load(tiles + tile) + 1)
    first = tl.program_id(0) % BLOCKS * ROWS
    end = tl.minimum(segment_end - tile_start, TILE)
    d_key = tl.zeros([ROWS, WIDTH], tl.float32)
    d_value = tl.zeros([ROWS, WIDTH], tl.float32)
    slot = tl.load(splits + num_splits + split)
    last = slot + tl.load(splits + 2 * num_splits + split)
    head_offset = tl.program_id(1) * SIZE
    for i in range(slot, last):
        offset = tl.cast(i, tl.int64) * TILE * row_size + head_offset
        d_key += load_block(
            dk_sums + offset, row_size, 0, first, end, ROWS, 1, SIZE, WIDTH
        )
        d_value += load_block(
            dv_sums + offset, row_size, 0, first, end, ROWS, 1, SIZE, WIDTH
        )
    first += tile_start
    dk += head_offset
    dv += head_offset
    store_block(dk, d_key, row_size, 0, first, segment_end, ROWS, 1, SIZE, WIDTH)
    store_block(dv, d_value, row_size, 0, first, segment_end, ROWS, 1, SIZE, WIDTH)


def attend_forward(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    ranges: KeyRanges,
    scale: float,
    keys_before: int,
) -> tuple[Tensor, Tensor]:
    """Compute attention of the row.

    Args:
        q_TNH: queries, of any strides, but contiguous in the last dimension; keys and
            values likewise. The head size is a multiple of 8, at most 256.
        k_TKH: keys.
        v_TKH: values.
        ranges: the keys that each segment reads.
        scale: positive factor on the products of queries and keys.
        keys_before: number of keys before its own that a query sees; -1: all.

    Returns:
        The output `[T, N, H]`, and float32 `[N, T]`: the logarithm of the sum of the
        exponentials of a query's scores.
    """
    q_TNH = _addressable(q_TNH)
    k_TKH = _addressable(k_TKH)
    v_TKH = _addressable(v_TKH)
    num_tokens, num_heads, size = q_TNH.shape
    group = num_heads // k_TKH.shape[1]
    heads = _heads_of_block(group)
    block = _blocks_for(q_TNH).forward
    out = q_TNH.new_empty(q_TNH.shape)
    lse = q_TNH.new_empty(num_heads, num_tokens, dtype=torch.float32)
    num_tiles = ranges.tiles.shape[1]
    grid = (num_tiles * TILE * heads // block.rows, num_heads // heads)
    with torch.cuda.device_of(q_TNH):  # type: ignore[no-untyped-call]
        forward_kernel[grid](
            q_TNH,
            k_TKH,
            v_TKH,
            out,
            lse,
            ranges.offsets,
            ranges.positions,
            ranges.runs,
            ranges.run_offsets,
            ranges.tiles,
            _num_columns(ranges.runs),
            num_tiles,
            num_tokens,
            keys_before,
            scale,
            *q_TNH.stride()[:2],
            *k_TKH.stride()[:2],
            *v_TKH.stride()[:2],
            ranges.runs is not None,
            keys_before >= 0,
            num_heads,
            group,
            heads,
            block.rows,
            block.keys,
            size,
            _width(size),
            TILE,
            num_warps=block.warps,
            num_stages=block.stages,
        )
    return out, lse


def attend_backward(
    grad: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: KeyRanges,
    scale: float,
    keys_before: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`attend_forward`.

    Args:
        grad: gradient of the output, `[T, N, H]`, of any strides.
        q_TNH: arguments of the forward pass, as those below.
        k_TKH: keys.
        v_TKH: values.
        out: output of the forward pass; with its log-sum-exp `lse`.
        lse: float32 `[N, T]`.
        ranges: the keys that each segment reads.
        scale: factor on scores.
        keys_before: number of keys before its own that a query sees; -1: all.

    Returns:
        The gradients of queries, keys and values.
    """
    grad = _addressable(grad)
    q_TNH = _addressable(q_TNH)
    k_TKH = _addressable(k_TKH)
    v_TKH = _addressable(v_TKH)
    num_tokens, num_heads, size = q_TNH.shape
    num_key_heads = k_TKH.shape[1]
    group = num_heads // num_key_heads
    width = _width(size)
    strides = [
        *grad.stride()[:2],
        *q_TNH.stride()[:2],
        *k_TKH.stride()[:2],
        *v_TKH.stride()[:2],
    ]
    dq = q_TNH.new_empty(q_TNH.shape)
    dk = k_TKH.new_empty(k_TKH.shape)
    dv = v_TKH.new_empty(v_TKH.shape)
    delta = torch.empty_like(lse)
    sums_shape = (2, ranges.num_slots, TILE, num_key_heads, size)
    dk_sums, dv_sums = lse.new_empty(sums_shape)
    num_tiles = ranges.tiles.shape[1]
    num_items = ranges.items.shape[1]
    num_splits = ranges.splits.shape[1]
    heads = _heads_of_block(group)
    blocks = _blocks_for(q_TNH)
    with torch.cuda.device_of(q_TNH):  # type: ignore[no-untyped-call]
        block = blocks.queries
        grid = (num_tiles * TILE * heads // block.rows, num_heads // heads)
        queries_kernel[grid](
            grad,
            q_TNH,
            k_TKH,
            v_TKH,
            out,
            lse,
            delta,
            dq,
            ranges.offsets,
            ranges.positions,
            ranges.runs,
            ranges.run_offsets,
            ranges.tiles,
            _num_columns(ranges.runs),
            num_tiles,
            num_tokens,
            keys_before,
            scale,
            *strides,
            ranges.runs is not None,
            keys_before >= 0,
            num_heads,
            group,
            heads,
            block.rows,
            block.keys,
            size,
            width,
            TILE,
            num_warps=block.warps,
            num_stages=block.stages,
        )
        is_simple = keys_before < 0 and heads == group
        block = blocks.keys if is_simple else blocks.complex_keys
        grid = (num_items * TILE // block.keys, num_key_heads)
        keys_kernel[grid](
            grad,
            q_TNH,
            k_TKH,
            v_TKH,
            lse,
            delta,
            dk,
            dv,
            dk_sums,
            dv_sums,
            ranges.offsets,
            ranges.positions,
            ranges.readers,
            ranges.tiles,
            ranges.items,
            _num_columns(ranges.readers),
            num_tiles,
            num_items,
            num_tokens,
            keys_before,
            scale,
            *strides,
            ranges.runs is not None,
            keys_before >= 0,
            num_key_heads,
            group,
            heads,
            block.rows,
            block.keys,
            size,
            width,
            TILE,
            num_warps=block.warps,
            num_stages=block.stages,
        )
        if num_splits:
            grid = (num_splits * TILE // SUM_ROWS, num_key_heads)
            sum_kernel[grid](
                dk_sums,
                dv_sums,
                dk,
                dv,
                ranges.offsets,
                ranges.tiles,
                ranges.splits,
                num_tiles,
                num_splits,
                num_key_heads,
                SUM_ROWS,
                size,
                width,
                TILE,
            )
    return dq, dk, dv


def _addressable(rows: Tensor) -> Tensor:
    """Return rows, copied if an offset in a block would not fit in int32."""
    largest_offset = LARGEST_GROUP * rows.stride(1) + TILE * rows.stride(0)
    if largest_offset < 2**31:
        return rows
    return rows.contiguous()


def _blocks_for(q_TNH: Tensor) -> Blocks:
    """Return the blocks for the device and head size of queries."""
    major, _ = flash.capability(q_TNH.device)
    blocks = BLOCKS.get(major, BLOCKS[8])
    return blocks[max(_width(q_TNH.shape[-1]), min(blocks))]


def _heads_of_block(group: int) -> int:
    """Return the heads in a block: the largest power of 2 that divides a group."""
    return min(group & -group, LARGEST_GROUP)


def _width(size: int) -> int:
    """Return the columns of blocks: a power of 2, and enough for a product."""
    width: int = triton.next_power_of_2(size)
    return max(width, 16)


def _num_columns(table: Tensor | None) -> int:
    return 0 if table is None else table.shape[1]
