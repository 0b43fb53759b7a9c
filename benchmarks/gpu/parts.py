"""Rates of the device, a profile of a step, and each part beside its peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import provenance
from logprobs import logsumexp, packstore, trl
from torch import Tensor

from gpu.fast import Trial
from gpu.predictions import HEADS, count_attention, count_head
from gpu.right_kernels import distance, random_head, random_heads
from gpu.rounds import OURS, Group, parse_way
from gpu.session import Figures, Session, check_backend
from gpu.sizes import (
    PROFILES,
    Lengths,
    Segments,
    Sizes,
    batch_of,
    cut,
    lengths,
    segments_of,
)

KINDS = {
    "elementwise": ("triton_",),
    "attention": (
        *("flash", "fmha", "attention", "flex"),
        *("forward_kernel", "queries_kernel", "keys_kernel"),  # of backend ranges
    ),
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
    """Record machine and versions; the rates of a copy and of a bfloat16 product, for
    all expectations.
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
    """Return the median seconds of a call, on the device's clock."""
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


def profiles(session: Session, model: str, way: str = OURS) -> None:
    """Profile a step of a model with compiled layers, on pairs like hh."""
    case = f"profile/{model}/{way}/compiled"
    seconds = 20 if session.sizes.cuda else 3
    session.case(case, partial(profile, session, model, way), seconds)


def profile(session: Session, model: str, way: str) -> Figures:
    """Profile a step of forward and backward pass by kernel: the longest, and
    milliseconds of each kind.

    ``ms`` is the time of the kernels, ``wall_ms`` that of one of several steps in a row
    without a profiler: what is beyond is the device waiting for the host, whose time by
    operator is ``host``.
    """
    cuda = session.sizes.cuda
    trial = Trial(session, Group(model, "hh", session.sizes.tokens[0], (way,), 0))
    micro_batch = trial.micro_batches(way)[0]
    wall = seconds_of_steps(partial(trial.backward, way, micro_batch), cuda)
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[kinds.CPU, *([kinds.CUDA] if cuda else [])]
    ) as p:
        float(trial.backward(way, micro_batch))
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
    by_kind = sum_by_kind((name, x / 1e3) for name, x in times.items())
    longest = sorted(times, key=lambda name: -times[name])[:40]
    table = [(name[:100], times[name] / 1e3, counts[name]) for name in longest]
    for name, ms, count in table[: 20 if cuda else 3]:
        print(f"           {ms:8.3f} ms {count:5} x {name}")
    figures = {
        "ms": total / 1e3,
        "wall_ms": 1e3 * wall,
        "kernels": sum(counts.values()),
        "ms_by_kind": by_kind,
        "expected": profile_expected(trial, way),
    }
    return {**figures, "table": table, "host": host}


def profile_expected(trial: Trial, way: str) -> dict[str, float]:
    """Return the milliseconds that are expected of a profile."""
    work = trial.work(parse_way(way))[0]
    return {
        "ms": 1e3 * work.device_seconds(trial.ceilings),
        "wall_ms": 1e3 * work.seconds(trial.ceilings),
        "kernels": work.kernels,
    }


def routes(cuda: bool) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return ways from hidden `[n, H]`, weight `[V, H]` and targets `[n]` to log-probs
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
    """Time forward and backward of each route, by shape of the head."""
    for vocab, width in session.sizes.head_shapes:
        for name, route in routes(session.sizes.cuda).items():
            case = partial(_head, session, name, route, (vocab, width))
            session.case(f"head/{vocab}x{width}/{name}", case, seconds=5)


def _head(
    session: Session, name: str, route: Callable[..., Tensor], shape: tuple[int, int]
) -> Figures:
    """Return time, peak of memory, error against float64."""
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
    counted_name = "logsumexp" if name == "logits" else name
    if counted_name in HEADS:
        work = count_head(n, *shape, counted_name)
        figures["expected"] = {"ms": 1e3 * work.device_seconds(session.ceilings)}
    return {"ms": 1e3 * seconds_of(step, sizes.cuda), **figures}


LENGTHS = (128, 512, 2048, 8192)
"""Tokens of sequences, for attention by length."""


def uniform(length: int, num_tokens: int) -> Segments:
    """Return the segments of a row of sequences of one length, without a prefix."""
    lengths = np.full(num_tokens // length, length)
    return Segments(lengths, lengths, lengths, np.zeros_like(lengths))


def profile_rows(sizes: Sizes, profile: str) -> Lengths:
    """Return the pairs of a row like a profile, in the larger micro-batch."""
    rows = lengths(profile, 1000, sizes.longest[profile])
    return cut(rows, "shared_prefix", sizes.tokens[-1])[0]


def attention_by_profile(session: Session) -> None:
    """Time backends on rows of each profile, shared prefixes."""
    for profile in PROFILES:
        rows = profile_rows(session.sizes, profile)
        batch = batch_of(rows, "shared_prefix", 100).to(session.sizes.device)
        segments = segments_of(rows, "shared_prefix")
        name = f"attention of {profile}"
        time_attention(session, name, batch.layout, segments)


def attention_by_length(session: Session) -> None:
    """Time backends on rows of sequences of one length."""
    sizes = session.sizes
    num_tokens = sizes.tokens[-1]
    for length in LENGTHS if sizes.cuda else (32,):
        segments = uniform(length, num_tokens)
        layout = uniform_layout(sizes, length)
        time_attention(session, f"attention by length {length}", layout, segments)


def uniform_layout(sizes: Sizes, length: int) -> Any:
    """Return the layout of a row of sequences of one length, on the device."""
    from packstore.torch.batch.layout import AttentionLayout
    from packstore.torch.batch.ranges import compute_key_ranges

    num_tokens = sizes.tokens[-1]
    ends = torch.arange(0, num_tokens + 1, length, dtype=torch.int32)
    ranges = compute_key_ranges(ends, ends, None)
    device_ends = ends.to(sizes.device)
    return AttentionLayout(
        cu_seqlens_q=device_ends,
        cu_seqlens_k=device_ends,
        max_seqlen_q=length,
        max_seqlen_k=length,
        num_queries=num_tokens,
        ranges=ranges.map_tensors(lambda tensor: tensor.to(sizes.device)),
    )


def time_attention(
    session: Session, name: str, layout: Any, segments: Segments
) -> None:
    """Time forward and backward pass of each backend, with the heads of each model."""
    for model in session.sizes.timed_models:
        _, config = session.sizes.models[model]
        for backend in session.sizes.timed_backends:
            work = partial(_attention, session, backend, config, layout, segments)
            session.case(f"{name}/{backend}/{model}", work)


def _attention(
    session: Session,
    backend: str,
    config: dict[str, Any],
    layout: Any,
    segments: Segments,
) -> Figures:
    """Return milliseconds, and operations a second of the scores that are seen."""
    from packstore.torch.attention import ATTENTION, Settings

    sizes = session.sizes
    check_backend(backend, sizes)
    size = config["head_dim"]
    heads = (config["num_attention_heads"], config["num_key_value_heads"], size)
    attend = ATTENTION.load(backend)
    qkv, up = random_heads(sizes, layout.num_queries, *heads)
    qkv = [x.requires_grad_() for x in qkv]

    def forward() -> Tensor:
        output: Tensor = attend(*qkv, layout, Settings(size**-0.5))
        return output

    def both() -> None:
        torch.autograd.grad(forward(), qkv, up)

    forward_seconds = seconds_of(forward, sizes.cuda)
    both_seconds = seconds_of(both, sizes.cuda)
    figures = {"forward_ms": 1e3 * forward_seconds, "both_ms": 1e3 * both_seconds}
    try:
        counted = count_attention(config, segments, backend)
    except KeyError:  # a backend whose kernels were never counted
        return figures
    return {
        **figures,
        "forward_tflops": counted.attention / forward_seconds / 1e12,
        "both_tflops": 3.5 * counted.attention / both_seconds / 1e12,
        "expected": {"both_ms": 1e3 * counted.device_seconds(session.ceilings)},
    }
