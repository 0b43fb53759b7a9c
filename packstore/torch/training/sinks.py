"""Outputs of metrics: a file of JSON lines, the console, and Accelerate's trackers.

A record is a mapping with a `step`; those of a validation have names ``eval/…``.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

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

VALIDATION = {
    "eval/loss": "loss",
    "eval/rewards/accuracies": "accuracy",
    "eval/rewards/margins": "margin",
}

Record = Mapping[str, float]


class Sink(Protocol):
    """Writes metric records."""

    def write(self, record: Record) -> None:
        """Writes one record."""

    def close(self) -> None:
        """Closes the sink."""


class JsonLines:
    """Writes each record as a line of JSON, null for what is not finite.

    Lines of steps after `step`, that the run resumes from, and those after a line that is no record
    are removed.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                break
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Writes and flushes one line."""
        values = {n: v if math.isfinite(v) else None for n, v in record.items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class ConsoleLines:
    """Logs one line per record; on a terminal, prints them above a progress bar."""

    def __init__(self, step: int, total_steps: int, console: Console) -> None:
        self._total = total_steps
        self._bar: Progress | None = None
        if console.is_terminal:
            times = (TimeElapsedColumn(), TimeRemainingColumn())
            columns = (BarColumn(), MofNCompleteColumn(), *times)
            self._bar = Progress(*columns, console=console, auto_refresh=False)
            self._task = self._bar.add_task("training", total=total_steps, completed=step)
            self._bar.start()

    def write(self, record: Record) -> None:
        """Writes one line."""
        step = int(record["step"])
        if "loss" in record:
            columns = [(n, *column) for n, column in TRAINING.items() if n in record]
            values = "  ".join(f"{short} {record[name]:{how}}" for name, short, how in columns)
            line = f"step {step:,}/{self._total:,}  {values}"
        else:
            parts = [f"{short} {record[n]:.4f}" for n, short in VALIDATION.items() if n in record]
            line = f"validation after step {step:,}: {', '.join(parts)}"
        if self._bar is None:
            logger.info("%s", line)
        else:
            self._bar.console.print(line, highlight=False)
            self._bar.update(self._task, completed=step, refresh=True)

    def close(self) -> None:
        """Stops the progress bar."""
        if self._bar is not None:
            self._bar.stop()


class Trackers:
    """Writes to the trackers of Accelerate, which closes them at the end of the training."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def write(self, record: Record) -> None:
        """Passes the record to Accelerate."""
        values = {n: v for n, v in record.items() if n != "step"}
        self._accelerator.log(values, step=int(record["step"]))

    def close(self) -> None:
        """Does nothing."""


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
