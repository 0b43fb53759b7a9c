"""A cell for attacks: a process with little memory and time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from children import run_python

LIMIT = """
import resource
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + ({room} << 20),) * 2)
"""


@pytest.fixture
def cell(tmp_path: Path) -> Callable[..., str]:
    """Runs code in the folder `tmp_path`: its imports, then the rest with `room` MB of
    memory.

    Returns what it prints; fails if it ends otherwise than well, or not within two
    minutes.
    """

    def run(code: str, given: str = "", room: int = 1024) -> str:
        imports, rest = code.split("\n\n", 1)
        limited = imports + LIMIT.format(room=room) + rest
        done = run_python("-c", limited, input=given, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run
