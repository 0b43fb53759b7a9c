"""Heads of model families: found by their public interface, proved, and used without
logits.
"""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packstore.errors import CompatibilityError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedPolicy,
    collate,
    find_head,
    packed_logps,
    segment_logps,
    use_packed_attention,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None},
    "phi": {},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "qwen2": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def batch(kit: SimpleNamespace) -> PackedBatch:
    examples = random_examples(4, seed=2)
    return collate(kit.packed(examples, [2, 2], "shared_prefix"), "preference")


def gradients(model: nn.Module, logps: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logps * torch.arange(1, len(logps) + 1)).sum().backward()
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def check_head(model: Any, batch: PackedBatch) -> dict[str, Tensor]:
    """Compares log-probs and gradients with those from logits; returns the
    gradients.
    """
    expected = segment_logps(batch, logits=model(**batch.model_inputs()).logits)
    found = packed_logps(model, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    wanted, given = gradients(model, expected), gradients(model, found)
    assert wanted.keys() == given.keys()
    for parameter, gradient in given.items():
        torch.testing.assert_close(gradient, wanted[parameter], rtol=0, atol=1e-8)
    return given


@pytest.mark.parametrize("name", FAMILIES)
def test_families(
    kit: SimpleNamespace, batch: PackedBatch, exact: None, name: str
) -> None:
    model = use_packed_attention(kit.tiny_family(name, **FAMILIES[name])).train()
    if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
        nn.init.normal_(bias)
    check_head(model, batch)
    assert model.training
    tied = find_head(model).weight is model.get_input_embeddings().weight
    assert tied == model.config.get_text_config().tie_word_embeddings


def test_the_proof_is_run_once_and_leaves_the_model_alone(kit: SimpleNamespace) -> None:
    model = kit.tiny_model().train()
    before = copy.deepcopy(model.state_dict())
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert find_head(model) is find_head(model)
    assert calls == [1]
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not model.model._forward_hooks
    assert all(p.grad is None for p in model.parameters())


CHANGES = {
    "a softcap": lambda m: setattr(m.config, "final_logit_softcapping", None),
    "another cap": lambda m: setattr(m.config, "final_logit_softcapping", 5.0),
    "a scale": lambda m: setattr(m.config, "logits_scaling", 2.0),
    "a hook": lambda m: m.lm_head.register_forward_hook(lambda *a: 2 * a[2]),
    "a hook of the model": lambda m: m.register_forward_hook(double_logits),
    "a forward call": lambda m: setattr(
        m.lm_head, "forward", lambda x: 2 * x @ m.lm_head.weight.T
    ),
    "a module": lambda m: setattr(
        m, "lm_head", Doubled(32, 50, bias=False, dtype=torch.float64)
    ),
}


def double_logits(_: Any, __: Any, output: Any) -> Any:
    output.logits = 2 * output.logits
    return output


def test_a_proof_keeps_no_model(kit: SimpleNamespace) -> None:
    """Whose memory on a GPU the next model of the process needs."""
    model = use_packed_attention(kit.tiny_model())
    find_head(model)
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_the_proof_is_used_or_refused(
    kit: SimpleNamespace, batch: PackedBatch, name: str
) -> None:
    model = use_packed_attention(kit.tiny_family("gemma2", **FAMILIES["gemma2"]))
    find_head(model)
    CHANGES[name](model)
    expected = segment_logps(batch, logits=model(**batch.model_inputs()).logits)
    try:
        found = packed_logps(model, batch)
    except CompatibilityError as error:
        assert "segment_logps" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert name in ("a softcap", "another cap")


class Doubled(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


class Curved(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        return 30 * torch.tanh(logits / 30)


@pytest.mark.parametrize("kind", [Doubled, Curved])
def test_an_unknown_head_is_found_out(
    kit: SimpleNamespace, kind: type[nn.Linear]
) -> None:
    model = kit.tiny_model()
    head = kind(32, kit.VOCAB, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(
            1e-4 * model.lm_head.weight
        )  # so small that a cap does not show by itself
    model.lm_head = head
    with pytest.raises(CompatibilityError, match="logits"):
        find_head(model)


@pytest.mark.parametrize(
    ("break_it", "mentioned"),
    [
        (lambda m: m.model, "get_output_embeddings"),
        (lambda m: nn.Linear(2, 2), "get_output_embeddings"),
        (lambda m: setattr(m, "lm_head", nn.Identity()) or m, "Identity"),
    ],
)
def test_refusals(kit: SimpleNamespace, break_it: Any, mentioned: str) -> None:
    with pytest.raises(CompatibilityError, match=f"{mentioned}.*segment_logps"):
        find_head(break_it(kit.tiny_model()))


of_peft = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # from its calls of transformers


def lora(model: nn.Module, **settings: Any) -> Any:
    peft = pytest.importorskip("peft", reason="adapters")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, init_lora_weights=False, task_type="CAUSAL_LM", **settings
    )
    return peft.get_peft_model(model, config).double()


@of_peft
@pytest.mark.parametrize("whole_head", [False, True])
def test_adapters(kit: SimpleNamespace, batch: PackedBatch, whole_head: bool) -> None:
    """Also with the head among the modules that PEFT saves whole."""
    base = use_packed_attention(kit.tiny_model())
    plain = packed_logps(base, batch).detach()
    saved = {"modules_to_save": ["lm_head"]} if whole_head else {}
    model = lora(base, target_modules=["q_proj", "v_proj"], **saved)
    if whole_head:
        with torch.no_grad():
            find_head(model).weight.mul_(2)
    given = check_head(model, batch)
    assert (packed_logps(model, batch) - plain).abs().max() > 1e-3
    assert all("lora" in name or "modules_to_save" in name for name in given)
    assert any("modules_to_save" in name for name in given) == whole_head
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(
            packed_logps(model, batch), plain, rtol=0, atol=1e-12
        )


@of_peft
def test_adapters_that_it_would_miss_are_refused(
    kit: SimpleNamespace, batch: PackedBatch
) -> None:
    model = use_packed_attention(kit.tiny_model())
    find_head(model)  # proved before the adapter takes the place of the head
    with pytest.raises(CompatibilityError, match="LoRA"):
        packed_logps(lora(model, target_modules=["lm_head"]), batch)


def test_wrappers(kit: SimpleNamespace, batch: PackedBatch, one_rank: None) -> None:
    model = use_packed_attention(kit.tiny_model())
    expected = packed_logps(model, batch)
    assert find_head(torch.compile(model, backend="eager")) is find_head(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert find_head(wrapped) is find_head(model)
    with torch.no_grad():
        assert torch.equal(packed_logps(wrapped, batch), expected)
    with pytest.raises(CompatibilityError, match="PackedPolicy"):
        packed_logps(wrapped, batch)
    policy = nn.parallel.DistributedDataParallel(PackedPolicy(model))
    assert torch.equal(policy(batch), expected)


def test_a_vocabulary_that_grew_and_half_precision(kit: SimpleNamespace) -> None:
    model = kit.tiny_model(dtype=torch.bfloat16)
    assert find_head(model).weight.shape == (kit.VOCAB, 32)
    model.resize_token_embeddings(kit.VOCAB + 3, mean_resizing=False)
    assert find_head(model).weight.shape == (kit.VOCAB + 3, 32)


@pytest.mark.filterwarnings("ignore")  # torch's own, in dynamo
def test_a_compiler_is_not_stripped(kit: SimpleNamespace, batch: PackedBatch) -> None:
    """The backbone is called without the head: what compiles the model's own call would
    not run.
    """
    in_place = use_packed_attention(kit.tiny_model())
    in_place.compile(backend="eager")
    outside = torch.compile(use_packed_attention(kit.tiny_model()), backend="eager")
    for compiled in (outside, in_place):
        for call in (lambda m: packed_logps(m, batch), PackedPolicy):
            with pytest.raises(CompatibilityError, match=r"torch\.compile"):
                call(compiled)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, in dynamo
def test_a_compiled_policy(kit: SimpleNamespace, batch: PackedBatch) -> None:
    """Or a compiled backbone, the part that is called."""
    frames: list[int] = []

    def counter(graph: Any, _: Any) -> Any:
        frames.append(1)
        return graph.forward

    expected = packed_logps(use_packed_attention(kit.tiny_model()), batch)
    policy = torch.compile(
        PackedPolicy(use_packed_attention(kit.tiny_model())), backend=counter
    )
    base = use_packed_attention(kit.tiny_model())
    base.model.compile(backend=counter)
    for call in (policy, lambda b: packed_logps(base, b)):
        torch._dynamo.reset()
        frames.clear()
        torch.testing.assert_close(call(batch), expected, rtol=0, atol=1e-12)
        assert frames


def test_a_forward_call_that_accelerate_changed(
    kit: SimpleNamespace, batch: PackedBatch
) -> None:
    """Its mixed precision would be passed over; the head is not to blame."""
    accelerate = pytest.importorskip(
        "accelerate", reason="accelerate is in the extra train"
    )
    model = use_packed_attention(kit.tiny_model(dtype=torch.float32))
    find_head(model)  # proved before
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        for call in (find_head, lambda m: packed_logps(m, batch), PackedPolicy):
            with pytest.raises(CompatibilityError, match="mixed precision"):
                call(prepared)
        plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        exact = packed_logps(plain, batch)
        policy = accelerator.prepare_model(PackedPolicy(plain), evaluation_mode=True)
        assert 1e-6 < (policy(batch) - exact).abs().max() < 1
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
