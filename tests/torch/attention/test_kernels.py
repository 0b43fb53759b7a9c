"""Calls of each flash kernel: signature tests, with a stand-in that computes by
definition.

Nothing here proves a kernel. The stand-ins have the signatures of flash-attn 2.8.3, of
flash-attention/hopper at 0f82fea and of torch 2.11, positional order included, and
refuse what those refuse; packages that are installed are
compared with them. For torch's own, the installed Python code runs, with a stand-in for
the two operators under it. The kernels themselves run in ``benchmarks/gpu_session.py``.
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
from packstore.torch import use_packed_attention
from packstore.torch.attention import ATTENTION, Settings, auto, flash, torch_varlen
from packstore.torch.batch import AttentionLayout

KERNELS = ("torch_varlen", "flash_attn", "flash_attn_3")
MODULES = {
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
}


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
    varlen_kernels.check(q, k, v, offsets)
    outputs, group = [], q.shape[1] // k.shape[1]
    for rows, keys in varlen_kernels.segments(*offsets[:2]):
        scores = varlen_kernels.scores_of(q[rows], k[keys], scale, left, 0)
        capped = scores if softcap == 0 else softcap * torch.tanh(scores / softcap)
        weights = capped.masked_fill(scores.isinf(), float("-inf")).softmax(-1)
        outputs.append(
            torch.einsum("nqk,knh->qnh", weights, v[keys].repeat_interleave(group, 1))
        )
    return torch.cat(outputs)


def called(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any, window_size: Any, **given: Any
) -> Tensor:
    """What the kernels compute from arguments that all versions name alike."""
    left, right = window_size
    assert given["causal"] is True
    assert right in (-1, 0, None)
    seen["deterministic"] = given["deterministic"]
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    cu_q, cu_k, max_q, max_k = (given[name] for name in names)
    left = -1 if left is None else left
    return by_definition(
        q, k, v, (cu_q, cu_k, max_q, max_k), softmax_scale, left, given["softcap"]
    )


def flash_attn_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    return called(**locals())


def flash_attn_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    assert qv is None
    # Builds before 2025-11 return the log-sum-exp as well.
    return called(**locals()), None


def varlen_attn_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1),
):  # fmt: skip
    left, right = window_size
    assert right == 0
    return by_definition(
        query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, left
    )


seen: dict[str, Any] = {}
STAND_INS = {
    "flash_attn": flash_attn_2,
    "flash_attn_3": flash_attn_3,
}


@pytest.mark.parametrize("backend", KERNELS)
def test_recorded_signatures_are_those_of_the_installed_package(backend: str) -> None:
    """Same names, order, kinds and defaults; the installed one may end with more that
    has any.
    """
    if backend == "torch_varlen":
        installed, recorded = varlen.varlen_attn, varlen_attn_2_11
    else:
        try:
            package: Any = importlib.import_module(MODULES[backend])
        except ImportError as error:
            pytest.skip(f"{MODULES[backend]} cannot be imported here: {error}")
        installed, recorded = package.flash_attn_varlen_func, STAND_INS[backend]
    signature = inspect.signature(installed)
    found = [x.replace(annotation=x.empty) for x in signature.parameters.values()]
    expected = list(inspect.signature(recorded).parameters.values())
    assert found[: len(expected)] == expected
    assert all(x.default is not x.empty for x in found[len(expected) :])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Loads a backend with a stand-in for its kernel."""
    with varlen_kernels.backend_on_cpu(monkeypatch):

        def load(backend: str) -> Any:
            if backend in MODULES:
                for name in ("flash_attn", MODULES[backend]):
                    module = ModuleType(name)
                    module.__path__ = []
                    module.flash_attn_varlen_func = STAND_INS[backend]
                    monkeypatch.setitem(sys.modules, name, module)
            return ATTENTION.load(backend)

        yield load


def inputs(layout: AttentionLayout, heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(layout.num_queries, n, 8) for n in (4, heads, heads)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.requires_grad_() for x in made]


def compare(
    attend: Any, heads: int, layout: AttentionLayout, settings: Settings
) -> None:
    """Value and gradients against backend `reference`."""
    qkv = inputs(layout, heads)
    found = attend(*qkv, layout, settings)
    expected = ATTENTION.load("reference")(*qkv, layout, settings)
    assert (found - expected).abs().max() < 1e-12
    upstream = torch.randn(found.shape, dtype=found.dtype)
    for a, b in zip(
        torch.autograd.grad(found, qkv, upstream),
        torch.autograd.grad(expected, qkv, upstream),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-11


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix", "forest"])
@pytest.mark.parametrize("backend", KERNELS)
def test_the_call_means_the_same_as_reference(
    kit: SimpleNamespace,
    stand_in: Callable[[str], Any],
    backend: str,
    layout: str,
    softcap: float | None,
) -> None:
    """For pairs and for five responses to a prompt, in deterministic algorithms too."""
    attend = stand_in(backend)
    for kind, heads, window in (
        *(("preference", 2, window) for window in (None, 3)),
        *(("scored", heads, None) for heads in (1, 4)),
    ):
        segments, settings = (
            kit.row(5, layout, kind).layout,
            Settings(0.3, window, softcap),
        )
        if backend == "torch_varlen" and softcap is not None:
            with pytest.raises(BackendError, match="softcap"):
                compare(attend, heads, segments, settings)
            continue
        torch.use_deterministic_algorithms(heads == 4)
        try:
            compare(attend, heads, segments, settings)
        finally:
            torch.use_deterministic_algorithms(False)
        if backend in MODULES:
            assert seen["deterministic"] is (heads == 4)


def test_gradients_of_copies_are_summed_in_float32() -> None:
    """256 + 1 + ... + 1: with bfloat16 sums each 1 is lost."""
    places, starts = torch.tensor([9, *range(9)]), torch.tensor([0, 1, 10, 10])
    grad = torch.tensor([256.0] + [1.0] * 8 + [5.0]).bfloat16()[:, None, None]
    found = torch_varlen.sum_over_copies(grad, places, starts)
    assert found.flatten().tolist() == [5, 264, 0]
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", KERNELS)
def test_refused_inputs(
    kit: SimpleNamespace,
    stand_in: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    attend = stand_in(backend)
    monkeypatch.undo()
    layout = kit.row().layout
    q, k, v = inputs(layout)
    with pytest.raises(BackendError, match=f"'{backend}'"):
        attend(q, k, v, layout, Settings(0.3))
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    half = [x.bfloat16() for x in (q, k, v)]
    for tensors, settings, message in (
        (
            (*half[:2], half[2][..., :6]),
            {},
            "heads",
        ),
        (
            [x[..., :7] for x in half],
            {},
            "heads",
        ),
        (
            half,
            {"chunk": 4},
            "chunks",
        ),
        (
            half,
            {"sinks": torch.zeros(4)},
            "sinks",
        ),
    ):
        with pytest.raises(BackendError, match=message):
            attend(*tensors, layout, Settings(0.3, **settings))


@pytest.mark.parametrize(
    ("backend", "install"),
    [
        ("flash_attn", r"packstore\[flash\]"),
        ("flash_attn_3", "flash-attention/hopper"),
    ],
)
def test_an_absent_package_gives_the_install_line(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, backend: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[backend], None)
    with pytest.raises(MissingExtraError, match=install):
        use_packed_attention(kit.tiny_model(), backend)


@pytest.mark.parametrize(
    ("on_gpu", "dtype", "supported", "capped", "expected"),
    [
        (True, torch.bfloat16, True, False, "torch_varlen"),
        (True, torch.float16, True, False, "torch_varlen"),
        (True, torch.bfloat16, True, True, "flex"),
        (True, torch.bfloat16, False, False, "flex"),
        (True, torch.float32, True, False, "sdpa"),
        (True, torch.float32, True, True, "reference"),
        (False, torch.bfloat16, True, False, "sdpa"),
        (False, torch.float64, False, True, "reference"),
    ],
)
def test_what_auto_chooses(
    on_gpu: bool, dtype: torch.dtype, supported: bool, capped: bool, expected: str
) -> None:
    assert auto.choose(on_gpu, dtype, supported, capped) == expected
