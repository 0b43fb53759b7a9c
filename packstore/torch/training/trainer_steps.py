"""Steps of a Trainer on packs: their loss, reference and records, and evaluation.

`PackedSteps` is a mixin for transformers' Trainer. To the Trainer, one optimizer step
is one batch: the list of the step's packed batches (``data.py``). A record is one entry
of the Trainer's log; `StepMetrics` sums the values of the next one. The model is
changed in place, so that its forward call takes a packed batch, and is released (put
back as it was) after each run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy

from packstore.config.settings import check_class
from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.logprobs.head import PackedPolicy, policy_output
from packstore.torch.losses.loss import (
    FirstStepCheck,
    PreferenceLoss,
    warn_about_one_sided_data,
)
from packstore.torch.losses.step_loss import (
    StepDivisor,
    count_step,
    sequence_weights,
)
from packstore.torch.metrics import Metrics, all_reduce_sums, wide_dtype
from packstore.torch.models.compatibility import (
    check_ids,
    check_model,
    check_same_tokenizer,
)
from packstore.torch.models.compiled import warn_about_uncompiled
from packstore.torch.models.replaced import (
    put_back_forward,
    release,
    replace_forward,
    replaced_forward,
)
from packstore.torch.models.routers import router_settings
from packstore.torch.models.row import BatchForward, take_back_attention
from packstore.torch.models.unwrap import (
    as_reference,
    evaluating,
    peft_model_of,
    unwrapped,
)
from packstore.torch.parallel.padding import pad_batch, static_sizes
from packstore.torch.training.arguments import hide_tokens, naming_settings
from packstore.torch.training.checkpoint_files import (
    newest_checkpoint,
    read_position,
    remove_torn_checkpoints,
)
from packstore.torch.training.checkpoints import CheckpointMixin, diverged_error
from packstore.torch.training.data import DataMixin, Steps, datasets_of, is_packed
from packstore.torch.training.evaluate import (
    check_evaluated,
    check_kind,
    evaluate_batches,
)
from packstore.torch.training.graphs import CudaGraph, GraphedStep, StepGraph

logger = logging.getLogger("packstore")

FIRST_STEPS = 10
"""Number of steps at the start of a run that are logged one by one."""

ENOUGH_EXAMPLES = 1000
"""Number of examples after which a warning is given if all are of one side."""


def take_batches(model: nn.Module, **settings: Any) -> None:
    """Let the forward call of `model` take a packed batch, and return its log-probs.

    The model itself is changed, not wrapped in a module: DDP and FSDP then see the head
    inside the forward call, and names of weights in checkpoints stay as they are.

    Args:
        model: the model, which is prepared in place.
        settings: arguments of PackedPolicy.
    """
    PackedPolicy(model, **settings)  # raises if the head is not one that it can use
    if replaced_forward(model) is None:
        replace_forward(model, BatchForward(model))
    put_back_forward(model)
    set_batch_call(model, **settings)


def set_batch_call(model: nn.Module, **settings: Any) -> None:
    """Set the arguments of PackedPolicy for a model that `take_batches` prepared.

    They are set again before each run, as trainers with other settings may use the
    same model in turn.
    """
    replacement: Any = replaced_forward(model)
    replacement.batch_call = partial(policy_output, **settings)


def release_copy(model: Any) -> None:
    """Release a model that was copied or saved while a trainer had prepared it."""
    if not isinstance(model, nn.Module):
        return
    if getattr(replaced_forward(model), "batch_call", None):
        release(model)


class StepMetrics(TrainerCallback):  # type: ignore[misc]
    """Sums metrics, tokens and work since the last record.

    It also makes the Trainer log the first steps and the last. If another collator
    packs the batches, a record has only metrics and tokens, and no rates.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.on_train_begin()

    def _start_record(self) -> None:
        self.metrics = Metrics()
        self._start_time = time.perf_counter()
        self._num_tokens: Tensor | float = 0.0
        self._num_examples = 0
        self._num_packs = 0
        self._work: list[list[float]] = []  # of each step: tokens, squares
        # Examples since the last record of the run that this one resumes.
        self._num_examples_before = 0
        self._start_wait_seconds = 0.0
        # Not by truth: bool() calls len(), which looks at all packs.
        if self.trainer.steps is not None:
            self._start_wait_seconds = self.trainer.steps.wait_seconds

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start anew, or with the sums that a checkpoint holds."""
        self._start_record()
        if self.trainer._checkpoint is not None:
            content = read_position(self.trainer._checkpoint)
            self._resume_record(content.get("open_record"))
        self._first_step = self.trainer.state.global_step
        # Over all ranks; but of this rank alone, if another collator packs the batches.
        self._num_trained_examples = 0
        # For the warning about one-sided data: examples seen, and counts of both sides.
        self._num_compared_examples = 0
        self._side_counts = torch.zeros(2)
        self._has_checked_sides = False

    def open_record(self) -> dict[str, Any]:
        """Return the sums since the last record, over all ranks; a collective call."""
        device = self.trainer.accelerator.device
        return {
            "examples": self._num_examples + self._num_examples_before,
            "num_tokens": all_reduce_sums([self._num_tokens], device=device)[0],
            "metrics": self.metrics.totals(),
        }

    def _resume_record(self, record: dict[str, Any] | None) -> None:
        """Start with the sums of :meth:`open_record`, which are over all ranks.

        So that they count once, the first rank takes all of them, and the others none.
        """
        if record is None:
            return
        accelerator = self.trainer.accelerator
        share = 1.0 if accelerator.is_main_process else 0.0
        self._num_examples_before = record["examples"]
        self._num_tokens = share * record["num_tokens"]
        dtype = wide_dtype(accelerator.device)
        for name, sum_and_count in record["metrics"].items():
            sums = torch.tensor(sum_and_count, dtype=dtype, device=accelerator.device)
            total, count = share * sums
            self.metrics.add({name: (total, count)})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Warn, once, if a side has no examples to compare; a collective call."""
        if not self._num_compared_examples or self._has_checked_sides:
            return
        self._has_checked_sides = True
        device = self.trainer.accelerator.device
        num_chosen, num_rejected = all_reduce_sums([*self._side_counts], device=device)
        if self.trainer.is_world_process_zero():
            warn_about_one_sided_data(self.trainer.loss_fn, num_chosen, num_rejected)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the first and last steps, and each before a checkpoint or evaluation.

        It runs after the Trainer's own callback, which decides about the latter two.
        """
        if self.trainer.steps is None:
            return
        state.epoch = self.trainer.steps.epoch_progress
        if args.logging_strategy != IntervalStrategy.STEPS:
            return
        is_first = state.global_step <= FIRST_STEPS
        is_last = state.global_step >= state.max_steps
        if is_first or is_last or control.should_save or control.should_evaluate:
            control.should_log = True

    def add(self, batches: list[PackedBatch]) -> None:
        """Add the batches of one step on this rank."""
        for batch in batches:
            is_counted = sequence_weights(batch) > 0  # False in fillers
            self._num_tokens = self._num_tokens + (batch.lengths * is_counted).sum()

        info = batches[0].step
        if self.trainer.steps is None or info is None:
            num_examples = sum(batch.num_examples for batch in batches)
            self._num_trained_examples += num_examples
            return

        self._num_trained_examples += info.examples
        self._num_examples += info.examples
        self._num_packs += sum(batch.num_packs for batch in batches)
        self._add_work(batches)
        loss_fn = self.trainer.loss_fn
        if isinstance(loss_fn, PreferenceLoss) and not self._has_checked_sides:
            self._num_compared_examples += info.examples
            for batch in batches:
                self._side_counts = loss_fn.count_sides(batch) + self._side_counts

    def _add_work(self, batches: list[PackedBatch]) -> None:
        tokens = 0.0
        # As in PackSizes: about twice the number of (query, key) pairs.
        squares = 0.0
        for batch in batches:
            queries = batch.cu_seqlens.diff().double()
            keys = batch.cu_seqlens_k.diff().double()
            tokens += batch.num_tokens
            squares += float((queries * (2 * keys - queries)).sum())
        self._work.append([tokens, squares])

    def close(self) -> dict[str, float]:
        """Return the record, with means and rates over all ranks; start the next one.

        A collective call. `num_tokens` counts the tokens of all sequences, each with
        its prompt, as TRL does.
        """
        record = self.metrics.means()
        if not record:  # no step since the last record
            return {}
        device = self.trainer.accelerator.device
        record["num_tokens"] = all_reduce_sums([self._num_tokens], device=device)[0]
        if math.isnan(record["loss"]):
            # These steps had no pair; the record then has the Trainer's own loss. If
            # the run has diverged, that is NaN as well.
            del record["loss"]
        if self._num_compared_examples >= ENOUGH_EXAMPLES:
            self.on_train_end()
        if self.trainer.steps is not None:
            record |= self._throughput(self.trainer.steps)
            record["examples"] += self._num_examples_before
        self._start_record()
        return record

    def summary_rates(self, seconds: float) -> dict[str, float]:
        """Return the rates of a call of `train`; a collective call.

        They replace the Trainer's, which assume that every step holds as many examples
        as requested.

        Args:
            seconds: duration of the call.
        """
        if not seconds:
            return {}
        trainer = self.trainer
        num_examples = float(self._num_trained_examples)
        if trainer.steps is None:
            device = trainer.accelerator.device
            num_examples = all_reduce_sums([num_examples], device=device)[0]
        num_steps = trainer.state.global_step - self._first_step
        return {
            "train_samples_per_second": round(num_examples / seconds, 3),
            "train_steps_per_second": round(num_steps / seconds, 3),
        }

    def _throughput(self, steps: Steps) -> dict[str, float]:
        """Return rates and balance over all ranks; a collective call."""
        seconds = max(time.perf_counter() - self._start_time, 1e-9)
        wait_share = (steps.wait_seconds - self._start_wait_seconds) / seconds

        packs = self._gather([self._num_packs])  # [ranks]
        wait_shares = self._gather([wait_share])  # [ranks]
        work = self._gather([self._work])  # [ranks, steps, 2]: tokens, squares
        num_tokens = float(work[..., 0].sum())

        datasets = steps.loader.data.stream.datasets
        pack_size = max(dataset.manifest.pack_size for dataset in datasets)
        record = {
            "examples": self._num_examples,
            "examples_per_second": self._num_examples / seconds,
            "tokens_per_second": num_tokens / seconds,
            "fill": num_tokens / (float(packs.sum()) * pack_size),
            "data_wait": float(wait_shares.mean()),
        }
        if len(work) > 1:
            record["slowest/tokens"] = slowdown(work[..., 0])
            record["slowest/squares"] = slowdown(work[..., 1])
            record["slowest/data_wait"] = float(wait_shares.max())
        return record

    def _gather(self, values: Any) -> Tensor:
        """Gather numbers of all ranks on the CPU; the first dimension is the rank."""
        accelerator = self.trainer.accelerator
        dtype = wide_dtype(accelerator.device)
        tensor = torch.tensor(values, dtype=dtype, device=accelerator.device)
        gathered: Tensor = accelerator.gather(tensor).cpu()
        return gathered


def slowdown(work: Tensor) -> float:
    """Return the slowest rank's time over the mean, as ranks wait for each other.

    Args:
        work: `[ranks, steps]`, a measure of each rank's work in each step.
    """
    slowest = work.amax(dim=0).sum()
    mean = work.mean(dim=0).sum()
    return float(slowest / mean)


class PackedSteps(DataMixin, CheckpointMixin):
    """Mixin for a Trainer: trains and evaluates on packed batches by a packstore loss.

    The packs of a packed dataset are distributed over the ranks, batched by step and
    resumed by packstore. If another collator packs the batches, a step is made by the
    Trainer's gradient accumulation.
    """

    runs_whole_steps = True
    """True: each of its batches is a whole step. Other Trainers are checked for it."""

    args: Any
    control: Any

    # Arguments of PackedPolicy, for the log-probs of the model.
    _head_settings: Mapping[str, Any] = MappingProxyType({})
    _first_step_check: FirstStepCheck | None = None
    # Batches of training are replayed as CUDA graphs.
    _uses_graphs = False
    _make_graph: Callable[[torch.device], StepGraph] = CudaGraph
    _graphed_step: GraphedStep | None = None
    _batch_sizes: Mapping[str, int] = MappingProxyType({})
    # True while the Trainer makes optimizer and schedule from its settings.
    _is_preparing = False
    _evaluation_prefix = ""
    _num_evaluated_batches = 0

    def _finish_init(self) -> None:
        """Complete the constructor, after the constructor of the Trainer."""
        self.args = hide_tokens(self.args)
        self._check_setup()
        self._step_metrics = StepMetrics(self)
        self.add_callback(self._step_metrics)
        # The loss is divided by the count of the step already, so that the Trainer must
        # not divide by the number of batches. Older releases know the second name only.
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = True
        # The filter hides a loss that is not finite, and waits for the device in every
        # step.
        self.args.logging_nan_inf_filter = False
        accelerator = self.accelerator
        if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
            # Accelerate's own policy rounds outputs, which are log-probs, and sums of
            # gradients to bfloat16, and copies the layout of a row for each layer.
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
            accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    def _check_setup(self) -> None:
        """Raise for a subclass or a backend that cannot train on packs."""
        if type(self).prediction_step is not PackedSteps.prediction_step:
            raise ConfigError(
                sentence(
                    where=type(self).__name__,
                    rule="prediction_step must not be overridden",
                    found="an override",
                    remedy="Override evaluation_loop, which does not call it",
                )
            )
        if self.args.deepspeed and not self.is_deepspeed_enabled:
            raise ConfigError(
                sentence(
                    where="setting deepspeed",
                    rule="Accelerate runs it on accelerators only",
                    found=self.args.device.type,
                    remedy="Leave it out",
                )
            )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise ConfigError(
                sentence(
                    where="setting fsdp",
                    rule="its version must be 2",
                    found="version 1",
                    remedy="Set version: 2 in fsdp_config",
                )
            )

    def _check_model(self, model: Any, datasets: Sequence[Dataset]) -> None:
        """Raise if model, datasets and loss do not belong together."""
        check_kind(self.loss_fn, model)
        for dataset in datasets:
            self.loss_fn.check_data(dataset)
        check_same_tokenizer([dataset.manifest for dataset in datasets])
        for dataset in datasets:
            check_model(dataset, model)
        if self.loss_fn.router_aux_loss_coef:
            self._check_routers(model)

    def _check_routers(self, model: Any) -> None:
        """Raise if the loss has a router term, and the model returns none."""
        if router_settings(model) is not None and not self.loss_fn.scores:
            return
        raise ConfigError(
            sentence(
                where="loss parameter router_aux_loss_coef",
                rule="the model's config must have output_router_logits and "
                "router_aux_loss_coef > 0",
                found=type(unwrapped(model)).__name__,
                remedy="Leave it out, or add them to its config.json",
            )
        )

    # A training run.

    def train(
        self,
        resume_from_checkpoint: str | PathLike[str] | bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train; afterwards the model is as ready for other uses as before.

        Args:
            resume_from_checkpoint: a folder; True: the newest whole checkpoint in the
                output folder, if there is one.
            kwargs: further arguments of the Trainer's method.
        """
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        if is_packed(self.train_dataset):
            self._checkpoint = None if checkpoint is None else Path(checkpoint)
            if self._checkpoint is not None:
                self._check_same_run(self._checkpoint)
                self._resume_attention(self._checkpoint)
        if self.args.should_save:
            remove_torn_checkpoints(
                Path(self.args.output_dir),
                resumed=Path(checkpoint) if isinstance(checkpoint, str) else None,
                limit=self.args.save_total_limit,
            )
        self._check_trained()
        self._check_reference(self._checkpoint)
        self._first_step_check = None
        if checkpoint is None and isinstance(self.loss_fn, PreferenceLoss):
            self._first_step_check = FirstStepCheck(self.loss_fn)

        save_total_limit = self.args.save_total_limit
        self._is_preparing = False
        self._set_up_model()
        try:
            with self._naming_settings_while_preparing():
                output = super().train(checkpoint, **kwargs)
        finally:
            # `_prepare_end` has changed it.
            self.args.save_total_limit = save_total_limit
            self._graphed_step = None
            self._release_model()
        self._remove_all_but_best()
        return output

    def _find_checkpoint(self, resume_from_checkpoint: Any) -> Any:
        """Return the checkpoint to resume from, or None.

        True if only the Trainer can find one: with data that is not packed.
        """
        if resume_from_checkpoint in (None, False):
            return None
        if resume_from_checkpoint is not True:
            path = resume_from_checkpoint
            if isinstance(path, PathLike):
                path = str(path)
            where = "argument resume_from_checkpoint"
            check_class(where, path, str, "Give a folder, or True")
            return path
        newest = newest_checkpoint(self.args.output_dir)
        if newest is None and not is_packed(self.train_dataset):
            return True  # it may be a checkpoint of TRL's own trainer
        if newest is None and self.is_world_process_zero():
            logger.warning(
                "%s holds no whole checkpoint to resume from: training starts anew",
                self.args.output_dir,
            )
        return newest

    def _check_trained(self) -> None:
        """Raise if no parameter requires gradients, or the optimizer holds none that
        do.
        """
        trained = {id(p) for p in self.model.parameters() if p.requires_grad}
        remedy = "Set requires_grad"
        is_prepared = hasattr(self.optimizer, "accelerator_state")
        if self.optimizer is not None and not is_prepared:
            where = "argument optimizers"
            check_class(where, self.optimizer, Optimizer, "Give an instance")
            for_optimizer: set[int] = set()
            for group in self.optimizer.param_groups:
                for_optimizer.update(id(p) for p in group["params"])
            trained &= for_optimizer
            remedy = "Make the optimizer from this model's parameters, or leave it out"
        if not trained:
            raise CompatibilityError(
                sentence(
                    where=type(self.model).__name__,
                    rule="some of its weights must require gradients",
                    found="none",
                    remedy=remedy,
                )
            )

    def _check_reference(self, checkpoint: Path | None) -> None:
        """Raise for stored log-probs of another reference; a collective call."""

    def _resume_attention(self, checkpoint: Path) -> None:
        """Take over the attention backend of the checkpoint's run."""

    def _set_up_model(self) -> None:
        """Set the model up for this trainer: others may have used it since."""
        set_batch_call(self.model, **self._head_settings)
        take_back_attention(self.model)

    def _release_model(self) -> None:
        """Undo Accelerate's changes to the model, so that it serves any further use."""
        if not self._is_sharded():
            release(self.model)
            self.model_wrapped = self.model

    def _is_sharded(self) -> bool:
        """Return True if the run has changed the model itself, for good."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @contextmanager
    def _naming_settings_while_preparing(self) -> Iterator[None]:
        """Re-raise errors as ConfigError while optimizer and schedule are made.

        The Trainer makes them between the two methods below, from settings. Later
        errors may have any cause, and stay as they are.
        """
        try:
            yield
        except Exception:
            if not self._is_preparing:
                raise
            with naming_settings():
                raise

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Count epochs and steps, which the Trainer does just before it makes the
        optimizer.
        """
        values = super().set_initial_training_values(args, dataloader)
        self._is_preparing = True
        return values

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the schedule, the last object that is made from settings."""
        schedule = super().create_scheduler(*args, **kwargs)
        self._is_preparing = False
        return schedule

    # A step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], StepDivisor | None]:
        """Return the items of a step, and its divisor over all batches and ranks."""
        items = list(islice(epoch_iterator, num_batches))
        if not items:
            return [], None
        batches = [batch for item in items for batch in _as_list(item)]
        divisor = count_step(batches, self.loss_fn, device=self.accelerator.device)
        # DDP and FSDP average gradients over the ranks.
        return items, divisor.averaged(self.accelerator.num_processes)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run the batches of a step, or one of them; return their part of the loss.

        It is this rank's part times the number of ranks, as the Trainer averages over
        the ranks.
        """
        batches = _as_list(inputs)
        self._check_whole_step(batches)
        self._step_metrics.add(batches)
        take_back_attention(self.model)  # a callback may have set another
        gradient_state = self.accelerator.gradient_state
        total = torch.zeros((), device=self.args.device)
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            if isinstance(inputs, list):
                # The Trainer takes the whole step for one batch. DeepSpeed's engine
                # would run an optimizer step for each batch that syncs gradients.
                gradient_state._set_sync_gradients(is_last)
            if self._uses_graphs:
                total += self._replay(model, batch, num_items_in_batch)
                continue
            with self._gradient_reduction(model, is_last=is_last):
                placed = self._to_device(batch)
                total += super().training_step(model, placed, num_items_in_batch)
        return total

    def _replay(self, model: Any, batch: PackedBatch, divisor: StepDivisor) -> Tensor:
        """Add the gradients of a batch by a replay of the graph; return its part of the
        loss.
        """
        check_ids(batch, self.model)
        model.train()
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()  # of a schedule-free optimizer
        if self._graphed_step is None:
            self._check_first_batch(model, batch)
            manifests = [data.manifest for data in datasets_of(self.train_dataset)]
            self._batch_sizes = static_sizes(manifests, self.packs_per_batch or 1)
            self._graphed_step = GraphedStep(
                model,
                self.loss_fn,
                reference=partial(self._reference_logps, model),
                backward=self.accelerator.backward,
                graph=self._make_graph,
            )
        output = self._graphed_step(
            pad_batch(batch, **self._batch_sizes), divisor=divisor
        )
        self._step_metrics.metrics.add(output.metrics)
        return output.loss

    @torch.no_grad()
    def _check_first_batch(self, model: Any, batch: PackedBatch) -> None:
        """Compare policy and reference before the first step, outside the graph."""
        if self._first_step_check is None:
            return
        placed = batch.to(self.accelerator.device)
        ref_logps = self._reference_logps(model, placed)
        self._first_step_check(model(placed), placed, ref_logps)

    def _check_whole_step(self, batches: list[PackedBatch]) -> None:
        """Raise if a loader of the user's own yields parts of a step."""
        info = batches[-1].step
        if info is None or info.batches == len(batches):
            return
        raise ConfigError(
            sentence(
                where="get_train_dataloader",
                rule="it must yield whole steps",
                found=f"{len(batches)} of the {info.batches} batches of a step",
                remedy="Return the loader of PackedTrainer, or one like it",
            )
        )

    def _gradient_reduction(
        self, model: Any, *, is_last: bool
    ) -> AbstractContextManager[Any]:
        """Return a context in which gradients are reduced over ranks only if needed."""
        plugin_settings = self.accelerator.gradient_state.plugin_kwargs
        if is_last or plugin_settings.get("sync_each_batch", False):
            return nullcontext()
        # FSDP2 would hold whole gradients between batches that it does not reduce.
        if self.accelerator.is_fsdp2 or self.is_deepspeed_enabled:
            return nullcontext()
        without_reduction: AbstractContextManager[Any] = self.accelerator.no_sync(model)
        return without_reduction

    def _to_device(self, batch: PackedBatch) -> PackedBatch:
        """Return the batch on the device of the run."""
        check_ids(batch, self.model)
        return batch.to(self.accelerator.device, non_blocking=True)

    def compute_loss(
        self,
        model: Any,
        inputs: PackedBatch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the part that one batch adds to a step's loss.

        If a subclass overrides it, records of training have the mean of its loss over
        steps; `eval_loss` is always of `loss_fn`.

        Returns:
            The loss; with `return_outputs` also log-probs `[S]` in nats.
        """
        check_class("inputs", inputs, PackedBatch, "Give one batch of a step")
        ref_logps = self._reference_logps(model, inputs)
        logps = model(inputs)
        output = self.loss_fn(
            logps, inputs, ref_logps=ref_logps, divisor=num_items_in_batch
        )
        if model.training:
            if self._first_step_check is not None:
                self._first_step_check(logps, inputs, ref_logps)
            self._step_metrics.metrics.add(output.metrics)
        return (output.loss, logps) if return_outputs else output.loss

    @torch.no_grad()
    def _reference_logps(self, model: Any, batch: PackedBatch) -> Tensor | None:
        """Return log-probs of the reference, in nats: `[S]`, or `[n]` for a loss of
        tokens.

        None if the loss needs no reference, or if the batch holds its log-probs, from
        side data or from TRL.
        """
        if not self.loss_fn.reference or self.loss_fn.has_reference(batch):
            return None
        return self._run_reference(model, batch)

    def _run_reference(self, model: Any, batch: PackedBatch) -> Tensor | None:
        """Return log-probs `[S]` of the policy without the adapter that is trained.

        A frozen copy of the adapter takes its place, if there is one. None if the
        policy has no adapter.
        """
        peft_model = peft_model_of(self.accelerator.unwrap_model(model))
        if peft_model is None:
            return None
        with as_reference(model, peft_model):
            logps: Tensor = model(batch)
        return logps

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the Trainer's estimate would count padding."""
        return 0

    # Evaluation.

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return metrics, as the Trainer does; see :meth:`evaluation_loop`."""
        metrics: dict[str, float] = super().evaluate(
            eval_dataset, ignore_keys, metric_key_prefix
        )
        # With several datasets, the Trainer calls this method for each.
        is_outer_call = eval_dataset is None and metric_key_prefix == "eval"
        if self.is_in_train and is_outer_call:
            self._check_best_metric(metrics)
        return metrics

    def _check_best_metric(self, metrics: Mapping[str, float]) -> None:
        """Raise if no metric has the name in `metric_for_best_model`."""
        name = self.args.metric_for_best_model
        if name is None:
            return
        if not name.startswith("eval_"):
            name = f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                sentence(
                    where="setting metric_for_best_model",
                    rule="it must be a metric of the evaluation",
                    found=name,
                    remedy=f"Choose one of: {', '.join(sorted(metrics))}",
                )
            )

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Compute metrics with each example counted once, over all ranks.

        Unless `prediction_loss_only`, predictions are a table with a row for each
        example.
        """
        has_rows = prediction_loss_only is not True
        datasets = self._check_evaluated(dataloader, has_rows=has_rows)
        self._set_up_model()
        if hasattr(self.optimizer, "eval"):
            # A schedule-free optimizer evaluates other weights than it trains. It
            # returns to the others by itself in the next step.
            self.optimizer.eval()
        self._evaluation_prefix = metric_key_prefix
        self.callback_handler.eval_dataloader = dataloader
        with self._model_to_evaluate() as model:
            figures = evaluate_batches(
                policy=model,
                batches=self._report_batches(dataloader),
                loss_fn=self.loss_fn,
                reference=partial(self._reference_logps, model),
                device=self.args.device,
                dataset=datasets[0] if datasets else None,
                rows=has_rows,
            )

        means = dict(figures["metrics"])
        num_examples = int(means.pop("examples"))
        if self.state.num_input_tokens_seen:
            means["num_tokens"] = float(self.state.num_input_tokens_seen)
        metrics = {
            f"{metric_key_prefix}_{name}": value for name, value in means.items()
        }
        return EvalLoopOutput(figures.get("rows"), None, metrics, num_examples)

    def _check_evaluated(self, dataloader: Any, *, has_rows: bool) -> list[Dataset]:
        """Raise if the loss cannot evaluate the data; return its packed datasets."""
        check_evaluated("evaluation", self.loss_fn)
        if not isinstance(dataloader, PackedDataLoader):
            if has_rows:
                raise ConfigError(
                    sentence(
                        where="predict",
                        rule="it needs a packed dataset",
                        found="another dataset",
                        remedy="Give its folder",
                    )
                )
            return []
        datasets = list(dataloader.data.stream.datasets)
        if not has_rows:
            for dataset in datasets:
                self.loss_fn.check_data(dataset)
        return datasets

    @contextmanager
    def _model_to_evaluate(self) -> Iterator[Any]:
        """Yield the model that Accelerate prepared; outside of training prepare it."""
        if self.is_in_train:
            yield self.model_wrapped
        elif self._is_sharded():
            if not self.accelerator._models:
                self.model_wrapped = self.accelerator.prepare_model(
                    self.model, evaluation_mode=True
                )
            yield self.model_wrapped
        else:
            try:
                yield self.accelerator.prepare_model(self.model, evaluation_mode=True)
            finally:
                self._release_model()

    def _report_batches(self, dataloader: Any) -> Iterator[PackedBatch]:
        """Yield the batches of an evaluation; call callbacks after each."""
        self._num_evaluated_batches = 0
        for batch in dataloader:
            yield batch
            self._num_evaluated_batches += 1
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return loss and log-probs `[S]` of a batch, or of a list of batches.

        For callers of their own: :meth:`evaluation_loop` does not use it.
        """
        losses = []
        logps = []
        with torch.no_grad(), evaluating(model):
            for batch in _as_list(inputs):
                placed = self._to_device(batch)
                loss, logps_of_batch = self.compute_loss(
                    model, placed, return_outputs=True
                )
                losses.append(loss)
                logps.append(logps_of_batch)
        total = torch.stack(losses).sum()
        return total, None if prediction_loss_only else torch.cat(logps), None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return predictions as a table with a row for each example, and metrics."""
        output = super().predict(*args, **kwargs)
        self._correct_evaluation_rate(output.metrics)
        return output

    def _correct_evaluation_rate(self, metrics: dict[str, float]) -> None:
        """Set the rate from the batches that ran: the Trainer counts unpacked ones."""
        prefix = self._evaluation_prefix
        seconds = metrics.get(f"{prefix}_runtime")
        if prefix and seconds:
            rate = self._num_evaluated_batches / seconds
            metrics[f"{prefix}_steps_per_second"] = round(rate, 3)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a search needs a model for each trial, and this trainer has one.

        The Trainer's own method would ask for `model_init`, which is refused.
        """
        raise ConfigError(
            sentence(
                where=f"{type(self).__name__}.hyperparameter_search",
                rule="every trial must have a model and a trainer of its own",
                found="one trainer",
                remedy="Make the trainer in the objective of the search, as optuna's "
                "study.optimize has",
            )
        )

    # Records.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs` with the metrics since the last record; stop a diverged run."""
        # The record at the end, with `train_loss`, has the metrics of the last steps.
        if "loss" in logs or "train_loss" in logs:
            logs |= self._close_record(has_loss="loss" in logs)
        is_end = "train_runtime" in logs
        if is_end:
            logs |= self._step_metrics.summary_rates(logs["train_runtime"])
        self._correct_evaluation_rate(logs)
        super().log(logs, start_time)

        for name in ("loss", "grad_norm", "eval_loss", "train_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise diverged_error(self.state.global_step, f"{name} {logs[name]}")
        if is_end:
            self._check_finite_weights()
            self._prepare_end()

    def _close_record(self, *, has_loss: bool) -> dict[str, float]:
        """Return the metrics since the last record; a collective call.

        Their loss is left out if the Trainer's record has none, or if a subclass
        computes another.
        """
        record = self._step_metrics.close()
        if record:
            self.state.num_input_tokens_seen += int(record["num_tokens"])
            record["num_tokens"] = float(self.state.num_input_tokens_seen)
            warn_about_uncompiled()
        has_other_loss = type(self).compute_loss is not PackedSteps.compute_loss
        if has_other_loss or not has_loss:
            record.pop("loss", None)
        return record

    def _open_record(self) -> dict[str, Any] | None:
        """Return the sums since the last record; None inside a step."""
        if self.steps is None or self.steps.num_yielded != self.state.global_step:
            return None
        return self._step_metrics.open_record()


def _as_list(inputs: Any) -> list[PackedBatch]:
    """Return the batches of a step, which may be one batch outside of a list."""
    batches = inputs if isinstance(inputs, list) else [inputs]
    for batch in batches:
        remedy = "The trainer's own loaders yield them"
        check_class("inputs", batch, PackedBatch, remedy)
    return batches
