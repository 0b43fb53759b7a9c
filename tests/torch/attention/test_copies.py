"""The Triton kernel for copies: equal to torch's under the interpreter, and compiled
for GPUs.

Needs no GPU, and proves no speed; ``make kernels`` installs Triton.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from children import run_python
from torch.nn.functional import embedding_bag

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: make kernels",
)


def compare() -> None:
    """Rows without copies, with one, with many; widths below, at and above a block."""
    from packstore.torch.attention._copies import sum_copies

    made = torch.Generator().manual_seed(0)
    for counts in ([1], [0, 2, 1, 0], [5, 0, 1, 1, 9], [0, 0]):
        size = sum(counts)
        places = torch.randperm(size, generator=made)
        starts = torch.tensor([0, *counts]).cumsum(0)
        for width in (8, 100, 1024, 1536):
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                copies = torch.randn(size, width, generator=made).to(dtype)
                found = sum_copies(copies, places, starts)
                expected = embedding_bag(
                    places,
                    copies.double(),
                    starts,
                    mode="sum",
                    include_last_offset=True,
                )
                rounding = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
                torch.testing.assert_close(
                    found.double(), expected, rtol=rounding, atol=1e-5
                )
                assert found.dtype == dtype
                assert torch.equal(found, sum_copies(copies, places, starts))


def compile_for(capability: int) -> None:
    """Compiles the kernel for a GPU of this compute capability, without one."""
    from layer_kernels import usage_for

    from packstore.torch.attention import _copies

    fixed = {"WIDTH": 1024, "BLOCK": _copies.BLOCK}
    types = {"copies": "*bf16", "out": "*bf16", "places": "*i64", "starts": "*i64"}
    signature = {n: types.get(n, "constexpr") for n in _copies.sum_kernel.arg_names}
    registers, stack = usage_for(capability, _copies.sum_kernel, signature, fixed)
    assert registers <= 64, registers
    assert stack == 0


@needs_triton
@pytest.mark.parametrize(
    "what",
    ["equal", "90", *(pytest.param(c, marks=pytest.mark.slow) for c in ("80", "100"))],
)
def test_kernel(what: str, tmp_path: Path) -> None:
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment["TRITON_INTERPRET"] = str(int(what == "equal"))
    environment["PYTHONUTF8"] = (
        "1"  # torch's compiler reads files of its own as the locale's text
    )
    done = run_python(__file__, what, env=environment)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    compare() if sys.argv[1] == "equal" else compile_for(int(sys.argv[1]))
