"""Runs the cases of a stage one after another, and records each as soon as it has ended."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from gpu.predictions import misses
from gpu.sizes import Sizes
from packstore.errors import MissingExtraError

Figures = dict[str, Any]

GOES_ON = "GPU_SESSION_GOES_ON"
"""Set in the environment of a process that goes on with a stage."""

LOST = 77
"""Exit code of a process whose device does not answer any more."""

SILENCE = 200
"""Seconds without a finished case after which a process is killed."""


class OverBudgetError(BaseException):
    """The time of a case is over; not an Exception, so that no ``except`` inside it holds it up."""


class Session:
    """The cases of one stage, within a budget of seconds.

    A case is a function that returns figures; ``right`` among them is its verdict. An exception of
    any class is recorded as the result of its case, and the next one runs. If a case has left the
    device unusable, the process exits with ``LOST``; :func:`supervise` starts one that goes on.

    Args:
        stage: number of the stage, 1 to 4.
        out: folder of the results; ``stage<N>.json`` is written after each case.
        budget: seconds after which no case starts.
        sizes: devices and sizes.
        only: a regular expression; cases whose names do not contain it are left out.
    """

    def __init__(
        self, stage: int, out: Path, budget: float, sizes: Sizes, only: str | None = None
    ) -> None:
        self.stage, self.budget, self.sizes = stage, budget, sizes
        self.only = re.compile(only or "")
        self.path = out / f"stage{stage}.json"
        self.results: Figures = {"stage": stage, "began": time.time(), "cases": {}}
        if os.environ.get(GOES_ON) and self.path.exists():
            self.results = json.loads(self.path.read_text(encoding="utf-8"))
        out.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def cases(self) -> dict[str, Figures]:
        """Figures by name of the case."""
        return self.results["cases"]

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.time() - self.results["began"])

    def case(self, name: str, work: Callable[[], Figures | None], seconds: float = 3) -> bool:
        """Runs a case; returns True if it ended without an exception and is not wrong.

        Args:
            name: name of the case, unique in the stage.
            work: returns the figures.
            seconds: the case is skipped if less than that is left of the budget.
        """
        if not self.only.search(name):
            return False
        if name in self.cases:  # recorded by the process that this one replaced
            return self.cases[name].get("verdict") in ("right", "measured")
        if self.left < seconds:
            self._close(name, {"verdict": "skipped", "why": "budget"})
            return False
        self.cases[name] = {"verdict": "unfinished"}  # is what remains if the process dies
        self.write()
        started = time.perf_counter()
        try:
            figures = dict(self._limited(work) or {})
            right = figures.get("right")
            figures["verdict"] = {None: "measured", True: "right"}.get(right, "WRONG")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            absent = isinstance(error, ModuleNotFoundError | MissingExtraError)
            figures = {"verdict": "absent" if absent else "FAILED"}
            figures["why"] = f"{type(error).__name__}: {error}"[:1000]
        figures["seconds"] = round(time.perf_counter() - started, 2)
        self._close(name, figures)
        self._clean_up()
        return figures["verdict"] in ("right", "measured")

    def update(self, name: str, figures: Figures) -> None:
        """Adds figures to a recorded case, and prints them."""
        self.cases[name].update(figures)
        self._compare(name, self.cases[name])
        self.write()
        print(f"      {name}: {_short(figures)}", flush=True)
        _print_misses(self.cases[name])

    def write(self) -> None:
        """Writes the JSON, so that what was measured outlives a crash."""
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.results, indent=1, default=str) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def table(self) -> None:
        """Prints all cases; the wrong and failed ones last, where they are seen."""
        print(f"\nstage {self.stage}: {len(self.cases)} cases, {self.budget - self.left:.0f} s")
        order = ("right", "measured", "absent", "skipped", "unfinished", "WRONG", "FAILED")
        for verdict in order:
            own = {n: c for n, c in self.cases.items() if c["verdict"] == verdict}
            if verdict == "right" and len(own) > 40:
                print(f"right      {len(own)} cases")
                continue
            for name, figures in own.items():
                print(f"{verdict:10} {name}  {_short(figures)}")
        counts = {v: sum(c["verdict"] == v for c in self.cases.values()) for v in order}
        print("  ".join(f"{name}: {count}" for name, count in counts.items() if count), flush=True)

    def _limited(self, work: Callable[[], Figures | None]) -> Figures | None:
        """Runs `work`; a signal ends it when the budget is over, if Python gets to run."""

        def ring(*_: Any) -> None:
            raise OverBudgetError("the budget of the stage is over")

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(self.left, 1))
        try:
            return work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _close(self, name: str, figures: Figures) -> None:
        self._compare(name, figures)
        self.cases[name] = figures
        self.write()
        print(f"{figures['verdict']:10} {name}  {_short(figures)}", flush=True)
        _print_misses(figures)

    def _compare(self, name: str, figures: Figures) -> None:
        if self.sizes.cuda:
            figures.update(misses(name, figures))

    def _clean_up(self) -> None:
        if not self.sizes.cuda:
            return
        gc.collect()
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except BaseException as error:  # an illegal access stays with the process
            print(f"the device is lost: {type(error).__name__}", flush=True)
            os._exit(LOST)


def supervise(command: list[str], path: Path, budget: float) -> int:
    """Runs a stage in a process, and in further ones if it crashes, hangs or loses its device.

    Args:
        command: runs the stage; a case that is recorded in `path` is not run again.
        path: the JSON of the stage.
        budget: seconds; a process that is still there 15 seconds later is killed.

    Returns:
        The exit code of the last process.
    """
    began, environment = time.time(), dict(os.environ)
    while True:
        code = _watched(command, environment, path, began + budget + 15)
        if code not in (LOST, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            return code
        over = time.time() - began > budget
        print(f"the process ended with {code}" + ("" if over else "; another goes on"), flush=True)
        if over:
            return 1
        environment[GOES_ON] = "1"


def _watched(command: list[str], environment: dict[str, str], path: Path, end: float) -> int:
    """Runs a process and its children, which are killed after `SILENCE` or at the time `end`."""
    started = time.time()
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            last = max(path.stat().st_mtime if path.exists() else 0, started)
            if time.time() > min(last + SILENCE, end):
                os.killpg(process.pid, signal.SIGKILL)
    finally:
        with contextlib.suppress(ProcessLookupError):  # also a training run that is left behind
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _short(figures: Figures) -> str:
    """Figures on one line."""
    shown = []
    for name, value in figures.items():
        if name in ("verdict", "right", "misses", "table"):
            continue
        if isinstance(value, float):
            value = f"{value:.4g}"
        elif isinstance(value, dict):
            value = "(" + _short(value) + ")"
        shown.append(f"{name} {value}")
    return " ".join(shown)[:300]


def _print_misses(figures: Figures) -> None:
    for text in figures.get("misses", ()):
        print(f"           MISS {text}", flush=True)


def about(sizes: Sizes) -> Figures:
    """Machine and versions."""
    packages = "torch transformers accelerate triton numpy pyarrow liger-kernel"
    device: Figures = {"device": "cpu"}
    if sizes.cuda:
        found = torch.cuda.get_device_properties(0)
        device = {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "memory_gib": found.total_memory / 2**30,
            "cuda": torch.version.cuda,
        }
    return {**device, **provenance(*packages.split())}
