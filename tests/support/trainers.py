"""transformers' Trainer on packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packstore.torch import PackCollator, PackedDataset, PackedLoss, PackedTrainerMixin


def make_trainer(
    model: Any,
    dataset: Any,
    loss: PackedLoss,
    folder: Path | str,
    collator: Any = None,
    metrics: Any = None,
    **arguments: Any,
) -> Any:
    """A trainer that trains and evaluates on `dataset`, in its order, and logs each step."""
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(PackedTrainerMixin, Trainer):
        pass

    defaults = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    data = dataset
    if not isinstance(data, PackedDataset):
        data = PackedDataset(dataset, rank=0, world_size=1, shuffle=False)
    return PackedTrainer(
        model,
        TrainingArguments(output_dir=str(folder), **defaults | arguments),
        train_dataset=data,
        eval_dataset=data,
        data_collator=collator or PackCollator(data.kind, loss_fn=loss.loss_fn),
        compute_metrics=metrics,
        packed_loss=loss,
    )


def logged(trainer: Any, metric: str = "loss") -> list[dict[str, float]]:
    """The entries of its log that have this metric."""
    return [entry for entry in trainer.state.log_history if metric in entry]
