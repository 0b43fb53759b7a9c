"""DPO with Lightning from packed data: a ``LightningDataModule``, and resume inside an
epoch.

Takes a dataset and a causal LM, and trains it with Lightning's own loop, checkpoints
and ranks::

    packstore pack prefs.jsonl prefs-8k --tokenizer my-sft-model
    packstore ref-logps prefs-8k prefs-8k-ref --model my-sft-model
    python examples/lightning_datamodule.py my-sft-model prefs-8k prefs-8k-ref [last.ckpt]

Lightning saves the position of the loader in its checkpoints, as the loader has
``state_dict``. Save after a whole step: no checkpoint holds the gradients of half a
step. Each loss is divided by the count of its whole step, as its batch tells; optimizer
steps are taken by hand, because their number of batches is the loader's. It takes the
number of batches of the first epoch for that of all, and would leave out batches of the
others without a word: with ``examples_per_step`` or ``tokens_per_batch``, set
``reload_dataloaders_every_n_epochs=1``.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch

from packstore.torch import (
    Metrics,
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    PackedPolicy,
    PreferenceLoss,
)
from packstore.torch.models.load import load_model


class PackedData(lightning.LightningDataModule):
    """Packed training data, and packed validation data if there are any.

    Args:
        train: folder or URL of the dataset.
        ref_logps: side dataset of reference log-probs.
        validation: folder or URL of a held-out dataset.
        validation_ref_logps: its side dataset.
        batching: of the training, see ``PackedDataLoader``.
    """

    def __init__(
        self,
        train: str,
        ref_logps: str,
        *,
        validation: str | None = None,
        validation_ref_logps: str | None = None,
        **batching: Any,
    ) -> None:
        super().__init__()
        self.sources = {
            "train": (train, ref_logps),
            "held": (validation, validation_ref_logps),
        }
        self.batching = batching
        self.loader: PackedDataLoader | None = None

    def train_dataloader(self) -> PackedDataLoader:
        """The loader, in the epoch that begins; asked for in each, as its length
        differs.
        """
        if self.loader is None:
            url, side = self.sources["train"]
            self.loader = PackedDataLoader(
                PackedDataset(url, side=[side]), **self.batching
            )
        self.loader.set_epoch(self.trainer.current_epoch)
        return self.loader

    def val_dataloader(self) -> Any:
        url, side = self.sources["held"]
        if url is None:
            return []
        return PackedDataLoader(PackedDataset(url, shuffle=False, side=[side]))


class DPO(lightning.LightningModule):
    """A causal LM, trained by a preference loss.

    Args:
        model: as :func:`packstore.torch.models.load.load_model` gives it.
        loss_fn: the loss.
        learning_rate: of AdamW.
    """

    def __init__(
        self, model: Any, loss_fn: PreferenceLoss, learning_rate: float = 1e-6
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = PackedPolicy(model).train()
        self.loss_fn, self.learning_rate = loss_fn, learning_rate
        self.metrics, self.held_out = Metrics(), Metrics()

    def training_step(self, batch: PackedBatch, index: int) -> None:
        optimizer = self.optimizers()
        out = self.loss_fn(self.policy(batch), batch)
        self.manual_backward(out.loss)
        self.metrics.add(out.metrics)
        if batch.step.last:
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            optimizer.zero_grad()
            means = self.metrics.means()  # of the step, over all its batches and ranks
            if self.logger is not None:
                self.logger.log_metrics(means, self.global_step)

    def validation_step(self, batch: PackedBatch, index: int) -> None:
        self.held_out.add(self.loss_fn(self.policy(batch), batch).metrics)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(
            {f"eval/{name}": value for name, value in self.held_out.means().items()}
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=0.0
        )


def main(
    model: str, dataset: str, ref_logps: str, checkpoint: str | None = None
) -> None:
    """Trains for two epochs; goes on from `checkpoint` if there is one."""
    data = PackedData(dataset, ref_logps, examples_per_step=64, packs_per_batch=1)
    module = DPO(load_model(model, trainable=True), PreferenceLoss("dpo", beta=0.1))
    trainer = lightning.Trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(
        module, data, ckpt_path=checkpoint, weights_only=False if checkpoint else None
    )
    module.policy.model.save_pretrained("model")


if __name__ == "__main__":
    main(*sys.argv[1:])
