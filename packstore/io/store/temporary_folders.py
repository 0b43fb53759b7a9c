"""Temporary folders on the local disk, named after their process so that leftovers can be removed.

A job removes its own folders. The next job removes those of killed jobs: at once if their process
has ended, or by age if that is unknown (another machine, an earlier boot, no ``/proc``).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from typing import NamedTuple

from packstore.io.store.process import Process, this_process

SPILL, STAGING, IN_DATASET = "packstore-spill-", "packstore-staging-", ".staging-"
"""Prefixes of names: tokenized examples; unfinished files outside and inside a dataset."""
YOUNG_SECONDS, OLD_SECONDS = 3600.0, 7 * 86_400.0
"""Ages, by the newest file, of folders of unknown processes: below the first one may be in use,
above the second a new job removes it."""

_OWNER = re.compile(r"([0-9a-f]{32})-([0-9]{1,10})-([0-9]+)-.*")


class AbandonedFolder(NamedTuple):
    """A folder that no job seems to use; `certain`: its process has certainly ended."""

    path: str
    bytes: int
    age: float
    certain: bool


def make(prefix: str, parent: str | None = None) -> str:
    """Creates a private folder; removes folders of killed jobs with this prefix.

    `parent`: None is the system's folder for temporary files.
    """
    parent = parent or tempfile.gettempdir()
    sweep(parent, prefix)
    owner = "-".join(map(str, this_process()))
    return tempfile.mkdtemp(prefix=f"{prefix}{owner}-", dir=parent)


def sweep(parent: str, prefix: str) -> None:
    """Removes the folders of processes that have ended, and old ones of unknown processes."""
    for folder in abandoned(parent, prefix):
        if folder.certain or folder.age > OLD_SECONDS:
            remove(folder.path)


def abandoned(parent: str, prefix: str) -> list[AbandonedFolder]:
    """Lists the folders of this user that no running job uses, as far as known; by path."""
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(parent), key=lambda e: e.name):
            if not entry.name.startswith(prefix) or not _is_own_folder(entry):
                continue
            match = _OWNER.fullmatch(entry.name.removeprefix(prefix))
            owner = Process(match[1], int(match[2]), match[3]) if match else None
            if owner is not None and owner.lives:
                continue
            certain = owner is not None and owner.is_of_this_machine
            size, age = _measured(entry.path)
            if certain or age > YOUNG_SECONDS:
                found.append(AbandonedFolder(entry.path, size, age, certain))
    return found


def remove(path: str) -> None:
    """Removes a folder and its contents; ignores errors."""
    shutil.rmtree(path, ignore_errors=True)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    try:
        stat = entry.stat(follow_symlinks=False)
        return entry.is_dir(follow_symlinks=False) and stat.st_uid == os.getuid()
    except OSError:
        return False


def _measured(folder: str) -> tuple[int, float]:
    """Returns the bytes in a folder, and seconds since its last change."""
    size, newest = 0, 0.0
    for root, _, names in os.walk(folder):
        for name in ["", *names]:
            with contextlib.suppress(OSError):
                stat = os.lstat(os.path.join(root, name))
                size += stat.st_size if name else 0
                newest = max(newest, stat.st_mtime)
    return size, max(0.0, time.time() - newest)
