"""The probe for one's own model: it passes what is sound, and refuses every leak that
we know.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packstore.torch
from packstore.cli import main
from packstore.errors import BackendError, CompatibilityError
from packstore.torch import check_isolation, use_packed_attention
from packstore.torch.attention import ATTENTION

OWN = "layout"


class Wrapper(nn.Module):
    """A prepared model behind a forward call of its own."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**self.changed(**inputs))

    def changed(self, **inputs: Any) -> dict[str, Any]:
        return inputs


class Deaf(Wrapper):
    """Positions that run on over the row."""

    def changed(
        self, position_ids: Tensor | None = None, **inputs: Any
    ) -> dict[str, Any]:
        return {
            **inputs,
            "position_ids": torch.arange(inputs["input_ids"].shape[1])[None],
        }


class Shifting(Wrapper):
    """Each token sees something of the token before it, whose ever it is."""

    def changed(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        rows = self.inner.get_input_embeddings()(input_ids)
        return {
            **inputs,
            "inputs_embeds": rows + 0.3 * nn.functional.pad(rows, (0, 0, 1, -1)),
        }


class Jumping(Wrapper):
    """One token of each packed row goes to another expert."""

    def forward(self, **inputs: Any) -> Any:
        output = self.inner(**inputs)
        if "packed_layout" in inputs:
            output.logits[0, 3] += 10
        return output


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
        head = k_[: len(q_)], v_[: len(q_)]
        outputs.append(ATTENTION.load("reference")(q_, *head, one, settings))
    return torch.cat(outputs)


def with_the_token_before(
    q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any
) -> Tensor:
    """A leak of one token over each border."""
    output = ATTENTION.load("reference")(q, k, v, layout, settings)
    return output + 0.2 * nn.functional.pad(output, (0, 0, 0, 0, 1, -1))


def rounded(q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any) -> Tensor:
    """Rounds as coarse kernels do."""
    output = ATTENTION.load("reference")(q, k, v, layout, settings)
    return output * (1 + 0.1 * torch.randn_like(output))


def without(name: str) -> Callable[..., Tensor]:
    """Attention that forgets a setting of the layer."""

    def forgetful(
        q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any
    ) -> Tensor:
        settings = settings._replace(**{name: None})
        return ATTENTION.load("reference")(q, k, v, layout, settings)

    return forgetful


@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
def test_it_passes_and_leaves_the_model_as_it_was(
    kit: SimpleNamespace, backend: str
) -> None:
    torch._dynamo.reset()
    model = kit.tiny_model("mistral", torch.float32).train()
    before = model.config._attn_implementation
    assert check_isolation(model, backend) < 1e-4
    assert model.config._attn_implementation == before
    assert model.training


@pytest.mark.parametrize(
    ("name", "dtype", "settings"),
    [
        ("llama", torch.float16, {}),
        ("gemma2", torch.bfloat16, {"tie_word_embeddings": True}),
        ("qwen3_moe", torch.float16, {}),
        ("mixtral", torch.bfloat16, {}),
        ("mixtral", torch.float32, {"router_jitter_noise": 0.5}),
    ],
)
def test_it_passes_through_rounding_and_noise(
    kit: SimpleNamespace, name: str, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """Experts, between which rounding moves tokens, tied heads, and noise in
    routers.
    """
    model = kit.tiny_family(name, torch.float32, **settings).to(dtype)
    assert check_isolation(model.train(), "auto") < 1


def test_single_tokens_may_jump_only_where_rounding_chooses_experts(
    kit: SimpleNamespace,
) -> None:
    for name, dtype, sound in (
        ("mixtral", torch.bfloat16, True),
        ("mixtral", torch.float32, False),
        ("llama", torch.bfloat16, False),
    ):
        model = Jumping(
            use_packed_attention(kit.tiny_family(name, torch.float32).to(dtype))
        )
        if sound:
            check_isolation(model)
        else:
            with pytest.raises(BackendError, match=OWN):
                check_isolation(model)


def test_it_fails_on_an_unprepared_model(kit: SimpleNamespace) -> None:
    """transformers cuts rows where positions restart, which tears off a shared
    prefix.
    """
    with pytest.raises(BackendError, match="'sdpa'"):
        check_isolation(kit.tiny_model(dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("wrong", "layout"),
    [
        # Rotary positions are relative, so only shared keys stand at wrong distances.
        (Deaf, "shared_prefix"),
        (Shifting, "concat"),
        (whole_row, "concat"),
        (with_the_token_before, "concat"),
        (top_left, "shared_prefix"),
    ],
)
def test_it_fails_on_leaks_and_wrong_positions(
    kit: SimpleNamespace,
    new_backend: Callable[[Any], str],
    wrong: Any,
    layout: str,
    dtype: torch.dtype,
) -> None:
    model = kit.tiny_model(dtype=dtype)
    backend = None
    if isinstance(wrong, type):
        model = wrong(use_packed_attention(model))
    else:
        backend = new_backend(wrong)
    with pytest.raises(BackendError, match=f"layout {layout}"):
        check_isolation(model, backend)


@pytest.mark.parametrize(
    ("name", "settings", "dropped"),
    [
        ("gpt_oss", {}, "sinks"),
        ("llama4_text", {"attention_chunk_size": 8}, "chunk"),
        ("mistral", {"sliding_window": 8}, "window"),
        ("mistral", {"sliding_window": 60, "max_position_embeddings": 128}, "window"),
        ("gemma2", {"attn_logit_softcapping": 0.5}, "softcap"),
    ],
)
def test_it_fails_where_attention_forgets_something(
    kit: SimpleNamespace,
    new_backend: Callable[[Any], str],
    name: str,
    settings: dict[str, Any],
    dropped: str,
) -> None:
    model = kit.tiny_family(name, torch.float32, **settings)
    check_isolation(model, "reference")
    with pytest.raises(BackendError, match="layout concat"):
        check_isolation(model, new_backend(without(dropped)))


@pytest.mark.parametrize(
    ("name", "mixer"), [("qwen3_next", "linear_attn"), ("mamba", "mixer")]
)
def test_it_fails_where_a_state_is_carried_over(
    kit: SimpleNamespace, name: str, mixer: str
) -> None:
    kinds = (
        {"layer_types": ["linear_attention", "full_attention"]}
        if name != "mamba"
        else {}
    )
    model = use_packed_attention(kit.tiny_family(name, torch.float32, **kinds))
    assert check_isolation(model) < 1e-3
    for path, module in model.named_modules():
        if path.endswith(mixer):
            del module.forward  # that of its class again
    with pytest.raises(BackendError, match="convolution"):
        check_isolation(model)


def test_weights_that_are_not_finite_are_named(kit: SimpleNamespace) -> None:
    model = kit.tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(CompatibilityError, match="logits"):
        check_isolation(model, "sdpa")


def test_it_says_when_it_cannot_tell(
    kit: SimpleNamespace, new_backend: Callable[[Any], str]
) -> None:
    """Attention that hardly matters, in coarse numbers."""
    model = kit.tiny_model(dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.01
    torch.manual_seed(0)
    with pytest.raises(BackendError, match="float32"):
        check_isolation(model, new_backend(rounded))


def test_lengths_that_are_not_reached_are_named(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "packstore")
    for positions, message in (
        (10_000, ""),
        (110, "the probe stops at 110 tokens: nothing beyond 100 was compared"),
    ):
        settings = {"sliding_window": 100, "max_position_embeddings": positions}
        check_isolation(kit.tiny_family("mistral", torch.float32, **settings), "sdpa")
        assert ("was compared" in caplog.text) == bool(message)
        assert message in caplog.text


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_commands_stop_where_packing_would_show(
    kit: SimpleNamespace,
    tmp_path: Path,
    new_backend: Callable[[Any], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = kit.short_run(tmp_path)
    leaking, out = new_backend(with_the_token_before), str(tmp_path / "out")
    with pytest.raises(BackendError, match=OWN):
        packstore.torch.train(
            **settings, attention=leaking, loss="simpo", output_dir=out
        )
    model = ["--model", settings["model"], "--attention", leaking, "--use-cpu"]
    for command, *where in (("ref-logps", out), ("evaluate", "--loss", "simpo")):
        call = [command, settings["train_dataset"], *where, *model]
        assert main(call) == 1
        assert OWN in " ".join(capsys.readouterr().err.split())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_a_run_may_begin_where_the_probe_cannot_tell(
    kit: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**kit.short_run(tmp_path), "loss": "simpo", "max_steps": 1}
    model = kit.tiny_model(dtype=torch.float32)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)  # so that no token sees another
    model.save_pretrained(tmp_path / "deaf")
    with caplog.at_level("INFO", "packstore"):
        packstore.torch.train(**settings, output_dir=str(tmp_path / "a"))
        assert "packed and unpacked logits differ by" in caplog.text
        settings["model"] = str(tmp_path / "deaf")
        packstore.torch.train(**settings, output_dir=str(tmp_path / "b"))
    assert "the probe gave no result: " in caplog.text
