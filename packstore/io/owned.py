"""Temporary folders and lock files on the local disk whose owner can be seen to live.

The owner holds a lock (``flock``) for as long as it runs, and the system takes the lock away when
it ends, however it ends. So what a killed job left can be removed at once, and what a running one
needs never is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from typing import NamedTuple

LOCK = "lock"
"""Name of the lock file in an owned folder."""

SPILL = "packstore-spill-"
"""Begins the names of the folders of tokenized examples."""

_NEW = ".packstore-new-"
_GRACE_SECONDS = 3600.0
"""After so long a folder that never got its lock was left by a job that ended in that moment."""

_FREE, _HELD, _MISSING = "free", "held", "missing"


def hold(path: str) -> int | None:
    """Makes a lock file and locks it; returns its handle, None where the disk knows no locks."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def state(path: str) -> str:
    """``held`` (also where that cannot be told), ``free`` or ``missing``, of a lock file."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _MISSING
    except OSError:
        return _HELD
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return _HELD
    finally:
        os.close(handle)
    return _FREE


class OwnedFolder:
    """A temporary folder that only this user can read, and the next job removes if this one dies.

    Args:
        prefix: begins its name; folders of dead owners with this prefix are removed first.
        parent: where it lies; None: the system's folder for temporary files.

    Attributes:
        name: its path.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        sweep(parent, prefix)
        # Under its own name only once it is locked: else another job may take it for a dead one's.
        for last in (False, False, True):
            fresh = tempfile.mkdtemp(prefix=_NEW, dir=parent)
            self.name = os.path.join(parent, prefix + os.path.basename(fresh)[len(_NEW) :])
            try:
                self._lock = hold(os.path.join(fresh, LOCK))
                os.rename(fresh, self.name)
                return
            except FileNotFoundError:  # swept in the instant before it was locked
                if last:
                    raise

    def cleanup(self) -> None:
        """Removes it with what is in it."""
        shutil.rmtree(self.name, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Abandoned(NamedTuple):
    """A folder whose owner is dead, and the bytes in it."""

    path: str
    bytes: int


def abandoned(parent: str, prefix: str) -> list[Abandoned]:
    """The folders of this user in `parent` whose owner is dead."""
    try:
        entries = sorted(os.scandir(parent), key=lambda e: e.name)
    except OSError:
        return []
    mine = (e for e in entries if e.name.startswith((prefix, _NEW)) and _is_own_folder(e))
    return [Abandoned(e.path, _bytes(e.path)) for e in mine if _is_abandoned(e)]


def sweep(parent: str, prefix: str) -> None:
    """Removes the folders that :func:`abandoned` lists."""
    for path, _ in abandoned(parent, prefix):
        shutil.rmtree(path, ignore_errors=True)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    try:
        stat = entry.stat(follow_symlinks=False)
        return entry.is_dir(follow_symlinks=False) and stat.st_uid == os.getuid()
    except OSError:
        return False


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether nobody holds its lock; one that has its name had a lock, and lost it at its end."""
    found = state(os.path.join(entry.path, LOCK))
    if found == _FREE or (found == _MISSING and not entry.name.startswith(_NEW)):
        return True
    try:
        age = time.time() - entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return False
    return found == _MISSING and age > _GRACE_SECONDS


def _bytes(folder: str) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total
