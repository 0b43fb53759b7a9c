"""Stage 3: where the time of a step goes, and each part beside its peers.

A profile by kernel; the head beside TRL's, Liger's, Apple's and a compiled chunked one; attention
kernels by segment length; the gather of shared keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu.fast import packed_loss
from gpu.right import seconds_of
from gpu.right_kernels import distance
from gpu.session import Figures, Session
from gpu.sizes import batch_of, cut, lengths, make_model

SORTS = {
    "products": ("gemm", "nvjet", "cutlass", "xmma", "mm_", "splitk", "::mm", "addmm"),
    "attention": ("flash", "fmha", "attention", "flex"),
    "copies": ("memcpy", "memset", "copy_"),
}
"""Kinds of kernels, by parts of their names; all others count as elementwise."""


def stage(session: Session) -> None:
    """The head first, as its peers are the question; the profiles, then attention."""
    for vocab, width in session.sizes.head_shapes[::-1]:
        heads(session, vocab, width)
    for model_name in session.sizes.models:
        for layout in ("shared_prefix", "concat"):
            session.case(
                f"profile/{model_name}/{layout}",
                lambda m=model_name, lay=layout: profile(session, m, lay),
                seconds=15,
            )
    gathers(session)
    kernels(session)


def profile(session: Session, model_name: str, layout: str) -> Figures:
    """One step of forward and backward by kernel: the 20 longest, and the share of each kind."""
    from packstore.torch import use_packed_attention

    sizes = session.sizes
    family, config = sizes.models[model_name]
    model = use_packed_attention(make_model(family, config, sizes))
    rows = next(cut(lengths("hh", 400, sizes.longest), layout, sizes.tokens[0]))
    batch = batch_of(rows, layout, config["vocab_size"]).to(sizes.device)

    def step() -> None:
        packed_loss(model, {}, batch).backward()

    for _ in range(3 if sizes.cuda else 1):
        step()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if sizes.cuda else [])]) as p:
        step()
        if sizes.cuda:
            torch.cuda.synchronize()
    if sizes.cuda:  # kernels only: an operator's time is that of its kernels
        found = [e for e in p.key_averages() if e.device_type.name == "CUDA"]
        times = {e.key: e.self_device_time_total for e in found}
        counts = {e.key: e.count for e in found}
    else:
        times = {e.key: e.self_cpu_time_total for e in p.key_averages()}
        counts = {e.key: e.count for e in p.key_averages()}
    total = sum(times.values()) or 1
    shares = dict.fromkeys((*SORTS, "elementwise"), 0.0)
    for name, time in times.items():
        sort = next((s for s, parts in SORTS.items() if any(x in name for x in parts)), None)
        shares[sort or "elementwise"] += time / total
    longest = sorted(times, key=lambda name: -times[name])[:20]
    table = [(name[:100], times[name] / 1e3, counts[name]) for name in longest]
    for name, ms, count in table[: 20 if sizes.cuda else 3]:
        print(f"           {ms:8.3f} ms {count:5} x {name}")
    return {"ms": total / 1e3, "kernels": sum(counts.values()), "shares": shares, "table": table}


def _routes(session: Session) -> dict[str, Callable[..., Tensor]]:
    """Ways from hidden `[n, H]`, weight `[V, H]` and targets `[n]` to log-probs `[n]`."""
    from packstore.torch.logprobs.fused_head import HeadLogProbs
    from packstore.torch.logprobs.tiles import Projection, default_chunk

    cuda = session.sizes.cuda

    def ours(chunk: int, backend: str = "eager") -> Callable[..., Tensor]:
        how = Projection(chunk_size=chunk, backend=backend)
        return lambda h, w, t: HeadLogProbs.apply(h, w, None, t, how)

    def default(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return ours(default_chunk(h.device))(h, w, t)

    def logits(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        made = (h @ w.T).float()
        return made.gather(-1, t[:, None]).squeeze(-1) - made.logsumexp(-1)

    compiled = torch.compile(logits, dynamic=True, backend="inductor" if cuda else "eager")

    def chunked(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        parts = zip(h.split(1024), t.split(1024), strict=True)
        return torch.cat([checkpoint(compiled, a, w, b, use_reentrant=False) for a, b in parts])

    def trl(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        from trl.kernels import ChunkedLogProbFunction

        return ChunkedLogProbFunction.apply(h, w, None, t, 1.0, len(w), None, 1.0, ())[0]

    def liger(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(w, h, t)

    def apple(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        return -linear_cross_entropy(h, w, t, reduction="none")

    return {
        "packstore": default,
        "trl": trl,
        "compiled_chunked": chunked,
        "logits": logits,
        "liger_cross_entropy_sum": liger,
        "cut_cross_entropy": apple,
        **({"packstore triton": ours(2**26, "triton")} if cuda else {}),
        **{f"packstore 2^{k}": ours(2**k) for k in ((23, 25, 26, 27) if cuda else (8,))},
    }


def heads(session: Session, vocab: int, width: int) -> None:
    """Forward and backward of each route: time, peak of memory, error against float64."""
    sizes = session.sizes
    n = sizes.head_tokens[-2]

    def measure(route: Callable[..., Tensor]) -> Figures:
        generator = torch.Generator(sizes.device).manual_seed(0)
        kind = {"generator": generator, "device": sizes.device}
        hidden = torch.randn(n, width, **kind).to(sizes.dtype).requires_grad_()
        weight = (torch.randn(vocab, width, **kind) * width**-0.5 * 4).to(sizes.dtype)
        weight.requires_grad_()
        targets = torch.randint(vocab, (n,), **kind)
        up = torch.rand(n, **kind)

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
                exact = hidden[:64].double() @ weight.double().T
                wanted = exact.gather(-1, targets[:64, None]).squeeze(-1) - exact.logsumexp(-1)
            figures["error"] = distance(out[:64], wanted)
        return {"ms": 1e3 * seconds_of(step, sizes.cuda), **figures}

    for name, route in _routes(session).items():
        session.case(f"head/{vocab}x{width}/{name}", lambda r=route: measure(r), seconds=5)


def gathers(session: Session) -> None:
    """Keys and values of shared prefixes: the gather, and the sum of their gradients."""
    sizes = session.sizes

    def measure(tokens: int, profile: str, heads: int, size: int) -> Figures:
        rows = next(cut(lengths(profile, tokens // 4, sizes.longest), "shared_prefix", tokens))
        layout = batch_of(rows, "shared_prefix", 100).to(sizes.device).layout
        shape = (layout.num_queries, heads, size)
        keys = torch.randn(shape, device=sizes.device).to(sizes.dtype).requires_grad_()
        up = torch.randn_like(layout.keys(keys).detach())
        forward = seconds_of(lambda: layout.keys(keys), sizes.cuda)
        both = seconds_of(lambda: torch.autograd.grad(layout.keys(keys), keys, up), sizes.cuda)
        moved = 2 * up.nbytes
        return {
            "forward_us": 1e6 * forward,
            "backward_us": 1e6 * (both - forward),
            "forward_tb_per_second": moved / forward / 1e12,
        }

    for _, config in sizes.models.values():
        heads, size = config["num_key_value_heads"], config["head_dim"]
        for tokens in sizes.tokens:
            for profile in sizes.profiles:
                session.case(
                    f"gather/{profile}/{tokens}/{heads} heads of {size}",
                    lambda t=tokens, p=profile, h=heads, s=size: measure(t, p, h, s),
                )


def kernels(session: Session) -> None:
    """Attention by segment length: operations a second of causal attention, forward + backward."""
    from packstore.torch.attention import ATTENTION, Settings

    sizes = session.sizes
    total = sizes.tokens[-1]
    heads, kv_heads, size = sizes.heads[0]

    def inputs() -> tuple[list[Tensor], Tensor]:
        shapes = [(total, n, size) for n in (heads, kv_heads, kv_heads, heads)]
        *qkv, up = (torch.randn(s, device=sizes.device).to(sizes.dtype) for s in shapes)
        return [x.requires_grad_() for x in qkv], up

    def packed(backend: str, length: int) -> Figures:
        from packstore.torch.batch.layout import AttentionLayout

        ends = torch.arange(0, total + 1, length, dtype=torch.int32, device=sizes.device)
        layout = AttentionLayout(ends, ends, length, length, total)
        attend = ATTENTION.load(backend)
        qkv, up = inputs()
        return rate(lambda: attend(*qkv, layout, Settings(size**-0.5)), qkv, up, length)

    def cudnn(length: int) -> Figures:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        qkv, up = inputs()
        kind = SDPBackend.CUDNN_ATTENTION if sizes.cuda else SDPBackend.MATH

        def attend() -> Tensor:
            rows = [x.view(-1, length, x.shape[1], size).transpose(1, 2) for x in qkv]
            with sdpa_kernel(kind):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *rows, is_causal=True, enable_gqa=True
                )
            return out.transpose(1, 2).reshape(up.shape)

        return rate(attend, qkv, up, length)

    def rate(attend: Callable[[], Any], qkv: list[Tensor], up: Tensor, length: int) -> Figures:
        work = total // length * (length * (length + 1) / 2) * heads * size * 4
        forward = seconds_of(attend, sizes.cuda)
        both = seconds_of(lambda: torch.autograd.grad(attend(), qkv, up), sizes.cuda)
        return {
            "forward_ms": 1e3 * forward,
            "both_ms": 1e3 * both,
            "forward_tflops": work / forward / 1e12,
            "both_tflops": 3.5 * work / both / 1e12,
        }

    for length in (128, 512, 2048, 8192) if sizes.cuda else (32,):
        session.case(f"attention/cudnn dense/{length}", lambda n=length: cudnn(n))
        for backend in sizes.backends:
            session.case(f"attention/{backend}/{length}", lambda b=backend, n=length: packed(b, n))
