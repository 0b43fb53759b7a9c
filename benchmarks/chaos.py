"""Runs writers, cleaners and readers on one dataset; stops, wakes and kills them at
random.

    python benchmarks/chaos.py --commits 2000 --out benchmarks/results/chaos.json
    python benchmarks/chaos.py --places local --seconds 10 --seed 7

Every role is a process in a loop: three replace the dataset, append to it and
concatenate it, two clean it, one reads epochs, one opens it. They are stopped for
fractions of a second or for many (others commit meanwhile), and killed; a writer that
was killed mostly begins its last job again. On an object store most requests go over a
proxy that delays them, loses their answers, does them after it hung up, and answers
listings from older answers.

An observer with its own file access checks: each version has its files and verifies, no
manifest is ever replaced, only `clean` removes versions, each job that reported success
has its version with its records behind those of the version before, and every error is
one of packstore's and names the place. A run is cut into rounds. The clock of the
cleaners makes files of earlier rounds old enough to be removed. At the end of a round
all processes stop, versions are verified again, two cleaners remove all leftovers at
once, and nothing else may remain.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import chaos_jobs
from chaos_jobs import KEEP, NAMES, SETTINGS, Scene, play, records
from chaos_observer import Observer
from common import parser, provenance, save
from fault_proxy import LATE_S, Faults, faulty
from server_kinds import BUCKET
from stores import Store, serving

import packstore
from packstore.io.versions.clean import clean

KINDS = (
    "refuse",
    "error 500",
    "slow down",
    "delay",
    "done but lost",
    "late",
    "stale",
    "wait",
)
DRAIN_S = 300
"""After so long a process that was asked to end has hung."""


def spawn(work: Callable[[], object]) -> int:
    """A child that does `work`; everything is imported already."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        work()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def in_child(work: Callable[[], Any]) -> Any:
    """The result of `work`, done in a process of its own, which holds no threads of
    this one.
    """
    reading, writing = os.pipe()

    def answer() -> None:
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            json.dump(work(), pipe)

    pid = spawn(answer)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"a process ended with status {status}; its error is above")
    return json.loads(text)


class Troupe:
    """The processes of a round, by name."""

    def __init__(self, scene: Scene, rng: random.Random) -> None:
        self.scene, self.rng = scene, rng
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self._pids = {name: spawn(lambda n=name: play(scene, n)) for name in NAMES}
        self._wake: dict[str, float] = {}

    def disturb(self, longest: float) -> None:
        """Stops, kills or wakes one of the processes."""
        now = time.monotonic()
        for name in [n for n, at in self._wake.items() if at <= now]:
            self._signal(name, signal.SIGCONT)
            del self._wake[name]
        name = self.rng.choice(list(self._pids))
        draw = self.rng.random()
        if draw < 0.3:
            self._signal(name, signal.SIGKILL)
            os.waitpid(self._pids[name], 0)
            self._wake.pop(name, None)
            self._pids[name] = spawn(lambda: play(self.scene, name))
        elif name not in self._wake:
            self._signal(name, signal.SIGSTOP)
            bound = longest if draw < 0.4 else 1.0
            self._wake[name] = now + self.rng.uniform(0, bound)

    def end(self) -> None:
        """Wakes all, and waits until each has finished what it does."""
        (self.scene.folder / "stop").touch()
        for name in self._pids:
            self._signal(name, signal.SIGCONT)
        until = time.monotonic() + DRAIN_S
        for name, pid in self._pids.items():
            status = None
            while status is None and time.monotonic() < until:
                done, found = os.waitpid(pid, os.WNOHANG)
                status = found if done else time.sleep(0.02)
            if status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if status:
                self.failed.append(f"{name} ended with status {status}")
            elif status is None:
                self.failed.append(f"{name} did not end within {DRAIN_S} s")

    def _signal(self, name: str, what: signal.Signals) -> None:
        self.counts[what.name] += 1
        os.kill(self._pids[name], what)


def play_round(
    scene: Scene, number: int, seconds: float, calm: float
) -> dict[str, Any]:
    """Runs one round to its end; returns the signals that it sent."""
    (scene.folder / "stop").unlink(missing_ok=True)
    time.sleep(2)  # stores tell whole seconds
    (scene.folder / "began").write_text(str(time.time() - 1), encoding="utf-8")
    rng = random.Random(f"{scene.seed}-{number}")
    troupe = Troupe(scene, rng)
    eye = spawn(lambda: watch(scene))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(0, 2 * calm))
        troupe.disturb(longest=min(20.0, seconds / 3))
    troupe.end()
    if os.waitpid(eye, 0)[1]:
        troupe.failed.append("the observer failed")
    if scene.proxy:
        time.sleep(LATE_S + 0.5)  # what is done late
    return {"signals": dict(troupe.counts), "failed": troupe.failed}


def watch(scene: Scene) -> None:
    """The observer's part in a round."""
    observer = Observer(scene)
    while not scene.is_over:
        observer.look()
        time.sleep(0.2)
    observer.save()


def sweep(scene: Scene) -> int:
    """Verifies again after all processes have ended, 50 versions at most, and cleans
    twice at once.

    That is with no age and no writers: nothing but the versions that are kept may
    remain. Returns the newest version.
    """
    tempfile.tempdir = str(scene.folder / "tmp")
    observer = Observer(scene)
    there = observer.look()
    for version in there[:: max(len(there) // 50, 1)]:
        observer.verify(version)
    how: dict[str, Any] = {"keep_versions": KEEP, "older_than": 0, "no_writers": True}
    how["storage_options"] = scene.options()

    def run() -> None:
        try:
            clean(scene.url, delete=True, **how)
        except Exception as error:
            observer.note(f"clean: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for leftover in clean(scene.url, **how).leftovers:
        observer.note(f"after clean: {leftover.path}: {leftover.why}")
    wanted = {
        path for version in observer.look() for path in observer.seen[version].files
    }
    for path in observer.raw.files().keys() - wanted:
        if "/manifest-" not in path:
            observer.note(f"after clean: {path}: no version names it")
    observer.save()
    return max(observer.seen, default=0)


def report_of(scene: Scene) -> dict[str, Any]:
    """The counts of the logs, and all problems."""
    observer = Observer(scene)
    return {**observer.check_logs(), "problems": list(observer.problems)}


def run(
    scene: Scene, commits: int, seconds: float, round_s: float, calm: float
) -> dict[str, Any]:
    """Runs rounds until the number of commits, or the time, is reached."""
    for name in ("logs", "inputs", "tmp"):
        (scene.folder / name).mkdir(parents=True)
    in_child(lambda: prepare(scene))
    began, number, newest = time.monotonic(), 0, 0
    signals, wrong = Counter[str](), list[str]()
    while newest < commits and (left := seconds - (time.monotonic() - began)) > 0:
        told = play_round(scene, number, min(round_s, max(left, 1)), calm)
        signals.update(told["signals"])
        wrong += told["failed"]
        newest = in_child(lambda: sweep(scene))
        number += 1
        print(
            f"round {number}: {newest} versions, {len(wrong)} problems", file=sys.stderr
        )
    report = in_child(lambda: report_of(scene))
    problems, unnamed = wrong + report.pop("problems"), report.pop("unnamed")
    return {
        "seed": scene.seed,
        "rounds": number,
        "seconds": round(time.monotonic() - began, 1),
        **report,
        "signals": dict(signals),
        "unnamed_errors": len(unnamed),
        "problems": len(problems),
        "first_problems": problems[:20],
        "first_unnamed": unnamed[:10],
    }


def prepare(scene: Scene) -> None:
    """The first version."""
    options = scene.options()
    packstore.pack(records(scene, 0), scene.url, storage_options=options, **SETTINGS)


@contextlib.contextmanager
def proxied(endpoint: str, rate: float, seed: int) -> Iterator[str]:
    """A proxy in a process of its own, as this one only forks and must have no
    threads.
    """
    reading, writing = os.pipe()

    def serve() -> None:
        with faulty(endpoint, Faults(rate, seed, KINDS)) as there:
            os.write(writing, there.encode() + b"\n")
            while True:
                time.sleep(60)

    pid = spawn(serve)
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as pipe:
            yield pipe.readline().strip()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def warm_up(folder: Path) -> None:
    """Loads what children would load each on their own: kernels, torch, clients."""
    import aiobotocore.session  # noqa: F401
    import botocore.session  # noqa: F401
    import s3fs  # noqa: F401

    scene = Scene(folder, 0)
    (folder / "began").write_text("0", encoding="utf-8")
    packstore.pack(records(scene, 0), scene.url, **SETTINGS)
    sum(1 for _ in chaos_jobs.PackedDataset(scene.url))
    packstore.append(scene.url, records(scene, 1), num_workers=0).verify(jobs=1)


def main() -> int:
    command = parser(__doc__)
    choices = ["local", "s3"]
    command.add_argument("--places", nargs="+", default=choices, choices=choices)
    command.add_argument("--commits", type=int, default=10**9, help="at each place")
    command.add_argument(
        "--seconds", type=float, default=3600, help="at each place, at most"
    )
    command.add_argument("--round", type=float, default=60, help="seconds of a round")
    command.add_argument(
        "--calm", type=float, default=0.3, help="seconds between two signals"
    )
    command.add_argument(
        "--rate", type=float, default=0.03, help="of requests that fail"
    )
    command.add_argument(
        "--seed", type=int, default=None, help="default: another one each time"
    )
    command.add_argument(
        "--endpoint", help="of a server that runs; default: one is started"
    )
    command.add_argument("--out", type=Path)
    args = command.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    report = provenance()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        (folder / "warm").mkdir()
        warm_up(folder / "warm")
        for place in args.places:
            with contextlib.ExitStack() as stack:
                scene = Scene(folder / place, seed)
                if place != "local":
                    endpoint = args.endpoint or stack.enter_context(
                        serving(place, folder / "servers" / place)
                    )
                    store = Store(
                        place, BUCKET, f"chaos-{os.getpid()}-{seed}", endpoint
                    )
                    proxy = stack.enter_context(proxied(endpoint, args.rate, seed))
                    scene = Scene(folder / place, seed, store, proxy)
                report[place] = run(
                    scene, args.commits, args.seconds, args.round, args.calm
                )
            save(args.out, report)
            print(place, json.dumps(report[place]), flush=True)
    bad = [
        p for p in args.places if report[p]["problems"] or report[p]["unnamed_errors"]
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
