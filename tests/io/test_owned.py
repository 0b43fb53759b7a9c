"""Temporary folders of dead jobs go, those of living ones stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from packstore.io import owned

HOLDER = """
import sys, time
from packstore.io.owned import OwnedFolder
folder = OwnedFolder("some-", sys.argv[1])
open(folder.name + "/data", "wb").write(b"12345")
print(folder.name, flush=True)
time.sleep(600)
"""


def test_only_what_a_dead_owner_left_is_removed(tmp_path: Path) -> None:
    here = str(tmp_path)
    command = [sys.executable, "-c", HOLDER, here]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as job:
        assert job.stdout is not None
        name = job.stdout.readline().strip()
        assert owned.abandoned(here, "some-") == []
        mine = owned.OwnedFolder("some-", here)
        assert Path(name, "data").read_bytes() == b"12345"
        job.send_signal(signal.SIGKILL)
    assert owned.abandoned(here, "some-") == [owned.Abandoned(name, 5)]
    other = owned.OwnedFolder("some-", here)
    assert sorted(os.listdir(here)) == sorted(map(os.path.basename, (mine.name, other.name)))
    for folder in (mine, other):
        folder.cleanup()
    assert os.listdir(here) == []


def test_folders_that_were_cut_off_at_their_beginning_or_end(tmp_path: Path) -> None:
    """Without its lock a new folder is spared for an hour, one that has its name is at its end."""
    for name in ("some-1", ".packstore-new-1", ".packstore-new-2"):
        (tmp_path / name).mkdir()
    (tmp_path / ".packstore-new-2" / "lock").touch()

    def found() -> list[str]:
        return [Path(a.path).name for a in owned.abandoned(str(tmp_path), "some-")]

    assert found() == [".packstore-new-2", "some-1"]
    os.utime(tmp_path / ".packstore-new-1", (0, 0))
    assert found() == [".packstore-new-1", ".packstore-new-2", "some-1"]
    (tmp_path / "link").symlink_to(tmp_path / "some-1")
    owned.sweep(str(tmp_path), "link")
    assert (tmp_path / "some-1").is_dir()
    owned.sweep(str(tmp_path), "some-")
    assert os.listdir(tmp_path) == ["link"]
