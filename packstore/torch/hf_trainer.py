"""What it takes to train on packs with transformers' Trainer: a module and an iterable.

The Trainer counts what its batches hold as ``labels`` over an optimizer step, its accumulation and
all ranks, hands the count to the model, and undoes the averaging of gradients over the ranks. Here
``labels`` holds one entry for each pair, so its count is the divisor of the step::

    class PackedTrainer(Trainer):
        def get_train_dataloader(self):
            return TrainerBatches(loader, loss_fn)

    PackedTrainer(TrainerPolicy(model, loss_fn), TrainingArguments(…), train_dataset=loader).train()

`per_device_train_batch_size` then says nothing: the loader makes the batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from packstore.errors import ConfigError, sentence
from packstore.torch.collate import PackedBatch
from packstore.torch.divisor import StepDivisor
from packstore.torch.head import PackedPolicy
from packstore.torch.loss import PreferenceLoss
from packstore.torch.metrics import Metrics


class BatchLoader(Protocol):
    """A loader of packed batches."""

    def __iter__(self) -> Iterator[PackedBatch]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of `epoch`."""


class TrainerBatches:
    """The batches of a loader as inputs of :class:`TrainerPolicy`.

    Args:
        loader: a :class:`~packstore.torch.PackedDataLoader`.
        loss_fn: the loss, which says what counts.

    Raises:
        ConfigError: the loss divides by two different counts, and the Trainer counts one.
    """

    def __init__(self, loader: BatchLoader, loss_fn: PreferenceLoss) -> None:
        check_counts(loss_fn)
        self.loader, self.loss_fn = loader, loss_fn

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            counted = torch.zeros(int(self.loss_fn.count(batch).count), dtype=torch.int64)
            yield {"batch": batch, "labels": counted}

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of `epoch`."""
        self.loader.set_epoch(epoch)


class TrainerPolicy(nn.Module):
    """A causal LM with its loss, as the Trainer calls it.

    Reference log-probs are those of the batch. What the Trainer logs as `loss` is the loss of the
    optimizer step; ``metrics.means()`` has the rest.

    Args:
        model: a Hugging Face causal LM, as :func:`use_packed_attention` left it.
        loss_fn: the loss.
        chunk_size: see :func:`segment_logps`.

    Raises:
        ConfigError: the loss divides by two different counts, and the Trainer counts one.
        CompatibilityError: the head is not a plain one, see :func:`find_head`.
    """

    accepts_loss_kwargs = True
    """By which the Trainer hands over its count, and does not divide by its accumulation."""

    def __init__(
        self, model: nn.Module, loss_fn: PreferenceLoss, *, chunk_size: int | None = None
    ) -> None:
        super().__init__()
        check_counts(loss_fn)
        self.policy = PackedPolicy(model, chunk_size=chunk_size)
        self.loss_fn, self.metrics = loss_fn, Metrics()

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> dict[str, Tensor]:
        """The loss of a batch over the count of its optimizer step, or its own if there is none."""
        logps = self.policy(batch)
        divisor = None
        if num_items_in_batch is not None:
            count = float(num_items_in_batch)
            divisor = StepDivisor(count, count if self.loss_fn.sft_weight else None)
        out = self.loss_fn(logps, batch.to(logps.device), divisor=divisor)
        self.metrics.add(out.metrics)
        return {"loss": out.loss}


def check_counts(loss_fn: PreferenceLoss) -> None:
    """Refuses a loss that divides by more than the one count that the Trainer gives.

    Raises:
        ConfigError: it does.
    """
    if loss_fn.sft_weight and loss_fn.sft_average == "token":
        must = "the SFT term must be divided by the number of pairs, which is all that it counts"
        do = "Use sft_average='sequence_mean' or 'sequence_sum', or a loop with count_step"
        raise ConfigError(sentence("transformers' Trainer", must, "a mean over tokens", do))
