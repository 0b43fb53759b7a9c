"""Rates of the device, a profile of a step, and each part beside its peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from common import provenance
from logprobs import logsumexp, packstore, trl
from torch import Tensor

from gpu.fast import OURS, Trial
from gpu.predictions import HEADS, Work
from gpu.right_kernels import distance, random_head, random_heads
from gpu.session import Figures, Session

KINDS = {
    "elementwise": ("triton_",),
    "attention": ("flash", "fmha", "attention", "flex"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "mm_", "splitk", "::mm", "addmm"),
    "head sums": ("reduce_kernel",),
    "gathered keys": ("indexfunc", "gather", "sum_kernel"),
    "copies": ("memcpy", "memset", "copy_"),
}
"""Kinds of kernels, by parts of their names, in the order of their tests: the names of
the compiler's elementwise kernels list operators, and those of FlashAttention contain
``cutlass``. Kernels of no kind are elementwise, too.

With compiled layers, torch's reductions are those of FlashAttention 2, which sums the
gradients of keys over the query heads of a group.
"""


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel, a key of `KINDS`."""
    lower_name = name.lower()
    for kind, parts in KINDS.items():
        if any(part in lower_name for part in parts):
            return kind
    return "elementwise"


def sum_by_kind(milliseconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the milliseconds of each kind of kernel.

    Args:
        milliseconds: names of kernels and their times.
    """
    sums = dict.fromkeys(KINDS, 0.0)
    for name, ms in milliseconds:
        sums[kind_of_kernel(name)] += ms
    return sums


def device(session: Session) -> None:
    """Machine and versions; the rates of a copy and of a bfloat16 product, for all
    expectations.
    """
    session.case("about", partial(about, session))
    session.case("ceilings", partial(ceilings, session))


def about(session: Session) -> Figures:
    packages = "torch transformers accelerate triton numpy pyarrow trl liger-kernel"
    properties: Figures = {"device": "cpu"}
    if session.sizes.cuda:
        card = torch.cuda.get_device_properties(0)
        properties = {
            "device": card.name,
            "capability": f"{card.major}.{card.minor}",
            "memory_gib": card.total_memory / 2**30,
            "cuda": torch.version.cuda,
        }
    return {**properties, **provenance(*packages.split())}


def ceilings(session: Session) -> Figures:
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


def seconds_of(
    work: Callable[[], Any], cuda: bool, times: int = 10, warm: int = 3
) -> float:
    """Median seconds of a call, on the device's clock."""
    for _ in range(warm if cuda else 1):
        work()
    seconds = []
    for _ in range(times if cuda else 1):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def seconds_of_steps(work: Callable[[], Tensor], cuda: bool, steps: int = 8) -> float:
    """Return the mean seconds of calls after which the host does not wait.

    Args:
        work: queues a step; returns its loss.
    """
    float(work())  # kernels are compiled and chosen
    steps = steps if cuda else 1
    start = time.perf_counter()
    for _ in range(steps):
        loss = work()
    float(loss)
    return (time.perf_counter() - start) / steps


def profiles(session: Session, model: str) -> None:
    """A model with shared prefixes and compiled layers."""
    case = f"profile/{model}/{OURS}/compiled"
    session.case(
        case, partial(profile, session, model), seconds=20 if session.sizes.cuda else 3
    )


def profile(session: Session, model: str) -> Figures:
    """One step of forward and backward by kernel: the longest, and milliseconds of each
    kind.

    ``ms`` is the time of the kernels, ``wall_ms`` that of one of several steps in a row
    without a profiler: what is beyond is the device waiting for the host, whose time by
    operator is ``host``.
    """
    cuda = session.sizes.cuda
    trial = Trial(session, model, "hh", session.sizes.tokens[0], compiled=True)
    batch = trial.batches(OURS)[0]
    wall = seconds_of_steps(partial(trial.backward, OURS, batch), cuda)
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[kinds.CPU, *([kinds.CUDA] if cuda else [])]
    ) as p:
        float(trial.backward(OURS, batch))
    # On a GPU kernels only: an operator's time is that of its kernels.
    events = p.key_averages()
    kernels = [e for e in events if not cuda or e.device_type.name == "CUDA"]
    calls = sorted(events, key=lambda e: -e.self_cpu_time_total)[:20]
    host = [(e.key[:60], e.self_cpu_time_total / 1e3, e.count) for e in calls]
    times = {
        e.key: e.self_device_time_total if cuda else e.self_cpu_time_total
        for e in kernels
    }
    counts = {e.key: e.count for e in kernels}
    total = sum(times.values()) or 1
    by_kind = sum_by_kind((name, took / 1e3) for name, took in times.items())
    longest = sorted(times, key=lambda name: -times[name])[:40]
    table = [(name[:100], times[name] / 1e3, counts[name]) for name in longest]
    for name, ms, count in table[: 20 if cuda else 3]:
        print(f"           {ms:8.3f} ms {count:5} x {name}")
    figures = {
        "ms": total / 1e3,
        "wall_ms": 1e3 * wall,
        "kernels": sum(counts.values()),
    }
    return {**figures, "ms_by_kind": by_kind, "table": table, "host": host}


def routes(cuda: bool) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Ways from hidden `[n, H]`, weight `[V, H]` and targets `[n]` to log-probs
    `[n]`.
    """
    from packstore.torch.logprobs.tiles import GPU_CHUNK

    def liger(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(w, h, t)

    def apple(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        return -linear_cross_entropy(h, w, t, reduction="none")

    triton = "triton" if cuda else "eager"
    kernels = {"liger cross entropy, sum": liger, "cut cross entropy": apple}
    return {
        "triton": packstore(GPU_CHUNK, backend=triton),
        "eager": packstore(GPU_CHUNK, backend="eager"),
        "trl": trl,
        "logits": logsumexp,
        **(kernels if cuda else {}),
        **{f"tiles of 2^{k}": packstore(2**k, backend=triton) for k in (23, 25, 27)},
    }


def heads(session: Session) -> None:
    """Forward and backward of each route, by shape of the head."""
    for vocab, width in session.sizes.head_shapes:
        for name, route in routes(session.sizes.cuda).items():
            case = partial(_head, session, name, route, (vocab, width))
            session.case(f"head/{vocab}x{width}/{name}", case, seconds=5)


def _head(
    session: Session, name: str, route: Callable[..., Tensor], shape: tuple[int, int]
) -> Figures:
    """Time, peak of memory, error against float64."""
    sizes, n = session.sizes, session.sizes.head_tokens[1]
    hidden, weight, targets, up = random_head(sizes, n, shape)
    hidden.requires_grad_()
    weight.requires_grad_()

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        out = route(hidden, weight, targets)
        (out * up).sum().backward() if out.ndim else out.backward()
        return out.detach()

    out = step()
    figures: Figures = {}
    if sizes.cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        figures["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    if out.ndim:
        with torch.no_grad():
            logits = hidden[:64].double() @ weight.double().T
            scores = logits.gather(-1, targets[:64, None]).squeeze(-1)
            exact = scores - logits.logsumexp(-1)
        figures["error"] = distance(out[:64], exact)
    if name in HEADS:
        (vocab, width), (times, passes) = shape, HEADS[name]
        counted = Work(0, 2 * n * vocab * width, 0, times, n * vocab * passes)
        figures["expected"] = {"ms": 1e3 * counted.seconds(session.ceilings)}
    return {"ms": 1e3 * seconds_of(step, sizes.cuda), **figures}


def attention(session: Session) -> None:
    """Attention by segment length: operations a second of causal attention, forward +
    backward.
    """
    from packstore.torch.attention import ATTENTION, Settings
    from packstore.torch.batch.layout import AttentionLayout

    sizes = session.sizes
    total = sizes.tokens[-1]
    heads, kv_heads, size = sizes.heads[0]

    def rate(backend: str, length: int) -> Figures:
        ends = torch.arange(
            0, total + 1, length, dtype=torch.int32, device=sizes.device
        )
        layout = AttentionLayout(ends, ends, length, length, total)
        attend = ATTENTION.load(backend)
        qkv, up = random_heads(sizes, total, heads, kv_heads, size)
        qkv = [x.requires_grad_() for x in qkv]

        def forward() -> Tensor:
            return attend(*qkv, layout, Settings(size**-0.5))

        one = seconds_of(forward, sizes.cuda)
        both = seconds_of(lambda: torch.autograd.grad(forward(), qkv, up), sizes.cuda)
        work = total // length * (length * (length + 1) / 2) * heads * size * 4
        return {
            "forward_ms": 1e3 * one,
            "both_ms": 1e3 * both,
            "forward_tflops": work / one / 1e12,
            "both_tflops": 3.5 * work / both / 1e12,
        }

    for length in (128, 512, 2048, 8192) if sizes.cuda else (32,):
        for backend in sizes.backends:
            case = f"attention by length/{backend}/{length}"
            session.case(case, partial(rate, backend, length))
