"""A Triton kernel that sums the gradients of the copies of each row.

With shared prefixes, a key of the row (R rows) is copied for each sequence that has it
(P copies in all), and its gradient is the sum over its copies. The kernel reads each
once and writes each row once. torch's ``embedding_bag`` gives the same bits, but on an
H200 it takes 509 us, and this kernel 93 us, for 58,166 copies of 31,024 rows of 8 heads
of 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a row that a program has in registers at once: 8 for each thread."""


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    copies, places, starts, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum one block of one row; there is one program per row and block.

    Arguments are those of :func:`sum_copies`, and WIDTH, the W there.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(starts + row), tl.load(starts + row + 1)):
        copy = copies + tl.load(places + i) * WIDTH
        total += tl.load(copy + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, total.to(out.dtype.element_ty), mask=inside)


def sum_copies(copies: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Sum the copies of each row, in float32 and in order.

    Args:
        copies: `[P, W]` gradients of P copies, in half or single precision.
        places: int64 `[P]`, indices of the copies, ordered by their rows.
        starts: int64 `[R + 1]`, offsets of the R rows in `places`.

    Returns:
        `[R, W]`: row i is the sum of ``copies[places[j]]`` for ``starts[i] <= j <
        starts[i + 1]``.
    """
    rows = len(starts) - 1
    width = copies.shape[1]
    out = copies.new_empty(rows, width)
    block_size = min(BLOCK, triton.next_power_of_2(width))
    num_blocks = triton.cdiv(width, block_size)
    with torch.cuda.device_of(copies):  # type: ignore[no-untyped-call]
        sum_kernel[(rows, num_blocks)](
            copies.contiguous(), places, starts, out, width, block_size, num_warps=4
        )
    return out
