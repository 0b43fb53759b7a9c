"""transformers' Trainer on packs: what it calls a batch is one optimizer step of packed batches.

::

    args = TrainingArguments("run", num_train_epochs=1, learning_rate=1e-6)
    PackedTrainer("Qwen3-0.6B", args, "prefs-8k", loss="dpo", examples_per_step=64).train()

So steps by examples, divisors of whole steps, balance over ranks and every loss hold as in a loop
of one's own, ``len(get_train_dataloader())`` is the number of steps, and settings, callbacks,
trackers, hub, checkpoints and the best model are the Trainer's.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import EvalLoopOutput

from packstore.errors import CompatibilityError, ConfigError, DivergedError, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.side.side import open_side
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.transfer import to_device
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.logprobs.head import PackedPolicy, policy_output
from packstore.torch.losses.figures import ExampleRows, GroupedMetrics
from packstore.torch.losses.first_step_check import FirstStepCheck
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.policy import PolicyLoss
from packstore.torch.losses.step_loss import StepLoss, count_step
from packstore.torch.metrics import Metrics, wide_dtype
from packstore.torch.models.compatibility import check_model, check_same_tokenizer
from packstore.torch.models.load import is_adapter, load_model
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.probe import probe_model
from packstore.torch.models.unwrap import (
    REF_ADAPTER,
    adapted,
    as_reference,
    evaluating,
    is_reward_model,
)
from packstore.torch.training.arguments import check_arguments
from packstore.torch.training.card import model_card
from packstore.torch.training.reference import Reference, frozen, of_the_batch
from packstore.torch.training.resharding import is_sharded, load_optimizer, load_weights

logger = logging.getLogger("packstore")

POSITION, STATE = "loader.json", "trainer_state.json"
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
        self.loader, self.waited = loader, 0.0

    def __len__(self) -> int:
        return self.loader.plan().steps

    def set_epoch(self, epoch: int) -> None:
        """Moves to an epoch; does nothing for that of a loaded position."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[PackedBatch]]:
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
    """Sums of metrics and work between two records."""

    def __init__(self, steps: Steps | None) -> None:
        self.steps, self.metrics = steps, Metrics()
        self._restart()

    def _restart(self) -> None:
        self._since, self._of_steps = time.perf_counter(), list[list[float]]()
        self._examples, self._packs = 0, 0
        self._waited = self.steps.waited if self.steps else 0.0

    def add(self, step: list[PackedBatch]) -> None:
        """Adds the batches of this rank in one step, which are on the CPU."""
        assert step[0].step is not None
        self._examples += step[0].step.examples
        self._packs += sum(batch.num_packs for batch in step)
        tokens = sum(batch.num_tokens for batch in step)
        squares = sum(float(batch.cu_seqlens.diff().double().square().sum()) for batch in step)
        self._of_steps.append([tokens, squares])

    def close(self, accelerator: Any, pack_size: int) -> dict[str, float]:
        """Returns means and rates over all ranks, and starts anew; a collective call."""
        means, seconds = self.metrics.means(), max(time.perf_counter() - self._since, 1e-9)
        waited = (self.steps.waited if self.steps else 0.0) - self._waited
        own = [self._packs, waited / seconds, *(x for step in self._of_steps for x in step)]
        device = accelerator.device
        here = torch.tensor([own], dtype=wide_dtype(device), device=device)
        ranks = accelerator.gather(here).cpu()
        work = ranks[:, 2:].unflatten(1, (-1, 2))  # [ranks, steps, tokens and squares]
        (packs, waited), tokens = ranks[:, :2].sum(0).tolist(), float(work[..., 0].sum())
        record = {
            **means,
            "examples": self._examples,
            "tokens": tokens,
            "examples_per_second": self._examples / seconds,
            "tokens_per_second": tokens / seconds,
            "fill": tokens / (packs * pack_size),
            "data_wait": waited / len(ranks),
        }
        if len(ranks) > 1:  # each step waits for the rank with the most work
            over = (work.amax(0).sum(0) / work.mean(0).sum(0)).tolist()
            record |= zip(("slowest/tokens", "slowest/squares"), over, strict=True)
            record["slowest/data_wait"] = float(ranks[:, 1].max())
        self._restart()
        return record


class _Flow(TrainerCallback):  # type: ignore[misc]
    """Logs the first steps, the last, and before whatever is evaluated or saved."""

    def __init__(self, trainer: PackedTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Follows the Trainer's own, which decides what is saved and evaluated."""
        state.epoch = self.trainer.through
        due = control.should_save or control.should_evaluate
        if due or state.global_step <= FIRST or state.global_step >= state.max_steps:
            control.should_log = True
        return control


class PackedTrainer(Trainer):  # type: ignore[misc]
    """transformers' Trainer, trained on packs.

    Args:
        model: a folder or hub name of a causal LM, of a reward model for a loss of scores, or of a
            LoRA adapter; or such a model, which is prepared in place.
        args: the settings; :mod:`packstore.torch.training.arguments` has those that are refused.
        train_dataset: a packed dataset, its folder or URL; or a PackedDataset.
        eval_dataset: the same, or several by name. Each example counts once, over all ranks.
        loss: as of :class:`~packstore.torch.PreferenceLoss`; or a loss made by it.
        loss_parameters: keywords of PreferenceLoss.
        reference: a model, or the folder or hub name of one; default: the policy without its
            adapter, else a frozen copy of it.
        ref_logps, eval_ref_logps: side datasets in its place, of training and evaluation.
        examples_per_step: examples of an optimizer step, over all ranks.
        packs_per_batch: packs of one forward call; default: 1.
        peft_config: of an adapter to be trained in place of the weights.
        dtype, attention: of a model that is loaded, as of `load_model`.
        head: backend of log-probs, as of :func:`~packstore.torch.segment_logps`.
        storage_options: of fsspec, for datasets.
        others: arguments of the Trainer.

    Raises:
        ConfigError: a setting of `args` does not go with packs.
        CompatibilityError: model, data, loss and reference do not belong together.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        loss: Any = "dpo",
        loss_parameters: Mapping[str, Any] | None = None,
        reference: Any = None,
        ref_logps: Sequence[str] = (),
        eval_ref_logps: Sequence[str] = (),
        examples_per_step: int = 64,
        packs_per_batch: int | None = None,
        peft_config: Any = None,
        dtype: Any = "float32",
        attention: str = "auto",
        head: str = "auto",
        storage_options: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        **others: Any,
    ) -> None:
        args = args or TrainingArguments("tmp_trainer")
        check_arguments(args, others)
        given = loss_parameters or {}
        self.loss_fn: Any = loss if isinstance(loss, StepLoss) else PreferenceLoss(loss, **given)
        self._options = dict(storage_options or {}) or None
        self.examples_per_step, self.packs_per_batch = examples_per_step, packs_per_batch
        train, held_out = self._opened(train_dataset), self._opened(eval_dataset)
        self._check_data([train, held_out])
        scores = bool(getattr(self.loss_fn, "scores", False))
        set_seed(args.seed)  # a new head is drawn
        load = partial(load_model, dtype=dtype, attention=attention)
        needs = bool(getattr(self.loss_fn, "reference", False))
        sides = bool(ref_logps) and (held_out is None or bool(eval_ref_logps))
        if isinstance(model, str | os.PathLike):
            path, model = model, load(model, trainable=True, scores=scores)
            if is_adapter(path) and needs and reference is None and not sides:
                model.load_adapter(os.fspath(path), REF_ADAPTER, is_trainable=False)
        else:
            use_packed_attention(model, attention)
        _check_kind(self.loss_fn, model)
        if isinstance(reference, str | os.PathLike):
            reference = load(reference)
        elif reference is None and needs and not sides and not peft_config and not adapted(model):
            reference = copy.deepcopy(model)
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model.requires_grad_(False), peft_config)
        for dataset in _datasets(train, held_out):
            check_model(dataset, model)
        probe_model(model)
        per_token = {"per_token": True} if isinstance(self.loss_fn, PolicyLoss) else {}
        how = {} if scores else {"backend": head, **per_token}
        take_batches(model, **how)
        self._sides = {"train": tuple(ref_logps), "eval": tuple(eval_ref_logps)}
        super().__init__(model, args, callbacks=callbacks, eval_dataset=held_out, **others)
        if self.accelerator.is_fsdp2 and self.accelerator.mixed_precision == "bf16":
            # Accelerate's own policy rounds outputs, which are log-probs, and sums of gradients to
            # bfloat16, and copies the layout of a row for each layer.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        self.add_callback(_Flow(self))
        self.train_dataset = train
        self._work, self.through = Work(None), 0.0
        self._guard: FirstStepCheck | None = None
        self._checkpoint: Path | None = None
        self._steps: Steps | None = None
        self._reference: Any = reference if needs else None
        self._needs, self._how = needs, how

    def _opened(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: self._opened(part) for name, part in data.items()}
        if isinstance(data, str | os.PathLike):
            return open_dataset(os.fspath(data), self._options)
        return data

    def _check_data(self, given: list[Any]) -> None:
        every = list(_datasets(*given))
        if isinstance(self.loss_fn, PreferenceLoss):
            for dataset in every:
                self.loss_fn.check_data(dataset)
        check_same_tokenizer([dataset.manifest for dataset in every])

    # Data

    def get_train_dataloader(self) -> Any:
        """Returns the steps: lists of packed batches; from the checkpoint's position if resumed."""
        loader = self._loader(self.train_dataset, "train", self.examples_per_step)
        if self._checkpoint is not None:
            text = (self._checkpoint / POSITION).read_text(encoding="utf-8")
            loader.load_state_dict(json.loads(text))
            if not loader.plan(1, left=True).steps:
                loader.set_epoch(loader.data.epoch + 1)
        self._steps = Steps(loader)
        self._work = Work(self._steps)
        return self._steps

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PackedDataLoader:
        """Returns the batches of a dataset; default: of the trainer's own."""
        own = self.eval_dataset
        if eval_dataset is None:
            chosen = own
        elif isinstance(own, Mapping) and isinstance(eval_dataset, str) and eval_dataset in own:
            chosen = own[eval_dataset]  # the Trainer names one of several
        else:
            chosen = self._opened(eval_dataset)
        return self._loader(chosen, "eval", None)

    get_test_dataloader = get_eval_dataloader

    def _loader(self, data: Any, part: str, examples: int | None) -> PackedDataLoader:
        args = self.args
        if not isinstance(data, PackedDataset):
            side = [open_side(url, self._options) for url in self._sides[part] if self._needs]
            seed = args.seed if args.data_seed is None else args.data_seed
            data = PackedDataset(data, seed=seed, side=side, shuffle=part == "train")
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

    @property
    def dataset(self) -> Dataset:
        """The packed dataset that is trained on, of a mix the first."""
        return next(_datasets(self.train_dataset))

    def num_examples(self, dataloader: Any) -> int:
        """Returns the examples of an epoch."""
        loader = dataloader.loader if isinstance(dataloader, Steps) else dataloader
        return sum(d.manifest.totals.examples for d in loader.data.stream.datasets)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Counts steps exactly: those done, and those of the data left."""
        loader = dataloader.loader
        done = 0 if self._checkpoint is None else _state(self._checkpoint)["global_step"]
        epochs = math.ceil(args.num_train_epochs)
        left = loader.plan(epochs - loader.data.epoch, left=True).steps if args.max_steps < 1 else 0
        steps = args.max_steps
        if steps < 1:
            steps = math.ceil((done + left) * args.num_train_epochs / epochs)
        epochs = epochs if args.max_steps < 1 else loader.data.epoch + steps
        examples = self.num_examples(dataloader)
        samples = examples * args.num_train_epochs
        # An epoch ends where its loader does, so its steps are a bound only.
        return epochs, steps, examples, samples, self.examples_per_step, steps, steps

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        super()._init_training_state(*args)
        assert self._steps is not None
        return self._steps.loader.data.epoch, 0

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Trains; `resume_from_checkpoint`: a folder, or True: the newest that is whole, if any."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.args.output_dir)
        self._checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self._guard = None if self._checkpoint else FirstStepCheck(self.loss_fn)
        return super().train(str(self._checkpoint) if self._checkpoint else None, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs the batches of one step; returns the part of this rank, times the ranks."""
        model.train()
        accelerator, total = self.accelerator, torch.zeros((), device=self.args.device)
        reference = self._reference_of("train", model)
        divisor = count_step(inputs, self.loss_fn, device=accelerator.device)
        divisor = divisor.averaged(accelerator.num_processes)
        info = inputs[0].step
        assert self._steps is not None
        loader = self._steps.loader
        self._work.add(inputs)
        self.through = loader.data.epoch + (info.index + 1) / max(loader.plan().steps, 1)
        batches = [batch.to(accelerator.device, non_blocking=True) for batch in inputs]
        for number, batch in enumerate(batches, start=1):
            # FSDP2 would hold whole gradients between batches that it does not reduce.
            reduced = number == len(batches) or accelerator.is_fsdp2
            with nullcontext() if reduced else accelerator.no_sync(model):
                ref_logps = reference(batch)
                logps = model(batch)
                if self._guard is not None:
                    self._guard(logps, batch, ref_logps)
                out = self.loss_fn(logps, batch, ref_logps, divisor=divisor)
                accelerator.backward(out.loss)
            self._work.metrics.add(out.metrics)
            total += out.loss.detach()
        return total

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0: what the Trainer estimates counts padding."""
        return 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            own = torch.tensor(sum(batch.num_tokens for batch in inputs), device=self.args.device)
            self.state.num_input_tokens_seen += int(self.accelerator.reduce(own))

    def _reference_of(self, part: str, model: Any) -> Reference:
        """Returns what computes log-probs of the reference."""
        if not self._needs or self._sides[part]:
            return of_the_batch
        if self._reference is None:
            inner = adapted(self.accelerator.unwrap_model(model))
            if inner is None:
                return of_the_batch  # of a PackedDataset's side data
            return frozen(model, partial(as_reference, model, inner))
        if not isinstance(self._reference, _Placed):
            self._reference = _Placed(self._reference, self.accelerator, self._how)
        placed = self._reference
        return frozen(placed.policy, placed.context)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last record, over all ranks; stops a diverged run."""
        if "loss" in logs:
            assert self._steps is not None
            stream = self._steps.loader.data.stream
            size = max(dataset.manifest.pack_size for dataset in stream.datasets)
            logs |= self._work.close(self.accelerator, size)
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
        dataloader: PackedDataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Computes metrics of each example once, over all ranks; predictions are a row for each."""
        if not isinstance(self.loss_fn, PreferenceLoss):
            found = repr(self.loss_fn)
            raise ConfigError(sentence("evaluation", "it must be of a PreferenceLoss", found))
        dataset = dataloader.data.stream.datasets[0]
        model, device = self._evaluated(), self.args.device
        reference = self._reference_of("eval", model)
        grouped = GroupedMetrics(self.loss_fn, dataset, None)
        rows = ExampleRows(self.loss_fn, dataset.manifest.carried)
        wants_rows = prediction_loss_only is not True
        dataloader.set_epoch(0)
        with evaluating(model):
            for batch in dataloader:
                here = to_device(batch, device)
                logps = model(here)
                ref_logps = reference(here)
                grouped.add(logps, here, ref_logps, batch)
                if wants_rows:
                    rows.add(logps, here, ref_logps, batch)
        means = dict(grouped.figures(device)["metrics"])
        number = int(means.pop("examples"))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        table = rows.table() if wants_rows else None
        return EvalLoopOutput(table, None, metrics, number)

    model_wrapped: Any

    def _evaluated(self) -> Any:
        """Returns the model as it is trained, or prepared for evaluation."""
        if not self.is_in_train and not self.accelerator._models:
            self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        return self.model_wrapped

    # Checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads weights, also those of a run that was sharded where this one is not."""
        checkpoint = Path(resume_from_checkpoint)
        if is_sharded(checkpoint) == self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(model or self.model, checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or is_sharded(Path(checkpoint)) == self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, schedule = self.optimizer.optimizer, self.lr_scheduler
        load_optimizer(self.model, optimizer, Path(checkpoint))
        state = torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True)
        schedule.load_state_dict(state)
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model, whole also where checkpoints are sharded; a collective call."""
        if _internal_call or not self.accelerator.is_fsdp2:
            super().save_model(output_dir, _internal_call)
            return
        weights = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def create_model_card(self, **given: Any) -> None:
        """Writes the model's ``README.md``: dataset, loss, settings, results."""
        if self.is_world_process_zero():
            text = model_card(self, **given)
            Path(self.args.output_dir, "README.md").write_text(text, encoding="utf-8")

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the position too; the Trainer's own state follows, and makes a checkpoint whole."""
        super()._save_rng_state(output_dir)
        if self.args.should_save and self._steps is not None:
            text = json.dumps(self._steps.loader.state_dict())
            Path(output_dir, POSITION).write_text(text, encoding="utf-8")
        self.accelerator.wait_for_everyone()


class _Placed:
    """A reference on the device of a run, in the precision of its policy."""

    def __init__(self, model: Any, accelerator: Any, how: Mapping[str, Any]) -> None:
        use_packed_attention(model)
        policy: Any = PackedPolicy(model.requires_grad_(False), **how).eval()
        policy._no_split_modules = model._no_split_modules  # the units that Accelerate shards
        self.context: Callable[[], AbstractContextManager[Any]] = accelerator.autocast
        if accelerator.is_fsdp2:
            from accelerate.utils.fsdp_utils import fsdp2_prepare_model

            policy, self.context = fsdp2_prepare_model(accelerator, policy), nullcontext
            policy.set_reshard_after_forward(True)  # no backward pass follows
        self.policy = policy.to(accelerator.device)


def newest_checkpoint(folder: str) -> str | None:
    """Returns the newest whole checkpoint: one that a killed run was writing is none."""
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdigit() and (path / POSITION).is_file():
            try:
                found.append((_state(path)["global_step"], str(path)))
            except (OSError, ValueError, KeyError):
                continue
    return max(found)[1] if found else None


def _state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def _datasets(*given: Any) -> Iterator[Dataset]:
    for data in given:
        if isinstance(data, Mapping):
            yield from _datasets(*data.values())
        elif isinstance(data, PackedDataset):
            yield from data.stream.datasets
        elif data is not None:
            yield data


def _check_kind(loss_fn: Any, model: Any) -> None:
    scores = bool(getattr(loss_fn, "scores", False))
    if scores != is_reward_model(model):
        kinds = ["a causal LM", "a reward model"]
        rule, remedy = f"it is for {kinds[scores]}", "Use bradley_terry for reward models"
        raise CompatibilityError(sentence(repr(loss_fn), rule, kinds[not scores], remedy))
