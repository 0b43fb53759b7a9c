"""Calls of each flash kernel: signature tests, with a stand-in that computes by definition.

Nothing here proves a kernel. The stand-ins have the signatures of flash-attn 2.8.3, of
flash-attention/hopper at 0f82fea, of flash-attn-4 4.0.0b36 and of torch 2.11, positional order
included, and refuse what those refuse; packages that are installed are compared with them. For
torch's own, the installed Python code runs, with a stand-in for the two operators under it, whose
schemas are compared. The kernels themselves run in ``benchmarks/gpu_session.py``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import varlen_kernels
from torch import Tensor
from torch.nn.attention import varlen

from packstore.errors import BackendError, MissingExtraError
from packstore.testing import random_examples
from packstore.torch import collate, use_packed_attention
from packstore.torch.attention import ATTENTION, _auto, _flash
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.models.model import _register

KERNELS = ("torch_varlen", "flash_attn", "flash_attn_3", "flash_attn_4")
MODULES = {
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute",
}
EXAMPLES = random_examples(5, seed=5)


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[Tensor, Tensor, int, int],
    scale: float,
    left: int,
    softcap: float = 0.0,
) -> Tensor:
    """softmax(q k^T) v of each run, causal from the end, `left` keys back (-1: all)."""
    cu_q, cu_k, max_q, max_k = offsets
    for cu, longest, rows in ((cu_q, max_q, q), (cu_k, max_k, k)):
        assert cu.dtype == torch.int32
        assert cu[0] == 0
        assert cu[-1] == len(rows)
        assert type(longest) is int
        assert longest == cu.diff().max()
    assert len(k) == len(v)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outputs = []
    for i in range(len(cu_q) - 1):
        one_q, one_k = q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]]
        weights = weights_of(one_q, one_k, scale, left, softcap)
        outputs.append(torch.einsum("nqk,knh->qnh", weights, v[cu_k[i] : cu_k[i + 1]]))
    return torch.cat(outputs)


def weights_of(q: Tensor, k: Tensor, scale: float, left: int, softcap: float) -> Tensor:
    scores = torch.einsum("qnh,knh->nqk", q, k) * scale
    scores = scores if softcap == 0 else softcap * torch.tanh(scores / softcap)
    behind = len(k) - len(q) + torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = (behind < 0) | ((behind > left) if left >= 0 else False)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def flash_attn_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert dropout_p == 0
    assert causal is True
    assert alibi_slopes is None
    assert block_table is None
    left, right = window_size
    assert right in (-1, 0)
    seen["deterministic"] = deterministic
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return by_definition(q, k, v, offsets, softmax_scale, left, softcap)


def flash_attn_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    assert seqused_q is seqused_k is qv is None
    assert causal is True
    left, right = window_size
    assert right in (-1, 0)
    seen["deterministic"] = deterministic
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return by_definition(q, k, v, offsets, softmax_scale, left, softcap)


def flash_attn_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
    mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
    disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    assert qv is None
    assert causal is True
    left, right = window_size
    assert (left is None) == (right is None)
    seen["deterministic"] = deterministic
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    left = -1 if left is None else left
    return by_definition(q, k, v, offsets, softmax_scale, left, softcap), None


def varlen_attn_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1),
):  # fmt: skip
    left, right = window_size
    assert right == 0
    return by_definition(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, left)


seen: dict[str, Any] = {}
STAND_INS = {
    "flash_attn": flash_attn_2,
    "flash_attn_3": flash_attn_3,
    "flash_attn_4": flash_attn_4,
}

RUNS = (
    "Tensor{0} cum_seq_q, Tensor{0} cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
    "bool is_causal, "
)
WINDOW = "*, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"
OPERATORS = {
    "_flash_attention_forward": (
        f"(Tensor query, Tensor key, Tensor value, {RUNS.format('?')}bool return_debug_mask, "
        + WINDOW,
        " -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
        "Tensor debug_attn_mask)",
    ),
    "_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        f"{RUNS.format('')}Tensor rng_state, Tensor unused, {WINDOW}",
        " -> (Tensor, Tensor, Tensor)",
    ),
}
"""Begin and end of the schema in torch 2.11; later ones have more keywords, with defaults."""


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends take the stand-ins' device and precision."""
    monkeypatch.setattr(_flash, "DEVICES", ("cpu",))
    monkeypatch.setattr(_flash, "DTYPES", (torch.float64,))
    monkeypatch.setattr(_flash, "capability", lambda _: (9, 0))


@pytest.mark.parametrize("backend", KERNELS)
def test_recorded_signatures_are_those_of_the_installed_package(backend: str) -> None:
    if backend == "torch_varlen":
        installed, recorded = varlen.varlen_attn, varlen_attn_2_11
    else:
        try:
            package: Any = importlib.import_module(MODULES[backend])
        except ImportError as error:
            pytest.skip(f"{MODULES[backend]} cannot be imported here: {error}")
        if package.__file__ is None:
            pytest.skip(f"{MODULES[backend]} is only the folder of flash_attn.cute here")
        installed, recorded = package.flash_attn_varlen_func, STAND_INS[backend]
    compare_signatures(inspect.signature(installed), inspect.signature(recorded))


def compare_signatures(installed: inspect.Signature, recorded: inspect.Signature) -> None:
    """Same names, order, kinds and defaults; the installed one may end with more that has any."""
    found = [x.replace(annotation=x.empty) for x in installed.parameters.values()]
    expected = list(recorded.parameters.values())
    assert found[: len(expected)] == expected
    assert all(x.default is not x.empty for x in found[len(expected) :])


@pytest.mark.parametrize("name", list(OPERATORS))
def test_recorded_schemas_are_those_of_the_installed_torch(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    begin, end = OPERATORS[name]
    assert str(schema).startswith(f"aten::{name}{begin}")
    assert str(schema).endswith(end)
    assert all(x.has_default_value() for x in schema.arguments if x.kwarg_only)


@pytest.fixture
def stand_in(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Loads a backend with a stand-in for its kernel."""
    with varlen_kernels.on_cpu():

        def load(backend: str) -> Any:
            if backend in MODULES:
                sys.modules.pop(f"packstore.torch.attention.{backend}", None)
                for name in ("flash_attn", MODULES[backend]):
                    module = ModuleType(name)
                    module.__path__ = []
                    module.flash_attn_varlen_func = STAND_INS[backend]
                    monkeypatch.setitem(sys.modules, name, module)
            return ATTENTION.load(backend)

        yield load
    for backend in MODULES:
        sys.modules.pop(f"packstore.torch.attention.{backend}", None)
    _register.cache_clear()


def inputs(tokens: int, heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, 8), (tokens, heads, 8), (tokens, heads, 8))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def compare(attend: Any, heads: int, layout: AttentionLayout, **settings: Any) -> None:
    """Value and gradients against backend `reference`."""
    qkv = inputs(layout.num_queries, heads)
    found = attend(*qkv, layout, scale=0.3, **settings)
    expected = ATTENTION.load("reference")(*qkv, layout, scale=0.3, **settings)
    assert (found - expected).abs().max() < 1e-12
    upstream = torch.randn(found.shape, dtype=found.dtype)
    for a, b in zip(
        torch.autograd.grad(found, qkv, upstream),
        torch.autograd.grad(expected, qkv, upstream),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-11


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 1000])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("backend", KERNELS)
def test_the_call_means_the_same_as_reference(
    kit: SimpleNamespace,
    stand_in: Callable[[str], Any],
    backend: str,
    layout: str,
    heads: int,
    window: int | None,
    softcap: float | None,
) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "preference")
    attend = stand_in(backend)
    if backend == "torch_varlen" and softcap is not None:
        with pytest.raises(BackendError, match=r"soft-capped; found softcap 0\.7"):
            compare(attend, heads, batch.layout, sliding_window=window, softcap=softcap)
    else:
        compare(attend, heads, batch.layout, sliding_window=window, softcap=softcap)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_torch_2_11_gets_grouped_queries_without_a_keyword(
    kit: SimpleNamespace, on_cpu: None, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn_2_11)
    module = importlib.import_module("packstore.torch.attention.torch_varlen")
    monkeypatch.setattr(module, "GROUPS", {})
    batch = collate(kit.packed(EXAMPLES, [2, 3], "concat"), "preference")
    for window in (None, 3):
        compare(module.attend, heads, batch.layout, sliding_window=window)


@pytest.mark.parametrize("backend", list(MODULES))
def test_deterministic_algorithms_are_asked_for(
    kit: SimpleNamespace, stand_in: Callable[[str], Any], backend: str
) -> None:
    layout = collate(kit.packed(EXAMPLES, [2, 3], "concat"), "preference").layout
    attend = stand_in(backend)
    for wanted in (True, False):
        torch.use_deterministic_algorithms(wanted)
        attend(*inputs(layout.num_queries), layout, scale=0.3)
        assert seen["deterministic"] is wanted


@pytest.mark.parametrize("backend", KERNELS)
def test_models_run_through_it(
    kit: SimpleNamespace, stand_in: Callable[[str], Any], backend: str
) -> None:
    stand_in(backend)
    model = kit.tiny_model("mistral")
    for layout in ("concat", "shared_prefix"):
        batch = collate(kit.packed(EXAMPLES, [2, 3], layout), "preference")
        logits = {}
        for name in ("reference", backend):
            use_packed_attention(model, name)
            logits[name] = model(**batch.model_inputs()).logits
        assert (logits["reference"] - logits[backend]).abs().max() < 1e-11


def test_torch_varlen_stays_in_the_compiled_graph(
    kit: SimpleNamespace, stand_in: Callable[[str], Any]
) -> None:
    stand_in("torch_varlen")
    torch._dynamo.reset()
    model = use_packed_attention(kit.tiny_family("llama", num_hidden_layers=1), "torch_varlen")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        batch = collate(
            kit.packed(random_examples(3 + seed, seed=seed), [3 + seed], "concat"), "preference"
        )
        limit = torch._dynamo.config.patch(error_on_recompile=seed >= 2)
        with limit:
            found = compiled(**batch.model_inputs()).logits
        assert (found - model(**batch.model_inputs()).logits).abs().max() < 1e-11


@pytest.mark.parametrize("backend", KERNELS)
def test_refused_inputs(
    kit: SimpleNamespace,
    stand_in: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    attend = stand_in(backend)
    monkeypatch.undo()
    layout = collate(kit.packed(EXAMPLES, [2, 3], "concat"), "preference").layout
    qkv = inputs(layout.num_queries)
    where = f"attention backend '{backend}': tensors must be float16 or bfloat16"
    with pytest.raises(
        BackendError, match=f"{where}.*; found torch.float64 on cpu. Load the model"
    ):
        attend(*qkv, layout, scale=0.3)
    monkeypatch.setattr(_flash, "DEVICES", ("cpu",))
    mixed = [qkv[0].float(), *(x.bfloat16() for x in qkv[1:])]
    with pytest.raises(BackendError, match=r"found torch.bfloat16 and torch.float32 on cpu"):
        attend(*mixed, layout, scale=0.3)
    half = [x.bfloat16() for x in qkv]
    with pytest.raises(BackendError, match=r"heads must have one size.*; found 8 for .* and 6"):
        attend(*half[:2], half[2][..., :6], layout, scale=0.3)
    with pytest.raises(BackendError, match="a multiple of 8 up to 256; found 7 for queries"):
        attend(*(x[..., :7] for x in half), layout, scale=0.3)


def test_flash_attn_4_needs_hopper(
    kit: SimpleNamespace, stand_in: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = stand_in("flash_attn_4")
    layout = collate(kit.packed(EXAMPLES, [2, 3], "concat"), "preference").layout
    attend(*inputs(layout.num_queries), layout, scale=0.3)
    monkeypatch.setattr(_flash, "capability", lambda _: (8, 6))
    with pytest.raises(BackendError, match=r"capability 9 or newer .*; found 8.6. Use backend="):
        attend(*inputs(layout.num_queries), layout, scale=0.3)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("flash_attn", r"package 'flash_attn'.*--no-build-isolation 'packstore\[flash\]'"),
        (
            "flash_attn_3",
            r"module 'flash_attn_interface'.*Run: git clone .*/flash-attention/hopper",
        ),
        ("flash_attn_4", r"package 'flash_attn.*'.*Run: pip install 'packstore\[flash4\]'"),
    ],
)
def test_an_absent_package_gives_the_install_line(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, backend: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[backend], None)
    monkeypatch.delitem(sys.modules, f"packstore.torch.attention.{backend}", raising=False)
    with pytest.raises(MissingExtraError, match=message):
        use_packed_attention(kit.tiny_model(), backend)


@pytest.mark.parametrize(
    ("flash", "dtype", "heads", "softcap", "expected"),
    [
        (True, torch.bfloat16, True, False, "torch_varlen"),
        (True, torch.float16, True, False, "torch_varlen"),
        (True, torch.bfloat16, True, True, "flex"),
        (True, torch.bfloat16, False, False, "flex"),
        (True, torch.float32, True, False, "sdpa"),
        (True, torch.float32, True, True, "reference"),
        (False, torch.bfloat16, True, False, "sdpa"),
        (False, torch.float32, True, False, "sdpa"),
        (False, torch.float64, False, True, "reference"),
    ],
)
def test_what_auto_chooses(
    flash: bool, dtype: torch.dtype, heads: bool, softcap: bool, expected: str
) -> None:
    assert _auto.choose(flash, dtype, heads, softcap) == expected
