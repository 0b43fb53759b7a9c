"""Temporary folders on the local disk, named after their process, so that a dead one's can go.

A job removes its own. What a killed one left goes when the next job begins, if its process is seen
to have ended, or by age where that cannot be told (another machine, a boot before, no ``/proc``).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from typing import NamedTuple

from packstore.io.process import Process, this_process

SPILL, STAGING, IN_DATASET = "packstore-spill-", "packstore-staging-", ".staging-"
"""Begin the names: of tokenized examples, and of unfinished files outside and inside a dataset."""

OLD_SECONDS = 7 * 86_400.0
"""So old, by the newest file in it, a folder of an unknown process goes when a job begins."""

YOUNG_SECONDS = 3600.0
"""A younger folder of an unknown process may be in use."""

_OWNER = re.compile(r"([0-9a-f]{32})-([0-9]{1,10})-([0-9]+)-.*")


class Left(NamedTuple):
    """A folder that no job seems to use: its path, its bytes, and seconds since it changed.

    Attributes:
        certain: its process was seen to have ended.
    """

    path: str
    bytes: int
    age: float
    certain: bool


def make(prefix: str, parent: str | None = None) -> str:
    """Makes a folder that only this user can read, and removes those that killed jobs left.

    Args:
        prefix: begins its name, and those of the folders that are looked at.
        parent: where it lies; None: the system's folder for temporary files.
    """
    parent = parent or tempfile.gettempdir()
    sweep(parent, prefix)
    owner = "-".join(map(str, this_process()))
    return tempfile.mkdtemp(prefix=f"{prefix}{owner}-", dir=parent)


def sweep(parent: str, prefix: str) -> None:
    """Removes the folders of processes that have ended, and old ones of unknown processes."""
    for folder in left(parent, prefix):
        if folder.certain or folder.age > OLD_SECONDS:
            remove(folder.path)


def left(parent: str, prefix: str) -> list[Left]:
    """The folders of this user that no running job is known, or likely, to use; by path."""
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(parent), key=lambda e: e.name):
            if not entry.name.startswith(prefix) or not _is_own_folder(entry):
                continue
            owner = _owner(entry.name.removeprefix(prefix))
            if owner is not None and owner.lives:
                continue
            certain = owner is not None and owner.is_of_this_machine
            size, age = _measured(entry.path)
            if certain or age > YOUNG_SECONDS:
                found.append(Left(entry.path, size, age, certain))
    return found


def remove(path: str) -> None:
    """Removes a folder with what is in it, as far as that can be done."""
    shutil.rmtree(path, ignore_errors=True)


def _owner(name: str) -> Process | None:
    match = _OWNER.fullmatch(name)
    return Process(match[1], int(match[2]), match[3]) if match else None


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    try:
        stat = entry.stat(follow_symlinks=False)
        return entry.is_dir(follow_symlinks=False) and stat.st_uid == os.getuid()
    except OSError:
        return False


def _measured(folder: str) -> tuple[int, float]:
    """Bytes in a folder, and seconds since anything in it changed."""
    size, newest = 0, 0.0
    for root, _, names in os.walk(folder):
        for name in ["", *names]:
            with contextlib.suppress(OSError):
                stat = os.lstat(os.path.join(root, name))
                size += stat.st_size if name else 0
                newest = max(newest, stat.st_mtime)
    return size, max(0.0, time.time() - newest)
