"""A job that is really killed, at a few moments; benchmarks/kills.py does it at fifty."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from stores import Store

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills.py"
GOOD = ("killed", "old_readable", "resumed", "identical", "without_orphans")


def kill(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--moments", "3", *arguments],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.partition(" ")[2])
    assert {name: found[name] for name in GOOD} == dict.fromkeys(GOOD, found["moments"])


@pytest.mark.slow
def test_on_a_local_disk() -> None:
    kill("--places", "local")


@pytest.mark.slow
def test_on_s3(s3: Store) -> None:
    kill("--places", "s3", "--endpoint", s3.endpoint)
