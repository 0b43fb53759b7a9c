"""Shared parts of the trainers on packs: steps of packed batches, exact metrics, checkpoints.

What transformers' Trainer calls a batch is here one optimizer step: the loader yields the list of
its packed batches. So steps by examples, divisors of whole steps, balance over ranks and every loss
hold as in a loop of one's own, and ``len(get_train_dataloader())`` is the number of steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from packstore.errors import (
    CompatibilityError,
    ConfigError,
    DivergedError,
    FormatError,
    StorageError,
    quote,
    sentence,
)
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.manifest.side_manifest import REF_LOGPS
from packstore.io.side.side import open_side
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.data.stream import StoredPacks
from packstore.torch.logprobs.head import PackedPolicy, policy_output
from packstore.torch.losses.divisor import StepDivisor
from packstore.torch.losses.figures import ExampleRows, GroupedMetrics
from packstore.torch.losses.first_step_check import FirstStepCheck
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.step_loss import count_step, sequence_weights
from packstore.torch.metrics import Metrics, all_reduce_sums, wide_dtype
from packstore.torch.models.compiled import tell_uncompiled
from packstore.torch.models.unwrap import adapted, as_reference
from packstore.torch.training.evaluate import evaluate_batches
from packstore.torch.training.reference import (
    Reference,
    frozen,
    needs_reference,
    of_the_batch,
)
from packstore.torch.training.resharding import is_sharded, load_optimizer, load_weights

logger = logging.getLogger("packstore")

POSITION, STATE = "packstore.json", "trainer_state.json"
"""Files of a checkpoint: the position in the data, and the Trainer's state, which comes last."""

FIRST = 10
"""The first steps, each of which is logged."""


def take_batches(model: nn.Module, **settings: Any) -> None:
    """Lets the forward call of `model` take a packed batch: it then returns what PackedPolicy does.

    The Trainer wraps, saves and loads the model itself, so that log-probs without logits run in the
    forward call that DDP and FSDP see, and no name of a weight changes.
    """
    PackedPolicy(model, **settings)  # proves the head
    own: Any = model
    own._packed_settings, own._unpacked_forward = settings, model.forward
    own.forward = MethodType(_forward, model)


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], PackedBatch):
        return policy_output(model, args[0], **model._packed_settings)
    return model._unpacked_forward(*args, **kwargs)


class Steps:
    """Yields the packed batches of each optimizer step as one list; adds up the time it waits."""

    def __init__(self, loader: PackedDataLoader) -> None:
        self.loader, self.waited, self.of_epoch = loader, 0.0, 1

    def __len__(self) -> int:
        return self.loader.plan().steps

    def set_epoch(self, epoch: int) -> None:
        """Moves to an epoch; does nothing for that of a loaded position."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        self.of_epoch = max(len(self), 1)  # once, as it looks at all packs
        source, step = iter(self.loader), list[PackedBatch]()
        while True:
            before = time.perf_counter()
            batch = next(source, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                return
            step.append(batch)
            if batch.step is not None and batch.step.last:
                yield step
                step = []


class Work:
    """Sums of metrics and work between two records; without `steps`, of metrics and tokens."""

    def __init__(self, steps: Steps | None = None) -> None:
        self.steps, self.metrics = steps, Metrics()
        self._restart()

    def _restart(self) -> None:
        self._since, self._of_steps = time.perf_counter(), list[list[float]]()
        self._examples, self._packs = 0, 0
        self._tokens: Tensor | float = 0.0
        self._waited = self.steps.waited if self.steps else 0.0

    def add(self, batches: list[PackedBatch]) -> None:
        """Adds the batches of this rank in one step."""
        for batch in batches:  # fillers do not count
            self._tokens = self._tokens + (batch.lengths * (sequence_weights(batch) > 0)).sum()
        if self.steps is None or (info := batches[0].step) is None:
            return
        self._examples += info.examples
        self._packs += sum(batch.num_packs for batch in batches)
        tokens = sum(batch.num_tokens for batch in batches)
        squares = sum(float(batch.cu_seqlens.diff().double().square().sum()) for batch in batches)
        self._of_steps.append([tokens, squares])

    def close(self, accelerator: Any) -> dict[str, float]:
        """Returns means and rates over all ranks, and starts anew; a collective call.

        `num_tokens` is the number of tokens of the sequences, each with its prompt, as TRL counts.
        """
        record = self.metrics.means()
        if not record:  # no step since
            return {}
        device = accelerator.device
        record["num_tokens"] = all_reduce_sums([self._tokens], device=device)[0]
        if self.steps is not None:
            record |= self._rates(self.steps, accelerator)
        self._restart()
        return record

    def _rates(self, steps: Steps, accelerator: Any) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        waited = (steps.waited - self._waited) / seconds
        own = [self._packs, waited, *(x for step in self._of_steps for x in step)]
        device = accelerator.device
        here = torch.tensor([own], dtype=wide_dtype(device), device=device)
        ranks = accelerator.gather(here).cpu()
        work = ranks[:, 2:].unflatten(1, (-1, 2))  # [ranks, steps, tokens and squares]
        (packs, waited), tokens = ranks[:, :2].sum(0).tolist(), float(work[..., 0].sum())
        size = max(dataset.manifest.pack_size for dataset in steps.loader.data.stream.datasets)
        record = {
            "examples": self._examples,
            "tokens": tokens,
            "examples_per_second": self._examples / seconds,
            "tokens_per_second": tokens / seconds,
            "fill": tokens / (packs * size),
            "data_wait": waited / len(ranks),
        }
        if len(ranks) > 1:  # each step waits for the rank with the most work
            over = (work.amax(0).sum(0) / work.mean(0).sum(0)).tolist()
            record |= zip(("slowest/tokens", "slowest/squares"), over, strict=True)
            record["slowest/data_wait"] = float(ranks[:, 1].max())
        return record


class LogFirstSteps(TrainerCallback):  # type: ignore[misc]
    """Logs the first steps, the last, and before whatever is evaluated or saved."""

    def __init__(self, trainer: PackedSteps) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Follows the Trainer's own, which decides what is saved and evaluated."""
        state.epoch = self.trainer.through
        due = control.should_save or control.should_evaluate
        if due or state.global_step <= FIRST or state.global_step >= state.max_steps:
            control.should_log = True
        return control


class PackedSteps(Trainer):  # type: ignore[misc]
    """Goes before another Trainer: trains and evaluates on packed batches by a loss of packstore.

    A packed dataset is dealt to the ranks, batched by step and resumed by packstore; of batches
    that another collator packs, the Trainer's accumulation makes a step.
    """

    loss_fn: Any
    examples_per_step = 0
    packs_per_batch: int | None = None
    through = 0.0
    """Epochs done, with the part of the current one."""

    _sides: Mapping[str, tuple[str, ...]] = {"train": (), "eval": ()}
    _options: dict[str, Any] | None = None
    _checkpoint: Path | None = None
    _guard: FirstStepCheck | None = None
    _steps: Steps | None = None
    _num_tokens = 0.0

    def _prepare_run(self) -> None:
        """Completes the constructor, after that of the Trainer."""
        self._work = Work()
        # It hides a loss that is not finite, and waits for the device in every step.
        self.args.logging_nan_inf_filter = False
        if self.accelerator.is_fsdp2 and self.accelerator.mixed_precision == "bf16":
            # Accelerate's own policy rounds outputs, which are log-probs, and sums of gradients to
            # bfloat16, and copies the layout of a row for each layer.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )

    # Data

    def _opened(self, data: Any) -> Any:
        """Returns packed datasets in the place of their folders and URLs."""
        if isinstance(data, Mapping) and not isinstance(data, Dataset):
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
        self._work = Work(self._steps)
        return self._steps

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns the batches of a dataset; default: of the trainer's own."""
        own, chosen = self.eval_dataset, eval_dataset
        if eval_dataset is None:
            chosen = own
        elif isinstance(own, Mapping) and isinstance(eval_dataset, str) and eval_dataset in own:
            chosen = own[eval_dataset]  # the Trainer names one of several
        chosen = self._opened(chosen)
        if not is_packed(chosen):
            return super().get_eval_dataloader(eval_dataset)
        return self._loader(chosen, "eval", None)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Returns the batches of a dataset."""
        return self.get_eval_dataloader(test_dataset)

    def _loader(self, data: Any, part: str, examples: int | None) -> PackedDataLoader:
        args = self.args
        if not isinstance(data, PackedDataset):
            urls = self._sides[part] if needs_reference(self.loss_fn) else ()
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

    def num_examples(self, dataloader: Any) -> int:
        """Returns the examples of an epoch."""
        loader = dataloader.loader if isinstance(dataloader, Steps) else dataloader
        if not isinstance(loader, PackedDataLoader):
            return int(super().num_examples(dataloader))
        return sum(d.manifest.totals.examples for d in loader.data.stream.datasets)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Counts steps exactly: those done, and those of the data left."""
        if self._steps is None:
            return super().set_initial_training_values(args, dataloader)
        loader = dataloader.loader
        done = 0 if self._checkpoint is None else read_state(self._checkpoint)["global_step"]
        epochs = math.ceil(args.num_train_epochs)
        left = loader.plan(epochs - loader.data.epoch, left=True).steps if args.max_steps < 1 else 0
        steps = args.max_steps
        if steps < 1:
            steps = math.ceil((done + left) * args.num_train_epochs / epochs)
        epochs = epochs if args.max_steps < 1 else loader.data.epoch + steps
        if done >= steps:  # the Trainer would run one more
            epochs = loader.data.epoch
        examples = self.num_examples(dataloader)
        if not examples:
            where = f"dataset {loader.data.stream.datasets[0].url}"
            raise ConfigError(sentence(where, "it must hold packs to train on", "none"))
        samples = examples * args.num_train_epochs
        # An epoch ends where its loader does, so its steps are a bound only.
        return epochs, steps, examples, samples, self.examples_per_step, steps, steps

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        begun: tuple[int, int] = super()._init_training_state(*args)
        logged = (r["num_tokens"] for r in self.state.log_history[::-1] if "num_tokens" in r)
        self._num_tokens = next(logged, 0.0)
        return begun if self._steps is None else (self._steps.loader.data.epoch, 0)

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Trains; `resume_from_checkpoint`: a folder, or True: the newest that is whole, if any."""
        if is_packed(self.train_dataset):
            if resume_from_checkpoint is True:
                resume_from_checkpoint = newest_checkpoint(self.args.output_dir)
            self._checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
            if self._checkpoint:
                self._check_unchanged(self._checkpoint)
                resume_from_checkpoint = str(self._checkpoint)
        self._check_reference(self._checkpoint)
        self._guard = None
        if not resume_from_checkpoint and isinstance(self.loss_fn, PreferenceLoss):
            self._guard = FirstStepCheck(self.loss_fn)
        return super().train(resume_from_checkpoint, **kwargs)

    def _check_reference(self, checkpoint: Path | None) -> None:
        """Refuses log-probs of another reference; a collective call."""

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> StepDivisor | None:
        """Counts the whole step, over its batches and all ranks."""
        batches = [batch for samples in batch_samples for batch in _as_list(samples)]
        if not batches:
            return None
        divisor = count_step(batches, self.loss_fn, device=self.accelerator.device)
        return divisor.averaged(self.accelerator.num_processes)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs batches of one step; returns the part of this rank, times the ranks."""
        model.train()
        accelerator, total = self.accelerator, torch.zeros((), device=self.args.device)
        reference = self._reference_of("train", model)
        batches = _as_list(inputs)
        self._work.add(batches)
        if self._steps is not None and (info := batches[0].step) is not None:
            epoch, steps = self._steps.loader.data.epoch, self._steps.of_epoch
            self.through = epoch + (info.index + 1) / steps
        batches = [batch.to(accelerator.device, non_blocking=True) for batch in batches]
        with getattr(self, "maybe_activation_offload_context", nullcontext()):  # TRL's
            for number, batch in enumerate(batches, start=1):
                # FSDP2 would hold whole gradients between batches that it does not reduce.
                reduced = number == len(batches) or accelerator.is_fsdp2
                with nullcontext() if reduced else accelerator.no_sync(model):
                    ref_logps = reference(batch)
                    logps = model(batch)
                    if self._guard is not None:
                        self._guard(logps, batch, ref_logps)
                    how = {"ref_logps": ref_logps, "divisor": num_items_in_batch}
                    out = self.loss_fn(logps, batch, **how)
                    accelerator.backward(out.loss)
                self._work.metrics.add(out.metrics)
                total += out.loss.detach()
        return total

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0: what the Trainer estimates counts padding."""
        return 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            tokens = sum(batch.num_tokens for batch in _as_list(inputs))
            own = torch.tensor(tokens, device=self.args.device)
            self.state.num_input_tokens_seen += int(self.accelerator.reduce(own))

    def _own_reference(self) -> Reference | None:
        """Returns what computes log-probs of a reference model; None: there is no such model."""
        raise NotImplementedError

    def _reference_of(self, part: str, model: Any) -> Reference:
        """Returns what gives log-probs of the reference."""
        if not needs_reference(self.loss_fn) or self._sides[part]:
            return of_the_batch
        own, inner = self._own_reference(), adapted(self.accelerator.unwrap_model(model))
        if own is None and inner is not None:
            own = frozen(model, partial(as_reference, model, inner))
        if own is None:
            return of_the_batch
        online = own
        # Log-probs may come with a PackedDataset, or from TRL.
        return lambda batch: None if batch.ref_logps is not None else online(batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last record, over all ranks; stops a diverged run."""
        if "loss" in logs or "train_loss" in logs:  # the last record has those of the last steps
            record = self._work.close(self.accelerator)
            if record:
                self._num_tokens = record["num_tokens"] = self._num_tokens + record["num_tokens"]
                tell_uncompiled()
            if "loss" not in logs:
                record.pop("loss", None)
            logs |= record
        super().log(logs, start_time)
        for name in ("loss", "grad_norm", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise DivergedError(
                    f"training, step {self.state.global_step}: loss and gradient must be finite; "
                    f"found {name} {logs[name]}. Lower learning_rate or lengthen warmup_steps; "
                    "earlier checkpoints are unchanged."
                )

    # Evaluation

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Computes metrics of each example once, over all ranks; predictions are a row for each."""
        if not isinstance(self.loss_fn, PreferenceLoss):
            found = repr(self.loss_fn)
            raise ConfigError(sentence("evaluation", "it must be of a PreferenceLoss", found))
        packed = isinstance(dataloader, PackedDataLoader)
        dataset = dataloader.data.stream.datasets[0] if packed else None
        model, device = self._evaluated(), self.args.device
        rows = None
        if prediction_loss_only is not True:
            if dataset is None:
                where, rule = "predict", "it must be asked for rows of a packed dataset"
                raise ConfigError(sentence(where, rule, "another dataset", "Give its folder"))
            rows = ExampleRows(self.loss_fn, dataset.manifest.carried)
        grouped = GroupedMetrics(self.loss_fn, dataset)
        reference = self._reference_of("eval", model)
        if packed:
            dataloader.set_epoch(0)
        figures = evaluate_batches(model, dataloader, grouped, reference, device, rows=rows)
        means = dict(figures["metrics"])
        number = int(means.pop("examples"))
        if self._num_tokens:
            means["num_tokens"] = self._num_tokens
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        return EvalLoopOutput(rows and rows.table(), None, metrics, number)

    def _evaluated(self) -> Any:
        """Returns the model as it is trained, or prepared for evaluation."""
        if not self.is_in_train and not self.accelerator._models:
            self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        return self.model_wrapped

    # Checkpoints

    def _described(self) -> dict[str, Any]:
        """Returns the facts that a run shares with every checkpoint of it."""
        model = self.accelerator.unwrap_model(self.model)
        trained = sum(p.requires_grad for p in model.parameters())
        plain = (bool, int, float, str)
        settings = {n: v for n, v in vars(self.loss_fn).items() if isinstance(v, plain)}
        return {
            "loss": f"{self.loss_fn!r}, {settings}",
            "model": str(getattr(model.config, "_name_or_path", "")),
            "weights": f"{sum(1 for _ in model.parameters())}, of which trained {trained}",
        }

    def _settings(self) -> dict[str, Any]:
        """Returns settings of this run that one that goes on looks at."""
        return {"mixed_precision": self.accelerator.mixed_precision}

    def _check_unchanged(self, checkpoint: Path) -> None:
        before, now = read_position(checkpoint)["run"], self._described()
        for name in now.keys() & before.keys():
            if now[name] != before[name]:
                rule = f"a run that goes on must keep its {name}, {quote(before[name], 200)}"
                remedy = "Choose another output_dir to begin a new run"
                where, found = f"checkpoint {checkpoint}", quote(now[name], 200)
                raise ConfigError(sentence(where, rule, found, remedy))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads weights, also those of a run that was sharded where this one is not."""
        checkpoint = Path(resume_from_checkpoint)
        with _readable(checkpoint):
            if self._checkpoint is None or is_sharded(checkpoint) == self._is_sharded:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:
                load_weights(model or self.model, checkpoint)

    @property
    def _is_sharded(self) -> bool:
        return bool(self.is_fsdp_enabled)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the state of the optimizer, beside the settings of this run."""
        schedule, groups = self.lr_scheduler, self.optimizer.param_groups
        own = [{n: x for n, x in group.items() if n not in ("params", "lr")} for group in groups]
        rates = getattr(schedule, "base_lrs", None)
        same = checkpoint is None or is_sharded(Path(checkpoint)) == self._is_sharded
        with _readable(Path(checkpoint or "")):
            if same or self._checkpoint is None or checkpoint is None:
                super()._load_optimizer_and_scheduler(checkpoint)
            else:
                load_optimizer(self.model, self.optimizer.optimizer, Path(checkpoint))
                state = torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True)
                schedule.load_state_dict(state)
        if checkpoint is not None and isinstance(schedule, LambdaLR):
            schedule.base_lrs, groups = rates or [], self.optimizer.param_groups
            shares = [share(schedule.last_epoch) for share in schedule.lr_lambdas]
            schedule._last_lr = [
                r * share for r, share in zip(schedule.base_lrs, shares, strict=True)
            ]
            for group, settings, rate in zip(groups, own, schedule._last_lr, strict=True):
                group.update(settings, lr=rate)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint; what could not be written whole is removed."""
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, SafetensorError) as error:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            shutil.rmtree(folder, ignore_errors=True)
            remedy = "Make room; the checkpoints before it are as they were"
            rule = "it must be possible to write it"
            raise StorageError(sentence(str(folder), rule, str(error), remedy)) from error

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model, whole also where checkpoints are sharded; a collective call."""
        if _internal_call or not self.accelerator.is_fsdp2:
            super().save_model(output_dir, _internal_call)
            return
        weights = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the position too; the Trainer's own state follows, and makes a checkpoint whole."""
        super()._save_rng_state(output_dir)
        if self._steps is not None:
            content = {"loader": self._steps.loader.state_dict(), "run": self._described()}
            content["settings"] = self._settings()
            if self.args.should_save:
                text = json.dumps({**content, "sha256": _hash(content)})
                Path(output_dir, POSITION).write_text(text, encoding="utf-8")
            self.accelerator.wait_for_everyone()


def is_packed(data: Any) -> bool:
    """Returns True for a packed dataset or a stream of one, or for several by name."""
    if isinstance(data, Mapping) and not isinstance(data, Dataset):
        return any(map(is_packed, data.values()))
    return isinstance(data, Dataset | PackedDataset)


def has_ref_logps(data: Any) -> bool:
    """Returns True for a stream of packs to which log-probs of a reference are joined."""
    stream = getattr(data, "stream", None)
    return isinstance(stream, StoredPacks) and REF_LOGPS in stream.columns


def datasets_of(*given: Any) -> Iterator[Dataset]:
    """Yields the packed datasets in what a trainer was given."""
    for data in given:
        if isinstance(data, PackedDataset):
            yield from data.stream.datasets
        elif isinstance(data, Dataset):
            yield data
        elif isinstance(data, Mapping):
            yield from datasets_of(*data.values())


def newest_checkpoint(folder: str) -> str | None:
    """Returns the newest whole checkpoint: one that a killed run was writing is none."""
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdigit() and (path / POSITION).is_file():
            try:
                found.append((read_state(path)["global_step"], str(path)))
            except (OSError, ValueError, KeyError):
                continue
    return max(found)[1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads the Trainer's state."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def read_position(checkpoint: Path) -> dict[str, Any]:
    """Reads the position in the data, and what run it is of."""
    file = checkpoint / POSITION
    rule = "it must be of a checkpoint that packstore wrote, byte for byte"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("sha256") == _hash(content):
            return content
        found = "other bytes than its hash says"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found = quote(f"{type(error).__name__}: {error}", 100)
    raise FormatError(sentence(str(file), rule, found, "Resume from an earlier checkpoint"))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Names the checkpoint in an error of reading it."""
    try:
        yield
    except CompatibilityError:
        raise
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, EOFError) as error:
        rule, remedy = "it must hold the state of every weight", "Resume from an earlier one"
        found = quote(f"{type(error).__name__}: {error}", 200)
        raise FormatError(sentence(f"checkpoint {checkpoint}", rule, found, remedy)) from error


def _as_list(inputs: Any) -> list[PackedBatch]:
    return inputs if isinstance(inputs, list) else [inputs]
