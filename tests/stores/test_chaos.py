"""Writers, cleaners, readers at one dataset, stopped and killed; benchmarks/chaos.py
for hours.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from children import run_python
from stores import Store

ROOT = Path(__file__).parents[2]
SECONDS = 6


def storm(folder: Path, place: str, *arguments: str) -> None:
    """Two rounds at a place, with another seed each time; it is told when something is
    wrong.
    """
    script = str(ROOT / "benchmarks" / "chaos.py")
    command = ["-W", "ignore", script, "--places", place, *arguments]
    command += ["--seconds", str(SECONDS), "--round", str(SECONDS // 2)]
    done = run_python(*command, env={"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)})
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    found = json.loads(done.stdout.partition(" ")[2])
    assert (found["problems"], found["unnamed_errors"]) == (0, 0), told
    assert found["commits"] > 0
    assert found["signals"]


@pytest.mark.slow
def test_on_a_local_disk(tmp_path: Path) -> None:
    storm(tmp_path, "local")


@pytest.mark.slow
def test_on_s3(s3: Store, tmp_path: Path) -> None:
    storm(tmp_path, "s3", "--endpoint", s3.endpoint)
