"""One contender in a process of its own: ``python -m peers_etl.child TASK`` with a task
in JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import HERE, memory

CONTENDERS = {
    "packstore": "peers_etl.ours:pack",
    "packstore-reference": "peers_etl.ours:pack_by_reference",
    "datasets+trl": "peers_etl.trls:pack",
    "datasets+trl-2": "peers_etl.trls:pack_in_two",
    "nemo-steps": "peers_etl.nemo:pack",
    "plain-script": "peers_etl.plain_script:pack",
}


@dataclass(kw_only=True)
class Task:
    """Arguments of a run."""

    contender: str  # a name in `CONTENDERS`
    source: str  # JSON lines
    out: str  # a folder for the result
    tokenizer: str  # a folder with ``tokenizer.json``
    pack_size: int = 8192
    limit: int | None = None  # bytes of RLIMIT_DATA


@dataclass
class Watch:
    """Measurements of a run."""

    stages: dict[str, float] = field(default_factory=dict)  # seconds
    counts: dict[str, int] = field(
        default_factory=dict
    )  # tokens and packs of the output
    engine: str | None = None  # tokenizer engine, where there is a choice
    peaks: dict[str, int] = field(
        default_factory=lambda: {"anonymous": 0, "data": 0}
    )  # bytes
    _begun: float = field(default_factory=time.perf_counter)

    def stage(self, name: str) -> None:
        """Ends stage `name`, which began where the last one ended."""
        now = time.perf_counter()
        self.stages[name] = self.stages.get(name, 0) + now - self._begun
        self._begun = now

    def look(self) -> None:
        """Reads the memory of this process, for ever."""
        while True:
            sizes = memory()
            for name, size in (
                ("anonymous", sizes["RssAnon"]),
                ("data", sizes["VmData"]),
            ):
                self.peaks[name] = max(self.peaks[name], size)
            time.sleep(0.05)


def cpu_seconds() -> float:
    """CPU seconds of this process and its children, finished or not."""
    times = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(t.ru_utime + t.ru_stime for t in times)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            figures = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(figures[1]) == os.getpid():
                seconds += sum(map(int, figures[11:13])) / os.sysconf("SC_CLK_TCK")
    return seconds


def run(task: Task) -> dict[str, Any]:
    """Runs a task and returns its measurements. Imports are timed apart."""
    if task.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (task.limit, task.limit))
    module, _, name = CONTENDERS[task.contender].partition(":")
    begun = time.perf_counter()
    contender = getattr(importlib.import_module(module), name)
    imports = time.perf_counter() - begun
    watch = Watch()
    threading.Thread(target=watch.look, daemon=True).start()
    begun, cpu = time.perf_counter(), cpu_seconds()
    contender(task, watch)
    found = {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": cpu_seconds() - cpu,
        "import_seconds": imports,
        "stages": watch.stages,
        **watch.counts,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    if watch.engine:
        found["engine"] = watch.engine
    return found | {f"peak_{name}": size for name, size in watch.peaks.items()}


def in_process(
    task: dict[str, Any], *prefix: str, **environment: str
) -> dict[str, Any]:
    """The measurements of a task in a process of its own, started by `prefix`.

    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    command = [*prefix, sys.executable, "-m", "peers_etl.child", json.dumps(task)]
    how: Any = {
        "cwd": HERE,
        "env": os.environ | environment,
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run(command, check=False, **how)
    if done.returncode:
        raise SystemExit(f"{task['contender']} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(run(Task(**json.loads(sys.argv[1])))))
