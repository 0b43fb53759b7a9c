"""Loops of the processes of a chaos run, until a file named ``stop`` appears.

Each writes its acts to a log of its own, a JSON object a line, so that the logs show
what a process had begun when it was killed. Signals and faults come from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
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
from packstore import clean
from packstore.errors import PackstoreError
from packstore.torch import PackedDataset

SETTINGS: dict[str, Any] = {"pack_size": 32, "row_group_tokens": 64, "shard_tokens": 1}
SETTINGS |= {"num_workers": 0, "overwrite": True}
FIRST_MARKER = 1000
KEEP = 3
"""Newest versions that a cleaner keeps."""

CLEAN_AGE = 3600.0
"""Age for cleaners: the smallest that is allowed beside writers."""


@dataclass(frozen=True)
class Scene:
    """The place of a chaos run: a local folder, where the dataset is if there is no
    store.

    `proxy` is the endpoint of one before the store; every error must name the dataset,
    `name`.
    """

    folder: Path
    seed: int
    store: Store | None = None
    proxy: str = ""
    name: str = "chaos-ds"

    @property
    def url(self) -> str:
        return (
            f"{self.store.url}/{self.name}"
            if self.store
            else str(self.folder / self.name)
        )

    def options(self, proxied: bool = False) -> dict[str, Any]:
        """Storage options, over the proxy or not."""
        if self.store is None:
            return {}
        reached = (
            self.store.through(self.proxy) if proxied and self.proxy else self.store
        )
        return {**reached.options, **QUICKLY}

    @property
    def is_over(self) -> bool:
        return (self.folder / "stop").exists()

    def log_of(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of the log of a process."""
        path = self.folder / "logs" / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        return [json.loads(line) for line in lines[:-1]]


class Log:
    """Lines that survive the process; each is one system call."""

    def __init__(self, scene: Scene, name: str) -> None:
        self._scene = scene
        path = scene.folder / "logs" / f"{name}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def tell(self, event: str, **more: Any) -> None:
        os.write(self._file, (json.dumps({"event": event, **more}) + "\n").encode())

    @contextlib.contextmanager
    def errors(self, **more: Any) -> Iterator[None]:
        """A context that logs all errors, and lets only the end of the process leave
        it.
        """
        try:
            yield
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            named = isinstance(error, PackstoreError) and self._scene.name in text
            trace = "" if named else "".join(traceback.format_exception(error))[-3000:]
            name = type(error).__name__
            self.tell(
                "error", name=name, text=text[:800], named=named, trace=trace, **more
            )


def records(scene: Scene, job: int) -> list[dict[str, list[int]]]:
    """The input of a job: every prompt begins with a token that no other job has."""
    size = random.Random(f"{scene.seed}-{job}-size").randint(5, 12)
    return [
        {
            "prompt": [FIRST_MARKER + job],
            "chosen": [8, 10 + i],
            "rejected": [9] * (1 + i % 7),
        }
        for i in range(size)
    ]


def markers_of(dataset: Any) -> dict[int, int]:
    """Job -> examples of it in a dataset; reads every pack."""
    ids = [
        packs.input_ids[packs.input_ids >= FIRST_MARKER]
        for packs in dataset.iter_packs()
    ]
    found, counts = np.unique(
        np.concatenate([np.empty(0, np.int32), *ids]), return_counts=True
    )
    return {
        int(f) - FIRST_MARKER: int(c) // 2 for f, c in zip(found, counts, strict=True)
    }


def kind_of(scene: Scene, job: int) -> str:
    """The work of a job."""
    draw = random.Random(f"{scene.seed}-{job}-kind").random()
    return "append" if draw < 0.55 else "concat" if draw < 0.65 else "pack"


def run_job(scene: Scene, job: int, log: Log) -> None:
    """Commits a version, or fails; logs which."""
    rng = random.Random(f"{scene.seed}-{job}")
    source = scene.folder / "inputs" / f"{job}.jsonl"
    source.write_text(
        "".join(json.dumps(r) + "\n" for r in records(scene, job)), encoding="utf-8"
    )
    kind, options = kind_of(scene, job), scene.options(rng.random() < 0.4)
    log.tell("begin", job=job, kind=kind)
    there: dict[str, Any] = {"storage_options": options}
    with log.errors(job=job):
        if kind == "append":
            done = packstore.append(scene.url, str(source), num_workers=0, **there)
        elif kind == "concat":
            other = packstore.pack(str(source), source.with_suffix(""), **SETTINGS)
            parts = [packstore.open(scene.url, options), other]
            done = packstore.concat(parts, scene.url, overwrite=True, **there)
        else:
            there["partitions"] = rng.choice((1, 1, 2))
            done = packstore.pack(str(source), scene.url, **there, **SETTINGS)
        shards = [shard.path for shard in done.manifest.shards]
        log.tell("done", job=job, version=done.version, shards=shards)


def write(scene: Scene, log: Log, name: str, rng: random.Random) -> None:
    """Runs job after job; mostly begins a killed one again."""
    earlier = [event for event in scene.log_of(name) if "job" in event]
    begun = sum(event["event"] == "begin" for event in earlier)
    job = int(name.rpartition("-")[2]) * 100_000 + begun
    if earlier and earlier[-1]["event"] == "begin" and rng.random() < 0.7:
        run_job(scene, earlier[-1]["job"], log)
        job += 1
    while not scene.is_over:
        run_job(scene, job, log)
        job += 1


def tidy(scene: Scene, log: Log, rng: random.Random) -> None:
    """Cleans; files from before this round count as old."""
    began = float((scene.folder / "began").read_text(encoding="utf-8"))
    # A clock that stands still: all files of this round stay younger than an hour.
    time.time = lambda: began + CLEAN_AGE
    how: dict[str, Any] = {
        "delete": True,
        "keep_versions": KEEP,
        "older_than": CLEAN_AGE,
    }
    how["storage_options"] = scene.options(rng.random() < 0.5)
    removed = clean(scene.url, **how).removable
    versions = [
        int(item.why[8:]) for item in removed if item.why.startswith("version ")
    ]
    log.tell("cleaned", files=len(removed), versions=versions)


def load(scene: Scene, log: Log, rng: random.Random) -> None:
    """An epoch of the loader: every pack once."""
    dataset = packstore.open(scene.url, scene.options(rng.random() < 0.5))
    packs = sum(1 for _ in PackedDataset(dataset, seed=rng.randrange(9)))
    log.tell("epoch", packs=packs, right=packs == len(dataset), version=dataset.version)


def look(scene: Scene, log: Log, rng: random.Random) -> None:
    """Opens the newest version. Listings over the proxy may be stale."""
    log.tell("opened", version=packstore.open(scene.url, scene.options()).version)


LOOPS: dict[str, Callable[[Scene, Log, random.Random], None]] = {
    "cleaner": tidy,
    "reader": load,
    "opener": look,
}
NAMES = (
    "writer-1",
    "writer-2",
    "writer-3",
    "cleaner-1",
    "cleaner-2",
    "reader-1",
    "opener-1",
)
"""The processes of a run: role and number, no number twice."""


def play(scene: Scene, name: str) -> None:
    """One process of a run."""
    tempfile.tempdir = str(scene.folder / "tmp")
    log, rng = Log(scene, name), random.Random(f"{scene.seed}-{name}-{os.getpid()}")
    role = name.partition("-")[0]
    if role == "writer":
        write(scene, log, name, rng)
    while not scene.is_over:
        with log.errors():
            LOOPS[role](scene, log, rng)
        time.sleep(rng.uniform(0, 0.5))
