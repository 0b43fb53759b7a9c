"""Checkpoints, from which a run resumes exactly, on any number of ranks.

A checkpoint is a folder that appears by a rename, so a run killed while writing leaves the earlier
ones intact. It holds the model in Hugging Face format (or the adapter), the optimizer's state by
parameter name, and one JSON file with the rest; nothing is pickled. The full state goes through
torch's distributed checkpoint functions, so it is independent of the sharding.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, FormatError, StorageError, display, quote, sentence
from packstore.torch.data.loader import PackedDataLoader

logger = logging.getLogger("packstore")

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model", "optimizer.safetensors", "state.json"
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
    model = accelerator.unwrap_model(policy).model
    adapted = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapted)
    state = get_model_state_dict(policy, options=options)
    if accelerator.is_main_process:
        tensors = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        only = {"selected_adapters": ["default"]} if adapted else {}
        model.save_pretrained(folder, state_dict=tensors, **only)


def save_checkpoint(
    accelerator: Any,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    state: dict[str, Any],
) -> None:
    """Writes a checkpoint; collective. `state`: a `RunState` less `optimizer` and `random`."""
    from accelerate.utils import gather_object

    with whole_folder(accelerator, folder / f"step-{state['step']:08d}") as partial:
        save_model(accelerator, policy, partial / MODEL)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = dict(get_optimizer_state_dict(policy, optimizer, options=options))
        generators = gather_object([random_state()])
        if accelerator.is_main_process:
            of_parameter = whole.get("state", {}).items()
            named = {f"{p}.{n}": v for p, values in of_parameter for n, v in values.items()}
            save_file({n: v.contiguous() for n, v in named.items()}, partial / OPTIMIZER)
            groups = whole.get("param_groups", [])
            run = RunState(optimizer=groups, random=generators, **state)
            text = json.dumps({"format": FORMAT, **asdict(run)})
            (partial / STATE).write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(accelerator: Any, final: Path) -> Iterator[Path]:
    """Yields a folder to write in, which then replaces `final`, or is removed; collective."""
    partial = final.with_name(f".{final.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
        if accelerator.is_main_process:
            for file in partial.rglob("*"):
                if file.is_file():
                    with file.open("rb") as stream:
                        os.fsync(stream.fileno())
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            rule = "it must be possible to write it"
            remedy = "Make room; the checkpoints before it are as they were"
            raise StorageError(sentence(str(final), rule, str(error), remedy)) from error
        raise
    accelerator.wait_for_everyone()


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


def load_optimizer(
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Path,
    state: RunState,
) -> None:
    """Restores the moments of the weights, beside this run's own settings; a collective call."""
    of_parameter: dict[str, dict[str, Tensor]] = defaultdict(dict)
    try:
        tensors = load_file(checkpoint / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        where, rule = f"checkpoint {checkpoint}", f"{OPTIMIZER} must hold the optimizer's state"
        remedy = "Remove this checkpoint, to go on from the one before"
        raise FormatError(sentence(where, rule, str(error), remedy)) from error
    for name, tensor in tensors.items():
        parameter, _, entry = name.rpartition(".")
        of_parameter[parameter][entry] = tensor
    now = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
    groups = [{**of, **group} for of, group in zip(state.optimizer, now, strict=True)]
    whole: dict[str, Any] = {"state": dict(of_parameter), "param_groups": groups}
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(policy, optimizer, whole, options=options)


def checkpoints(folder: Path) -> list[Path]:
    """Lists the checkpoints of a run, by step."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def best_checkpoint(folder: Path) -> Path | None:
    """Returns the earliest checkpoint of lowest validation loss; None without validation."""
    scores = [(read_state(path).score, path) for path in checkpoints(folder)]
    scored = [pair for pair in scores if pair[0] < float("inf")]
    return min(scored)[1] if scored else None


def prune(folder: Path) -> None:
    """Removes all checkpoints except the two newest and the best."""
    every = checkpoints(folder)
    for path in {*every[:-2]} - {best_checkpoint(folder)}:
        shutil.rmtree(path)


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
