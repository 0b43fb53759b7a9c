"""A job that is really killed: the dataset before stays whole, and a rerun ends as undisturbed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import packstore

JOB = """
import json, os, signal, sys, tempfile
source, out, options, temporary, root, moment = json.loads(sys.argv[1])
import packstore
from packstore.etl import pipeline  # what it loads is no act of the job
tempfile.tempdir = temporary
acts = 0
def count(event, args):
    global acts
    if event == "open":
        path = args[0] if args[2] & (os.O_WRONLY | os.O_RDWR) else None
    else:
        path = args[0] if event in ("os.rename", "os.link", "os.remove", "os.mkdir") else None
    if isinstance(path, str) and path.startswith(root):
        acts += 1
        if acts == moment:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
settings = dict(pack_size=64, row_group_tokens=512, shard_tokens=2000, partitions=4, num_workers=0)
packstore.pack(source, out, storage_options=options, overwrite=True, **settings)
print(acts)
"""
"""Replaces a dataset; with a moment, is killed before its n-th act on the disk."""


class Job:
    """Replaces the dataset at `url` by one of 800 pairs; `folder` is local and temporary."""

    def __init__(self, folder: Path, url: str, options: Mapping[str, Any]) -> None:
        self.url, self.options, self.folder = url, dict(options), folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        source = write(folder.parent / "old.jsonl", 1000, 400)
        packstore.pack(source, url, storage_options=self.options, pack_size=64)
        self.before = self.manifest()

    def run(self, moment: int = 0, seconds: float | None = None) -> int:
        """Runs the job, killed in that act or after that time; returns its acts, 0 if killed."""
        source = write(self.folder.parent / "new.jsonl", 0, 800)
        places = (self.url, self.options, str(self.temporary), str(self.folder), moment)
        command = [sys.executable, "-c", JOB, json.dumps([source, *places])]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
        try:
            text, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            text, _ = child.communicate()
        assert child.returncode in (0, -9)
        return int(text) if child.returncode == 0 else 0

    def manifest(self, version: int | None = None) -> bytes:
        dataset = packstore.open(self.url, self.options, version=version)
        assert dataset.verify().ok
        # A job that was killed after its commit makes one more version.
        return re.sub(rb"packs-\d{6}-", b"packs-", dataset.manifest.to_json())

    def assert_undisturbed(self, expected: bytes) -> None:
        """Checks what must hold after a kill, and after the rerun that follows."""
        assert self.manifest(1) == self.before
        self.run()
        assert self.manifest() == expected
        how = {"older_than": 0, "no_writers": True, "storage_options": self.options}
        packstore.clean(self.url, delete=True, **how)
        assert not packstore.clean(self.url, **how).leftovers
        assert self.manifest() == expected


def write(path: Path, first: int, number: int) -> str:
    """A file of pairs as token ids, which need no tokenizer."""
    records = (
        {"prompt": [5, 6, 7], "chosen": [8, 10 + i, 11 + i], "rejected": [9] * (1 + i % 7)}
        for i in range(first, first + number)
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "fractions",
    [(0.4, 0.97), pytest.param([i / 40 for i in range(1, 40)], marks=pytest.mark.slow)],
)
def test_on_a_local_disk(fractions: tuple[float, ...], tmp_path: Path) -> None:
    undisturbed = Job(tmp_path / "whole", str(tmp_path / "whole" / "ds"), {})
    acts = undisturbed.run()
    for n, fraction in enumerate(fractions):
        job = Job(tmp_path / str(n), str(tmp_path / str(n) / "ds"), {})
        assert job.run(moment=round(acts * fraction)) == 0
        job.assert_undisturbed(undisturbed.manifest())
