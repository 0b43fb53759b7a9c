"""Writes files atomically, on any store."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from fnmatch import fnmatchcase
from types import TracebackType
from typing import BinaryIO, Self

from packstore.errors import DatasetExistsError, PackstoreError, sentence
from packstore.io.store.location import Location
from packstore.io.store.storage_errors import as_storage_errors


class _Output:
    """Context manager that commits its output unless there was an error, and cleans up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._clean()

    def _finish(self) -> None:
        raise NotImplementedError

    def _clean(self) -> None:
        raise NotImplementedError


class OutputFile(_Output):
    """A binary file, written to a temporary path and moved or uploaded at the end.

    A context manager: on an error nothing is left, and an existing file is unchanged.

    Args:
        location: path or URL of the file.
        overwrite: replace an existing file.

    Raises:
        DatasetExistsError: the file exists, and `overwrite` is False.
        StorageError: no space, no permission, or the store refuses.
    """

    def __init__(self, location: Location, overwrite: bool) -> None:
        self._location, self._overwrite = location, overwrite
        refuse_existing(location, overwrite)
        target = location.local_path
        if target is None:
            self._path = os.path.join(tempfile.gettempdir(), f"packstore-{uuid.uuid4().hex}")
        else:
            folder, name = os.path.split(target)
            self._path = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
        with as_storage_errors("write", self._path, {}):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self.file: BinaryIO = open(self._path, "xb")  # noqa: SIM115

    def _clean(self) -> None:
        self.file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def write(self, data: bytes | memoryview) -> None:
        """Adds bytes."""
        with as_storage_errors("write", self._location.url, {}):
            self.file.write(data)

    def _finish(self) -> None:
        with as_storage_errors("write", self._location.url, {}):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        refuse_existing(self._location, self._overwrite)
        self._location.put_file(self._path, "")


class OutputFolder(_Output):
    """A folder whose files are written to a temporary folder and published when all are complete.

    A context manager: on an error the published files are removed. Files are published in the order
    of :meth:`path`, so the last one marks a complete export.

    Args:
        location: the folder.
        patterns: name patterns of the files of an earlier export.
        overwrite: replace an earlier export. Its last file is removed first, so that a reader who
            waits for that file never sees a mixture.

    Raises:
        DatasetExistsError: an earlier export exists, and `overwrite` is False.
    """

    def __init__(self, location: Location, patterns: tuple[str, ...], overwrite: bool) -> None:
        self._location = location
        names = [name for name, _ in location.files()]
        self._before = [n for n in names if any(fnmatchcase(n, p) for p in patterns)]
        if self._before and not overwrite:
            _refuse(location, f"{self._before[0]} in it")
        root = location.local_path
        with as_storage_errors("write", root or tempfile.gettempdir(), {}):
            self._made = root is not None and not os.path.isdir(root)
            if root is not None:
                os.makedirs(root, exist_ok=True)
            self._staging = tempfile.mkdtemp(prefix=".staging-", dir=root)
        self._names: list[str] = []

    def _clean(self) -> None:
        for name in os.listdir(self._staging):
            os.unlink(os.path.join(self._staging, name))
        os.rmdir(self._staging)
        root = self._location.local_path
        if self._made and root is not None:
            with contextlib.suppress(OSError):  # not empty: it holds the export
                os.rmdir(root)

    def path(self, name: str) -> str:
        """Returns a local path for the file `name`; files are published in this order."""
        self._names.append(name)
        return os.path.join(self._staging, name)

    def _finish(self) -> None:
        put: list[str] = []
        last = self._names[-1]
        if last in self._before:  # it marks a complete export, which is not so from here on
            self._location.remove(last)
        try:
            for name in self._names:
                if name == last:  # files of an earlier export are removed before the new mark
                    for old in set(self._before) - set(self._names):
                        self._location.remove(old)
                self._location.put_file(os.path.join(self._staging, name), name)
                put.append(name)
        except BaseException:
            for name in put:
                with contextlib.suppress(PackstoreError):
                    self._location.remove(name)
            raise


def refuse_existing(location: Location, overwrite: bool) -> None:
    """Raises :class:`DatasetExistsError` for a folder, or for a file without `overwrite`."""
    if location.is_dir():
        _refuse(location, "a folder")
    if not overwrite and location.exists():
        _refuse(location, "a file")


def _refuse(location: Location, found: str) -> None:
    do = "Name another place, or replace it (overwrite=True, --overwrite)"
    if found == "a folder":
        do = "Name a file"
    raise DatasetExistsError(sentence(location.display, "must not exist yet", found, do))
