"""A local cache of row groups and footers, shared by many processes.

Each row group or footer is one file, so the first batch does not wait for a whole shard, and a rank
caches only its own row groups. A file is named by the sha256 of its shard and its byte range, and
is checked against the manifest's checksum on every read: bytes of another dataset and damaged bytes
are never returned.
The cache never stops a training run: if its folder fails (full, read-only, removed), readers use
the store and warn once.
Files are written under a temporary name, which counts and may be evicted like any other, and
renamed. Only eviction takes a lock. The system releases it if its holder is killed, and the wait
for it is short, as its holder may be suspended.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from packstore.errors import StorageError, sentence
from packstore.io.store.storage_errors import as_storage_errors

log = logging.getLogger("packstore")

_TOTAL = "account"
"""Name of the file with the bytes of all others."""
_LOCK_ATTEMPTS = 100
"""Attempts to take the lock, 10 ms apart."""
_CREATE = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Key(NamedTuple):
    """Bytes `start` to `end`, exclusive, of the shard with this hash."""

    sha256: str
    start: int
    end: int


@dataclass(frozen=True)
class Cache:
    """A least-recently-used cache in a private folder of the user. Picklable; keeps no file open.

    Args:
        folder: contains one folder for each user, accessible to its owner only.
        limit: total bytes of the files; the least recently used are evicted first.
    """

    folder: str
    limit: int

    def read(self, key: Key, good: Callable[[bytes], bool], fetch: Callable[[], bytes]) -> bytes:
        """Returns the cached bytes of `key`, or fetches and caches them.

        Args:
            key: what to read.
            good: checks bytes; on False, cached bytes are dropped and fetched ones not cached.
            fetch: reads the bytes from the store; its errors propagate.
        """
        data = None
        with self._ignoring_errors():
            data = _contents(_path(self.home(), key), key.end - key.start)
        if data is not None and good(data):
            return data
        data = fetch()
        if good(data):
            with self._ignoring_errors():
                self._store(self.home(), key, data)
        return data

    def home(self) -> str:
        """Returns the user's folder in the cache; creates it if needed.

        Raises:
            StorageError: it cannot be created, or other users can write to it.
        """
        home = os.path.join(self.folder, f"packstore-{os.getuid()}")
        with as_storage_errors("write", home, {}):
            with contextlib.suppress(FileExistsError):
                os.makedirs(self.folder, exist_ok=True)
                os.mkdir(home, 0o700)
            found = os.lstat(home)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            must = "a cache folder must be the user's own, and closed to others (mode 700)"
            what = f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"
            raise StorageError(sentence(home, must, what, "Name another cache_dir"))
        return home

    @contextlib.contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        """Suppresses errors of the folder in this context; warns once for each reason."""
        try:
            yield
        except FileNotFoundError:
            pass  # a cache miss, or the file or folder was just removed
        except OSError as error:
            _warn(self.folder, error.strerror or str(error))

    def _store(self, home: str, key: Key, data: bytes) -> None:
        path = _path(home, key)
        unfinished = f"{path}.{uuid.uuid4().hex}"
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        try:
            with _open(unfinished, _CREATE | os.O_EXCL | os.O_WRONLY) as file:
                file.truncate(len(data))  # so that others count it
                if self._make_room(home, unfinished, len(data)):
                    file.write(data)
                    file.flush()
                    os.replace(unfinished, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)

    def _make_room(self, home: str, own: str, size: int) -> bool:
        """Adds `size` to the total; above the limit, evicts the least recently used files.

        Evicts a tenth more than needed, so that files are not listed on each write. Returns False
        if there is no room, or another process holds the lock for too long.
        """
        room = self.limit - size
        with _open(os.path.join(home, _TOTAL), _CREATE | os.O_RDWR) as file:
            if not _lock(file):
                return False
            try:
                text = file.read()
                total = int(text) if text.isdigit() else self.limit
                if total > room:
                    total = _evict(home, min(room, self.limit * 9 // 10), own)
                fits = total <= room
                file.seek(0)
                file.write(b"%020d" % (total + size * fits))
                file.flush()
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile also holds the lock
        return fits


def _open(path: str, flags: int) -> BinaryIO:
    mode = {os.O_WRONLY: "wb", os.O_RDWR: "r+b"}.get(flags & os.O_ACCMODE, "rb")
    return open(path, mode, opener=lambda p, _: os.open(p, flags, 0o600))  # type: ignore[return-value]


@functools.cache
def _warn(folder: str, reason: str) -> None:
    """Warns once for each reason, not for each file."""
    log.warning("cannot cache in %s: %s", folder, reason)


def _evict(home: str, limit: int, own: str) -> int:
    """Removes files until at most `limit` bytes are left besides `own`; returns the bytes left."""
    files = []
    for bucket in os.scandir(home):
        if bucket.is_dir(follow_symlinks=False):
            for entry in os.scandir(bucket.path):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    files.append((found.st_mtime_ns, found.st_size, entry.path))
    files = sorted(file for file in files if file[2] != own)
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= limit:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
    return total


def _lock(file: BinaryIO) -> bool:
    """Locks a file; returns False if another process holds the lock for too long."""
    for _ in range(_LOCK_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def _path(home: str, key: Key) -> str:
    return os.path.join(home, key.sha256[:2], f"{key.sha256}-{key.start}-{key.end}")


def _contents(path: str, size: int) -> bytes:
    """Returns the bytes of a file and sets its time of last use."""
    with _open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as file:
        with contextlib.suppress(OSError):  # a disk that turned read-only can still be read
            os.utime(file.fileno())
        return file.read(size + 1)  # one more, so that a longer file fails the check
