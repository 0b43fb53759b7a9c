"""A local folder of unfinished files: readers of a place see complete files only."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Self

from packstore.io.store import local
from packstore.io.store.location import Location
from packstore.io.store.storage_errors import as_storage_errors

PREFIX = ".staging-"
"""Prefix of the names of staging folders in a local place."""

BESIDE = ("..",)
"""`folders` of a place that is one file: its files are staged beside it."""


class Staging:
    """Local files that are moved or uploaded to a place once they are complete.

    A context manager that removes unfinished files at its end. Files for a local place
    lie in a hidden folder of the place: each is synced, and moved by one rename. Files
    for other places lie in the temporary folder of the system.

    Args:
        location: the place.
        folders: folders to create in a local place; the first holds the hidden folder.

    Attributes:
        durable: True if files have to be synced before they are stored.
    """

    def __init__(self, location: Location, folders: tuple[str, ...] = ("",)) -> None:
        root = location.local_path
        self.durable = root is not None
        self._location = location
        self._folders_to_make: list[str] = []
        if root is None:
            self._parent = tempfile.gettempdir()
        else:
            for folder in folders:
                path = os.path.normpath(os.path.join(root, folder))
                self._folders_to_make.append(path)
            self._parent = self._folders_to_make[0]

        self._lock = threading.Lock()
        self._folder = ""  # made with the first file
        self._num_files = 0

    def path(self) -> str:
        """Return a new path in the folder. Thread-safe."""
        with self._lock:
            if not self._folder:
                with as_storage_errors("write", self._parent, {}):
                    for folder in self._folders_to_make:
                        local.make_folder(folder)
                    self._folder = tempfile.mkdtemp(prefix=PREFIX, dir=self._parent)
            self._num_files += 1
            return os.path.join(self._folder, str(self._num_files))

    @contextlib.contextmanager
    def file(self) -> Iterator[IO[bytes]]:
        """Open a new file, complete once the context ends without an error.

        Its `name` is its path, for :meth:`store`.
        """
        path = self.path()
        try:
            with open(path, "xb") as file:
                yield file
                local.finish_file(file, self.durable)
        except OSError:  # errors of other kinds are not the store's
            with as_storage_errors("write", path, {}):
                raise

    def store(self, local_path: str, path: str) -> None:
        """Move or upload a finished file of the folder to `path` in the place."""
        self._location.put_file(local_path, path)
        is_uploaded = not self.durable  # a file of a local place was moved
        if is_uploaded:
            os.unlink(local_path)

    def remove(self) -> None:
        """Remove the folder and its contents."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.remove()
