"""Checkpoints, from which a run resumes exactly, on any number of ranks.

A checkpoint is a folder that appears by a rename, so a run killed while writing leaves the earlier
ones intact. It holds the model in Hugging Face format (or the adapter), the optimizer's state by
parameter name, and one JSON file with the rest; nothing is pickled. That of a sharded run holds
weights and optimizer in files of each rank (``shards.py``), written while the training goes on.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, FormatError, StorageError, display, quote, sentence
from packstore.io.store.local import sync_folder
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.training.shards import cause, read_tensors, write_shards

logger = logging.getLogger("packstore")

FORMAT = 1
MODEL, OPTIMIZER, SHARDS, STATE = "model", "optimizer.safetensors", "shards", "state.json"
_NAME = re.compile(r"step-([0-9]{8})")

FIXED = ("model", "reference_model", "dtype", "loss", "loss_parameters", "lora")
"""Settings that a resumed run must share with its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run, as JSON values; `random` is that of each rank, `evaluation` of this step."""

    step: int
    examples: int
    loader: Mapping[str, Any]
    optimizer: list[dict[str, Any]]
    random: list[Mapping[str, Any]]
    evaluation: Mapping[str, float] | None
    config: Mapping[str, Any]

    @property
    def score(self) -> float:
        """Loss on the validation set; infinite without one."""
        return (self.evaluation or {}).get("eval/loss", float("inf"))


def save_model(accelerator: Any, policy: torch.nn.Module, folder: Path) -> None:
    """Writes the model, or its adapter, in Hugging Face format; a collective call."""
    tensors = _weights(accelerator, policy, full_state_dict=True, cpu_offload=True)
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(policy).model
        only = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
        model.save_pretrained(folder, state_dict=tensors, **only)


def _weights(accelerator: Any, policy: torch.nn.Module, **how: Any) -> dict[str, Any]:
    """The weights of a model, or of its adapter, by their names in it: this rank's shares."""
    adapted = hasattr(accelerator.unwrap_model(policy).model, "peft_config")
    options = StateDictOptions(ignore_frozen_params=adapted, **how)
    state = get_model_state_dict(policy, options=options)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


class Checkpoints:
    """Writes the checkpoints of a run; making it and its calls are collective.

    Those of a sharded run are written in the background. The next call of :meth:`save` or
    :meth:`wait` raises what went wrong.
    """

    def __init__(self, accelerator: Any, policy: Any, optimizer: Any, folder: Path) -> None:
        self.accelerator, self.policy, self.optimizer = accelerator, policy, optimizer
        self.folder = folder
        self._group = dist.new_group(backend="gloo") if accelerator.is_fsdp2 else None
        self._writing: tuple[Future[Any], Path] | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Writes a checkpoint, or begins to; `state`: `RunState` less `optimizer`, `random`."""
        from accelerate.utils import gather_object

        self.wait()
        final = self.folder / f"step-{state['step']:08d}"
        state["random"] = gather_object([random_state()])
        if self._group is None:
            with whole_folder(self.accelerator, final) as partial:
                save_model(self.accelerator, self.policy, partial / MODEL)
                options = StateDictOptions(full_state_dict=True, cpu_offload=True)
                whole = get_optimizer_state_dict(self.policy, self.optimizer, options=options)
                if self.accelerator.is_main_process:
                    save_file(_moments(whole), partial / OPTIMIZER)
                    _write_state(partial, state, whole)
            if self.accelerator.is_main_process:
                prune(self.folder)
            return
        partial = _new_folder(self.accelerator, final)
        weights = _weights(self.accelerator, self.policy)  # first, as it shards them again
        sharded = get_optimizer_state_dict(self.policy, self.optimizer)

        def finished() -> None:
            _write_state(partial, state, sharded)
            _commit(partial, final)
            prune(self.folder)

        tensors = weights | _moments(sharded)
        self._writing = write_shards(tensors, partial / SHARDS, self._group, finished), partial

    def wait(self) -> None:
        """Returns when the checkpoint that is being written is there."""
        if self._writing is not None:
            (writing, partial), self._writing = self._writing, None
            try:
                writing.result()
            except CheckpointException as error:
                shutil.rmtree(partial, ignore_errors=True)
                raise _unwritable(partial, cause(error)) from error


def _moments(optimizer: Any) -> dict[str, Tensor]:
    """The tensors of an optimizer's state, named by parameter and entry."""
    of_parameter = optimizer.get("state", {}).items()
    return {f"{p}.{n}": v.contiguous() for p, values in of_parameter for n, v in values.items()}


def _write_state(partial: Path, state: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    run = RunState(optimizer=optimizer.get("param_groups", []), **state)
    text = json.dumps({"format": FORMAT, **asdict(run)})
    (partial / STATE).write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(accelerator: Any, final: Path) -> Iterator[Path]:
    """Yields a folder to write in, which then replaces `final`, or is removed; collective."""
    partial = _new_folder(accelerator, final)
    try:
        yield partial
        if accelerator.is_main_process:
            _commit(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise _unwritable(final, str(error)) from error
        raise
    accelerator.wait_for_everyone()


def _new_folder(accelerator: Any, final: Path) -> Path:
    """Makes the empty folder in which `final` is written; collective."""
    partial = final.with_name(f".{final.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    return partial


def _commit(partial: Path, final: Path) -> None:
    """Makes a folder that is written appear."""
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    _remove(final)
    partial.rename(final)
    sync_folder(str(final.parent))


def _unwritable(folder: Path, reason: str) -> StorageError:
    remedy = "Make room; the checkpoints before it are as they were"
    return StorageError(sentence(str(folder), "it must be possible to write it", reason, remedy))


def read_state(checkpoint: Path) -> RunState:
    """Reads the JSON part of a checkpoint."""
    try:
        values = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        return RunState(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"it must be a checkpoint of format {FORMAT}"
        raise FormatError(sentence(f"checkpoint {checkpoint}", rule, str(error))) from error


def load_state(
    accelerator: Any,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Path,
    state: RunState,
) -> None:
    """Restores the moments of the weights, beside this run's own settings; a collective call.

    Of a sharded checkpoint also the weights, which others hold as a model.
    """
    of_run: dict[str, Any] = dict(get_optimizer_state_dict(policy, optimizer))
    tensors, folder = _moments(of_run), checkpoint
    if (checkpoint / SHARDS).is_dir():
        tensors, folder = tensors | _weights(accelerator, policy), checkpoint / SHARDS
    read_tensors(tensors, folder)
    now = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
    groups = [{**of, **group} for of, group in zip(state.optimizer, now, strict=True)]
    set_optimizer_state_dict(policy, optimizer, {**of_run, "param_groups": groups})


def checkpoints(folder: Path) -> list[Path]:
    """Lists the checkpoints of a run, by step; one without its state is being removed."""
    if not folder.is_dir():
        return []
    whole = (path for path in folder.iterdir() if (path / STATE).exists())
    return sorted(path for path in whole if _NAME.fullmatch(path.name))


def best_checkpoint(folder: Path) -> Path | None:
    """Returns the earliest checkpoint of lowest validation loss; None without validation."""
    scores = [(read_state(path).score, path) for path in checkpoints(folder)]
    scored = [pair for pair in scores if pair[0] < float("inf")]
    return min(scored)[1] if scored else None


def prune(folder: Path) -> None:
    """Removes all checkpoints except the two newest and the best."""
    for left in folder.glob(".step-*.old"):
        shutil.rmtree(left, ignore_errors=True)
    every = checkpoints(folder)
    for path in {*every[:-2]} - {best_checkpoint(folder)}:
        _remove(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint; a kill on the way leaves it whole, or hidden until the next call."""
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    if path.exists():
        path.rename(hidden)
        sync_folder(str(path.parent))
        shutil.rmtree(hidden, ignore_errors=True)


def random_state() -> dict[str, Any]:
    """Returns the state of this process's generators."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002 (models and libraries still draw from it)
    kind, keys, *rest = legacy
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores the generators of this process."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if torch.cuda.is_available() and "cuda" in state:
        state_of_gpu = bytearray.fromhex(state["cuda"])
        torch.cuda.set_rng_state(torch.frombuffer(state_of_gpu, dtype=torch.uint8))


def find_checkpoint(config: TrainConfig) -> Path | None:
    """Returns the checkpoint to resume from, or None to start in an output without a model."""
    saved = checkpoints(Path(config.output, "checkpoints"))
    if not saved and Path(config.output, "model").exists():
        rule = "it must hold no model without checkpoints"
        remedy = "Choose another, or move it away"
        raise ConfigError(sentence(f"output {config.output}", rule, "model", remedy))
    if config.resume not in ("auto", "never"):
        chosen = Path(config.resume)
        name = chosen.name if _NAME.fullmatch(chosen.name) else ""
        later = [path.name for path in saved if path.name > name]
        if later and chosen.is_dir():
            rule = "its output must have no later checkpoints"
            remedy = "Remove them, or choose another output"
            raise ConfigError(sentence(f"resume {chosen}", rule, ", ".join(later), remedy))
        return chosen
    if saved and config.resume == "never":
        where, remedy = f"output {config.output}", "Choose another output, or resume: auto"
        raise ConfigError(sentence(where, "it must be new", saved[-1].name, remedy))
    return saved[-1] if saved else None


def make_output(config: TrainConfig) -> None:
    """Makes the folder of the run."""
    try:
        Path(config.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"output {config.output}: the output must be a folder that can be written; "
            f"found {error.strerror}. Name another."
        ) from error


def check_unchanged(config: TrainConfig, before: Mapping[str, Any]) -> None:
    """Refuses to resume with another model or loss; logs other changes."""
    now = config.recorded()
    changed = [n for n in now if now[n] != before.get(n) and n not in ("resume", "output")]
    for name in changed:
        text = f"{name} was {quote(before.get(name))} and is {quote(now[name])}"
        if name in FIXED:
            needed = "a run that goes on must keep its model and loss"
            remedy = "Choose another output to begin a new run"
            raise ConfigError(sentence(f"checkpoint in {config.output}", needed, text, remedy))
        logger.warning("since the checkpoint, %s", text)


def count_steps(config: TrainConfig, loader: PackedDataLoader, done: int) -> int:
    """Returns the optimizer steps of the whole run: those `done`, and those of the data left."""
    total = done + loader.plan(config.epochs - loader.data.epoch, left=True).steps
    if not total:
        must = "it must hold packs to train on"
        raise ConfigError(sentence(f"dataset {display(config.dataset)}", must, "none"))
    if config.max_steps is None or config.max_steps >= total:
        return total
    logger.info("max_steps ends training before step %d of %d", config.max_steps + 1, total)
    return config.max_steps
