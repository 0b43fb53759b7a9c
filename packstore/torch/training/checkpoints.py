"""Checkpoints of a Trainer on packs: they hold the position in the data, and any number
of ranks can resume from them.

A run with FSDP writes a sharded checkpoint, a part from each rank; other runs write
unsharded ones. Either kind of run can load either kind of checkpoint.

Three private methods of transformers' Trainer are overridden here, as it has no public
ones in their place: where a checkpoint is written, and where its weights and its
optimizer are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import Trainer
from transformers.trainer_pt_utils import safe_globals

from packstore.errors import (
    ConfigError,
    DivergedError,
    FormatError,
    PackstoreError,
    StorageError,
    quote,
    sentence,
)
from packstore.torch.metrics import all_reduce_sums, is_distributed
from packstore.torch.training.checkpoint_files import (
    begin_checkpoint,
    finish_checkpoint,
    has_mark,
    read_content,
    read_position,
    read_state,
    remove_checkpoint,
    rotate_checkpoints,
)
from packstore.torch.training.shards import check_shards

WEIGHTS = "pytorch_model_fsdp_0"
"""Folder of the weights in a sharded checkpoint, by Accelerate's name."""

OPTIMIZER = "optimizer_0"
"""Folder of the optimizer's state in a sharded checkpoint, by Accelerate's name."""

OPTIMIZER_SETTINGS = ("betas", "eps", "momentum", "weight_decay")
"""Entries of ``param_groups`` that a resumed run takes from its settings. All others
are loaded: schedule-free optimizers and Prodigy keep counters and estimates there.
"""

CYCLED_SETTINGS = ("betas", "momentum")
"""Optimizer settings that torch's cyclic schedules change in each step."""

PLATEAU_SETTINGS = (
    "cooldown",
    "eps",
    "factor",
    "min_lrs",
    "mode",
    "patience",
    "threshold",
    "threshold_mode",
)
"""Settings of ReduceLROnPlateau; its state is in attributes beside them."""


class CheckpointMixin(Trainer):  # type: ignore[misc]
    """Saves and loads checkpoints with the position in packed data."""

    loss_fn: Any
    steps: Any = None
    _checkpoint: Path | None = None

    # The run that a checkpoint belongs to.

    def _describe_run(self) -> dict[str, dict[str, Any]]:
        """Return `run`, which must be the same where a run resumes, and `settings`,
        which a resumed run takes over.
        """
        model = self.accelerator.unwrap_model(self.model)
        weights = list(model.parameters())
        num_trained = sum(weight.requires_grad for weight in weights)

        names = signature(type(self.loss_fn)).parameters
        loss_settings = {}
        for name in names:
            value = getattr(self.loss_fn, name, None)
            if isinstance(value, bool | int | float | str):
                loss_settings[name] = value

        engine = ""
        if self.is_deepspeed_enabled:
            stage = self.accelerator.state.deepspeed_plugin.zero_stage
            engine = f" of DeepSpeed, ZeRO {stage} on {self.args.world_size} ranks"

        run = {
            "loss": f"{self.loss_fn!r}, {loss_settings}",
            "optimizer": self.args.optim.value.removesuffix("_fused") + engine,
            "model": str(getattr(model.config, "_name_or_path", "")),
            "weights": f"{len(weights)}, of which trained {num_trained}",
        }
        settings = {"mixed_precision": self.accelerator.mixed_precision}
        return {"run": run, "settings": settings}

    def _check_same_run(self, checkpoint: Path) -> None:
        """Raise if the checkpoint's run had another model, loss or optimizer."""
        read_state(checkpoint)
        old_run = read_position(checkpoint)["run"]
        new_run = self._describe_run()["run"]
        for name in new_run.keys() & old_run.keys():
            if new_run[name] == old_run[name]:
                continue
            old_value = quote(old_run[name], 200)
            raise ConfigError(
                sentence(
                    where=f"checkpoint {checkpoint}",
                    rule=f"a resumed run must keep its {name}, {old_value}",
                    found=quote(new_run[name], 200),
                    remedy="Choose another output_dir to begin a new run",
                )
            )

    # Loading.

    def _is_of_other_kind(self, checkpoint: Path) -> bool:
        """Return True if either the checkpoint or this run is sharded, but not both."""
        if self._checkpoint is None:  # the data is not packed
            return False
        return is_sharded(checkpoint) != bool(self.is_fsdp_enabled)

    def _check_shards(self, checkpoint: Path) -> None:
        """Raise if this run would load shards whose pickles could run any code."""
        loads_shards = self.is_fsdp_enabled
        if self._checkpoint is not None and is_sharded(checkpoint):
            loads_shards = True
        if loads_shards:
            check_shards(checkpoint / WEIGHTS)
            check_shards(checkpoint / OPTIMIZER)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        """Load the weights, sharded or not, whether this run is sharded or not."""
        checkpoint = Path(resume_from_checkpoint)
        with _naming_checkpoint(checkpoint):
            self._check_shards(checkpoint)
            if self._is_of_other_kind(checkpoint):
                load_weights(model or self.model, checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer and schedule, but keep the learning rates and settings of this
        run.
        """
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        schedule = self.lr_scheduler
        groups = self.optimizer.param_groups
        new_settings = [_settings_of(group, schedule) for group in groups]
        new_rates = [group["initial_lr"] for group in groups]
        plateau_settings = {
            name: getattr(schedule, name)
            for name in PLATEAU_SETTINGS
            if hasattr(schedule, name)
        }

        with _naming_checkpoint(folder):
            if self._is_of_other_kind(folder):
                load_optimizer(self.model, self.optimizer.optimizer, folder)
                schedule.load_state_dict(_load_tensors(folder / "scheduler.pt"))
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
            # The Trainer loads scaler and random states later, with errors that do not
            # name the checkpoint. So they are read here first.
            self._load_scaler(checkpoint)
            _check_random_states(folder)

        groups = self.optimizer.param_groups  # loading replaces them
        for group, settings in zip(groups, new_settings, strict=True):
            group.update(settings)
        if isinstance(schedule, LambdaLR):
            _resume_rates(schedule, groups, new_rates)
        elif isinstance(schedule, ReduceLROnPlateau):
            vars(schedule).update(plateau_settings)
            _resume_reduced_rates(groups, new_rates)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the schedule; record its first rate in each parameter group."""
        schedule = super().create_scheduler(*args, **kwargs)
        for group in self.optimizer.param_groups:
            # torch's schedules record it themselves, except ReduceLROnPlateau.
            group.setdefault("initial_lr", group["lr"])
        return schedule

    # Saving.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint; remove it again if it could not be written in full."""
        self._check_finite_weights()
        output = Path(self.args.output_dir)
        step = self.state.global_step
        folder = output / f"checkpoint-{step}"
        # A folder of this name that another program made is never removed.
        is_foreign = folder.exists() and not has_mark(folder)
        try:
            if self.args.should_save:
                begin_checkpoint(folder)
            self.accelerator.wait_for_everyone()
            # The Trainer would remove checkpoints by the times and names of folders,
            # and upload this one without the position.
            with _changed(self.args, save_total_limit=None, push_to_hub=False):
                super()._save_checkpoint(model, trial)
            self._finish_checkpoint(folder)
        except (OSError, SafetensorError) as error:
            if self.args.should_save and not is_foreign:
                remove_checkpoint(folder)
            raise StorageError(
                sentence(
                    where=str(folder),
                    rule="it must be possible to write it",
                    found=str(error),
                    remedy="Make room; the checkpoints before it are as they were",
                )
            ) from error

        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            rotate_checkpoints(
                output,
                limit=self.args.save_total_limit,
                newest=step,
                best=self.state.best_model_checkpoint,
            )

    def _finish_checkpoint(self, folder: Path) -> None:
        """Write the position, which completes the checkpoint; a collective call."""
        content: dict[str, Any] = {}
        if not self.args.save_only_model:
            content["loader"] = None
            if self.steps is not None:
                content["loader"] = self.steps.position(self.state.global_step)
            content["open_record"] = self._open_record()
        content |= self._describe_run()

        # The first rank hashes the files of all ranks.
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            finish_checkpoint(folder, content)
        self.accelerator.wait_for_everyone()

    def _open_record(self) -> dict[str, Any] | None:
        """Return the sums that the next record begins with; a collective call."""
        return None

    def _check_finite_weights(self) -> None:
        """Raise before weights that are not finite are saved; a collective call.

        A loss that is not finite raises with its record, but not each step has one.
        """
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        finite = [torch.isfinite(_local_part(weight)).all() for weight in trained]
        num_damaged = all_reduce_sums([(~flag).sum() for flag in finite])
        if any(num_damaged):
            raise diverged_error(self.state.global_step, "weights that are not")

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Write the model, unsharded even if checkpoints are sharded.

        A collective call.
        """
        if self.accelerator.is_fsdp2 and not _internal_call:
            weights = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state_dict=weights)
        else:
            super().save_model(output_dir, _internal_call)

    # The end of a run.

    def _prepare_end(self) -> None:
        """Check the best model before the Trainer loads it; stop its removals.

        With a `save_total_limit` of 1, the Trainer would remove every other folder that
        is named like a checkpoint, also of other programs. After it,
        :meth:`_remove_all_but_best` removes packstore's.
        """
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            self._check_best(Path(best))
        self.args.save_total_limit = None

    def _check_best(self, checkpoint: Path) -> None:
        """Raise FormatError if the weights of the best checkpoint cannot be read."""
        with _naming_checkpoint(checkpoint):
            self._check_shards(checkpoint)
            for file in checkpoint.glob("*.safetensors"):
                with safe_open(file, framework="pt"):
                    pass  # opening checks the header against the length of the file

    def _remove_all_but_best(self) -> None:
        """Remove the other checkpoints of a run that may keep a single one."""
        best = self.state.best_model_checkpoint
        if not self.args.should_save or best is None:
            return
        if self.args.save_total_limit == 1:
            output = Path(self.args.output_dir)
            rotate_checkpoints(output, limit=1, newest=None, best=best)


def diverged_error(step: int, problem: str) -> DivergedError:
    """Return the error of a run with numbers that are no longer finite."""
    return DivergedError(
        sentence(
            where=f"training, step {step}",
            rule="loss, gradient and weights must be finite",
            found=problem,
            remedy="Lower learning_rate or lengthen warmup_steps; checkpoints are "
            "unchanged",
        )
    )


@contextmanager
def _changed(settings: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `settings`, and restore them at the end."""
    old_values = {name: getattr(settings, name) for name in values}
    for name, value in values.items():
        setattr(settings, name, value)
    try:
        yield
    finally:
        for name, value in old_values.items():
            setattr(settings, name, value)


@contextmanager
def _naming_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Re-raise errors of reading a checkpoint as FormatError, with its name."""
    try:
        yield
    except PackstoreError:
        raise
    except (Exception, CheckpointException) as error:
        # A damaged file causes errors of any class; torch's own is no Exception.
        raise FormatError(
            sentence(
                where=f"checkpoint {checkpoint}",
                rule="it must hold the state of every weight",
                found=quote(f"{type(error).__name__}: {error}", 200),
                remedy="Resume from an earlier one",
            )
        ) from error


def _load_tensors(file: Path) -> Any:
    """Load a file of torch that holds tensors and plain values only."""
    return torch.load(file, map_location="cpu", weights_only=True)


def _check_random_states(checkpoint: Path) -> None:
    """Read the random states of all ranks, which raises for damaged files."""
    for file in checkpoint.glob("rng_state*.pth"):
        with safe_globals():
            _load_tensors(file)


# Settings of a run that resumes.


def _settings_of(group: dict[str, Any], schedule: Any) -> dict[str, Any]:
    """Return the settings of a parameter group that the schedule does not change."""
    settings = {name: group[name] for name in OPTIMIZER_SETTINGS if name in group}
    if getattr(schedule, "cycle_momentum", False):
        for name in CYCLED_SETTINGS:
            settings.pop(name, None)
    return settings


def _resume_rates(
    schedule: LambdaLR, groups: list[dict[str, Any]], new_rates: list[Any]
) -> None:
    """Continue a schedule at its step, with the learning rates of the new run."""
    factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    current_rates = [
        rate * factor for rate, factor in zip(new_rates, factors, strict=True)
    ]
    schedule.base_lrs = new_rates
    schedule._last_lr = current_rates
    for i, group in enumerate(groups):
        group["initial_lr"] = new_rates[i]
        group["lr"] = current_rates[i]


def _resume_reduced_rates(groups: list[dict[str, Any]], new_rates: list[Any]) -> None:
    """Reduce the rates of the new run by the factor that the old run has reached.

    The old run's ReduceLROnPlateau has lowered its rates from its own initial ones.
    """
    for group, new_rate in zip(groups, new_rates, strict=True):
        old_rate = group.get("initial_lr", new_rate)
        group["initial_lr"] = new_rate
        if old_rate != new_rate:  # else the product might round
            group["lr"] = new_rate * (group["lr"] / old_rate)


# Sharded and unsharded checkpoints, each loaded by a run of the other kind.


def is_sharded(checkpoint: Path) -> bool:
    """Return True for a checkpoint that ranks wrote in shards."""
    # The list of files as they were written: a folder may have been added since.
    files = read_content(checkpoint)["files"]
    return any(name.startswith(f"{WEIGHTS}/") for name in files)


def load_weights(model: Any, checkpoint: Path) -> None:
    """Load weights from a checkpoint of the other kind; a collective call.

    With an adapter, only the adapter's weights.
    """
    if is_sharded(checkpoint):
        _load_sharded_weights(model, checkpoint)
    else:
        _load_unsharded_weights(model, checkpoint)


def _load_sharded_weights(model: Any, checkpoint: Path) -> None:
    weights: dict[str, Tensor] = model.state_dict()  # views, which loading fills
    if hasattr(model, "peft_config"):
        names = _adapter_names(model)
        weights = {name_in_file: weights[name] for name, name_in_file in names.items()}
    load(
        {"model": weights},
        checkpoint_id=checkpoint / WEIGHTS,
        no_dist=not is_distributed(),
    )


def _load_unsharded_weights(model: Any, checkpoint: Path) -> None:
    weights: dict[str, Any] = {}
    for pattern in ("model*.safetensors", "adapter_model.safetensors"):
        for file in checkpoint.glob(pattern):
            weights.update(load_file(file))
    if hasattr(model, "peft_config"):
        names = _adapter_names(model)
        weights = {name: weights[name_in_file] for name, name_in_file in names.items()}
    set_model_state_dict(
        model, weights, options=StateDictOptions(full_state_dict=True, strict=False)
    )


def load_optimizer(model: Any, optimizer: Optimizer, checkpoint: Path) -> None:
    """Load the optimizer's state from a checkpoint of the other kind; a collective
    call.
    """
    if is_sharded(checkpoint):
        _load_sharded_optimizer(model, optimizer, checkpoint)
    else:
        _load_unsharded_optimizer(optimizer, checkpoint)


def _load_sharded_optimizer(model: Any, optimizer: Optimizer, checkpoint: Path) -> None:
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    load(
        {"optimizer": state},
        checkpoint_id=checkpoint / OPTIMIZER,
        no_dist=not is_distributed(),
    )
    set_optimizer_state_dict(model, optimizer, state)


def _load_unsharded_optimizer(optimizer: Optimizer, checkpoint: Path) -> None:
    saved = _load_tensors(checkpoint / "optimizer.pt")
    saved_groups = saved["param_groups"]
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        group.update({**saved_group, "params": group["params"]})

    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, values in saved["state"].items():
        weight = weights[number]
        optimizer.state[weight] = {
            name: _distribute_like(weight, value) for name, value in values.items()
        }


def _distribute_like(weight: Tensor, value: Any) -> Any:
    """Shard a tensor of the optimizer's state as its weight is."""
    if not isinstance(weight, DTensor) or not isinstance(value, Tensor):
        return value
    if value.ndim == 0:  # a step count
        return value
    return distribute_tensor(value, weight.device_mesh, weight.placements)


def _local_part(weight: Tensor) -> Tensor:
    """Return the part of a weight that this rank holds."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _adapter_names(model: Any) -> dict[str, str]:
    """Return the adapter's weights: name in the model -> name in its file."""
    names = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            names[name] = name.replace(".default.", ".")
    return names
