"""Steps of a Trainer on packs: their loss, reference and records, and evaluation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
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
    StepLoss,
    count_step,
    sequence_weights,
)
from packstore.torch.metrics import Metrics, all_reduce_sums, wide_dtype
from packstore.torch.models.compatibility import (
    check_ids,
    check_model,
    check_same_tokenizer,
)
from packstore.torch.models.compiled import tell_uncompiled
from packstore.torch.models.replaced import (
    put_back_forward,
    release,
    replace_forward,
    replaced_forward,
)
from packstore.torch.models.routers import router_settings
from packstore.torch.models.row import PackedForward, take_back_attention
from packstore.torch.models.unwrap import adapted, as_reference, evaluating, unwrapped
from packstore.torch.training.arguments import hide_tokens, named_settings
from packstore.torch.training.checkpoint_files import (
    newest_checkpoint,
    read_position,
    remove_torn_checkpoints,
)
from packstore.torch.training.checkpoints import CheckpointMixin, diverged_error
from packstore.torch.training.data import DataMixin, Steps, is_packed
from packstore.torch.training.evaluate import check_kind, evaluate_batches

logger = logging.getLogger("packstore")

FIRST = 10
"""The first steps, each of which is logged."""

ENOUGH = 1000
"""Examples after which some of both sides must have been seen."""


def take_batches(model: nn.Module, **settings: Any) -> None:
    """Let the forward call of `model` take a packed batch: it then returns what
    PackedPolicy does.

    The Trainer wraps, saves and loads the model itself, so that log-probs without
    logits run in the forward call that DDP and FSDP see, and no name of a weight
    changes.
    """
    PackedPolicy(model, **settings)  # proves the head
    if replaced_forward(model) is None:
        replace_forward(model, PackedForward(model))
    put_back_forward(model)
    set_batch_call(model, **settings)


def set_batch_call(model: nn.Module, **settings: Any) -> None:
    """Set how a model that takes batches computes them; several trainers may use one in
    turn.
    """
    replacement: Any = replaced_forward(model)
    replacement.batch_call = partial(policy_output, **settings)


def release_copy(model: Any) -> None:
    """Release a model that was copied or saved while a trainer had prepared it."""
    if isinstance(model, nn.Module) and getattr(
        replaced_forward(model), "batch_call", None
    ):
        release(model)


class StepMetrics(TrainerCallback):  # type: ignore[misc]
    """Sums metrics and work between two records, and has the first steps recorded.

    Of batches that another collator packs, metrics and tokens alone.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.on_train_begin()

    def _restart(self) -> None:
        self.metrics, self._since = Metrics(), time.perf_counter()
        self._of_steps, self._examples, self._packs = list[list[float]](), 0, 0
        self._examples_before = (
            0  # in the run that this one resumes, since its last record
        )
        self._tokens: Tensor | float = 0.0
        steps = (
            self.trainer.steps
        )  # bool() of them would call len(), which looks at all packs
        self._waited = 0.0 if steps is None else steps.waited

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Forgets what a training before it left, but for the record that a resumed run
        began.
        """
        self._restart()
        if self.trainer._checkpoint is not None:
            self._resume_record(
                read_position(self.trainer._checkpoint).get("open_record")
            )
        self._first_step = self.trainer.state.global_step
        self._trained_examples = (
            0  # of this rank alone, if its batches are not whole steps
        )
        self._sides, self._seen, self._is_told = torch.zeros(2), 0, False

    def open_record(self) -> dict[str, Any]:
        """Return the sums since the last record, over all ranks; a collective call."""
        device = self.trainer.accelerator.device
        return {
            "examples": self._examples + self._examples_before,
            "num_tokens": all_reduce_sums([self._tokens], device=device)[0],
            "metrics": self.metrics.totals(),
        }

    def _resume_record(self, record: dict[str, Any] | None) -> None:
        """Begin with the sums of :meth:`open_record`, which one rank holds for all."""
        if record is None:
            return
        accelerator = self.trainer.accelerator
        share = 1.0 if accelerator.is_main_process else 0.0
        self._examples_before = record["examples"]
        self._tokens = share * record["num_tokens"]
        dtype = wide_dtype(accelerator.device)
        for name, both in record["metrics"].items():
            total, count = share * torch.tensor(
                both, dtype=dtype, device=accelerator.device
            )
            self.metrics.add({name: (total, count)})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Warns, once, if there was nothing to compare; a collective call."""
        if self._seen and not self._is_told:
            self._is_told = True
            sides = all_reduce_sums(
                [*self._sides], device=self.trainer.accelerator.device
            )
            if self.trainer.is_world_process_zero():
                warn_about_one_sided_data(self.trainer.loss_fn, *sides)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Follows the Trainer's own callback, which decides what is saved and
        evaluated.
        """
        if self.trainer.steps is None:
            return
        state.epoch = self.trainer.steps.epoch_progress
        if args.logging_strategy != IntervalStrategy.STEPS:
            return
        due = control.should_save or control.should_evaluate
        if due or state.global_step <= FIRST or state.global_step >= state.max_steps:
            control.should_log = True

    def add(self, batches: list[PackedBatch]) -> None:
        """Adds the batches of this rank in one step."""
        for batch in batches:  # fillers do not count
            self._tokens = (
                self._tokens + (batch.lengths * (sequence_weights(batch) > 0)).sum()
            )
        info = batches[0].step
        if self.trainer.steps is None or info is None:
            self._trained_examples += sum(batch.num_examples for batch in batches)
            return
        self._trained_examples += info.examples
        if isinstance(self.trainer.loss_fn, PreferenceLoss) and not self._is_told:
            counts = [self.trainer.loss_fn.count_sides(batch) for batch in batches]
            self._sides, self._seen = (
                sum(counts, self._sides),
                self._seen + info.examples,
            )
        self._examples += info.examples
        self._packs += sum(batch.num_packs for batch in batches)
        tokens = sum(batch.num_tokens for batch in batches)
        squares = sum(
            float(batch.cu_seqlens.diff().double().square().sum()) for batch in batches
        )
        self._of_steps.append([tokens, squares])

    def close(self) -> dict[str, float]:
        """Returns means and rates over all ranks, and starts anew; a collective call.

        `num_tokens` is the number of tokens of the sequences, each with its prompt, as
        TRL counts.
        """
        record = self.metrics.means()
        if not record:  # no step since
            return {}
        device = self.trainer.accelerator.device
        record["num_tokens"] = all_reduce_sums([self._tokens], device=device)[0]
        if math.isnan(
            record["loss"]
        ):  # of no pair; the Trainer's own is nan, too, if it diverged
            del record["loss"]
        if self._seen >= ENOUGH:
            self.on_train_end()
        if self.trainer.steps is not None:
            record |= self._rates(self.trainer.steps)
            record["examples"] += self._examples_before
        self._restart()
        return record

    def summary_rates(self, seconds: float) -> dict[str, float]:
        """Return the rates of a whole call of `train`, from its time; a collective
        call.

        The Trainer's own assume that every step holds as many examples as were asked
        for.
        """
        if not seconds:
            return {}
        trainer = self.trainer
        examples = float(self._trained_examples)
        if trainer.steps is None:
            examples = all_reduce_sums([examples], device=trainer.accelerator.device)[0]
        steps = trainer.state.global_step - self._first_step
        return {
            "train_samples_per_second": round(examples / seconds, 3),
            "train_steps_per_second": round(steps / seconds, 3),
        }

    def _rates(self, steps: Steps) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        waited = (steps.waited - self._waited) / seconds
        own = [self._packs, waited, *(x for step in self._of_steps for x in step)]
        accelerator = self.trainer.accelerator
        here = torch.tensor(
            [own], dtype=wide_dtype(accelerator.device), device=accelerator.device
        )
        ranks = accelerator.gather(here).cpu()
        work = ranks[:, 2:].unflatten(1, (-1, 2))  # [ranks, steps, tokens and squares]
        (packs, waited), tokens = (
            ranks[:, :2].sum(0).tolist(),
            float(work[..., 0].sum()),
        )
        size = max(
            dataset.manifest.pack_size for dataset in steps.loader.data.stream.datasets
        )
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


class PackedSteps(DataMixin, CheckpointMixin):
    """Goes before another Trainer: trains and evaluates on packed batches by a loss of
    packstore.

    A packed dataset is dealt to the ranks, batched by step and resumed by packstore; of
    batches that another collator packs, the Trainer's accumulation makes a step.
    """

    runs_whole_steps = True
    """Its batches are steps of the loader; of other Trainers that is checked."""

    _guard: FirstStepCheck | None = None
    _head_settings: Mapping[str, Any] = MappingProxyType({})  # of PackedPolicy
    args: Any
    control: Any
    _evaluation_prefix = ""
    _evaluated_batches = 0

    def _prepare_run(self) -> None:
        """Completes the constructor, after that of the Trainer."""
        self.args = hide_tokens(self.args)
        if type(self).prediction_step is not PackedSteps.prediction_step:
            rule, remedy = (
                "prediction_step must stay",
                "Override evaluation_loop, which calls none",
            )
            raise ConfigError(
                sentence(type(self).__name__, rule, "one of its own", remedy)
            )
        if self.args.deepspeed and not self.is_deepspeed_enabled:
            rule, found = (
                "Accelerate runs it on accelerators only",
                self.args.device.type,
            )
            raise ConfigError(
                sentence("setting deepspeed", rule, found, "Leave it out")
            )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            rule, remedy = "its version must be 2", "Set version: 2 in fsdp_config"
            raise ConfigError(sentence("setting fsdp", rule, "version 1", remedy))
        self._step_metrics = StepMetrics(self)
        self.add_callback(self._step_metrics)
        # The divisor of the step has scaled it; older transformers know the second name
        # alone.
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True
        # It hides a loss that is not finite, and waits for the device in every step.
        self.args.logging_nan_inf_filter = False
        if self.accelerator.is_fsdp2 and self.accelerator.mixed_precision == "bf16":
            # Accelerate's own policy rounds outputs, which are log-probs, and sums of
            # gradients to bfloat16, and copies the layout of a row for each layer.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = (
                MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16,
                    reduce_dtype=torch.float32,
                    cast_forward_inputs=False,
                )
            )

    def _open_record(self) -> dict[str, Any] | None:
        """Return the sums since the last record; None: a step is in hand, and runs
        anew.
        """
        if self.steps is None or self.steps.yielded != self.state.global_step:
            return None
        return self._step_metrics.open_record()

    def _check_model(self, model: Any, datasets: Sequence[Dataset]) -> None:
        """Refuses data and a model that do not belong to the loss, or to each other."""
        if isinstance(self.loss_fn, PreferenceLoss):
            check_kind(self.loss_fn, model)
            for dataset in datasets:
                self.loss_fn.check_data(dataset)
        check_same_tokenizer([dataset.manifest for dataset in datasets])
        for dataset in datasets:
            check_model(dataset, model)
        if self.loss_fn.router_aux_loss_coef and (
            self.loss_fn.scores or router_settings(model) is None
        ):
            rule = (
                "the model's config must have output_router_logits and "
                "router_aux_loss_coef > 0"
            )
            found = type(unwrapped(model)).__name__
            remedy = "Leave it out, or add them to its config.json"
            raise ConfigError(
                sentence("loss parameter router_aux_loss_coef", rule, found, remedy)
            )

    def train(
        self,
        resume_from_checkpoint: str | PathLike[str] | bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Trains; `resume_from_checkpoint`: a folder, or True: the newest that is
        whole, if any.
        """
        found = self._checkpoint_of(resume_from_checkpoint)
        if is_packed(self.train_dataset):
            self._checkpoint = None if found is None else Path(found)
            if self._checkpoint:
                self._check_unchanged(self._checkpoint)
        if self.args.should_save:
            remove_torn_checkpoints(
                Path(self.args.output_dir),
                resumed=Path(found) if isinstance(found, str) else None,
                limit=self.args.save_total_limit,
            )
        self._check_trained()
        self._check_reference(self._checkpoint)
        self._guard = None
        if found is None and isinstance(self.loss_fn, PreferenceLoss):
            self._guard = FirstStepCheck(self.loss_fn)
        self._take_model()
        try:
            return super().train(found, **kwargs)
        finally:
            self._release_model()

    def _take_model(self) -> None:
        """Set the model up for this trainer: others may have used it since."""
        set_batch_call(self.model, **self._head_settings)
        take_back_attention(self.model)

    def _release_model(self) -> None:
        """Leave the model as it was before Accelerate prepared it, for any
        further use.
        """
        if not self._is_sharded():
            release(self.model)
            self.model_wrapped = self.model

    def _is_sharded(self) -> bool:
        """Return True if the run has changed the model itself, for good."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _checkpoint_of(self, resume_from_checkpoint: Any) -> Any:
        """Return the checkpoint to resume from, or None; True: one that the Trainer
        looks for.
        """
        if resume_from_checkpoint in (None, False):
            return None
        if resume_from_checkpoint is not True:
            path = resume_from_checkpoint
            path = str(path) if isinstance(path, PathLike) else path
            check_class(
                "argument resume_from_checkpoint", path, str, "Give a folder, or True"
            )
            return path
        newest = newest_checkpoint(self.args.output_dir)
        if newest is None and not is_packed(self.train_dataset):
            return True  # it may be of TRL's own trainer
        if newest is None and self.is_world_process_zero():
            text = "%s holds no whole checkpoint to resume from: training starts anew"
            logger.warning(text, self.args.output_dir)
        return newest

    def _check_trained(self) -> None:
        """Refuses a model of which nothing is trained, or not by the optimizer that was
        given.
        """
        trained = {id(p) for p in self.model.parameters() if p.requires_grad}
        rule, remedy = "some of its weights must be trained", "Set requires_grad"
        if self.optimizer is not None and not hasattr(
            self.optimizer, "accelerator_state"
        ):
            check_class(
                "argument optimizers",
                self.optimizer,
                Optimizer,
                "Give one that is made",
            )
            trained &= {
                id(p) for group in self.optimizer.param_groups for p in group["params"]
            }
            remedy = "Make the optimizer of this model's parameters, or leave it out"
        if not trained:
            raise CompatibilityError(
                sentence(type(self.model).__name__, rule, "none", remedy)
            )

    def _check_reference(self, checkpoint: Path | None) -> None:
        """Refuses log-probs of another reference; a collective call."""

    def _prepare_for_training(self, *args: Any) -> Any:
        """Makes optimizer and schedule, of whose settings transformers raises errors of
        its own.
        """
        with named_settings():
            return super()._prepare_for_training(*args)

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Finds the metric by its name in an evaluation, or names it."""
        with named_settings():
            return bool(super()._determine_best_metric(*args, **kwargs))

    def _get_num_items_in_batch(
        self, batch_samples: list[Any], device: Any
    ) -> StepDivisor | None:
        """Counts the whole step, over its batches and all ranks."""
        batches = [batch for samples in batch_samples for batch in _as_list(samples)]
        if not batches:
            return None
        divisor = count_step(batches, self.loss_fn, device=self.accelerator.device)
        return divisor.averaged(self.accelerator.num_processes)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Runs batches of one step; returns the part of this rank, times the ranks."""
        batches, total = _as_list(inputs), torch.zeros((), device=self.args.device)
        if (step := batches[-1].step) is not None and step.batches != len(batches):
            rule, remedy = (
                "it must yield whole steps",
                "Return that of PackedTrainer, or its like",
            )
            found = f"{len(batches)} of the {step.batches} batches of one"
            raise ConfigError(sentence("get_train_dataloader", rule, found, remedy))
        self._step_metrics.add(batches)
        take_back_attention(self.model)  # a callback may have set another
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            if isinstance(
                inputs, list
            ):  # the whole step; DeepSpeed's engine steps at its end
                self.accelerator.gradient_state._set_sync_gradients(last)
            # FSDP2 would hold whole gradients between batches that it does not reduce.
            each = self.accelerator.gradient_state.plugin_kwargs.get(
                "sync_each_batch", False
            )
            reduced = (
                last or each or self.accelerator.is_fsdp2 or self.is_deepspeed_enabled
            )
            with nullcontext() if reduced else self.accelerator.no_sync(model):
                total += super().training_step(model, batch, num_items_in_batch)
        return total

    def _prepare_inputs(self, inputs: PackedBatch) -> PackedBatch:
        check_ids(inputs, self.model)
        return inputs.to(self.accelerator.device, non_blocking=True)

    def compute_loss(
        self,
        model: Any,
        inputs: PackedBatch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Computes the part of a step's loss that one batch adds; its outputs are
        log-probs.

        Of a subclass's own, records of training have the mean over steps; `eval_loss`
        is of `loss_fn`.
        """
        check_class("inputs", inputs, PackedBatch, "Give one batch of a step")
        ref_logps = self._reference_logps(model, inputs)
        logps = model(inputs)
        out = self.loss_fn(
            logps, inputs, ref_logps=ref_logps, divisor=num_items_in_batch
        )
        if model.training:
            if self._guard is not None:
                self._guard(logps, inputs, ref_logps)
            self._step_metrics.metrics.add(out.metrics)
        return (out.loss, logps) if return_outputs else out.loss

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Returns loss and log-probs `[S]` of a batch, or of a list; evaluation does
        without.
        """
        batches = map(self._prepare_inputs, _as_list(inputs))
        with torch.no_grad(), evaluating(model):
            outs = [
                self.compute_loss(model, batch, return_outputs=True)
                for batch in batches
            ]
        loss = torch.stack([loss for loss, _ in outs]).sum()
        return (
            loss,
            None if prediction_loss_only else torch.cat([x for _, x in outs]),
            None,
        )

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0: what the Trainer estimates counts padding."""
        return 0

    @torch.no_grad()
    def _reference_logps(self, model: Any, batch: PackedBatch) -> Tensor | None:
        """Returns log-probs of the reference, `[S]`; None: the batch has them, or none
        is needed.

        They may come of side data, with a PackedDataset, or from TRL.
        """
        if not self.loss_fn.reference or batch.ref_logps is not None:
            return None
        return self._online_reference(model, batch)

    def _online_reference(self, model: Any, batch: PackedBatch) -> Tensor | None:
        """Runs the reference: here the policy itself, by its frozen adapter or without
        any.
        """
        inner = adapted(self.accelerator.unwrap_model(model))
        if inner is None:
            return None
        with as_reference(model, inner):
            logps: Tensor = model(batch)
        return logps

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Computes metrics of each example once, over all ranks; predictions are a row
        for each.
        """
        check_evaluated("evaluation", self.loss_fn)
        dataset = None
        if isinstance(dataloader, PackedDataLoader):
            dataset = dataloader.data.stream.datasets[0]
            for each in dataloader.data.stream.datasets if prediction_loss_only else ():
                self.loss_fn.check_data(each)
        elif prediction_loss_only is not True:
            where, rule = "predict", "it must be asked for rows of a packed dataset"
            raise ConfigError(
                sentence(where, rule, "another dataset", "Give its folder")
            )
        self._take_model()
        if hasattr(
            self.optimizer, "eval"
        ):  # of schedule-free ones; a step turns it back
            self.optimizer.eval()
        self._evaluation_prefix = metric_key_prefix
        self.callback_handler.eval_dataloader = dataloader
        with self._model_to_evaluate() as model:
            figures = evaluate_batches(
                model,
                self._report_batches(dataloader),
                self.loss_fn,
                partial(self._reference_logps, model),
                self.args.device,
                dataset,
                rows=prediction_loss_only is not True,
            )
        means = dict(figures["metrics"])
        number = int(means.pop("examples"))
        if self.state.num_input_tokens_seen:
            means["num_tokens"] = float(self.state.num_input_tokens_seen)
        metrics = {
            f"{metric_key_prefix}_{name}": value for name, value in means.items()
        }
        return EvalLoopOutput(figures.get("rows"), None, metrics, number)

    @contextmanager
    def _model_to_evaluate(self) -> Iterator[Any]:
        """Yield the model as it is trained: prepared by Accelerate, outside of training
        for now.
        """
        if self.is_in_train:
            yield self.model_wrapped
        elif self._is_sharded():
            if not self.accelerator._models:
                prepared = self.accelerator.prepare_model(
                    self.model, evaluation_mode=True
                )
                self.model_wrapped = prepared
            yield self.model_wrapped
        else:
            try:
                yield self.accelerator.prepare_model(self.model, evaluation_mode=True)
            finally:
                self._release_model()

    def _report_batches(self, dataloader: Any) -> Iterator[PackedBatch]:
        """Yield the batches of an evaluation; callbacks hear of each when it is
        computed.
        """
        self._evaluated_batches = 0
        for batch in dataloader:
            yield batch
            self._evaluated_batches += 1
            handler = self.callback_handler
            self.control = handler.on_prediction_step(
                self.args, self.state, self.control
            )

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return predictions as a table with a row for each example, and metrics."""
        output = super().predict(*args, **kwargs)
        self._correct_evaluation_rate(output.metrics)
        return output

    def _correct_evaluation_rate(self, metrics: dict[str, float]) -> None:
        """Count the batches that ran: the Trainer divides by
        `per_device_eval_batch_size`.
        """
        prefix = self._evaluation_prefix
        seconds = metrics.get(f"{prefix}_runtime")
        if prefix and seconds:
            rate = self._evaluated_batches / seconds
            metrics[f"{prefix}_steps_per_second"] = round(rate, 3)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a search needs a model for each trial, and this trainer has prepared
        one.

        The Trainer's own asks for `model_init`, which is refused.
        """
        where = f"{type(self).__name__}.hyperparameter_search"
        rule = "every trial must have a model and a trainer of its own"
        remedy = (
            "Make the trainer in the objective of the search, as optuna's "
            "study.optimize has"
        )
        raise ConfigError(sentence(where, rule, "one trainer", remedy))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last record, over all ranks; stops a
        diverged run.
        """
        if (
            "loss" in logs or "train_loss" in logs
        ):  # the last record has those of the last steps
            record = self._step_metrics.close()
            if record:
                self.state.num_input_tokens_seen += int(record["num_tokens"])
                record["num_tokens"] = float(self.state.num_input_tokens_seen)
                tell_uncompiled()
            if (
                "loss" not in logs
                or type(self).compute_loss is not PackedSteps.compute_loss
            ):
                record.pop("loss", None)
            logs |= record
        if "train_runtime" in logs:
            logs |= self._step_metrics.summary_rates(logs["train_runtime"])
        self._correct_evaluation_rate(logs)
        super().log(logs, start_time)
        for name in ("loss", "grad_norm", "eval_loss", "train_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise diverged_error(self.state.global_step, f"{name} {logs[name]}")
        if "train_runtime" in logs:
            self._check_finite_weights()


def check_evaluated(where: str, loss_fn: StepLoss) -> None:
    """Raise for a loss without metrics of an evaluation: they are of pairs and their
    examples.
    """
    if not isinstance(loss_fn, PreferenceLoss):
        rule = "it must be of a PreferenceLoss"
        raise ConfigError(sentence(where, rule, repr(loss_fn), "Leave it out"))


def _as_list(inputs: Any) -> list[PackedBatch]:
    batches = inputs if isinstance(inputs, list) else [inputs]
    for batch in batches:
        check_class(
            "inputs", batch, PackedBatch, "The trainer's own loaders yield them"
        )
    return batches
