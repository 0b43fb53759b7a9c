"""Packed datasets for a Trainer, and loaders that yield optimizer steps.

To the Trainer, one optimizer step is one batch: the list of the step's packed batches.
So steps, their divisors and their balance over ranks are as in a training loop without
a Trainer, and ``len(get_train_dataloader())`` is the number of steps of an epoch.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer

from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.side.join import SideColumns
from packstore.io.side.parts import open_sides
from packstore.io.side.side import Side
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.data.position import Position
from packstore.torch.data.steps import plan_steps
from packstore.torch.data.stream import PackStream, StoredPacks
from packstore.torch.training.checkpoint_files import read_position, read_step


class Steps:
    """Yields each optimizer step as the list of its packed batches.

    Attributes:
        loader: the loader of the batches.
        num_yielded: steps of the run that were yielded, with the steps before the
            checkpoint.
        wait_seconds: seconds spent waiting for batches.
        epoch_progress: epochs that were completed at the end of the step yielded last,
            such as 1.25.
    """

    def __init__(self, loader: PackedDataLoader, num_yielded: int = 0) -> None:
        self.loader = loader
        self.num_yielded = num_yielded
        self.wait_seconds = 0.0
        self.epoch_progress = 0.0
        self._position_before_step: dict[str, Any] = {}

    def __len__(self) -> int:
        return self.loader.plan().steps

    def set_epoch(self, epoch: int) -> None:
        """Move to an epoch; do nothing if the position is in it."""
        self.loader.set_epoch(epoch)

    def position(self, num_trained: int) -> dict[str, Any]:
        """Return the position after `num_trained` steps of the run.

        These are all steps that were yielded, or all but the last: the Trainer fetches
        a step before it trains on it.
        """
        if num_trained < self.num_yielded:
            return self._position_before_step
        return self.loader.state_dict()

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        # Counted once: a count looks up the sizes of all packs.
        steps_per_epoch = max(len(self), 1)
        batches = iter(self.loader)
        position = self.loader.state_dict()
        step: list[PackedBatch] = []
        while True:
            wait_start = time.perf_counter()
            batch = next(batches, None)
            self.wait_seconds += time.perf_counter() - wait_start
            if batch is None:
                return

            step.append(batch)
            info = batch.step  # never None, as the loader plans all steps
            if info is None or not info.last:
                continue
            epoch_fraction = (info.index + 1) / steps_per_epoch
            self.epoch_progress = self.loader.epoch + epoch_fraction
            self.num_yielded += 1
            self._position_before_step = position
            position = self.loader.state_dict()
            yield step
            step = []


def steps_of_epochs(
    loader: PackedDataLoader, *, steps: float = math.inf, epochs: float = math.inf
) -> list[int]:
    """Return the number of steps in each epoch of a run, from the loader's position on.

    The first number counts the steps that remain in the loader's epoch.

    Args:
        loader: a loader of a dataset with packs.
        steps: optimizer steps that the run still takes; the last epoch counts in full.
        epochs: epochs that the run still takes.
    """
    if steps <= 0 or epochs <= 0:
        return []
    remaining_steps = loader.plan(left=True).steps
    counts = [remaining_steps]
    data = loader.data
    stream = copy.copy(data.stream)  # the plans move it to other epochs
    while sum(counts) < steps and len(counts) < epochs:
        epoch = loader.epoch + len(counts)
        plan = plan_steps(stream, loader.config, data.world_size, [epoch], Position())
        if not plan.steps:  # a user's loader with drop_last may drop every step
            break
        counts.append(plan.steps)
    return counts


def datasets_of(*sources: Any) -> Iterator[Dataset]:
    """Yield the packed datasets in a trainer's arguments, also by name in mappings."""
    for source in sources:
        if isinstance(source, PackedDataset):
            yield from source.stream.datasets
        elif isinstance(source, Dataset):
            yield source
        elif isinstance(source, Mapping):
            yield from datasets_of(*source.values())


def is_packed(data: Any) -> bool:
    """Return True for a stored packed dataset, or a PackedDataset, which streams it."""
    return isinstance(data, PackedDataset | Dataset)


def side_types(stream: PackStream) -> Mapping[str, str] | None:
    """Return joined column -> its type; None for a mix or a stream of another class."""
    if not isinstance(stream, StoredPacks):
        return None
    return {} if stream.side is None else stream.side.types


def has_column(data: Any, name: str) -> bool:
    """Return True for a PackedDataset with a joined or carried column."""
    stream = getattr(data, "stream", None)
    return isinstance(stream, StoredPacks) and name in stream.columns


class DataMixin(Trainer):  # type: ignore[misc]
    """Loads packed datasets in steps, and other data as the Trainer does."""

    loss_fn: Any
    # Mean examples of a step, over all ranks; trainers set it for packed datasets.
    examples_per_step = 0
    packs_per_batch: int | None = None
    steps: Steps | None = None

    # URLs of side datasets: with log-probs of a reference, and with any columns.
    _side_urls: Mapping[str, tuple[str, ...]] = {"train": (), "eval": ()}
    _joined_urls: Mapping[str, tuple[str, ...]] = {"train": (), "eval": ()}
    # Options of fsspec.
    _storage_options: dict[str, Any] | None = None
    _checkpoint: Path | None = None

    def _open(self, data: Any) -> Any:
        """Open a packed dataset by its folder or URL; return other data as it is."""
        if isinstance(data, str | Path):
            return open_dataset(str(data), self._storage_options)
        return data

    def _open_all(self, data: Any) -> Any:
        """Open a dataset, or each in a mapping of them by name."""
        if isinstance(data, Mapping) and data:
            return {name: self._open(part) for name, part in data.items()}
        return self._open(data)

    def get_train_dataloader(self) -> Any:
        """Return the loader of steps, at the position of the checkpoint if resumed."""
        if not is_packed(self.train_dataset):
            return super().get_train_dataloader()
        loader = self._make_loader(self.train_dataset, "train", self.examples_per_step)
        num_trained = 0
        if self._checkpoint is not None:
            num_trained = read_step(self._checkpoint)
            _load_position(loader, self._checkpoint)
        self.steps = Steps(loader, num_trained)
        return self.steps

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the batches of a dataset, which may be a name in `eval_dataset`."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str) and isinstance(self.eval_dataset, Mapping):
            data = self.eval_dataset.get(data, data)
        data = self._open(data)
        if is_packed(data):
            return self._make_loader(data, "eval", None)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the batches of a dataset."""
        return self.get_eval_dataloader(test_dataset)

    def _make_loader(
        self, data: Any, part: str, examples_per_step: int | None
    ) -> PackedDataLoader:
        """Make the loader of a dataset.

        Args:
            data: a stored packed dataset, or a PackedDataset.
            part: ``train`` or ``eval``.
            examples_per_step: mean examples of a step; None: one batch is a step.
        """
        args = self.args
        is_cuda = args.device.type == "cuda"
        return PackedDataLoader(
            self._packs_of_rank(data, part),
            packs_per_batch=self.packs_per_batch,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=getattr(
                args, "dataloader_multiprocessing_context", None
            ),
            pin_memory=args.dataloader_pin_memory and is_cuda,
            examples_per_step=examples_per_step,
            balance=True,
        )

    def _packs_of_rank(self, data: Any, part: str) -> PackedDataset:
        """Return the packs of this rank, in the order of the run."""
        args = self.args
        if not isinstance(data, PackedDataset):
            return PackedDataset(
                data,
                seed=args.seed if args.data_seed is None else args.data_seed,
                side=self._sides_of(data, part),
                shuffle=part == "train",
            )
        if data.world_size != args.world_size:
            raise ConfigError(
                sentence(
                    where=f"{type(self).__name__}, dataset of {part}",
                    rule="it must be distributed over the "
                    f"{args.world_size} ranks of the run",
                    found=f"world_size={data.world_size}",
                    remedy="Make the PackedDataset without rank and world_size",
                )
            )
        # Its user may have moved it, and may go on to use it.
        return data.copy_at_start()

    def _sides_of(self, data: Dataset, part: str) -> list[Side]:
        """Open the side datasets to join to a dataset of ``train`` or ``eval``."""
        urls = self._joined_urls[part]
        if self.loss_fn.reference:
            urls += self._side_urls[part]
        return open_sides(urls, data.manifest, self._storage_options)

    def _check_side_columns(self, data: Any, part: str) -> None:
        """Raise if the columns that the loss needs are not joined, before a model is
        loaded.

        Args:
            data: a stored packed dataset, a PackedDataset, a mapping of them, or None.
            part: ``train`` or ``eval``.
        """
        if isinstance(data, Mapping):
            for dataset in data.values():
                self._check_side_columns(dataset, part)
        elif isinstance(data, PackedDataset):
            if self._joined_urls[part]:
                raise ConfigError(
                    sentence(
                        where="setting side",
                        rule="it joins stored datasets, not a PackedDataset",
                        found=", ".join(self._joined_urls[part]),
                        remedy="Give it to the dataset: PackedDataset(…, side=[…])",
                    )
                )
            types = side_types(data.stream)
            if types is not None:
                self.loss_fn.check_side(types, data.stream.datasets[0].url)
        elif isinstance(data, Dataset):
            sides = self._sides_of(data, part)
            types = SideColumns(data, sides).types if sides else {}
            self.loss_fn.check_side(types, data.url)
            if self.loss_fn.reference and not self._side_urls[part]:
                _check_no_reference(types, self.loss_fn.ref_column)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of examples, over all ranks if they are packed."""
        loader = getattr(dataloader, "loader", dataloader)
        if not isinstance(loader, PackedDataLoader):
            return int(super().num_examples(dataloader))
        datasets = loader.data.stream.datasets
        return sum(dataset.manifest.totals.examples for dataset in datasets)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Count epochs and steps exactly, from the position in the data on."""
        if self.steps is None:
            return super().set_initial_training_values(args, dataloader)
        loader = self.steps.loader
        first_epoch = loader.epoch
        num_trained = self.steps.num_yielded
        num_examples = self.num_examples(loader)
        if not num_examples:
            url = loader.data.stream.datasets[0].url
            raise ConfigError(
                sentence(
                    where=f"dataset {url}",
                    rule="it must hold packs to train on",
                    found="none",
                )
            )

        if args.max_steps > 0:
            max_steps = args.max_steps
            epoch_steps = steps_of_epochs(loader, steps=max_steps - num_trained)
            num_epochs = first_epoch + len(epoch_steps)
        else:
            num_epochs = _count_epochs(args)
            epoch_steps = steps_of_epochs(loader, epochs=num_epochs - first_epoch)
            total_steps = num_trained + sum(epoch_steps)
            # `num_train_epochs` may be a fraction, which cuts the last epoch short.
            max_steps = math.ceil(total_steps * args.num_train_epochs / num_epochs)
        if not max_steps:
            raise _no_steps_error(first_epoch, num_epochs)
        if num_trained >= max_steps:
            num_epochs = first_epoch  # else the Trainer would run one more step

        # An epoch ends where its loader does. The Trainer takes one number for all
        # epochs, which must not be below any of them.
        longest_epoch = max(epoch_steps, default=1)
        # In the order of `Trainer.set_initial_training_values`.
        return (
            num_epochs,
            longest_epoch,  # optimizer steps per epoch
            num_examples,
            num_examples * args.num_train_epochs,  # examples of the run
            self.examples_per_step,  # examples of a step, over all ranks
            longest_epoch,  # items of the loader per epoch
            max_steps,  # optimizer steps of the run
        )

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Return the epoch of the position, and 0 batches to skip.

        The Trainer would divide the steps so far by a fixed number of steps per epoch,
        and then read and drop the batches before the checkpoint.
        """
        start: tuple[int, int] = super()._init_training_state(*args)
        if self.steps is None:
            return start
        return self.steps.loader.epoch, 0


def _check_no_reference(types: Mapping[str, str], ref_column: str) -> None:
    """Raise for log-probs of a reference that nobody compared with this run's.

    Args:
        types: joined column -> its type.
        ref_column: column with the reference's log-probs that the loss takes.
    """
    if ref_column in types:
        raise ConfigError(
            sentence(
                where="setting side",
                rule="it must have no log-probs of a reference for a loss that takes "
                "them",
                found=f"a column {ref_column}",
                remedy="Give it as ref_logps, which checks that they are of the "
                "reference of this run",
            )
        )


def _load_position(loader: PackedDataLoader, checkpoint: Path) -> None:
    """Move the loader to the position in a checkpoint."""
    try:
        loader.load_state_dict(read_position(checkpoint)["loader"])
    except CompatibilityError as error:
        error.add_note(f"To begin a new run beside {checkpoint}, change output_dir.")
        raise
    remaining_steps = loader.plan(left=True).steps
    if not remaining_steps:
        loader.set_epoch(loader.epoch + 1)


def _count_epochs(args: Any) -> int:
    """Return the epochs of a run without `max_steps`; part of one counts as one."""
    num_epochs: int = math.ceil(args.num_train_epochs)
    if num_epochs < 1:
        raise ConfigError(
            sentence(
                where="setting num_train_epochs",
                rule="it must be above 0",
                found=str(args.num_train_epochs),
            )
        )
    return num_epochs


def _no_steps_error(epoch: int, num_epochs: int) -> ConfigError:
    """Return the error for a run without a step, which would save untrained weights.

    An overridden `get_train_dataloader` may return a loader at the end of the data.
    """
    return ConfigError(
        sentence(
            where="get_train_dataloader",
            rule=f"it must have steps left in {num_epochs} epochs",
            found=f"a loader at the end of epoch {epoch}",
            remedy="Return one at the start of epoch 0",
        )
    )
