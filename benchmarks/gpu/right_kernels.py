"""Correctness of attention kernels and of the head, against float32 and float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu.session import AbsentError, Figures, Session, check_backend
from gpu.sizes import Sizes, batch_of, cut, lengths

LIMIT = 1e-2
"""Largest norm of an error, as a share of the norm of the exact values."""

FLOOR = 1e-4
"""Errors below are right without a comparison with plain arithmetic."""


RAGGED = "ragged"
"""Name of the layout whose keys are taken from anywhere."""


def distance(actual: Tensor, exact: Tensor) -> float:
    """Return the norm of the error as a share of the norm of the exact values; both may
    be empty.
    """
    actual, exact = actual.detach().double(), exact.detach().double()
    if not bool(actual.isfinite().all()):
        return math.inf
    scale = float(exact.norm())
    return float((actual - exact).norm()) / scale if scale else float(actual.norm())


def verdict(
    actual: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
) -> Figures:
    """Return errors by norm; right up to `LIMIT` and twice the plain arithmetic's."""
    errors = {name: distance(actual[name], exact[name]) for name in exact}
    allowed = {
        name: max(2 * distance(plain[name], exact[name]), FLOOR) for name in exact
    }
    right = all(e <= min(LIMIT, allowed[n]) for n, e in errors.items())
    over_plain = {name: 2 * error / allowed[name] for name, error in errors.items()}
    return {"right": right, "errors": errors, "over_plain": over_plain}


def plain(
    q: Tensor, k: Tensor, v: Tensor, layout: Any, window: int | None, scale: float
) -> Tensor:
    """Compute attention as eager models do: matmuls in their dtype, softmax in
    float32.
    """
    from packstore.torch.attention import Settings
    from packstore.torch.attention.plain import visible

    group = q.shape[1] // k.shape[1]
    outputs = []
    for one_q, one_k, one_v in layout.split(q, layout.keys(k), layout.keys(v)):
        one_k, one_v = (x.repeat_interleave(group, 1) for x in (one_k, one_v))
        scores = torch.einsum("qnh,knh->nqk", one_q, one_k) * scale
        hidden = ~visible(len(one_q), len(one_k), Settings(scale, window), q.device)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(
            -1, dtype=torch.float32
        )
        outputs.append(torch.einsum("nqk,knh->qnh", weights.to(q.dtype), one_v))
    return torch.cat(outputs)


def ragged(device: str, seed: int = 0) -> Any:
    """Return key runs longer than their queries, and taken from anywhere in the row."""
    from packstore.torch.batch.layout import AttentionLayout

    rng = np.random.default_rng(seed)
    queries = rng.integers(1, 200, 9)
    keys = queries + rng.integers(0, 150, 9)
    ends = [
        torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (queries, keys)
    ]
    index = torch.from_numpy(rng.integers(0, queries.sum(), keys.sum()))
    return AttentionLayout(
        cu_seqlens_q=ends[0].to(device),
        cu_seqlens_k=ends[1].to(device),
        max_seqlen_q=int(queries.max()),
        max_seqlen_k=int(keys.max()),
        num_queries=int(queries.sum()),
        kv_index=index.to(device),
    )


def layouts(sizes: Sizes) -> dict[str, Any]:
    """Return layouts of rows: both of packstore, trees of prefixes, key runs of any
    length, empty segments, fixed shapes.
    """
    from packstore.torch import pad_batch

    rows = cut(lengths("hh", 100, sizes.row // 4), "concat", sizes.row)[0]
    layout_of = {}
    for name in ("concat", "shared_prefix"):
        batch = batch_of(rows, name, 100)
        layout_of[name] = batch.to(sizes.device).layout
        shape = {"num_tokens": sizes.row + 100, "num_segments": batch.num_segments + 20}
        layout_of[f"{name} padded to a shape"] = (
            pad_batch(batch, **shape).to(sizes.device).layout
        )
        empty = pad_batch(
            batch, num_tokens=batch.num_tokens, num_segments=batch.num_segments + 6
        )
        layout_of[f"{name} with empty segments"] = empty.to(sizes.device).layout
    rollouts = cut(lengths("agents", 100, sizes.row // 4), "shared_prefix", sizes.row)[
        0
    ]
    trees = batch_of(rollouts, "shared_prefix", 100)
    layout_of["trees"] = trees.to(sizes.device).layout
    return {**layout_of, RAGGED: ragged(sizes.device)}


def run(
    attend: Callable[..., Tensor], tensors: list[Tensor], up: Tensor
) -> dict[str, Tensor]:
    """Return output and the three gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = attend(*leaves)
    grads = torch.autograd.grad(output, leaves, up.to(output.dtype))
    return dict(zip(("o", "dq", "dk", "dv"), (output.detach(), *grads), strict=True))


def attention(
    session: Session, backends: Iterable[str], heads: Iterable[tuple[int, int, int]]
) -> None:
    """Compare backends on every layout and window with float32, both passes."""
    from packstore.torch.attention import ATTENTION, Settings

    sizes = session.sizes
    layout_of = layouts(sizes)

    def compare(
        backend: str, name: str, heads: tuple[int, int, int], window: int | None
    ) -> Any:
        attend, exact = ATTENTION.load(backend), ATTENTION.load("reference")
        layout, settings = layout_of[name], Settings(heads[2] ** -0.5, window)
        qkv, up = random_heads(sizes, layout.num_queries, *heads)
        return verdict(
            run(lambda *x: attend(*x, layout, settings), qkv, up),
            run(lambda *x: plain(*x, layout, window, settings.scale), qkv, up),
            run(
                lambda *x: exact(*x, layout, settings),
                [x.float() for x in qkv],
                up.float(),
            ),
        )

    def load(backend: str) -> None:
        check_backend(backend, sizes)
        ATTENTION.load(backend)

    for backend in backends:
        try:
            load(backend)
        except (AbsentError, ImportError):  # recorded once, not for each case
            session.case(f"attention/{backend}", partial(load, backend))
            continue
        for shape in heads:
            for name in layout_of:
                if backend == "ranges" and name == RAGGED:
                    continue  # its keys are no ranges of rows
                for window in (None, sizes.window):
                    case = f"attention/{backend}/{name}/{shape}/window {window}"
                    args = (backend, name, shape, window)
                    session.case(case, partial(compare, *args))


def random_heads(
    sizes: Sizes, tokens: int, heads: int, kv_heads: int, size: int
) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys and values, and the gradient of the output."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    kind = {"generator": generator, "device": sizes.device}
    shapes = [(tokens, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, up = (torch.randn(shape, **kind).to(sizes.dtype) for shape in shapes)
    return qkv, up


def random_head(
    sizes: Sizes, tokens: int, shape: tuple[int, int], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return hidden `[n, H]`, weight `[V, H]`, targets and upstream gradient `[n]`."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    kind = {"generator": generator, "device": sizes.device}
    vocab, width = shape
    hidden = torch.randn(tokens, width, **kind).to(dtype or sizes.dtype)
    weight = (torch.randn(shape, **kind) * width**-0.5 * 4).to(dtype or sizes.dtype)
    return [
        hidden,
        weight,
        torch.randint(vocab, (tokens,), **kind),
        torch.rand(tokens, **kind),
    ]


def deterministic(session: Session, backends: Iterable[str]) -> None:
    """Compare the bits of two runs of both passes, with deterministic algorithms."""
    from packstore.torch.attention import ATTENTION, Settings

    sizes = session.sizes
    *heads, size = sizes.heads[0]

    def twice(backend: str) -> Figures:
        check_backend(backend, sizes)
        layout = layouts(sizes)["trees"]
        attend = ATTENTION.load(backend)
        qkv, up = random_heads(sizes, layout.num_queries, *heads, size)
        torch.use_deterministic_algorithms(True)
        try:
            one, two = (
                run(lambda *x: attend(*x, layout, Settings(size**-0.5)), qkv, up)
                for _ in range(2)
            )
        finally:
            torch.use_deterministic_algorithms(False)
        same = {name: bool(torch.equal(one[name], two[name])) for name in one}
        return {"right": all(same.values()), **same}

    for backend in backends:
        session.case(f"deterministic/{backend}", partial(twice, backend))


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "bias": {"bias": True},
    "frozen": {"frozen": True},
    "autocast": {"autocast": True},
    "float32": {"dtype": torch.float32},
}


def head(session: Session, tokens: Iterable[int], ways: Iterable[str]) -> None:
    """Compare log-probs and gradients of the head with float64."""
    for n in tokens:
        for way in ways:
            for backend in ("eager", "triton") if session.sizes.cuda else ("eager",):
                how = {**HEADS[way], "backend": backend}
                session.case(
                    f"head/{n} tokens/{backend} {way}", partial(_head, session, n, how)
                )


def chosen(session: Session) -> None:
    """Ask whether head `auto` takes Triton's passes on this device, after its proof."""
    from packstore.torch.logprobs.tiles import EAGER, Projection, choose_passes

    def ask() -> Figures:
        sizes = session.sizes
        kind = {"device": sizes.device, "dtype": sizes.dtype}
        hidden, weight = torch.randn(16, 128, **kind), torch.randn(32768, 128, **kind)
        targets = torch.arange(16, device=sizes.device)
        passes = choose_passes(
            hidden, weight, None, targets, Projection(backend="auto")
        )
        triton = passes is not EAGER
        return {"right": triton == sizes.cuda, "triton": triton}

    session.case("head auto", ask)


def _head(session: Session, n: int, how: dict[str, Any]) -> Figures:
    from packstore.torch.logprobs.logprobs import HeadLogProbs
    from packstore.torch.logprobs.tiles import Projection, default_chunk

    sizes = session.sizes
    vocab, width = sizes.head_shapes[0]
    dtype = torch.float32 if how.get("autocast") else how.get("dtype", sizes.dtype)
    hidden, weight, targets, up = random_head(sizes, n, (vocab, width), dtype)
    random = {
        "generator": torch.Generator(sizes.device).manual_seed(1),
        "device": sizes.device,
    }
    bias = torch.randn(vocab, **random).to(dtype) if how.get("bias") else None
    softcap = how.get("softcap")
    chunk = default_chunk(torch.device(sizes.device)) if sizes.cuda else 512

    def ours(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        projection = Projection(
            softcap=softcap, chunk_size=chunk, backend=how["backend"]
        )
        return HeadLogProbs.apply(h, w, b, targets, projection)

    def logits(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        rows = torch.nn.functional.linear(h, w, b)
        if rows.dtype != torch.float64:
            rows = rows.float()
        if softcap is not None:
            rows = softcap * torch.tanh(rows / softcap)
        return rows.gather(-1, targets[:, None]).squeeze(-1) - rows.logsumexp(-1)

    def graded(way: Callable[..., Tensor], wide: bool) -> dict[str, Tensor]:
        inputs = [
            x if x is None else x.double() if wide else x.clone()
            for x in (hidden, weight)
        ]
        inputs.append(bias if bias is None else bias.double() if wide else bias.clone())
        for i, x in enumerate(inputs):
            if x is not None:
                x.requires_grad_(not (how.get("frozen") and i == 1))
        lower = bool(how.get("autocast")) and not wide
        with torch.autocast(sizes.device, torch.bfloat16, enabled=lower):
            out = way(*inputs)
        leaves = {
            f"d_{name}": x
            for name, x in zip(("hidden", "weight", "bias"), inputs, strict=True)
            if x is not None and x.requires_grad
        }
        gradients = torch.autograd.grad(out, list(leaves.values()), up.to(out.dtype))
        return {"logps": out.detach(), **dict(zip(leaves, gradients, strict=True))}

    exact = graded(logits, wide=True)
    return verdict(graded(ours, wide=False), graded(logits, wide=False), exact)
