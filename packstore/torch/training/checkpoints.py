"""Checkpoints of a Trainer on packs: with the position in the data, whole, for any
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
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
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import Trainer

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
    finish_files,
    is_own,
    read_content,
    read_position,
    read_state,
    remove_checkpoint,
    rotate_checkpoints,
)
from packstore.torch.training.shards import check_shards

WEIGHTS, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""Folders of a sharded checkpoint, by Accelerate's names."""


OPTIMIZER_SETTINGS = ("betas", "eps", "momentum", "weight_decay")
"""Entries of ``param_groups`` that a resumed run takes from its settings. All others
are loaded: schedule-free optimizers and Prodigy keep counters and estimates there.
"""

CYCLED_SETTINGS = ("betas", "momentum")
"""Those of them that torch's cyclic schedules change in each step."""

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
"""Settings of ReduceLROnPlateau, beside its state in the same attributes."""


class CheckpointMixin(Trainer):  # type: ignore[misc]
    """Saves the position beside the Trainer's own state, and reads checkpoints of other
    ranks.
    """

    def _described(self) -> dict[str, dict[str, Any]]:
        """Describes this run: what all its checkpoints share, and settings that it goes
        on with.
        """
        model = self.accelerator.unwrap_model(self.model)
        trained = sum(p.requires_grad for p in model.parameters())
        names = signature(type(self.loss_fn)).parameters
        given = {name: getattr(self.loss_fn, name, None) for name in names}
        settings = {
            n: v for n, v in given.items() if isinstance(v, bool | int | float | str)
        }
        engine = ""
        if self.is_deepspeed_enabled:
            stage = self.accelerator.state.deepspeed_plugin.zero_stage
            engine = f" of DeepSpeed, ZeRO {stage} on {self.args.world_size} ranks"
        run = {
            "loss": f"{self.loss_fn!r}, {settings}",
            "optimizer": self.args.optim.value.removesuffix("_fused") + engine,
            "model": str(getattr(model.config, "_name_or_path", "")),
            "weights": f"{sum(1 for _ in model.parameters())}, of which trained "
            f"{trained}",
        }
        return {
            "run": run,
            "settings": {"mixed_precision": self.accelerator.mixed_precision},
        }

    def _check_unchanged(self, checkpoint: Path) -> None:
        read_state(checkpoint)
        before, now = read_position(checkpoint)["run"], self._described()["run"]
        for name in now.keys() & before.keys():
            if now[name] != before[name]:
                rule = (
                    f"a run that goes on must keep its {name}, "
                    f"{quote(before[name], 200)}"
                )
                remedy = "Choose another output_dir to begin a new run"
                where, found = f"checkpoint {checkpoint}", quote(now[name], 200)
                raise ConfigError(sentence(where, rule, found, remedy))

    def _is_of_other_kind(self, checkpoint: Path) -> bool:
        """Returns True for a checkpoint in shards if this run has none, and the other
        way round.
        """
        return (
            self._checkpoint is not None
            and is_sharded(checkpoint) != self.is_fsdp_enabled
        )

    def _check_shards(self, checkpoint: Path) -> None:
        """Raise for shards whose loading would run code of others, if this run loads
        shards.
        """
        if self.is_fsdp_enabled or (
            self._checkpoint is not None and is_sharded(checkpoint)
        ):
            check_shards(checkpoint / WEIGHTS)
            check_shards(checkpoint / OPTIMIZER)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        """Loads weights, also those of a run that was sharded where this one is not."""
        checkpoint = Path(resume_from_checkpoint)
        with _readable(checkpoint):
            self._check_shards(checkpoint)
            if self._is_of_other_kind(checkpoint):
                load_weights(model or self.model, checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the state of the optimizer, beside the settings of this run."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        schedule = self.lr_scheduler
        groups = self.optimizer.param_groups
        new_settings = [_settings_of(group, schedule) for group in groups]
        new_rates = [group["initial_lr"] for group in groups]
        schedule_settings = {
            name: getattr(schedule, name)
            for name in PLATEAU_SETTINGS
            if hasattr(schedule, name)
        }
        with _readable(folder):
            if self._is_of_other_kind(folder):
                load_optimizer(self.model, self.optimizer.optimizer, folder)
                schedule.load_state_dict(
                    torch.load(folder / "scheduler.pt", weights_only=True)
                )
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
        groups = self.optimizer.param_groups  # loading replaces them
        for group, settings in zip(groups, new_settings, strict=True):
            group.update(settings)
        if isinstance(schedule, LambdaLR):
            _resume_rates(schedule, groups, new_rates)
        elif isinstance(schedule, ReduceLROnPlateau):
            vars(schedule).update(schedule_settings)
            _resume_reduced_rates(groups, new_rates)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the schedule, and note in each group the rate that it starts from."""
        schedule = super().create_scheduler(*args, **kwargs)
        for group in self.optimizer.param_groups:
            group.setdefault(
                "initial_lr", group["lr"]
            )  # as torch's own schedules do, but one
        return schedule

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint; what could not be written whole is removed."""
        self._check_finite_weights()
        output = Path(self.args.output_dir)
        step = self.state.global_step
        folder = output / f"checkpoint-{step}"
        is_foreign = folder.exists() and not is_own(folder)
        try:
            if self.args.should_save:
                begin_checkpoint(folder)
            self.accelerator.wait_for_everyone()
            with self._without_rotation():
                super()._save_checkpoint(model, trial)
        except (OSError, SafetensorError) as error:
            if self.args.should_save and not is_foreign:
                remove_checkpoint(folder)
            remedy = "Make room; the checkpoints before it are as they were"
            rule = "it must be possible to write it"
            raise StorageError(
                sentence(str(folder), rule, str(error), remedy)
            ) from error
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(
                output, limit=self.args.save_total_limit, newest=step, best=best
            )

    @contextmanager
    def _without_rotation(self) -> Iterator[None]:
        """Keep the Trainer from removing checkpoints: it goes by the times and names of
        folders.
        """
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def _finalize_training(self, *args: Any) -> Any:
        """Finish the run; as in the Trainer, of one checkpoint the best is what
        stays.
        """
        with self._without_rotation():
            output = super()._finalize_training(*args)
        best = self.state.best_model_checkpoint
        if (
            self.args.should_save
            and self.args.save_total_limit == 1
            and best is not None
        ):
            rotate_checkpoints(
                Path(self.args.output_dir), limit=1, newest=None, best=best
            )
        return output

    def _check_finite_weights(self) -> None:
        """Raise before weights that are not finite are saved; a collective call.

        Records show a loss or gradient that is not finite, but a step may have none.
        """
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        finite = [torch.isfinite(_local_part(weight)).all() for weight in trained]
        damaged = all_reduce_sums([(~flag).sum() for flag in finite])
        if any(damaged):
            raise diverged_error(self.state.global_step, "weights that are not")

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Writes the model, whole also where checkpoints are sharded; a collective
        call.
        """
        if _internal_call or not self.accelerator.is_fsdp2:
            super().save_model(output_dir, _internal_call)
            if _internal_call and self.args.save_only_model and self.args.should_save:
                finish_files(Path(str(output_dir)), self._described())
            return
        weights = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the position too; the Trainer's own state follows, and makes a
        checkpoint whole.
        """
        super()._save_rng_state(output_dir)
        position = (
            None if self.steps is None else self.steps.position(self.state.global_step)
        )
        content = {
            "loader": position,
            "open_record": self._open_record(),
            **self._described(),
        }
        self.accelerator.wait_for_everyone()  # whose files are there now
        if self.args.should_save:
            finish_files(Path(output_dir), content)
        self.accelerator.wait_for_everyone()

    def _open_record(self) -> dict[str, Any] | None:
        """Return what the next record of the run begins with; a collective call."""
        return None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the states of the random generators."""
        with _readable(Path(str(checkpoint))):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the scale of gradients in half precision."""
        with _readable(Path(str(checkpoint))):
            super()._load_scaler(checkpoint)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        checkpoint = Path(str(self.state.best_model_checkpoint))
        with _readable(checkpoint):
            self._check_shards(checkpoint)
            super()._load_best_model()


def diverged_error(step: int, found: str) -> DivergedError:
    """Return the error of a run whose numbers are no longer finite."""
    rule = "loss, gradient and weights must be finite"
    remedy = "Lower learning_rate or lengthen warmup_steps; checkpoints are unchanged"
    return DivergedError(sentence(f"training, step {step}", rule, found, remedy))


def _settings_of(group: dict[str, Any], schedule: Any) -> dict[str, Any]:
    """Return the settings of a parameter group that the schedule does not change."""
    settings = {name: group[name] for name in OPTIMIZER_SETTINGS if name in group}
    if getattr(schedule, "cycle_momentum", False):
        for name in CYCLED_SETTINGS:
            settings.pop(name, None)
    return settings


def _resume_rates(
    schedule: LambdaLR, groups: list[dict[str, Any]], rates: list[Any]
) -> None:
    """Let a schedule go on from the rates of the new run, at the step that it has
    reached.
    """
    shares = [share(schedule.last_epoch) for share in schedule.lr_lambdas]
    schedule.base_lrs = rates
    schedule._last_lr = [
        rate * share for rate, share in zip(rates, shares, strict=True)
    ]
    for group, rate, current_rate in zip(groups, rates, schedule._last_lr, strict=True):
        group["initial_lr"] = rate
        group["lr"] = current_rate


def _resume_reduced_rates(groups: list[dict[str, Any]], rates: list[Any]) -> None:
    """Scale rates that the former run has reduced to the rates of the new run."""
    for group, rate in zip(groups, rates, strict=True):
        former_rate = group.get("initial_lr", rate)
        group["initial_lr"] = rate
        if former_rate != rate:  # else the product might round
            group["lr"] = rate * (group["lr"] / former_rate)


def _local_part(weight: Tensor) -> Tensor:
    """Return the part of a weight that this rank holds."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Names the checkpoint in an error of reading it."""
    try:
        yield
    except PackstoreError:
        raise
    except (
        Exception,
        CheckpointException,
    ) as error:  # of any class; torch's own is no Exception
        rule, remedy = (
            "it must hold the state of every weight",
            "Resume from an earlier one",
        )
        found = quote(f"{type(error).__name__}: {error}", 200)
        raise FormatError(
            sentence(f"checkpoint {checkpoint}", rule, found, remedy)
        ) from error


def is_sharded(checkpoint: Path) -> bool:
    """Returns True for a checkpoint that ranks wrote in shards."""
    files = read_content(checkpoint)[
        "files"
    ]  # as it was written: a folder may be added later
    return any(name.startswith(f"{WEIGHTS}/") for name in files)


def load_weights(model: Any, checkpoint: Path) -> None:
    """Loads the weights, or those of the adapter, of the other kind of checkpoint;
    collective.
    """
    if is_sharded(checkpoint):
        weights: dict[str, Tensor] = model.state_dict()  # views
        if hasattr(model, "peft_config"):
            weights = {
                name: weights[own] for own, name in _adapter_names(model).items()
            }
        load(
            {"model": weights},
            checkpoint_id=checkpoint / WEIGHTS,
            no_dist=not is_distributed(),
        )
        return
    files = [
        *checkpoint.glob("model*.safetensors"),
        *checkpoint.glob("adapter_model.safetensors"),
    ]
    whole: dict[str, Any] = {
        name: value for file in files for name, value in load_file(file).items()
    }
    if hasattr(model, "peft_config"):
        whole = {own: whole[name] for own, name in _adapter_names(model).items()}
    set_model_state_dict(
        model, whole, options=StateDictOptions(full_state_dict=True, strict=False)
    )


def load_optimizer(
    model: Any, optimizer: torch.optim.Optimizer, checkpoint: Path
) -> None:
    """Loads the optimizer's state from the other kind of checkpoint; collective."""
    if is_sharded(checkpoint):
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
        load(
            {"optimizer": state},
            checkpoint_id=checkpoint / OPTIMIZER,
            no_dist=not is_distributed(),
        )
        set_optimizer_state_dict(model, optimizer, state)
        return
    saved = torch.load(
        checkpoint / "optimizer.pt", map_location="cpu", weights_only=True
    )
    for group, saved_group in zip(
        optimizer.param_groups, saved["param_groups"], strict=True
    ):
        group.update({**saved_group, "params": group["params"]})
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, values in saved["state"].items():
        weight = weights[number]
        optimizer.state[weight] = {
            name: _like(weight, value) for name, value in values.items()
        }


def _like(weight: Tensor, value: Any) -> Any:
    if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.ndim:
        return distribute_tensor(value, weight.device_mesh, weight.placements)
    return value


def _adapter_names(model: Any) -> dict[str, str]:
    """Names of the adapter's weights in the model, and in its file."""
    names = (name for name, weight in model.named_parameters() if weight.requires_grad)
    return {name: name.replace(".default.", ".") for name in names}
