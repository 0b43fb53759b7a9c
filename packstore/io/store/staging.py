"""Local folders for unfinished files, which readers must not see."""

from __future__ import annotations

import os
import tempfile
import threading

from packstore.io.store import local
from packstore.io.store import temporary_folders as temporary
from packstore.io.store.location import Location
from packstore.io.store.storage_errors import as_storage_errors


class Staging:
    """The local folder of unfinished files, created for the first one.

    For a local dataset it is a hidden folder inside, so that files are moved by one rename.

    Args:
        location: the dataset.
        folders: folders of a local dataset, relative; the staging folder is in the first.
        spill_dir: the folder to use for a remote dataset; None: the system's.

    Attributes:
        in_dataset: True if the folder is inside a local dataset.
    """

    def __init__(self, location: Location, folders: tuple[str, ...], spill_dir: str | None) -> None:
        self._location, self._root = location, location.local_path
        self._spill_dir, self._folders = spill_dir, folders
        self.in_dataset = self._root is not None
        self._folder = ""
        self._count = 0
        self._lock = threading.Lock()

    def path(self) -> str:
        """Returns a new path in the folder. Thread-safe."""
        with self._lock:
            if not self._folder:
                self._folder = self._make()
            self._count += 1
            return os.path.join(self._folder, str(self._count))

    def _make(self) -> str:
        with as_storage_errors("write", self._root or self._spill_dir or tempfile.gettempdir(), {}):
            if self._root is None:
                return temporary.make(temporary.STAGING, self._spill_dir)
            folders = [os.path.join(self._root, folder) for folder in self._folders]
            for folder in folders:
                local.make_folder(folder)
            return temporary.make(temporary.IN_DATASET, folders[0])

    def store(self, local_path: str, path: str) -> None:
        """Moves or uploads a finished file of the folder to `path` in the dataset."""
        self._location.put_file(local_path, path)
        if not self.in_dataset:
            os.unlink(local_path)

    def remove(self) -> None:
        """Removes the folder and its contents."""
        if self._folder:
            temporary.remove(self._folder)
            self._folder = ""
