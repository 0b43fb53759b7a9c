"""Loops of the processes of a chaos run, until a file named ``stop`` appears.

Each writes its acts to a log of its own, a JSON object a line, so that the logs show what a process
had begun when it was killed. Signals and faults come from outside.
"""

from __future__ import annotations

import json
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fault_runs import QUICKLY
from stores import Store

import packstore
from packstore.errors import PackstoreError
from packstore.io.maintain.clean import clean
from packstore.io.store import operations
from packstore.torch import PackedDataset

SETTINGS: dict[str, Any] = {
    "pack_size": 32,
    "row_group_tokens": 64,
    "shard_tokens": 1,
    "num_workers": 0,
}
FIRST_MARKER = 1000
KEEP = 3
"""Newest versions that a cleaner keeps."""

CLEAN_AGE = 3600.0
"""Age for cleaners: the smallest that is allowed beside writers."""


@dataclass(frozen=True)
class Scene:
    """The place of a chaos run.

    Attributes:
        name: of the dataset: every error must name it.
        folder: local, with inputs, logs and temporary files, and the dataset if it is local.
        seed: of all choices.
        store: of the dataset; None on a local disk.
        proxy: the endpoint of a proxy before the store; empty: none.
    """

    name: str
    folder: Path
    seed: int
    store: Store | None = None
    proxy: str = ""

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.name}" if self.store else str(self.folder / self.name)

    def options(self, proxied: bool) -> dict[str, Any]:
        """Storage options, over the proxy or not."""
        if self.store is None:
            return {}
        reached = self.store.through(self.proxy) if proxied and self.proxy else self.store
        return {**reached.options, **QUICKLY}

    @property
    def is_over(self) -> bool:
        return (self.folder / "stop").exists()


class Log:
    """Lines that survive the process; each is one system call."""

    def __init__(self, scene: Scene, name: str) -> None:
        path = scene.folder / "logs" / f"{name}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def tell(self, event: str, **more: Any) -> None:
        line = json.dumps({"at": time.time(), "event": event, **more}) + "\n"
        os.write(self._file, line.encode())


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines[:-1]]


def records(scene: Scene, job: int) -> list[dict[str, list[int]]]:
    """The input of a job: every prompt begins with a token that no other job has."""
    size = random.Random(f"{scene.seed}-{job}-size").randint(5, 12)
    return [
        {"prompt": [FIRST_MARKER + job], "chosen": [8, 10 + i], "rejected": [9] * (1 + i % 7)}
        for i in range(size)
    ]


def markers_of(dataset: Any) -> dict[int, int]:
    """Job -> examples of it in a dataset; reads every pack."""
    ids = [packs.input_ids[packs.input_ids >= FIRST_MARKER] for packs in dataset.iter_packs()]
    found, counts = np.unique(np.concatenate([np.empty(0, np.int32), *ids]), return_counts=True)
    return {int(f) - FIRST_MARKER: int(c) // 2 for f, c in zip(found, counts, strict=True)}


def kind_of(scene: Scene, job: int) -> str:
    """The work of a job."""
    draw = random.Random(f"{scene.seed}-{job}-kind").random()
    return "append" if draw < 0.55 else "concat" if draw < 0.65 else "pack"


def run_job(scene: Scene, job: int, log: Log) -> None:
    """Commits a version, or fails; logs which."""
    rng = random.Random(f"{scene.seed}-{job}")
    source = scene.folder / "inputs" / f"{job}.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in records(scene, job)))
    kind, options = kind_of(scene, job), scene.options(rng.random() < 0.4)
    log.tell("begin", job=job, kind=kind)
    with reported(scene, log, job=job):
        if kind == "append":
            done = packstore.append(scene.url, str(source), storage_options=options, num_workers=0)
        elif kind == "concat":
            other = scene.folder / "inputs" / f"other-{job}"
            packstore.pack(str(source), str(other), overwrite=True, **SETTINGS)
            newest = packstore.open(scene.url, options)
            parts = [newest, packstore.open(str(other))]
            done = packstore.concat(parts, scene.url, overwrite=True, storage_options=options)
        else:
            partitions = rng.choice((1, 1, 2))
            done = packstore.pack(
                str(source),
                scene.url,
                storage_options=options,
                overwrite=True,
                partitions=partitions,
                **SETTINGS,
            )
        log.tell(
            "done", job=job, version=done.version, shards=[s.path for s in done.manifest.shards]
        )


class reported:
    """A context that logs all errors, and lets only the end of the process leave it."""

    def __init__(self, scene: Scene, log: Log, **more: Any) -> None:
        self._scene, self._log, self._more = scene, log, more

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            return True
        if not isinstance(error, Exception):
            return False
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        place = self._scene.name in text
        named = isinstance(error, PackstoreError) and place
        told = "" if named else "".join(traceback.format_exception(error))[-3000:]
        name = type(error).__name__
        self._log.tell("error", name=name, text=text[:800], named=named, trace=told, **self._more)
        return True


def write(scene: Scene, log: Log, name: str) -> None:
    """Runs job after job; mostly begins a killed one again."""
    number = int(name.rpartition("-")[2])
    earlier = read_log(scene.folder / "logs" / f"{name}.jsonl")
    last = next((e for e in reversed(earlier) if "job" in e), None)
    begun = sum(e["event"] == "begin" for e in earlier)
    job = number * 100_000 + begun
    if last and last["event"] == "begin" and random.Random(job).random() < 0.7:
        run_job(scene, last["job"], log)
        job += 1
    while not scene.is_over:
        run_job(scene, job, log)
        job += 1


def tidy(scene: Scene, log: Log, name: str) -> None:
    """Cleans; files from before this round count as old."""
    rng = random.Random(f"{scene.seed}-{name}-{os.getpid()}")
    began = float((scene.folder / "began").read_text())

    class Clock:
        """A clock that stands still: all files of this round stay younger than an hour."""

        @staticmethod
        def time() -> float:
            return began + CLEAN_AGE

    operations.time = Clock  # type: ignore[assignment]
    while not scene.is_over:
        with reported(scene, log):
            report = clean(
                scene.url,
                delete=True,
                keep_versions=KEEP,
                older_than=CLEAN_AGE,
                storage_options=scene.options(rng.random() < 0.5),
            )
            gone = [int(x.why[8:]) for x in report.removable if x.why.startswith("version ")]
            log.tell("cleaned", files=len(report.removable), versions=gone)
        time.sleep(rng.uniform(0, 1.0))


def load(scene: Scene, log: Log, name: str) -> None:
    """Epochs of the loader: every pack once."""
    rng = random.Random(f"{scene.seed}-{name}-{os.getpid()}")
    while not scene.is_over:
        options = scene.options(rng.random() < 0.5)
        with reported(scene, log):
            dataset = packstore.open(scene.url, options)
            packs = sum(1 for _ in PackedDataset(dataset, seed=rng.randrange(9)))
            log.tell("epoch", packs=packs, right=packs == len(dataset), version=dataset.version)
        time.sleep(rng.uniform(0, 0.5))


def look(scene: Scene, log: Log, name: str) -> None:
    """Opens the newest version: its number never falls."""
    rng, newest = random.Random(f"{scene.seed}-{name}-{os.getpid()}"), 0
    while not scene.is_over:
        with reported(scene, log):
            # Listings over the proxy may be stale.
            version = packstore.open(scene.url, scene.options(False)).version
            log.tell("opened", version=version, right=version >= newest)
            newest = max(newest, version)
        time.sleep(rng.uniform(0, 0.5))


ROLES: dict[str, Callable[[Scene, Log, str], None]] = {
    "writer": write,
    "cleaner": tidy,
    "reader": load,
    "opener": look,
}


def names(writers: int) -> Iterator[str]:
    """Roles of the processes of a run; the number behind a role is not used twice."""
    yield from (f"writer-{n}" for n in range(1, writers + 1))
    yield from ("cleaner-1", "cleaner-2", "reader-1", "opener-1")
