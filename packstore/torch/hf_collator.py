"""A data collator and a loss function for transformers' Trainer, and for TRL's on top of it.

The model stays as it is, so that the Trainer saves it as ever::

    Trainer(
        use_packed_attention(model),
        TrainingArguments(…, accelerator_config={"dispatch_batches": False},
                          dataloader_drop_last=True, remove_unused_columns=False),
        train_dataset=PackedDataset(url, rank=0, world_size=1),   # Accelerate deals it to the ranks
        data_collator=PackCollator("dpo"),
        compute_loss_func=PackedLoss(loss_fn),
    ).train()

`per_device_train_batch_size` is then packs; over records of token ids it is examples, which the
collator lays end to end. What the Trainer counts as items is what the loss divides by, over
accumulation and ranks. The logits are made, as the Trainer calls the model; where they are too
large, and where a step is to hold so many pairs, take :mod:`packstore.torch.hf_trainer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from packstore.config import PackConfig
from packstore.errors import ConfigError
from packstore.records import Packs
from packstore.torch.collate import PackedBatch, collate
from packstore.torch.divisor import StepDivisor
from packstore.torch.head import packed_logps
from packstore.torch.hf_trainer import BatchLoader, check_counts
from packstore.torch.logprobs import segment_logps
from packstore.torch.loss import PreferenceLoss
from packstore.torch.metrics import Metrics


class PackedLabels:
    """What the Trainer takes for labels: a batch, which counts its examples.

    Attributes:
        batch: the batch.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch

    def __getitem__(self, key: Any) -> Self:
        """Itself: examples have no first token that nothing predicts."""
        return self

    def ne(self, ignored: int) -> Tensor:
        """True for each example that counts."""
        return self.batch.weights > 0

    def detach(self) -> Self:
        """Itself."""
        return self

    def to(self, device: Any, **_: Any) -> PackedLabels:
        """The batch on `device`."""
        return PackedLabels(self.batch.to(device))


class PackedInputs(dict[str, Any]):
    """Keyword arguments of the model's forward call, and ``labels``."""

    @classmethod
    def of(cls, batch: PackedBatch) -> PackedInputs:
        """Those of a batch."""
        return cls(**batch.model_inputs(), labels=PackedLabels(batch))

    def to(self, device: Any, **_: Any) -> PackedInputs:
        """The same on `device`."""
        return PackedInputs.of(self["labels"].batch.to(device))


class PackCollator:
    """Lays packs, or records of token ids, end to end as one batch.

    Args:
        kind: ``dpo``, ``sft`` or ``ranked``.
        config: of records, the `layout` and what is to be carried; they are told in
            :mod:`packstore.repacking.tokenized`. Their number and lengths are not looked at.
    """

    def __init__(self, kind: str = "dpo", config: PackConfig | None = None) -> None:
        self.kind, self.config = kind, config or PackConfig()

    def __call__(self, items: Sequence[Packs | Mapping[str, Any]]) -> PackedInputs:
        """The batch of these items.

        Raises:
            RecordError: a record is not of the kind.
            ConfigError: no items.
        """
        if not items:
            raise ConfigError("a batch must hold at least one item; found none.")
        packs = [item for item in items if isinstance(item, Packs)]
        if len(packs) < len(items):
            from packstore.torch.unpacked import lay_end_to_end

            packs = [lay_end_to_end(items, self.kind, self.config)]
        return PackedInputs.of(collate(packs, self.kind))


class InputBatches:
    """The batches of a loader as inputs of an unchanged model, for ``get_train_dataloader``.

    Args:
        loader: a :class:`~packstore.torch.PackedDataLoader`.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[PackedInputs]:
        return map(PackedInputs.of, self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of `epoch`."""
        self.loader.set_epoch(epoch)


class PackedLoss:
    """The Trainer's ``compute_loss_func``: a sum over examples, divided by those of the whole step.

    Args:
        loss_fn: the loss.
        reference: a frozen model on the device of the policy; default: the batch's ``ref_logps``.

    Attributes:
        metrics: ``metrics.means()`` tells those since the last call, over all ranks.

    Raises:
        ConfigError: the loss divides by two different counts, and the Trainer counts one.
    """

    def __init__(self, loss_fn: PreferenceLoss, reference: nn.Module | None = None) -> None:
        check_counts(loss_fn)
        self.loss_fn, self.reference, self.metrics = loss_fn, reference, Metrics()

    def __call__(
        self,
        outputs: Any,
        labels: PackedLabels,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor:
        """The loss of a batch over the count of its step, or over its own if there is none."""
        logits = outputs["logits"]
        batch = labels.batch.to(logits.device)
        divisor = ref_logps = None
        if num_items_in_batch is not None:
            count = float(num_items_in_batch)
            divisor = StepDivisor(count, count if self.loss_fn.sft_weight else None)
        if self.reference is not None and self.loss_fn.reference:
            with torch.no_grad():
                ref_logps = packed_logps(self.reference, batch)
        logps = segment_logps(batch, logits=logits)
        out = self.loss_fn(logps, batch, ref_logps, divisor=divisor)
        self.metrics.add(out.metrics)
        return out.loss
