"""The probe for one's own model: it passes what is sound, and names what is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packstore.errors import BackendError, CompatibilityError
from packstore.torch import check_isolation, use_packed_attention
from packstore.torch.attention import ATTENTION
from packstore.torch.models import own_attention


class Wrapper(nn.Module):
    """A prepared model behind a forward call of its own."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**self.changed(**inputs))

    def changed(self, **inputs: Any) -> dict[str, Any]:
        return inputs


class Deaf(Wrapper):
    """Positions that run on over the row."""

    def changed(self, position_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        return {**inputs, "position_ids": torch.arange(position_ids.shape[1])[None]}


class Shifting(Wrapper):
    """Each token sees something of the token before it, whose ever it is."""

    def changed(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        rows = self.inner.get_input_embeddings()(input_ids)
        return {**inputs, "inputs_embeds": rows + 0.3 * nn.functional.pad(rows, (0, 0, 1, -1))}


class Jumping(Wrapper):
    """One token of each call goes to another expert."""

    def forward(self, **inputs: Any) -> Any:
        output = self.inner(**inputs)
        output.logits[0, torch.randint(output.logits.shape[1], ())] += 10
        return output


@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_it_passes_and_leaves_the_model_as_it_was(
    kit: SimpleNamespace, name: str, backend: str
) -> None:
    torch._dynamo.reset()
    model = kit.tiny_model(name, torch.float32).train()
    before = model.config._attn_implementation
    assert check_isolation(model, backend) < 1e-4
    assert model.config._attn_implementation == before
    assert model.training


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_passes_in_half_precision(kit: SimpleNamespace, name: str, dtype: torch.dtype) -> None:
    """Also with experts, between which rounding moves tokens, and with tied heads."""
    tied = name in ("gemma2", "qwen2")
    model = kit.tiny_family(name, torch.float32, tie_word_embeddings=tied).to(dtype)
    assert check_isolation(model, "auto") < 1


def test_single_tokens_may_jump_only_where_rounding_chooses_experts(kit: SimpleNamespace) -> None:
    torch.manual_seed(0)
    for name, dtype, sound in (
        ("mixtral", torch.bfloat16, True),
        ("mixtral", torch.float32, False),
        ("llama", torch.bfloat16, False),
    ):
        model = Jumping(use_packed_attention(kit.tiny_family(name, torch.float32).to(dtype)))
        if sound:
            check_isolation(model)
        else:
            with pytest.raises(BackendError, match="must not move the logits of another"):
                check_isolation(model)


def test_it_passes_with_noise_in_routers(kit: SimpleNamespace) -> None:
    model = kit.tiny_family("mixtral", torch.float32, router_jitter_noise=0.5).train()
    check_isolation(model, "auto")


def test_it_fails_on_an_unprepared_model(kit: SimpleNamespace) -> None:
    model = kit.tiny_model(dtype=torch.float32)
    model.set_attn_implementation("plain_for_tests")  # one sequence per row, whatever the layout
    must = "layout concat: other tokens in one segment must not move the logits of another; found"
    with pytest.raises(BackendError, match=f"{must} .*its attention is 'plain_for_tests'"):
        check_isolation(model)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_it_fails_on_attention_that_infers_segments(
    kit: SimpleNamespace, implementation: str
) -> None:
    """transformers cuts rows where positions restart, which tears a shared prefix off."""
    model = kit.tiny_family("llama", torch.float32)
    model.set_attn_implementation(implementation)
    with pytest.raises(BackendError, match=f"Prepare the model .*'{implementation}'"):
        check_isolation(model)


def test_it_fails_on_wrong_positions(kit: SimpleNamespace) -> None:
    # Rotary positions are relative, so only keys that a segment shares stand at wrong distances.
    model = Deaf(use_packed_attention(kit.tiny_model(dtype=torch.float32)))
    must = "layout shared_prefix: a segment must have the logits of its sequence alone"
    with pytest.raises(BackendError, match=f"{must}.*the model ignores position_ids"):
        check_isolation(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_fails_on_tokens_that_mix_outside_of_attention(
    kit: SimpleNamespace, dtype: torch.dtype
) -> None:
    model = Shifting(use_packed_attention(kit.tiny_model(dtype=dtype)))
    with pytest.raises(BackendError, match=r"must not move .*outside of attention \(a convolution"):
        check_isolation(model)


def whole_row(q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any) -> Tensor:
    """One causal segment, whatever the layout."""
    row = torch.tensor([0, len(q)], dtype=torch.int32)
    one = type(layout)(row, row, len(q), len(q), len(q))
    return ATTENTION.load("reference")(q, k, v, one, settings)


def top_left(q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any) -> Tensor:
    """Segments apart, but causal masks aligned at the start of the keys."""
    keys, values = layout.keys(k), layout.keys(v)
    outputs = []
    for q_, k_, v_ in layout.split(q, keys, values):
        ends = torch.tensor([0, len(q_)], dtype=torch.int32)
        one = type(layout)(ends, ends, len(q_), len(q_), len(q_))
        outputs.append(ATTENTION.load("reference")(q_, k_[: len(q_)], v_[: len(q_)], one, settings))
    return torch.cat(outputs)


def with_the_token_before(q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any) -> Tensor:
    """A leak of one token over each border."""
    output = ATTENTION.load("reference")(q, k, v, layout, settings)
    return output + 0.2 * nn.functional.pad(output, (0, 0, 0, 0, 1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (whole_row, "layout concat: other tokens in one segment .*If not, the backend leaks"),
        (with_the_token_before, "layout concat: other tokens .*If not, the backend leaks"),
        (top_left, "layout shared_prefix: a segment must have .*If not, the backend is wrong"),
    ],
)
def test_it_fails_on_a_broken_backend(
    kit: SimpleNamespace,
    new_backend: Callable[[Any], str],
    attend: Any,
    message: str,
    dtype: torch.dtype,
) -> None:
    with pytest.raises(BackendError, match=message):
        check_isolation(kit.tiny_model(dtype=dtype), new_backend(attend))


def test_weights_that_are_not_finite_are_named(kit: SimpleNamespace) -> None:
    model = kit.tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(CompatibilityError, match="its logits must be finite; found nan"):
        check_isolation(model, "sdpa")


def rounded(q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any) -> Tensor:
    """Rounds as coarse kernels do."""
    output = ATTENTION.load("reference")(q, k, v, layout, settings)
    return output * (1 + 0.1 * torch.randn_like(output))


@pytest.mark.parametrize(
    ("share", "must"),
    [(0.0, "no leak would show; found a difference of 0"), (0.01, "must not move the logits")],
)
def test_it_says_when_it_cannot_tell(
    kit: SimpleNamespace, new_backend: Callable[[Any], str], share: float, must: str
) -> None:
    """Attention that hardly matters, in coarse numbers."""
    model = kit.tiny_model(dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= share
    torch.manual_seed(0)
    with pytest.raises(BackendError, match=f"{must}.*within rounding.*the probe in float32"):
        check_isolation(model, new_backend(rounded))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("phimoe", {}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 2}),
        ("smollm3", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}),
    ],
)
@pytest.mark.parametrize("window", [8, 60])
def test_it_fails_where_a_window_is_dropped(
    kit: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, Any],
    window: int,
) -> None:
    """Packed and single sequences agree with each other, and not with the model's own attention."""
    more = {"sliding_window": window, "max_position_embeddings": 128}
    model = kit.tiny_family(name, torch.float32, **more, **settings)
    assert check_isolation(model, "sdpa") < 1e-3
    monkeypatch.setattr("packstore.torch.models.model.window_of", lambda mask, keyword: keyword)
    must = (
        "beside attention 'eager': a sequence must have the logits that the model's own attention"
    )
    with pytest.raises(BackendError, match=f"{must}.*found a difference of .*a mask of its own"):
        check_isolation(model, "sdpa")


def test_it_fails_where_a_cap_is_dropped(
    kit: SimpleNamespace, new_backend: Callable[[Any], str]
) -> None:
    def uncapped(q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any) -> Tensor:
        return ATTENTION.load("reference")(q, k, v, layout, settings._replace(softcap=None))

    model = kit.tiny_family("gemma2", torch.float32, attn_logit_softcapping=0.5)
    with pytest.raises(BackendError, match="that the model's own attention gives it"):
        check_isolation(model, new_backend(uncapped))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_it_fails_where_tables_come_from_the_longest_sequence(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 48}
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5]}
    model = kit.tiny_family(
        "llama", torch.float32, rope_parameters=rope, max_position_embeddings=48
    )
    check_isolation(model, "sdpa")
    monkeypatch.setattr("packstore.torch.models.model._tables_by_length", lambda *_: False)
    use_packed_attention(model, "sdpa")
    with pytest.raises(BackendError, match="that the model's own attention gives it"):
        check_isolation(model)


def test_long_sequences_are_compared_with_sdpa_and_longer_ones_named(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("packstore.torch.models.own_attention.SCORES", 4 * 99**2)
    model = kit.tiny_family(
        "mistral", torch.float32, sliding_window=100, max_position_embeddings=10_000
    )
    called = []
    real = model.set_attn_implementation
    monkeypatch.setattr(model, "set_attn_implementation", lambda x: (called.append(x), real(x)))
    with caplog.at_level("INFO", "packstore"):
        check_isolation(model, "sdpa")
    assert "sdpa" in called
    assert "was compared" not in caplog.text
    monkeypatch.setitem(
        own_attention.WORK, "cpu", 99 * 4 * sum(map(torch.numel, model.parameters()))
    )
    with caplog.at_level("INFO", "packstore"):
        check_isolation(model, "sdpa")
    assert "the probe stops at 99 tokens: nothing beyond 100 was compared" in caplog.text


@pytest.mark.parametrize("name", ["deepseek_v3", "dots1", "glm4_moe", "minimax_m2"])
def test_routers_that_compute_in_float32_pass_in_float64(kit: SimpleNamespace, name: str) -> None:
    assert check_isolation(kit.tiny_family(name), "reference") < 1e-3


@pytest.mark.parametrize(
    ("name", "settings", "dropped"),
    [
        ("gpt_oss", {}, "sinks"),
        ("llama4_text", {"attention_chunk_size": 8}, "chunk"),
        ("mistral", {"sliding_window": 8}, "window"),
    ],
)
def test_it_fails_where_attention_forgets_something(
    kit: SimpleNamespace,
    new_backend: Callable[[Any], str],
    name: str,
    settings: dict[str, Any],
    dropped: str,
) -> None:
    def forgetful(q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any) -> Tensor:
        assert getattr(settings, dropped) is not None
        return ATTENTION.load("reference")(q, k, v, layout, settings._replace(**{dropped: None}))

    model = kit.tiny_family(name, torch.float32, **settings)
    check_isolation(model, "reference")
    check_isolation(model, "sdpa")
    with pytest.raises(BackendError, match="that the model's own attention gives it"):
        check_isolation(model, new_backend(forgetful))
