"""Outputs of metrics: a file of JSON lines, the console, and Accelerate's trackers.

A record is a mapping with a `step`; those of a validation have names ``eval/…``.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from packstore.config.training import TrainConfig
from packstore.errors import MissingExtraError, UnknownNameError, quote

logger = logging.getLogger("packstore")

TRAINING: dict[str, tuple[str, str]] = {
    "loss": ("loss", ".4f"),
    "rewards/accuracies": ("accuracy", ".1%"),
    "rewards/margins": ("margin", ".3f"),
    "pairs_per_second": ("pairs/s", ",.1f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "fill": ("fill", ".1%"),
    "data_wait": ("data wait", ".1%"),
    "learning_rate": ("learning rate", ".2e"),
}
"""Metric -> its name on the console, and its format."""

Record = Mapping[str, float]

Sink = Callable[[Record], None]
"""Writes one record of metrics."""


def make_sinks(
    accelerator: Any, config: TrainConfig, step: int, total_steps: int, stack: ExitStack
) -> list[Sink]:
    """Makes the sinks of this rank; `stack` closes them. The run goes on after `step`."""
    if accelerator.log_with:
        flat = {n: str(v) for n, v in config.recorded().items()}
        project = "packstore" if config.trackers else "tensorboard"  # also the name of its folder
        accelerator.init_trackers(os.environ.get("WANDB_PROJECT", project), flat)
    if not accelerator.is_main_process:
        return []

    def track(record: Record) -> None:
        values = {n: v for n, v in record.items() if n != "step"}
        accelerator.log(values, step=int(record["step"]))

    lines = JsonLines(Path(config.output, "metrics.jsonl"), step)
    console = console_lines(step, total_steps, stack)
    return [lines, console, track] if accelerator.log_with else [lines, console]


class JsonLines:
    """Writes records as lines of JSON, after those up to `step`, that the run resumes from."""

    def __init__(self, path: Path, step: int) -> None:
        self._path, kept = path, []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                break
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)

    def __call__(self, record: Record) -> None:
        """Writes one line."""
        values = {n: v if math.isfinite(v) else None for n, v in record.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def console_lines(step: int, total_steps: int, stack: ExitStack) -> Sink:
    """Logs one line per record; on a terminal, prints them above a progress bar."""
    console = Console(stderr=True)
    if console.is_terminal:
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        columns = (BarColumn(), MofNCompleteColumn(), *times)
        bar = stack.enter_context(Progress(*columns, console=console, auto_refresh=False))
        task = bar.add_task("training", total=total_steps, completed=step)

    def write(record: Record) -> None:
        step = int(record["step"])
        if "loss" in record:
            columns = [(n, *column) for n, column in TRAINING.items() if n in record]
            values = "  ".join(f"{short} {record[n]:{digits}}" for n, short, digits in columns)
            line = f"step {step:,}/{total_steps:,}  {values}"
        else:
            named = [(f"eval/{n}", short) for n, (short, _) in TRAINING.items()]
            parts = [f"{short} {record[n]:.4f}" for n, short in named if n in record]
            line = f"validation after step {step:,}: {', '.join(parts)}"
        if console.is_terminal:
            console.print(line, highlight=False)
            bar.update(task, completed=step, refresh=True)
        else:
            logger.info("%s", line)

    return write


def tracker_names(wanted: tuple[str, ...]) -> list[str]:
    """Returns the trackers to log to: those of the settings, and TensorBoard if installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(name) for name in get_available_trackers()}
    for name in wanted:
        if name not in LOGGER_TYPE_TO_CLASS:
            choices = ", ".join(LOGGER_TYPE_TO_CLASS)
            raise UnknownNameError(f"unknown tracker {quote(name)}; choose from: {choices}.")
        if name not in installed:
            raise MissingExtraError(
                f"tracker {name} needs the package {name!r}, which is not installed. "
                f"Run: pip install {name}"
            )
    return list(dict.fromkeys([*wanted, *({"tensorboard"} & installed)]))
