"""A job that is really killed: the dataset before stays whole, and a rerun ends as
undisturbed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from small_jobs import pairs, write_jsonl

import packstore

JOB = """
import inspect, json, os, signal, sys, tempfile
source, folder, moment = json.loads(sys.argv[1])
import packstore
inspect.signature(packstore.pack)  # loads the code, which is no act of the job
tempfile.tempdir = folder + "/temporary"
acts = 0
def count(event, args):
    global acts
    if event == "open":
        path = args[0] if args[2] & (os.O_WRONLY | os.O_RDWR) else None
    else:
        path = args[0] if event in ("os.rename", "os.link", "os.remove", "os.mkdir") else None
    if isinstance(path, str) and path.startswith(folder):
        acts += 1
        if acts == moment:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
settings = dict(pack_size=64, row_group_tokens=512, shard_tokens=2000, partitions=4, num_workers=0)
packstore.pack(source, folder + "/ds", overwrite=True, **settings)
print(acts)
"""
"""Replaces a dataset; with a moment, is killed before its n-th act on the disk."""


def begin(folder: Path) -> bytes:
    """Makes the dataset that jobs replace; returns its manifest."""
    (folder / "temporary").mkdir(parents=True)
    source = write_jsonl(folder.parent / "old.jsonl", pairs(400, 1000))
    packstore.pack(source, folder / "ds", pack_size=64)
    return manifest(folder)


def replace(folder: Path, moment: int = 0) -> int:
    """Replaces it by one of 800 pairs; returns the acts, 0 if killed in that of the
    moment.
    """
    source = write_jsonl(folder.parent / "new.jsonl", pairs(800))
    command = [sys.executable, "-c", JOB, json.dumps([source, str(folder), moment])]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    assert done.returncode == (-9 if moment else 0)
    return int(done.stdout or 0)


def manifest(folder: Path, version: int | None = None) -> bytes:
    dataset = packstore.open(folder / "ds", version=version)
    assert dataset.verify().ok
    # A job that was killed after its commit makes one more version.
    return re.sub(rb"packs-\d{6}-", b"packs-", dataset.manifest.to_json())


@pytest.mark.parametrize(
    "fractions",
    [(0.97,), pytest.param([i / 40 for i in range(1, 40)], marks=pytest.mark.slow)],
)
def test_on_a_local_disk(fractions: tuple[float, ...], tmp_path: Path) -> None:
    begin(tmp_path / "whole")
    acts = replace(tmp_path / "whole")
    expected = manifest(tmp_path / "whole")
    for n, fraction in enumerate(fractions):
        folder = tmp_path / str(n)
        before = begin(folder)
        assert replace(folder, moment=round(acts * fraction)) == 0
        assert manifest(folder, 1) == before
        replace(folder)
        assert manifest(folder) == expected
        place = str(folder / "ds")
        packstore.clean(place, delete=True, older_than=0, no_writers=True)
        assert not packstore.clean(place, older_than=0, no_writers=True).leftovers
        assert manifest(folder) == expected


def test_no_file_is_closed_under_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the thread that writes is started: native code crashed on the closed
    file.
    """
    start, write = threading.Thread.start, pq.ParquetWriter.write_table
    begun: list[int] = []
    ended: list[int] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("packstore-write"):
            time.sleep(0.2)
            raise KeyboardInterrupt

    def slowly(*args: Any, **settings: Any) -> None:
        begun.append(1)
        time.sleep(0.5)
        write(*args, **settings)
        ended.append(1)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", slowly)
    with pytest.raises(KeyboardInterrupt):
        packstore.pack(
            write_jsonl(tmp_path / "a.jsonl", pairs(20)), tmp_path / "ds", pack_size=64
        )
    assert begun == ended
    assert not [*tmp_path.glob("ds/**/*.parquet")]
