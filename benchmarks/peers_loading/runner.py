"""Starts children, watches their memory, and brings back what they found."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import HERE, memory

from peers_loading import READERS, Entry

PERIOD = 0.02
"""Seconds between looks at a child's memory."""

_VERSIONS = """
import importlib.metadata as m, json, platform, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({"python": platform.python_version(), **{n: version(n) for n in sys.argv[1:]}}))
"""


class ChildError(Exception):
    """A child that failed; the last line that it wrote."""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python and the versions of the packages in it (None: not installed)."""

    path: str
    versions: dict[str, str | None]

    @classmethod
    def at(cls, path: str) -> Interpreter:
        """Asks the interpreter at `path` what it has."""
        packages = {"torch", "pyarrow", "numpy"}.union(
            *(e.packages for e in READERS.values())
        )
        command = [path, "-c", _VERSIONS, *sorted(packages)]
        text = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout
        return cls(path, json.loads(text))

    def has(self, entry: Entry) -> bool:
        """Returns True if a reader can run with it."""
        return all(self.versions[package] for package in ("torch", *entry.packages))


class Runner:
    """Runs tasks of ``peers_loading.child``.

    Args:
        interpreters: the first that has a reader's packages runs it.
        root: folder of the packs.
        limit: seconds until a child is ended.
    """

    def __init__(
        self, interpreters: list[Interpreter], root: Path, limit: float
    ) -> None:
        self.interpreters, self.root, self.limit = interpreters, root, limit

    def interpreter(self, reader: str) -> Interpreter | None:
        """The interpreter that runs `reader`, if one can."""
        return next(
            (python for python in self.interpreters if python.has(READERS[reader])),
            None,
        )

    def __call__(self, mode: str, reader: str, **options: Any) -> dict[str, Any]:
        """The result of one task, and the peak of its memory in bytes.

        Raises:
            ChildError: it failed or took too long.
        """
        python = self.interpreter(reader)
        if python is None:
            raise ChildError("not installed")
        with tempfile.TemporaryDirectory(dir=self.root, prefix="scratch-") as scratch:
            out, inner = Path(scratch, "result.json"), Path(scratch, "scratch")
            inner.mkdir()
            task = {"mode": mode, "reader": reader, "root": str(self.root), **options}
            task |= {"scratch": str(inner), "out": str(out)}
            command = [python.path, "-m", "peers_loading.child", json.dumps(task)]
            with Path(scratch, "log").open("w+", encoding="utf-8") as log:
                peak, ended = _watch(command, log, inner, self.limit)
                log.seek(0)
                lines = log.read().strip().splitlines()
            if not out.exists():
                last = lines[-1] if lines else "it ended without a word"
                raise ChildError(
                    last if ended else f"not done after {self.limit:.0f} s"
                )
            return {**json.loads(out.read_text(encoding="utf-8")), "peak_memory": peak}


def _watch(command: list[str], log: Any, home: Path, limit: float) -> tuple[int, bool]:
    """Runs a command; the most memory that no file backs, and whether it ended by
    itself.
    """
    places = filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(places),
        "HF_HOME": str(home),
    }
    environment |= {"HF_DATASETS_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1"}
    child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    peak, end = 0, time.monotonic() + limit
    while child.poll() is None:
        if time.monotonic() > end:
            child.kill()
            child.wait()
            return peak, False
        peak = max(peak, private_memory(child.pid))
        time.sleep(PERIOD)
    return peak, True


def private_memory(pid: int) -> int:
    """Bytes of a process that no file backs."""
    sizes = memory(pid)
    return sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)
