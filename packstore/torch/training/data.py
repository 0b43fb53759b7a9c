"""The data of a Trainer on packs: datasets, and loaders whose items are optimizer
steps.

What the Trainer calls a batch is one step: the list of its packed batches. So steps by
examples, divisors of whole steps, balance over ranks and every loss hold as in a loop
of one's own, and ``len(get_train_dataloader())`` is the number of steps.
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
from packstore.io.manifest.side_manifest import REF_LOGPS
from packstore.io.side.side import open_side
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.data.position import Position
from packstore.torch.data.steps import plan_steps
from packstore.torch.data.stream import StoredPacks
from packstore.torch.training.checkpoint_files import read_position, step_of


class Steps:
    """Yields the packed batches of each optimizer step as one list.

    Attributes:
        waited: seconds in which it waited for batches.
        yielded: steps of the run that it has yielded, with those before a checkpoint.
        epoch_progress: epochs at the end of the step that it yielded last, with their
            fraction.
    """

    def __init__(self, loader: PackedDataLoader, yielded: int = 0) -> None:
        self.loader, self.yielded = loader, yielded
        self.waited, self.epoch_progress = 0.0, 0.0

    def __len__(self) -> int:
        return self.loader.plan().steps

    def set_epoch(self, epoch: int) -> None:
        """Moves to an epoch; does nothing for that of a loaded position."""
        self.loader.set_epoch(epoch)

    def position(self, done: int) -> dict[str, Any]:
        """Returns the position after `done` steps: a step that was yielded may not be
        run yet.
        """
        return self._begun if done < self.yielded else self.loader.state_dict()

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        steps = max(len(self), 1)  # once, as it looks at all packs
        source, step = iter(self.loader), list[PackedBatch]()
        begun = self.loader.state_dict()
        while True:
            before = time.perf_counter()
            batch = next(source, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                return
            step.append(batch)
            if batch.step is not None and batch.step.last:
                self.epoch_progress = self.loader.epoch + (batch.step.index + 1) / steps
                self._begun, self.yielded = begun, self.yielded + 1
                begun = self.loader.state_dict()
                yield step
                step = []


def steps_of_epochs(
    loader: PackedDataLoader, *, steps: float = math.inf, epochs: float = math.inf
) -> list[int]:
    """Return the steps of each epoch that a run takes, from the position of the loader
    on.

    Args:
        loader: a loader whose dataset holds packs; the first epoch is what remains of
            its own.
        steps: optimizer steps that the run still takes; the last epoch counts whole.
        epochs: epochs that the run still takes.
    """
    if steps <= 0 or epochs <= 0:
        return []
    counts = [loader.plan(left=True).steps]
    data = loader.data
    stream = copy.copy(data.stream)  # set to other epochs by the plans
    while sum(counts) < steps and len(counts) < epochs:
        epoch = loader.epoch + len(counts)
        plan = plan_steps(stream, loader.config, data.world_size, [epoch], Position())
        if not plan.steps:  # of a loader of one's own, which drops all
            break
        counts.append(plan.steps)
    return counts


def datasets_of(*given: Any) -> Iterator[Dataset]:
    """Yields the packed datasets in what a trainer was given."""
    for data in given:
        if isinstance(data, PackedDataset):
            yield from data.stream.datasets
        elif isinstance(data, Dataset):
            yield data
        elif isinstance(data, Mapping):
            yield from datasets_of(*data.values())


def is_packed(data: Any) -> bool:
    """Returns True for a packed dataset or a stream of one."""
    return isinstance(data, PackedDataset | Dataset)


def has_ref_logps(data: Any) -> bool:
    """Returns True for a stream of packs to which log-probs of a reference are
    joined.
    """
    stream = getattr(data, "stream", None)
    return isinstance(stream, StoredPacks) and REF_LOGPS in stream.columns


class DataMixin(Trainer):  # type: ignore[misc]
    """Loads packed datasets in steps; other data as the Trainer does."""

    loss_fn: Any
    examples_per_step = 0
    packs_per_batch: int | None = None

    _sides: Mapping[str, tuple[str, ...]] = {"train": (), "eval": ()}
    _options: dict[str, Any] | None = None
    _checkpoint: Path | None = None
    steps: Steps | None = None

    def _opened(self, data: Any) -> Any:
        """Returns a packed dataset in the place of its folder or URL."""
        if isinstance(data, str | Path):
            return open_dataset(str(data), self._options)
        return data

    def _all_opened(self, data: Any) -> Any:
        """Returns a packed dataset, or several by name, in the place of folders and
        URLs.
        """
        if isinstance(data, Mapping) and data:
            return {name: self._opened(part) for name, part in data.items()}
        return self._opened(data)

    def get_train_dataloader(self) -> Any:
        """Returns the steps: lists of packed batches; from the checkpoint's position if
        resumed.
        """
        if not is_packed(self.train_dataset):
            return super().get_train_dataloader()
        loader = self._loader(self.train_dataset, "train", self.examples_per_step)
        done = 0
        if self._checkpoint is not None:
            done = step_of(self._checkpoint)
            try:
                loader.load_state_dict(read_position(self._checkpoint)["loader"])
            except CompatibilityError as error:
                error.add_note(
                    f"To begin a new run beside {self._checkpoint}, change output_dir."
                )
                raise
            if not loader.plan(1, left=True).steps:
                loader.set_epoch(loader.epoch + 1)
        self.steps = Steps(loader, done)
        return self.steps

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns the batches of a dataset; default: of the trainer's own, which may be
        named.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str) and isinstance(self.eval_dataset, Mapping):
            data = self.eval_dataset.get(data, data)
        if is_packed(data := self._opened(data)):
            return self._loader(data, "eval", None)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Returns the batches of a dataset."""
        return self.get_eval_dataloader(test_dataset)

    def _loader(self, data: Any, part: str, examples: int | None) -> PackedDataLoader:
        args = self.args
        if not isinstance(data, PackedDataset):
            urls = self._sides[part] if self.loss_fn.reference else ()
            side = [open_side(url, self._options) for url in urls]
            seed = args.seed if args.data_seed is None else args.data_seed
            data = PackedDataset(data, seed=seed, side=side, shuffle=part == "train")
        elif data.world_size != args.world_size:
            where = f"{type(self).__name__}, dataset of {part}"
            rule = f"it must be dealt to the {args.world_size} ranks of the run"
            remedy = "Make the PackedDataset without rank and world_size"
            found = f"world_size={data.world_size}"
            raise ConfigError(sentence(where, rule, found, remedy))
        else:  # its user may have moved it, and may go on to use it
            data = data.copy_at_start()
        return PackedDataLoader(
            data,
            packs_per_batch=self.packs_per_batch,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=getattr(
                args, "dataloader_multiprocessing_context", None
            ),
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            examples_per_step=examples,
            balance=True,
        )

    def num_examples(self, dataloader: Any) -> int:
        """Returns the number of examples, of packed datasets over all ranks."""
        loader = getattr(dataloader, "loader", dataloader)
        if not isinstance(loader, PackedDataLoader):
            return int(super().num_examples(dataloader))
        return sum(
            dataset.manifest.totals.examples for dataset in loader.data.stream.datasets
        )

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Counts steps exactly: those done, and those of the data left."""
        if self.steps is None:
            return super().set_initial_training_values(args, dataloader)
        loader = self.steps.loader
        examples = self.num_examples(loader)
        if not examples:
            where = f"dataset {loader.data.stream.datasets[0].url}"
            raise ConfigError(sentence(where, "it must hold packs to train on", "none"))
        done = self.steps.yielded
        begun = loader.epoch
        if args.max_steps > 0:
            steps = args.max_steps
            per_epoch = steps_of_epochs(loader, steps=steps - done)
            epochs = begun + len(per_epoch)
        else:
            epochs = math.ceil(args.num_train_epochs)
            if epochs < 1:
                found = str(args.num_train_epochs)
                raise ConfigError(
                    sentence("setting num_train_epochs", "it must be above 0", found)
                )
            per_epoch = steps_of_epochs(loader, epochs=epochs - begun)
            steps = math.ceil((done + sum(per_epoch)) * args.num_train_epochs / epochs)
        if not steps:  # the run would end at once, and save untrained weights
            where, rule = (
                "get_train_dataloader",
                f"it must have steps left in {epochs} epochs",
            )
            found = f"a loader in epoch {loader.epoch}, of which none is left"
            remedy = "Return one at the start of epoch 0"
            raise ConfigError(sentence(where, rule, found, remedy))
        if done >= steps:  # the Trainer would run one more
            epochs = begun
        samples = examples * args.num_train_epochs
        # An epoch ends where its loader does: the longest one bounds the steps of each.
        longest = max(per_epoch, default=1)
        return (
            epochs,
            longest,
            examples,
            samples,
            self.examples_per_step,
            longest,
            steps,
        )

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Begins at the epoch of the position, and skips nothing of it."""
        begun: tuple[int, int] = super()._init_training_state(*args)
        return begun if self.steps is None else (self.steps.loader.epoch, 0)
