"""A mixin that makes transformers' Trainer, or a subclass such as TRL's, train on packed batches::

    class PackedTrainer(PackedTrainerMixin, Trainer):       # or TRL's DPOTrainer
        pass

    PackedTrainer(
        use_packed_attention(model),
        TrainingArguments(output_dir="run"),
        train_dataset=PackedDataset(url, rank=0, world_size=1),   # Accelerate shards it over ranks
        data_collator=PackCollator("preference"),
        packed_loss=PackedLoss(loss_fn, reference),
    ).train()

Saving, resuming, evaluation, accumulation and mixed precision remain the trainer's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from packstore.errors import ConfigError
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.integrations.hf_collator import LOGITS_TO_KEEP, PackedLoss
from packstore.torch.models.routers import router_settings
from packstore.torch.models.unwrap import unwrapped


class PackedTrainerMixin:
    """Takes the loss from :class:`~packstore.torch.PackedLoss`, and logs its metrics.

    They appear beside the Trainer's own, under TRL's names (``rewards/accuracies``,
    ``logps/chosen``, …), with the prefix ``eval_`` in an evaluation; ``eval_loss`` is the mean over
    all pairs.

    Args:
        packed_loss: the loss.
        args, kwargs: arguments of the trainer.

    Raises:
        ConfigError: the dataset splits itself over the ranks, which the trainer does too.
        CompatibilityError: the model's config asks for a load-balancing loss of its experts, which
            its routers cannot give.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, packed_loss: PackedLoss, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packed_loss = self.compute_loss_func = packed_loss
        trainer: Any = self
        packed_loss.routers = router_settings(trainer.model)
        models = [trainer.model, packed_loss.reference]
        # Metrics of the user's own get the logits of all tokens.
        self._keeps_few = trainer.compute_metrics is None and all(map(_keeps_few, models))
        given = getattr(trainer.args, "router_aux_loss_coef", None)  # TRL's setting
        if given is not None and packed_loss.loss_fn.router_aux_loss_coef is None:
            packed_loss.loss_fn.router_aux_loss_coef = given
        for dataset in (trainer.train_dataset, trainer.eval_dataset):
            _check_whole(dataset)
        if isinstance(trainer.train_dataset, PackedDataset):
            # Otherwise Accelerate repeats the first packs to fill up the last batch.
            trainer.args.dataloader_drop_last = True
        loading = trainer.accelerator.dataloader_config
        if loading.dispatch_batches is None:  # a packed batch cannot be sliced for other ranks
            loading.dispatch_batches = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Uses the Trainer's method, which calls `compute_loss_func`; TRL's averages per batch."""
        from transformers import Trainer

        own: Any = self
        if self._keeps_few:
            inputs[LOGITS_TO_KEEP] = inputs["labels"].batch.targets.rows
        if torch.is_grad_enabled() and self.packed_loss.routers is not None:
            inputs["output_router_logits"] = True
        return Trainer.compute_loss(own, model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the metrics since the last call, over all ranks; a collective call."""
        held_out = [n for n in logs if n.endswith("_loss") and n != "train_loss"]
        if "loss" in logs:
            means = self.packed_loss.metrics.means()
            logs |= {name: value for name, value in means.items() if name != "loss"}
        elif held_out:
            prefix = held_out[0].removesuffix("loss")
            means = self.packed_loss.held_out.means()
            logs |= {f"{prefix}{name}": value for name, value in means.items()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def _keeps_few(model: Any) -> bool:
    """Returns True if the model can leave out logits, or if there is none."""
    names = inspect.signature(unwrapped(model).forward).parameters if model is not None else ()
    return model is None or LOGITS_TO_KEEP in names


def _check_whole(dataset: Any) -> None:
    """Refuses a dataset of packs, or one of several, that yields only this rank's share."""
    for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if isinstance(part, PackedDataset) and part.world_size != 1:
            raise ConfigError(
                "PackedTrainerMixin: the trainer deals packs to the ranks, so the dataset must "
                f"not; found a PackedDataset of rank {part.rank} of {part.world_size}. "
                "Make it with rank=0, world_size=1."
            )
