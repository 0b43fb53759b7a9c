"""Temporary folders of dead jobs go, those of living ones stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from packstore.io.store import temporary_folders as temporary
from packstore.io.store.process import this_process

DAY = 86_400.0
HOLDER = """
import sys, time
from packstore.io.store import temporary_folders as temporary
folder = temporary.make("some-", sys.argv[1])
open(folder + "/data", "wb").write(b"12345")
print(folder, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not this_process().machine, reason="needs /proc and a machine id")
def test_what_a_dead_process_left_goes_when_the_next_job_begins(tmp_path: Path) -> None:
    here = str(tmp_path)
    command = [sys.executable, "-c", HOLDER, here]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as job:
        assert job.stdout is not None
        name = job.stdout.readline().strip()
        os.utime(name, (0, 0))
        os.utime(f"{name}/data", (0, 0))
        assert temporary.abandoned(here, "some-") == []
        mine = temporary.make("some-", here)
        assert Path(name, "data").read_bytes() == b"12345"
        job.send_signal(signal.SIGKILL)
    (found,) = temporary.abandoned(here, "some-")
    assert (found.path, found.bytes, found.certain) == (name, 5, True)
    other = temporary.make("some-", here)
    assert sorted(os.listdir(here)) == sorted(map(os.path.basename, (mine, other)))
    for folder in (mine, other):
        temporary.remove(folder)
    assert os.listdir(here) == []


@pytest.mark.parametrize("name", ["some-1", f"some-{'0' * 32}-7-8-x"])
def test_folders_of_unknown_processes_go_by_age(tmp_path: Path, name: str) -> None:
    """By the newest file in them; from an hour on they are listed."""
    import time

    folder, other = tmp_path / name, tmp_path / "link"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "data").write_bytes(b"12345")
    other.symlink_to(folder)

    def aged(seconds: float) -> list[temporary.AbandonedFolder]:
        then = time.time() - seconds
        for path in (folder, folder / "inner"):
            os.utime(path, (0, 0))
        os.utime(folder / "inner" / "data", (then, then))
        return temporary.abandoned(str(tmp_path), "some-")

    assert aged(3000) == []
    (found,) = aged(6 * DAY)
    assert found.bytes == 5
    assert not found.certain
    assert 6 * DAY <= found.age < 6.5 * DAY
    temporary.sweep(str(tmp_path), "some-")
    temporary.sweep(str(tmp_path), "link")
    assert folder.is_dir()
    aged(8 * DAY)
    temporary.sweep(str(tmp_path), "some-")
    assert os.listdir(tmp_path) == ["link"]
