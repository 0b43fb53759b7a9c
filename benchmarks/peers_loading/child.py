"""One measurement of one reader, in a fresh process: ``python -m peers_loading.child
TASK``.

TASK is a JSON object; the result is written to the file that it names, as peers print.
torch and the reader's library are imported before any clock starts.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers_loading import READERS
from peers_loading.base import PACKS_PER_BATCH, Reader, Source, identify
from peers_loading.runner import private_memory

POSITIONS = (0.5, 0.95)


@dataclass
class Task:
    """Arguments of a child."""

    mode: str  # a name of `MODES`
    reader: str  # a name of ``READERS``
    root: str  # folder of the packs: ``source`` and the files of every reader
    scratch: str  # an empty folder
    out: str  # file of the result
    position: int = 0  # in mode ``resume``, the place in ``POSITIONS``

    @property
    def folder(self) -> Path:
        """Folder of the reader's files."""
        return Path(self.root, READERS[self.reader].files)

    @property
    def source(self) -> Source:
        """The packs."""
        return Source(Path(self.root, "source"))

    def plan_file(self, suffix: str) -> Path:
        """File of the state that mode ``plan`` saves for mode ``resume``."""
        return Path(self.root, f"plan-{self.reader.replace(' ', '-')}{suffix}")


def write(reader: Reader, task: Task) -> dict[str, Any]:
    """Writes the reader's files."""
    reader.write(task.source, task.folder)
    times = os.times()  # those of workers too
    seconds = times.user + times.system + times.children_user + times.children_system
    size = sum(path.stat().st_size for path in task.folder.rglob("*") if path.is_file())
    return {"write_cpu_seconds": seconds, "bytes": size}


def source(reader: Any, task: Task) -> dict[str, Any]:
    """Makes the flat files of the packs out of the reader's own, which must be ours."""
    return dict(reader.export(task.folder, task.source.folder))


def read(reader: Reader, task: Task) -> dict[str, Any]:
    """One epoch: time to the first batch from nothing, then the whole epoch with it."""
    opened = time.perf_counter()
    loader = reader.open(task.folder, Path(task.scratch))
    start, start_cpu = time.perf_counter(), time.process_time()
    first = samples = 0.0
    for batch in loader:
        first = first or time.perf_counter() - opened
        samples += reader.count(batch)
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return {
        "samples": int(samples),
        "samples_per_second": samples / wall,
        "cpu_us": 1e6 * cpu / samples,
        "first_seconds": first,
    }


def plan(reader: Reader, task: Task) -> dict[str, Any]:
    """The order of an undisturbed epoch, and the states at all positions on the way."""
    truth = set(map(identify, task.source))
    count = len(truth)
    stops = [int(p * count) // PACKS_PER_BATCH * PACKS_PER_BATCH for p in POSITIONS]
    loader = reader.open(task.folder, Path(task.scratch))
    order: list[int] = []
    states: list[tuple[int, Any]] = []
    for batch in loader:
        order += map(identify, reader.samples(batch))
        if len(states) < len(stops) and len(order) >= stops[len(states)]:
            states.append((len(order), pickle.dumps(loader.state_dict())))
    task.plan_file(".pickle").write_bytes(pickle.dumps(states))
    np.save(task.plan_file(".npy"), np.array(order))
    return {
        "complete": len(order) == count
        and len(set(order)) == count
        and set(order) <= truth,
        "state_bytes": [len(state) for _, state in states],
    }


def resume(reader: Reader, task: Task) -> dict[str, Any]:
    """Continues at one position: seconds to the first batch, and what was lost or
    repeated.
    """
    order = np.load(task.plan_file(".npy")).tolist()
    place, state = pickle.loads(task.plan_file(".pickle").read_bytes())[task.position]
    start = time.perf_counter()
    loader = reader.open(task.folder, Path(task.scratch))
    loader.load_state_dict(pickle.loads(state))
    found: list[int] = []
    seconds = 0.0
    for batch in loader:
        seconds = seconds or time.perf_counter() - start
        found += map(identify, reader.samples(batch))
    expected = order[place:]
    return {
        "seconds": seconds,
        "exact": found == expected,
        "lost": len(set(expected) - set(found)),
        "repeated": len(found) - len(set(found) - set(order[:place])),
    }


def check(reader: Reader, task: Task) -> dict[str, Any]:
    """Compare the packs of an epoch with those that were written, each once."""
    loader = reader.open(task.folder, Path(task.scratch))
    packs = [
        number for batch in loader for number in map(identify, reader.samples(batch))
    ]
    return {"intact": sorted(packs) == sorted(map(identify, task.source))}


MODES: dict[str, Callable[[Any, Task], dict[str, Any]]] = {
    function.__name__: function
    for function in (write, source, read, plan, resume, check)
}


def main() -> None:
    """Runs the task of the command line."""
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    torch_memory = private_memory(os.getpid())
    entry = READERS[task.reader]
    module, _, name = entry.target.partition(":")
    reader = getattr(importlib.import_module(f"peers_loading.{module}"), name)(
        *entry.arguments
    )
    result = {**MODES[task.mode](reader, task), "torch_memory": torch_memory}
    Path(task.out).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # some peers' threads keep an interpreter from ending


if __name__ == "__main__":
    main()
