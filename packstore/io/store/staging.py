"""A local folder of unfinished files: readers of a place see whole files only."""

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
    """Local files that are moved or uploaded to a place once they are complete; a
    context manager.

    In a local place they lie in a hidden folder in the first of its `folders`, which
    are made, so that one rename moves each, and are synced before (`durable`); else in
    a temporary folder.
    """

    def __init__(self, location: Location, folders: tuple[str, ...] = ("",)) -> None:
        root = location.local_path
        self._location, self._folder, self._count = location, "", 0
        self.durable = root is not None
        paths = [
            os.path.normpath(os.path.join(root or "", folder)) for folder in folders
        ]
        self._folders = paths if self.durable else []
        self._lock = threading.Lock()

    def path(self) -> str:
        """Returns a new path in the folder. Thread-safe."""
        with self._lock:
            if not self._folder:
                first = (self._folders or [tempfile.gettempdir()])[0]
                with as_storage_errors("write", first, {}):
                    for folder in self._folders:
                        local.make_folder(folder)
                    self._folder = tempfile.mkdtemp(prefix=PREFIX, dir=first)
            self._count += 1
            return os.path.join(self._folder, str(self._count))

    @contextlib.contextmanager
    def file(self) -> Iterator[IO[bytes]]:
        """Opens a new file, complete once the context ends without an error; it has a
        `name`.
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
        """Moves or uploads a finished file of the folder to `path` in the place."""
        self._location.put_file(local_path, path)
        if not self.durable:
            os.unlink(local_path)

    def remove(self) -> None:
        """Removes the folder and its contents."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.remove()
