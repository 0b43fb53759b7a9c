"""Local folders for unfinished files, which readers must not see."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading

from packstore.io.store import temporary_folders as temporary
from packstore.io.store.faults import guarded
from packstore.io.store.location import Location
from packstore.io.store.upkeep import make_folder


class Staging:
    """The local folder of unfinished files, created for the first one.

    For a local dataset it is a hidden folder inside, so that files are moved by one rename.

    Args:
        location: the dataset.
        folders: folders of a local dataset, relative; the staging folder is in the first.
        spill_dir: the folder to use for a remote dataset; None: the system's.
    """

    def __init__(self, location: Location, folders: tuple[str, ...], spill_dir: str | None) -> None:
        self._root, self._spill_dir, self._folders = location.local_path, spill_dir, folders
        self._folder = ""
        self._made: list[str] = []
        self._count = 0
        self._lock = threading.Lock()

    @property
    def in_dataset(self) -> bool:
        """True if the folder is inside a local dataset."""
        return self._root is not None

    def path(self) -> str:
        """Returns a new path in the folder. Thread-safe."""
        with self._lock:
            if not self._folder:
                self._folder = self._make()
            self._count += 1
            return os.path.join(self._folder, str(self._count))

    def _make(self) -> str:
        with guarded("write", self._root or self._spill_dir or tempfile.gettempdir(), {}):
            if self._root is None:
                return temporary.make(temporary.STAGING, self._spill_dir)
            for folder in self._folders:
                self._made += make_folder(os.path.join(self._root, folder))
            parent = os.path.join(self._root, self._folders[0])
            return temporary.make(temporary.IN_DATASET, parent)

    def remove(self) -> None:
        """Removes the folder and its contents."""
        if self._folder:
            temporary.remove(self._folder)
            self._folder = ""

    def prune(self) -> None:
        """Removes empty folders of a local dataset that this job created."""
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
