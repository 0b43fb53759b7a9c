"""Stage 1: is everything right? What decides about the device comes first."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from gpu import right_kernels, right_models
from gpu.session import Figures, Session, about


def stage(session: Session, data: Path, scratch: Path) -> None:
    """Runs all checks; the slow ones, which compile or start processes, last."""
    session.case("about", lambda: about(session.sizes))
    session.case("ceilings", lambda: ceilings(session))
    right_models.isolation(session)
    right_models.packed_is_padded(session)
    right_models.waits(session)
    right_kernels.head(session)
    right_kernels.native_groups(session)
    right_kernels.deterministic(session)
    right_models.resumed(session, data, scratch)
    right_models.cuda_graph(session)
    right_kernels.attention(session)


def ceilings(session: Session) -> Figures:
    """Rates of a copy and of a bfloat16 product, which all other figures are compared with."""
    device, size = session.sizes.device, 8192 if session.sizes.cuda else 128
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source = torch.empty(size * size * 8, device=device, dtype=torch.int64)
    target = torch.empty_like(source)
    product = seconds_of(lambda: torch.mm(a, b), session.sizes.cuda)
    copy = seconds_of(lambda: target.copy_(source), session.sizes.cuda)
    return {
        "product_tflops": 2 * size**3 / product / 1e12,
        "copy_tb_per_second": 2 * source.nbytes / copy / 1e12,
    }


def seconds_of(work: object, cuda: bool, times: int = 10, warm: int = 3) -> float:
    """Median seconds of a call, on the device's clock."""
    assert callable(work)
    for _ in range(warm if cuda else 1):
        work()
    found = []
    for _ in range(times if cuda else 1):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]
