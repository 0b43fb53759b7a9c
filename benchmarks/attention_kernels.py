"""Part 1 of attention_gpu.py: its inputs, and the correctness of every kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes and devices of the measurement."""

    device: str
    dtype: torch.dtype
    backends: tuple[str, ...]
    pack_size: int
    packs: int
    warmup: int
    repeats: int
    model: dict[str, Any]
    heads: tuple[tuple[int, int, int], ...]

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


GPU = Setting(
    device="cuda",
    dtype=torch.bfloat16,
    backends=("torch_varlen", "flash_attn", "flash_attn_3", "flash_attn_4", "flex"),
    pack_size=8192,
    packs=8,
    warmup=2,
    repeats=3,
    model={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    heads=((32, 8, 64), (8, 8, 128), (16, 1, 128)),
)
DRY = Setting(
    device="cpu",
    dtype=torch.bfloat16,
    backends=("sdpa", "reference"),
    pack_size=256,
    packs=2,
    warmup=0,
    repeats=1,
    model={
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    heads=((4, 2, 16),),
)


def lengths(n: int, limit: int, data: str | None, seed: int = 0) -> np.ndarray:
    """Tokens of prompt, chosen and rejected, int `[n, 3]`."""
    if data is not None:
        return np.loadtxt(data, dtype=np.int64, ndmin=2)[:n]
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log([94, 32, 32]), 0.9, (n, 3))
    return np.clip(np.rint(drawn), 2, limit).astype(np.int64)


def batch_of(rows: np.ndarray, layout: str, vocab_size: int) -> Any:
    """One pack of these pairs; the tokens follow from the lengths, the same in every layout."""
    from packstore.format.arrays import Packs, signed, to_offsets
    from packstore.torch import collate

    ids, labels, whole = [], [], []
    for prompt, *responses in rows.tolist():
        rng = np.random.default_rng([prompt, *responses])
        shared = rng.integers(0, vocab_size, prompt)
        for i, response in enumerate(responses):
            own = rng.integers(0, vocab_size, response)
            start = prompt - 1 if i and layout == "shared_prefix" else 0
            ids.append(np.concatenate([shared, own])[start:])
            labels.append(np.concatenate([np.full(prompt, -100), own])[start:])
            whole.append(prompt + response)
    segments, pairs = len(ids), len(rows)
    packs = Packs(
        signed_ids=signed(np.concatenate(ids), np.concatenate(labels)).astype(np.int32),
        reward=np.tile(np.array([1, 0], np.float32), pairs),
        lengths=np.array(whole, np.int32),
        seq_boundaries=to_offsets(np.array([len(x) for x in ids])).astype(np.int32),
        example_ids=np.arange(pairs),
        num_responses=np.full(pairs, 2, np.int32),
        token_offsets=np.array([0, sum(map(len, ids))]),
        sequence_offsets=np.array([0, segments]),
        example_offsets=np.array([0, pairs]),
    )
    return collate(packs, "preference")


def batches_of(rows: np.ndarray, way: str, size: int, vocab_size: int) -> Iterator[Any]:
    """Pairs in order, as many to a batch as `size` tokens hold; padded rows count their padding."""
    start = 0
    for stop in range(1, len(rows)):
        p, c, r = rows[start : stop + 1].T
        tokens = {
            "padded": 2 * len(p) * int((p + np.maximum(c, r)).max()),
            "concat": int((2 * p + c + r).sum()),
            "shared_prefix": int((p + 1 + c + r).sum()),
        }
        if tokens[way] > size:
            yield batch_of(rows[start:stop], way.replace("padded", "concat"), vocab_size)
            start = stop


def make_model(setting: Setting) -> Any:
    """A random Llama in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**setting.model, tie_word_embeddings=True, use_cache=False)
    with torch.device(setting.device):
        return LlamaForCausalLM(config).to(setting.dtype).train()


def plain(q: Tensor, k: Tensor, v: Tensor, layout: Any, window: int | None, scale: float) -> Tensor:
    """Attention as eager models compute it: matmuls in their dtype, softmax in float32."""
    from packstore.torch.attention._causal import visible

    group = q.shape[1] // k.shape[1]
    outputs = []
    for one_q, one_k, one_v in layout.split(q, layout.keys(k), layout.keys(v)):
        one_k, one_v = (x.repeat_interleave(group, 1) for x in (one_k, one_v))
        scores = torch.einsum("qnh,knh->nqk", one_q, one_k) * scale
        hidden = ~visible(len(one_q), len(one_k), window, q.device)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
        outputs.append(torch.einsum("nqk,knh->qnh", weights.to(q.dtype), one_v))
    return torch.cat(outputs)


def ragged(device: str, seed: int = 0) -> Any:
    """Key runs longer than their queries, and taken from anywhere in the row."""
    from packstore.torch.batch.layout import AttentionLayout

    rng = np.random.default_rng(seed)
    queries = rng.integers(1, 200, 9)
    keys = queries + rng.integers(0, 150, 9)
    ends = [torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (queries, keys)]
    index = torch.from_numpy(rng.integers(0, queries.sum(), keys.sum()))
    return AttentionLayout(
        cu_seqlens_q=ends[0].to(device),
        cu_seqlens_k=ends[1].to(device),
        max_seqlen_q=int(queries.max()),
        max_seqlen_k=int(keys.max()),
        num_queries=int(queries.sum()),
        kv_index=index.to(device),
    )


def run_attention(attend: Callable[..., Tensor], tensors: list[Tensor], up: Tensor) -> list[Tensor]:
    """Output and the three gradients, in float32."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = attend(*leaves)
    return [x.float() for x in (output, *torch.autograd.grad(output, leaves, up.to(output.dtype)))]


def correctness(setting: Setting) -> Iterator[dict[str, Any]]:
    """Errors of every backend over those of plain attention of the same precision.

    FlexAttention compiles for every head size, so it gets the first one only.
    """
    from packstore.torch.attention import ATTENTION

    rows = lengths(12 if setting.cuda else 3, 400, None)
    layouts = {
        name: batch_of(rows, name, 100).to(setting.device).layout
        for name in ("concat", "shared_prefix")
    }
    layouts["ragged"] = ragged(setting.device)
    for backend in setting.backends:
        try:
            attend = ATTENTION.load(backend)
        except ImportError as error:
            yield {"backend": backend, "absent": str(error)}
            continue
        for name, layout in layouts.items():
            for heads, kv_heads, size in setting.heads[: 1 if backend == "flex" else None]:
                for window in (None, 64):
                    case = {"backend": backend, "layout": name, "window": window}
                    case |= {"heads": heads, "kv_heads": kv_heads, "head_size": size}
                    yield case | compare(attend, layout, (heads, kv_heads, size), window, setting)


def compare(
    attend: Any, layout: Any, sizes: tuple[int, int, int], window: int | None, setting: Setting
) -> dict[str, Any]:
    """One case: the largest error of output and gradients, over that of plain attention."""
    from packstore.torch.attention import ATTENTION

    heads, kv_heads, size = sizes
    generator = torch.Generator(setting.device).manual_seed(0)
    shapes = [(layout.num_queries, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    kind = {"generator": generator, "device": setting.device}
    *qkv, up = (torch.randn(shape, **kind).to(setting.dtype) for shape in shapes)
    scale = size**-0.5
    words = {"scale": scale, "sliding_window": window}
    exact_qkv = [x.float() for x in qkv]
    reference = ATTENTION.load("reference")
    exact = run_attention(lambda *x: reference(*x, layout, **words), exact_qkv, up.float())
    coarse = run_attention(lambda *x: plain(*x, layout, window, scale), qkv, up)
    try:
        found = run_attention(lambda *x: attend(*x, layout, **words), qkv, up)
    except Exception as error:  # one backend that fails must not hide the others
        return {"failed": f"{type(error).__name__}: {error}"[:500], "right": False}
    ratios = {}
    for part, a, b, c in zip(("o", "dq", "dk", "dv"), found, coarse, exact, strict=True):
        error, allowed = (a - c).abs().max(), (b - c).abs().max()
        ratios[part] = float(error / allowed.clamp_min(1e-9))
    return {"error_over_plain": ratios, "right": all(r <= 2 for r in ratios.values())}


def native_groups(setting: Setting) -> str:
    """Reports if torch's kernel takes grouped queries without a Python argument for them."""
    from packstore.torch.attention import ATTENTION, torch_varlen

    if torch_varlen.GROUPS or not setting.cuda:
        return "not asked: this torch has enable_gqa, or there is no GPU"
    layout = ragged(setting.device)
    generator = torch.Generator(setting.device).manual_seed(0)
    shapes = [(layout.num_queries, n, 64) for n in (8, 2, 2, 8)]
    kind = {"generator": generator, "device": setting.device, "dtype": setting.dtype}
    *qkv, up = (torch.randn(shape, **kind) for shape in shapes)

    def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ends = (layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k)
        call = torch_varlen.varlen.varlen_attn
        return call(q, layout.keys(k), layout.keys(v), *ends, scale=0.125, window_size=(-1, 0))

    repeated = ATTENTION.load("torch_varlen")
    try:
        found = run_attention(native, qkv, up)
    except (RuntimeError, ValueError) as error:
        return f"refused: {error}"
    wanted = run_attention(lambda *x: repeated(*x, layout, scale=0.125), qkv, up)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    return f"taken; differs from repeated heads by {worst:.2g}"


def isolation(setting: Setting) -> dict[str, str]:
    """Runs the probe on each backend, with a small random model."""
    from packstore.errors import PackstoreError
    from packstore.torch import check_isolation

    sizes = {**DRY.model, "hidden_size": 256, "num_hidden_layers": 2, "initializer_range": 0.1}
    model = make_model(replace(setting, model=sizes))
    said = {}
    for backend in setting.backends:
        try:
            said[backend] = f"passed, largest difference {check_isolation(model, backend):.2g}"
        except (PackstoreError, ImportError) as error:
            said[backend] = str(error)
    return said
