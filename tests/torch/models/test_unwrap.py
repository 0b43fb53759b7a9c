"""Each caller finds the same model inside DDP, FSDP, torch.compile and PEFT, in any
order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from packstore.errors import CompatibilityError
from packstore.torch import PackedPolicy, find_head, use_packed_attention

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT's calls of transformers
]


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def lora(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft", reason="adapters")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


ORDERS: dict[str, list[Callable[[Any], Any]]] = {
    "ddp": [DistributedDataParallel],
    "ema": [AveragedModel],
    "peft, compile, ddp": [lora, compiled, DistributedDataParallel],
    "compile, peft": [compiled, lora],
    "peft, ddp, compile": [lora, DistributedDataParallel, compiled],
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_caller_finds_the_model(kit: SimpleNamespace, order: str) -> None:
    model = wrapped = kit.tiny_model(dtype=torch.float32)
    for wrap in ORDERS[order]:
        wrapped = wrap(wrapped)
    if order == "ema":  # a copy
        model = wrapped.module
    assert use_packed_attention(wrapped, "reference") is wrapped
    assert model.config._attn_implementation.startswith("packstore_")
    assert find_head(wrapped).output is model.lm_head
    if compiled in ORDERS[order]:
        with pytest.raises(CompatibilityError, match="compiled"):
            PackedPolicy(wrapped)


def test_fsdp(kit: SimpleNamespace) -> None:
    """The first wraps; the second changes the class of the model in place."""
    sharded = lora(kit.tiny_model())
    fully_shard(
        sharded, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    )
    outer = FullyShardedDataParallel.__new__(
        FullyShardedDataParallel
    )  # its own needs a GPU
    nn.Module.__init__(outer)
    outer._fsdp_wrapped_module = kit.tiny_model()
    for wrapped, model in (
        (sharded, sharded.base_model.model),
        (outer, outer._fsdp_wrapped_module),
    ):
        use_packed_attention(wrapped)
        assert "forward" in vars(model)
        assert "forward" not in vars(wrapped) or wrapped is model


def test_mixed_precision_around_an_adapted_model(kit: SimpleNamespace) -> None:
    model = lora(kit.tiny_model())
    model._original_forward = model.forward  # as Accelerate leaves it
    with pytest.raises(CompatibilityError, match="PeftModel"):
        find_head(model)
