"""A local cache of row groups and footers, shared by many processes.

A file is named by the dataset's place, the sha256 of its shard and its byte range, and
is checked against the manifest's checksum on every read. So damaged bytes are fetched
again, and bytes of a copy elsewhere are never used. (fsspec's own ``filecache::`` would
not do: it returns unfinished files to other threads.)
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

MIN_FREE_SHARE = 0.1
"""Share of the disk that stays free: with less, nothing more is cached."""


@dataclass(frozen=True)
class Cache:
    """Files in a private folder of the user below `folder`. Picklable; keeps no file
    open.
    """

    folder: str

    def read(
        self, name: str, is_intact: Callable[[bytes], bool], fetch: Callable[[], bytes]
    ) -> bytes:
        """Return the cached bytes of a name, or fetch and cache them.

        A folder that fails (full, read-only, removed) is bypassed, with one warning.

        Args:
            name: file name, one for each range of bytes.
            is_intact: verifies a checksum; other bytes are not cached.
            fetch: reads the bytes from the store.
        """
        with self._bypassing_errors():
            data = Path(self.home(), name).read_bytes()
            if is_intact(data):
                return data

        data = fetch()
        with self._bypassing_errors():
            if is_intact(data) and self._has_room(len(data)):
                local.replace(os.path.join(self.home(), name), data)
        return data

    def home(self) -> str:
        """Return the user's folder in the cache, which is created if it is missing.

        Raises:
            StorageError: others can write to it, or it cannot be created.
        """
        home = os.path.join(self.folder, f"packstore-{os.getuid()}")
        with as_storage_errors("write", home, {}):
            with contextlib.suppress(FileExistsError):
                os.makedirs(self.folder, exist_ok=True)
                os.mkdir(home, 0o700)
            status = os.lstat(home)

        mode = stat.filemode(status.st_mode)
        if mode != "drwx------" or status.st_uid != os.getuid():
            raise StorageError(
                sentence(
                    home,
                    rule="a cache folder must be the user's own, and closed to others "
                    "(mode 700)",
                    found=f"owner {status.st_uid}, mode {mode}",
                    remedy="Name another cache_dir",
                )
            )
        return home

    def _has_room(self, num_bytes: int) -> bool:
        usage = shutil.disk_usage(self.home())
        return usage.free - num_bytes > MIN_FREE_SHARE * usage.total

    @contextlib.contextmanager
    def _bypassing_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass  # not cached yet
        except OSError as error:
            _warn_once(self.folder, str(error))


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    """Warn once for each reason."""
    log.warning("cannot cache in %s: %s", folder, reason)
