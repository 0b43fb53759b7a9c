"""Cases one after another, each recorded as soon as it has ended."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu.predictions import CEILINGS, misses
from gpu.sizes import Sizes
from packstore.errors import MissingExtraError

Figures = dict[str, Any]

LOST = 77
"""Exit code of a process whose device does not answer any more."""

SILENCE = 150
"""Seconds without a finished case after which a process is killed."""

GRACE = 10
"""Seconds that a case may be late before its process is killed."""

TRIES = 9
"""Processes of a part at most."""

GOOD = ("right", "measured")
BAD = ("unfinished", "WRONG", "FAILED")
VERDICTS = (*GOOD, "does not fit", "absent", "skipped", *BAD)


class AbsentError(Exception):
    """A case lacks a package, or the device that it needs."""


NEED_GPU = ("ranges",)
"""Attention backends that run on GPUs only; others without a package are refused."""


def check_backend(name: str, sizes: Sizes) -> None:
    """Raise AbsentError for a backend that the device cannot run."""
    if name in NEED_GPU and not sizes.cuda:
        raise AbsentError(f"attention backend {name!r} needs a GPU")


class Session:
    """The cases of a session, of which some may have run before.

    A case is a function that returns figures; ``right`` among them is its verdict, and
    those under ``expected`` are compared with what was measured. An exception of any
    class is recorded as the result of its case, and the next one runs. If a case has
    left the device unusable, the process exits with ``LOST``; :func:`supervise` starts
    one that goes on.

    Args:
        out: folder of the results; ``results.json`` is written after each case, there
            and in ``$OUT``. Cases that it holds already do not run again.
        sizes: devices and sizes.
        only: a regular expression; cases whose names do not contain it are left out.
        stop: time at which no case starts any more.
    """

    def __init__(self, out: Path, sizes: Sizes, only: str, stop: float) -> None:
        self.sizes, self.only, self.stop = sizes, re.compile(only), stop
        self.path = out / "results.json"
        self.cases: dict[str, Figures] = {}
        if self.path.exists():
            self.cases = json.loads(self.path.read_text(encoding="utf-8"))

    def forget(self, verdicts: Iterable[str]) -> None:
        """Let cases of these verdicts run again."""
        self.cases = {
            n: c for n, c in self.cases.items() if c["verdict"] not in verdicts
        }
        self.write()

    @property
    def seconds_left(self) -> float:
        """Seconds until no case starts any more."""
        return self.stop - time.time()

    @property
    def ceilings(self) -> dict[str, float]:
        """Best rates of the device, as measured; else those of an H100."""
        measured = self.cases.get("ceilings", {}) if self.sizes.cuda else {}
        return {name: measured.get(name, value) for name, value in CEILINGS.items()}

    def should_run(self, name: str) -> bool:
        """Return True for a case that is to run, and was not recorded by a process
        before this one.
        """
        return bool(self.only.search(name)) and name not in self.cases

    def case(
        self, name: str, work: Callable[[], Figures | None], seconds: float = 3
    ) -> bool:
        """Run a case; return True if it ended without an exception and is not wrong.

        Args:
            name: unique name of the case.
            work: returns the figures.
            seconds: the case is skipped if less than that is left.
        """
        if not self.should_run(name):
            return self.cases.get(name, {}).get("verdict") in GOOD
        if self.seconds_left < seconds:
            self._close(name, {"verdict": "skipped", "why": "budget"})
            return False
        self.cases[name] = {
            "verdict": "unfinished"
        }  # is what remains if the process dies
        self.write()
        started = time.perf_counter()
        try:
            figures = dict(work() or {})
            right = figures.get("right")
            figures["verdict"] = {None: "measured", True: "right"}.get(right, "WRONG")
        except Exception as error:
            figures = failure(error)
        figures["seconds"] = round(time.perf_counter() - started, 2)
        self._close(name, figures)
        self._clean_up()
        return figures["verdict"] in GOOD

    def update(self, name: str, figures: Figures) -> None:
        """Add figures to a recorded case, and print them."""
        self._close(name, {**self.cases[name], **figures})

    def write(self) -> None:
        """Write the JSON, so that measured figures outlive a crash."""
        for folder in {
            self.path.parent,
            Path(os.environ.get("OUT") or self.path.parent),
        }:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / "results.part"
            text = json.dumps(self.cases, indent=1, default=str)
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(folder / self.path.name)

    def table(self) -> bool:
        """Print the ratios, then all cases but right ones; return True if none is
        wrong.
        """
        print(f"\n{len(self.cases)} cases")
        verdicts = {name: case["verdict"] for name, case in self.cases.items()}
        for name in sorted(
            verdicts, key=lambda n: ("ratio" not in n, VERDICTS.index(verdicts[n]))
        ):
            if verdicts[name] != "right":
                print(f"{verdicts[name]:12} {name}  {_short(self.cases[name])}")
        counts = Counter(verdicts.values())
        print(
            "  ".join(f"{name}: {count}" for name, count in counts.items()), flush=True
        )
        return not any(counts[verdict] for verdict in BAD)

    def _close(self, name: str, figures: Figures) -> None:
        expected = figures.pop("expected", {})
        if self.sizes.cuda and expected:
            figures |= {"expected": expected, "misses": misses(expected, figures)}
        self.cases[name] = figures
        self.write()
        print(f"{figures['verdict']:12} {name}  {_short(figures)}", flush=True)
        for text in figures.get("misses", ()):
            print(f"           MISS {text}", flush=True)

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


def failure(error: BaseException) -> Figures:
    """Return the verdict about an exception: a package or memory that is lacking is no
    failure.
    """
    verdict = "FAILED"
    if isinstance(error, AbsentError | ModuleNotFoundError | MissingExtraError):
        verdict = "absent"
    elif isinstance(error, torch.OutOfMemoryError):
        verdict = "does not fit"
    return {"verdict": verdict, "why": f"{type(error).__name__}: {error}"[:1000]}


class Part(NamedTuple):
    """Cases that run in a process of their own, which has compiled nothing before."""

    name: str
    seconds: float  # after that no case of it starts
    works: tuple[Callable[[Session], Any], ...]  # run the cases, one after another


def supervise(
    parts: Iterable[Part], session: Callable[[float], Session], end: float
) -> None:
    """Run parts, each in a process; if one crashes, hangs or loses its device, another
    goes on.

    Processes are forked, so that torch and transformers are imported once; the caller
    must not have touched CUDA.

    Args:
        parts: in order.
        session: makes the session of a part, given the time at which it stops.
        end: time at which no case starts any more.
    """
    for part in parts:
        stop = min(end, time.time() + part.seconds)
        for _ in range(TRIES):
            if not (code := _watched(part, session(stop), stop + GRACE)):
                break
            print(
                f"{part.name}: a process ended with {code}; another goes on", flush=True
            )


def _watched(part: Part, session: Session, end: float) -> int:
    """Run a part and its children, which are killed after `SILENCE` or at the time
    `end`.
    """
    end = max(
        end, time.time() + GRACE
    )  # when its time is over, all is recorded as skipped
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(part, session)
    )
    last = time.time()
    process.start()
    try:
        while process.is_alive():
            process.join(0.2)
            if session.path.exists():
                last = max(last, session.path.stat().st_mtime)
            if time.time() > min(last + SILENCE, end):
                _kill(process)
    finally:
        _kill(process)  # also a training run that is left behind
    process.join()
    return process.exitcode or 0


def _kill(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _run(part: Part, session: Session) -> None:
    os.setsid()
    for number, work in enumerate(part.works):
        try:
            work(session)
        except Exception as error:  # cases are guarded; this is what prepares them
            session.cases[f"{part.name}, work {number}"] = failure(error)
            session.write()


def _short(figures: Figures) -> str:
    """Return figures on one line."""
    texts = []
    for name, value in figures.items():
        if name in ("verdict", "right", "misses", "table", "host"):
            continue
        if isinstance(value, float):
            value = f"{value:.4g}"
        elif isinstance(value, dict):
            value = "(" + _short(value) + ")"
        texts.append(f"{name} {value}")
    return " ".join(texts)[:300]
