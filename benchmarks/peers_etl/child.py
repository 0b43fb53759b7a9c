"""One contender in a process of its own: ``python -m peers_etl.child TASK`` with a task in JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import resource
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """Arguments of a run.

    Attributes:
        contender: a name in `CONTENDERS`.
        source: JSON lines.
        out: a folder for the result.
        tokenizer: a folder with ``tokenizer.json``.
        pack_size: tokens of a pack.
        template: chat template, if the tokenizer has none of its own.
        limit: bytes of RLIMIT_DATA, or None.
    """

    contender: str
    source: str
    out: str
    tokenizer: str
    pack_size: int
    template: str | None = None
    limit: int | None = None


@dataclass
class Watch:
    """Measurements of a run.

    Attributes:
        stages: seconds by stage.
        counts: tokens and packs of the output.
        engine: tokenizer engine, where there is a choice.
        peaks: of memory, in bytes, which a thread reads.
    """

    stages: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    engine: str | None = None
    peaks: dict[str, int] = field(default_factory=lambda: {"anonymous": 0, "data": 0})
    _begun: float = field(default_factory=time.perf_counter)

    def stage(self, name: str) -> None:
        """Ends stage `name`, which began where the last one ended."""
        now = time.perf_counter()
        self.stages[name] = self.stages.get(name, 0) + now - self._begun
        self._begun = now

    def look(self) -> None:
        """Reads the memory of this process, for ever."""
        names = {"RssAnon": "anonymous", "VmData": "data"}
        while True:
            for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
                key, _, value = line.partition(":")
                if key in names:
                    size = int(value.split()[0]) << 10
                    self.peaks[names[key]] = max(self.peaks[names[key]], size)
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


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    names = {f.name for f in dataclasses.fields(Task)}
    print(json.dumps(run(Task(**{k: v for k, v in given.items() if k in names}))))
