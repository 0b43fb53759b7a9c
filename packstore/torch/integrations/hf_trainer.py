"""A mixin that makes transformers' Trainer train on packed batches::

    class PackedTrainer(PackedTrainerMixin, Trainer):
        pass

    PackedTrainer(
        use_packed_attention(model),
        TrainingArguments(output_dir="run"),
        train_dataset="prefs-8k",               # or a PackedDataset, with side data
        data_collator=PackCollator("preference"),
        packed_loss=PackedLoss(loss_fn, reference),
    ).train()

Saving, resuming, evaluation, accumulation and mixed precision remain the trainer's. TRL's
DPOTrainer on packs is :class:`packstore.torch.PackedDPOTrainer`.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from packstore.errors import ConfigError, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.integrations.hf_collator import LOGITS_TO_KEEP, PackedLoss
from packstore.torch.models.compatibility import check_model
from packstore.torch.models.unwrap import unwrapped

logger = logging.getLogger(__name__)

Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""Setting -> the values that are taken, and what to do for another."""

REFUSED: Refusals = {
    "average_tokens_across_devices": ((True,), "The loss divides by the examples of all ranks"),
    "label_smoothing_factor": ((0, 0.0), "Label smoothing is part of the loss: take cdpo"),
    "neftune_noise_alpha": ((None,), "Its noise would depend on the length of the packed row"),
    "parallelism_config": ((None,), "Split rows by packstore.torch.parallel in your own loop"),
}
"""Settings of transformers' TrainingArguments that packs do not go with; all others are taken."""


class PackedTrainerMixin:
    """Takes the loss from :class:`~packstore.torch.PackedLoss`, and logs its metrics.

    They appear beside the Trainer's own, under TRL's names (``rewards/accuracies``,
    ``logps/chosen``, …), with the prefix ``eval_`` in an evaluation; ``eval_loss`` is the mean over
    all pairs. Datasets given by keyword may be packstore datasets, or their folders or URLs.

    Args:
        packed_loss: the loss.
        args, kwargs: arguments of the trainer.

    Raises:
        ConfigError: a setting of the trainer is in :data:`REFUSED`; there is no collator of packs;
            or the dataset splits itself over the ranks, which the trainer does too.
        CompatibilityError: the reference shares weights with the policy; or the model's config asks
            for a load-balancing loss of its experts, which its routers cannot give.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, packed_loss: PackedLoss, **kwargs: Any) -> None:
        for name in ("train_dataset", "eval_dataset"):
            if name in kwargs:
                kwargs[name] = as_packed(kwargs[name])
        super().__init__(*args, **kwargs)
        trainer: Any = self
        self._check(trainer)
        self.packed_loss = self.compute_loss_func = packed_loss
        packed_loss.bind(trainer.model, getattr(trainer, "ref_model", None))
        models = [trainer.model, packed_loss.reference]
        # Metrics of the user's own get the logits of all tokens.
        self._keeps_few = trainer.compute_metrics is None and all(map(_keeps_few, models))
        given = getattr(trainer.args, "router_aux_loss_coef", None)  # TRL's setting
        if given is not None and packed_loss.loss_fn.router_aux_loss_coef is None:
            packed_loss.loss_fn.router_aux_loss_coef = given
        ranks = trainer.accelerator.num_processes
        if isinstance(trainer.train_dataset, PackedDataset) and ranks > 1:
            # Otherwise Accelerate repeats the first packs to fill up the last batch.
            trainer.args.dataloader_drop_last = True
            most = ranks * trainer.args.per_device_train_batch_size - 1
            logger.warning(
                "Up to %d packs at the end of each epoch are left out: the Trainer needs as many "
                "batches on each of %d ranks. packstore train leaves none out.", most, ranks,
            )  # fmt: skip
        trainer.accelerator.dataloader_config.dispatch_batches = False

    def _check(self, trainer: Any) -> None:
        """Refuses settings, collators and datasets that would train on something else."""
        where = type(self).__name__
        if any(c.__module__.startswith("trl.") for c in type(self).__mro__):
            must = "the mixin goes before transformers' Trainer; found a trainer of TRL"
            raise ConfigError(f"{where}: {must}. For DPO take packstore.torch.PackedDPOTrainer.")
        check_settings(trainer.args, REFUSED)
        self._check_data(trainer, where)

    def _check_data(self, trainer: Any, where: str) -> None:
        if trainer.data_collator.__module__.startswith(("transformers.", "trl.")):
            raise ConfigError(
                f"{where}: batches must be packed; found the default collator. "
                'Give data_collator=PackCollator("preference"), or of your kind of examples.'
            )
        config = trainer.args.accelerator_config
        for name in ("dispatch_batches", "split_batches"):
            if getattr(config, name, None):
                must = "must be off: a packed batch is whole, and cannot be cut up for other ranks"
                raise ConfigError(f"setting accelerator_config: {name} {must}; found True.")
        for part in _parts(trainer.train_dataset, trainer.eval_dataset):
            for dataset in part.stream.datasets:
                check_model(dataset, trainer.model)
            if part.world_size != 1:
                raise ConfigError(
                    f"{where}: the trainer deals packs to the ranks, so the dataset not; found "
                    f"a PackedDataset of rank {part.rank} of {part.world_size}. "
                    "Make it with rank=0, world_size=1."
                )
            if trainer.args.dataloader_num_workers and trainer.args.dataloader_drop_last:
                raise ConfigError(
                    "setting dataloader_num_workers must be 0 with dataloader_drop_last, which "
                    "would leave out packs of every worker; threads of packstore read ahead."
                )

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Uses the Trainer's method, which calls `compute_loss_func`; TRL's averages per batch."""
        from transformers import Trainer

        own: Any = self
        if self._keeps_few:
            inputs[LOGITS_TO_KEEP] = inputs["labels"].batch.targets.rows
        if torch.is_grad_enabled() and self.packed_loss.routers is not None:
            inputs["output_router_logits"] = True
        return Trainer.compute_loss(own, model, inputs, *args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as the trainer does; `eval_dataset` may be a packstore dataset or its URL."""
        given = as_packed(eval_dataset)
        return super().evaluate(given, *args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: predictions would be the logits of every token of each row.

        Raises:
            ConfigError: always.
        """
        rule = "it must be asked for metrics, by evaluate(eval_dataset)"
        remedy = "For values of each example use packstore.torch.evaluate(model, dataset)"
        raise ConfigError(sentence(type(self).__name__, rule, "predict", remedy))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the metrics since the last call, over all ranks; a collective call."""
        held_out = [n for n in logs if n.endswith("_loss") and n != "train_loss"]
        if "loss" in logs or "train_loss" in logs:  # the last record has those of the last steps
            means = self.packed_loss.trained()
            logs |= {name: value for name, value in means.items() if name != "loss"}
        elif held_out:
            prefix = held_out[0].removesuffix("loss")
            means = self.packed_loss.held_out.means()
            logs |= {f"{prefix}{name}": value for name, value in means.items()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def as_packed(data: Any) -> Any:
    """Returns packstore datasets, folders and URLs as streams of all packs; others as they are."""
    if isinstance(data, dict):
        return {name: as_packed(part) for name, part in data.items()}
    if isinstance(data, str | os.PathLike | Dataset):
        return PackedDataset(data, rank=0, world_size=1)
    return data


def check_settings(args: Any, refused: Refusals) -> None:
    """Refuses settings that are set to something else than what packs go with."""
    for name, (taken, remedy) in refused.items():
        value = getattr(args, name, taken[0])
        if value not in taken:
            raise ConfigError(
                f"setting {name} must be {taken[0]!r} with packs; found {value!r}. {remedy}."
            )


def _parts(*datasets: Any) -> Iterable[PackedDataset]:
    for dataset in datasets:
        for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
            if isinstance(part, PackedDataset):
                yield part


def _keeps_few(model: Any) -> bool:
    """Returns True if the model can leave out logits, or if there is none."""
    names = inspect.signature(unwrapped(model).forward).parameters if model is not None else ()
    return model is None or LOGITS_TO_KEEP in names
