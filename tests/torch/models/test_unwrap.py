"""Each caller finds the same model inside DDP, FSDP, torch.compile and PEFT, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from packstore.errors import CompatibilityError
from packstore.torch.logprobs.head import find_head
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.routers import router_settings
from packstore.torch.models.unwrap import adapted, check_not_compiled, layers, unwrapped
from packstore.torch.reference.reference_fingerprint import weights_sha256

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # from PEFT's calls of transformers

Wrap = Callable[[Any], Any]


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def lora(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft", reason="adapters")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


ORDERS: dict[str, list[Wrap]] = {
    "ddp": [DistributedDataParallel],
    "compile": [compiled],
    "ema": [AveragedModel],
    "peft, compile, ddp": [lora, compiled, DistributedDataParallel],
    "compile, peft": [compiled, lora],
    "compile, ddp": [compiled, DistributedDataParallel],
    "peft, ddp, compile": [lora, DistributedDataParallel, compiled],
}


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("order", ORDERS)
def test_every_caller_finds_the_model(kit: SimpleNamespace, order: str) -> None:
    model = kit.tiny_model(dtype=torch.float32)
    wrapped, peft_model = model, None
    sha256 = weights_sha256(model)
    for wrap in ORDERS[order]:
        if wrap is AveragedModel:  # a copy
            wrapped = wrap(wrapped)
            model = wrapped.module
        else:
            wrapped = wrap(wrapped)
        if wrap is lora:
            peft_model = wrapped
    assert unwrapped(wrapped) is model
    assert adapted(wrapped) is peft_model
    assert len(list(layers(wrapped))) == len(ORDERS[order]) + 1
    assert use_packed_attention(wrapped, "reference") is wrapped
    assert model.config._attn_implementation.startswith("packstore_")
    assert find_head(wrapped).output is model.lm_head
    assert weights_sha256(wrapped, adapter=False) == sha256
    if compiled in ORDERS[order]:
        with pytest.raises(CompatibilityError, match="found a compiled model"):
            check_not_compiled(wrapped)
    else:
        check_not_compiled(wrapped)
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.1
    with pytest.raises(CompatibilityError, match=f"experts of {type(model).__name__}: "):
        router_settings(wrapped)


def test_fsdp(kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wraps; the second changes the class of the model in place."""
    model = lora(kit.tiny_model())
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    assert fully_shard(model, mesh=mesh) is adapted(model) is model
    assert unwrapped(model) is model.base_model.model
    model = kit.tiny_model()
    outer = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its own needs a GPU
    nn.Module.__init__(outer)
    outer._fsdp_wrapped_module = model
    assert unwrapped(outer) is model


def test_what_is_no_wrapper(kit: SimpleNamespace) -> None:
    config = kit.tiny_model().config
    assert unwrapped(config) is config
    assert adapted(config) is None
    peft = pytest.importorskip("peft", reason="adapters")
    settings = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = kit.tiny_model()
    assert unwrapped(peft.get_peft_model(model, settings)) is model


def test_mixed_precision_around_an_adapted_model(kit: SimpleNamespace) -> None:
    model = lora(kit.tiny_model())
    model._original_forward = model.forward  # as Accelerate leaves it
    with pytest.raises(CompatibilityError, match=r"log-probs of PeftModel: .*mixed precision"):
        find_head(model)
