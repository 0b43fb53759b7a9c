"""A local cache of row groups and footers, shared by many processes.

A file is named by the dataset's place, the sha256 of its shard and its byte range, and
is checked against the manifest's checksum on every read, so damaged bytes are fetched
again, and those of a copy elsewhere are never used. (``filecache::`` of fsspec returns
unfinished files to other threads.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packstore.errors import StorageError, sentence
from packstore.io.store import local
from packstore.io.store.storage_errors import as_storage_errors

log = logging.getLogger("packstore")

FREE = 0.1
"""Fraction of the disk that stays free: with less, nothing more is cached."""


@dataclass(frozen=True)
class Cache:
    """Files in a private folder of the user below `folder`. Picklable; keeps no file
    open.
    """

    folder: str

    def read(
        self, name: str, good: Callable[[bytes], bool], fetch: Callable[[], bytes]
    ) -> bytes:
        """Returns the cached bytes of that name, or fetches and caches those that are
        `good`.

        A folder that fails (full, read-only, removed) is warned of once, and then
        bypassed.
        """
        with self._bypassing_errors():
            data = Path(self.home(), name).read_bytes()
            if good(data):
                return data
        data = fetch()
        with self._bypassing_errors():
            usage = shutil.disk_usage(self.home())
            if good(data) and usage.free - len(data) > FREE * usage.total:
                local.replace(os.path.join(self.home(), name), data)
        return data

    def home(self) -> str:
        """Returns the user's folder in the cache; creates it, refuses one open to
        others.
        """
        home = os.path.join(self.folder, f"packstore-{os.getuid()}")
        with as_storage_errors("write", home, {}):
            with contextlib.suppress(FileExistsError):
                os.makedirs(self.folder, exist_ok=True)
                os.mkdir(home, 0o700)
            status = os.lstat(home)
        mode = stat.filemode(status.st_mode)
        if mode != "drwx------" or status.st_uid != os.getuid():
            rule = (
                "a cache folder must be the user's own, and closed to others (mode 700)"
            )
            found = f"owner {status.st_uid}, mode {mode}"
            raise StorageError(sentence(home, rule, found, "Name another cache_dir"))
        return home

    @contextlib.contextmanager
    def _bypassing_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass  # not cached yet
        except OSError as error:
            _warn(self.folder, str(error))


@functools.cache
def _warn(folder: str, reason: str) -> None:
    """Warns once for each reason."""
    log.warning("cannot cache in %s: %s", folder, reason)
