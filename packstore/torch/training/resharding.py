"""Reads checkpoints of a sharded run in one that is not, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor

WEIGHTS, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""Folders of a sharded checkpoint, by Accelerate's names."""


def is_sharded(checkpoint: Path) -> bool:
    """Returns True for a checkpoint that ranks wrote in shards."""
    return (checkpoint / WEIGHTS).is_dir()


def load_weights(model: Any, checkpoint: Path) -> None:
    """Loads the weights, or those of the adapter, of the other kind of checkpoint; collective."""
    if is_sharded(checkpoint):
        weights = _names(model)
        load({"model": weights}, checkpoint_id=checkpoint / WEIGHTS, no_dist=_alone())
        return
    files = [*checkpoint.glob("model*.safetensors"), *checkpoint.glob("adapter_model.safetensors")]
    whole: dict[str, Any] = {
        name: value for file in files for name, value in load_file(file).items()
    }
    if hasattr(model, "peft_config"):
        whole = {own: whole[name] for own, name in _adapter_names(model).items()}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, strict=False))


def load_optimizer(model: Any, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Loads the optimizer's state from the other kind of checkpoint; collective."""
    if is_sharded(checkpoint):
        own: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
        state = {"optimizer": {"state": own["state"]}}
        load(state, checkpoint_id=checkpoint / OPTIMIZER, no_dist=_alone())
        set_optimizer_state_dict(model, optimizer, own)
        return
    saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)["state"]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, values in saved.items():
        weight = weights[number]
        optimizer.state[weight] = {name: _like(weight, value) for name, value in values.items()}


def _like(weight: Tensor, value: Any) -> Any:
    if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.ndim:
        return distribute_tensor(value, weight.device_mesh, weight.placements)
    return value


def _names(model: Any) -> dict[str, Tensor]:
    """The weights of a whole model by their names in shards, as views."""
    state: dict[str, Tensor] = model.state_dict()
    if hasattr(model, "peft_config"):
        return {name: state[own] for own, name in _adapter_names(model).items()}
    return state


def _adapter_names(model: Any) -> dict[str, str]:
    """Names of the adapter's weights in the model, and in its file."""
    names = (name for name, weight in model.named_parameters() if weight.requires_grad)
    return {name: name.replace(".default.", ".") for name in names}


def _alone() -> bool:
    return not dist.is_initialized()
