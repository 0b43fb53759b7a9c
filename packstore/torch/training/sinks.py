"""Outputs of metrics: the console, a file of JSON lines, and Accelerate's trackers."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from packstore.config.training import TrainConfig
from packstore.errors import MissingExtraError

logger = logging.getLogger("packstore")

COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", ",d"),
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

ROWS = 15
"""Rows of the table on a terminal."""

Record = Mapping[str, float]


class Sink(Protocol):
    """Writes metric records; each has a `step`."""

    def write(self, record: Record) -> None:
        """Writes one record: of training, or of a validation with names ``eval/…``."""

    def close(self) -> None:
        """Closes the sink."""


class JsonLines:
    """Writes each record as one line of JSON, with null for non-finite values.

    Args:
        path: path of the file.
        step: step that the run resumes from; lines of later steps are removed.
    """

    def __init__(self, path: Path, step: int) -> None:
        keep_until(path, step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes and flushes one line."""
        values = {n: None if _is_odd(v) else v for n, v in record.items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def keep_until(path: Path, step: int) -> None:
    """Removes lines after `step`, and an incomplete last line, from a file."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            break
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)


class ConsoleTable:
    """Shows the last records as a table that is updated in place on a terminal.

    Args:
        total_steps: steps of the run.
        console: console of the table.
    """

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total = total_steps
        self._rows: deque[list[str]] = deque(maxlen=ROWS)
        self._evaluation = ""
        self._live = Live(self._table(), console=console, auto_refresh=False)
        self._live.start()

    def write(self, record: Record) -> None:
        """Adds a row; a validation updates the caption."""
        if "loss" in record:
            self._rows.append(list(_cells(record).values()))
        else:
            self._evaluation = evaluation_line(record)
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        """Stops updating the table."""
        self._live.stop()

    def _table(self) -> Table:
        table = Table(title=f"{self._total:,} steps", caption=self._evaluation or None)
        for name, _ in COLUMNS.values():
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table


class ConsoleLines:
    """Logs one plain line per record."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def write(self, record: Record) -> None:
        """Logs one record."""
        if "loss" not in record:
            logger.info("%s", evaluation_line(record))
            return
        cells = _cells(record)
        step = f"{cells.pop('step')}/{self._total:,}"
        logger.info(
            "step %s  %s", step, "  ".join(f"{n} {v}" for n, v in cells.items() if v != "–")
        )

    def close(self) -> None:
        """Does nothing."""


class Trackers:
    """Writes to TensorBoard and Weights & Biases through Accelerate."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def write(self, record: Record) -> None:
        """Passes the record to Accelerate."""
        values = {n: v for n, v in record.items() if n != "step"}
        self._accelerator.log(values, step=int(record["step"]))

    def close(self) -> None:
        """Does nothing: Accelerate closes trackers at the end of the training."""


def tracker_names(config: TrainConfig) -> list[str]:
    """Returns the trackers to use: TensorBoard if installed, wandb if set.

    Raises:
        MissingExtraError: wandb is set and not installed.
    """
    names = [n for n in ("tensorboard", "tensorboardX") if importlib.util.find_spec(n)]
    found = ["tensorboard"] if names else []
    if config.wandb is None:
        return found
    if importlib.util.find_spec("wandb") is None:
        raise MissingExtraError(
            "setting wandb needs the package 'wandb', which is not installed. "
            "Run: pip install wandb"
        )
    return [*found, "wandb"]


def console_sink(total_steps: int) -> Sink:
    """Returns a table on a terminal, else plain lines."""
    if sys.stderr.isatty():
        return ConsoleTable(total_steps, Console(stderr=True))
    return ConsoleLines(total_steps)


def evaluation_line(record: Record) -> str:
    """Returns a validation as one sentence."""
    named = {"eval/loss": "loss", "eval/rewards/accuracies": "accuracy"}
    named["eval/rewards/margins"] = "margin"
    parts = [f"{short} {record[n]:.4f}" for n, short in named.items() if n in record]
    return f"validation after step {int(record['step']):,}: {', '.join(parts)}"


def _cells(record: Record) -> dict[str, str]:
    return {
        short: format(record[name], how) if name in record else "–"
        for name, (short, how) in COLUMNS.items()
    }


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
