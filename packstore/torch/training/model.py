"""Loads the model that a run trains, and probes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, sentence
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.models.load import add_lora, checkpoint_gradients, is_adapter, load_model
from packstore.torch.models.probe import probe_model
from packstore.torch.training.checkpoint import MODEL
from packstore.torch.training.reference import REF_ADAPTER


def make_model(config: TrainConfig, checkpoint: Path | None, loss_fn: PreferenceLoss) -> Any:
    """Loads the starting or checkpointed model, with its trained weights unfrozen."""
    goes_on = is_adapter(config.model)
    if goes_on and config.lora_rank is not None:
        do = "Leave lora_rank out to train it further, or merge it first"
        raise ConfigError(sentence("lora_rank", "the model must have no adapter", config.model, do))
    path = config.model if checkpoint is None else checkpoint / MODEL
    model = load_model(
        path,
        dtype=config.dtype,
        attention=config.attention,
        trainable=True,
        disable_dropout=config.disable_dropout,
    )
    if config.lora_rank is not None and checkpoint is None:
        model = add_lora(
            model,
            config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            targets=config.lora_targets,
        )
    if goes_on and loss_fn.reference and config.reference_model is None:
        model.load_adapter(config.model, REF_ADAPTER, is_trainable=False)
    if config.gradient_checkpointing:
        checkpoint_gradients(model)
    return model


def probe(config: TrainConfig, accelerator: Any, model: Any) -> None:
    """Compares packed with unpacked logits, on the device and in the precision of the run."""
    if not config.probe:
        return
    if accelerator.distributed_type in ("NO", "MULTI_GPU"):  # else a device may not hold it whole
        model.to(accelerator.device)
    with accelerator.autocast():
        probe_model(model)
