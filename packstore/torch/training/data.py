"""The data of a Trainer on packs: datasets, loaders, and the number of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer

from packstore.errors import ConfigError, sentence
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.side.side import open_side
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.training.checkpoints import read_position, step_of
from packstore.torch.training.step_loader import Steps, datasets_of, is_packed
from packstore.torch.training.step_metrics import StepMetrics


class DataMixin(Trainer):  # type: ignore[misc]
    """Loads packed datasets in steps; other data as the Trainer does."""

    loss_fn: Any
    examples_per_step = 0
    packs_per_batch: int | None = None

    _sides: Mapping[str, tuple[str, ...]] = {"train": (), "eval": ()}
    _options: dict[str, Any] | None = None
    _checkpoint: Path | None = None
    _steps: Steps | None = None

    def _opened(self, data: Any) -> Any:
        """Returns packed datasets in the place of their folders and URLs."""
        if isinstance(data, Mapping):
            return {name: self._opened(part) for name, part in data.items()}
        if isinstance(data, str | Path):
            return open_dataset(str(data), self._options)
        return data

    def get_train_dataloader(self) -> Any:
        """Returns the steps: lists of packed batches; from the checkpoint's position if resumed."""
        if not is_packed(self.train_dataset):
            return super().get_train_dataloader()
        loader = self._loader(self.train_dataset, "train", self.examples_per_step)
        if self._checkpoint is not None:
            loader.load_state_dict(read_position(self._checkpoint)["loader"])
            if not loader.plan(1, left=True).steps:
                loader.set_epoch(loader.data.epoch + 1)
        self._steps = Steps(loader)
        self._step_metrics = StepMetrics(self._steps)
        return self._steps

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns the batches of a dataset; default: of the trainer's own, which may be named."""
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
        return PackedDataLoader(
            data,
            packs_per_batch=self.packs_per_batch,
            num_workers=args.dataloader_num_workers,
            prefetch=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            examples_per_step=examples,
            balance=True,
        )

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Counts steps exactly: those done, and those of the data left."""
        if self._steps is None:
            return super().set_initial_training_values(args, dataloader)
        loader = self._steps.loader
        done = 0 if self._checkpoint is None else step_of(self._checkpoint)
        if args.max_steps > 0:
            steps, epochs = args.max_steps, loader.data.epoch + args.max_steps
        else:
            epochs = math.ceil(args.num_train_epochs)
            left = loader.plan(epochs - loader.data.epoch, left=True).steps
            steps = math.ceil((done + left) * args.num_train_epochs / epochs)
        if done >= steps:  # the Trainer would run one more
            epochs = loader.data.epoch
        datasets = [*datasets_of(loader.data)]
        examples = sum(dataset.manifest.totals.examples for dataset in datasets)
        if not examples:
            where = f"dataset {datasets[0].url}"
            raise ConfigError(sentence(where, "it must hold packs to train on", "none"))
        samples = examples * args.num_train_epochs
        # An epoch ends where its loader does, so its steps are a bound only.
        return epochs, steps, examples, samples, self.examples_per_step, steps, steps

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Begins at the epoch of the position, and skips nothing of it."""
        begun: tuple[int, int] = super()._init_training_state(*args)
        return begun if self._steps is None else (self._steps.loader.data.epoch, 0)
