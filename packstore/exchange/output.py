"""Files that appear whole or not at all, on any store."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from fnmatch import fnmatchcase
from types import TracebackType
from typing import BinaryIO, Self

from packstore.errors import DatasetExistsError, PackstoreError, sentence
from packstore.io.faults import guarded
from packstore.io.storage import Location


class _Output:
    """Finishes at the end of a ``with`` block, if there was no error; cleans up in any case."""

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
    """A binary file that is written beside its place, and moved or uploaded there at the end.

    A context manager: on an error nothing is left, and what was there stays.

    Args:
        location: its place.
        overwrite: replace what is there.

    Raises:
        DatasetExistsError: something is there, and `overwrite` is False.
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
        with guarded("write", self._path, {}):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self.file: BinaryIO = open(self._path, "xb")  # noqa: SIM115

    def _clean(self) -> None:
        self.file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def write(self, data: bytes | memoryview) -> None:
        """Adds bytes."""
        with guarded("write", self._location.url, {}):
            self.file.write(data)

    def _finish(self) -> None:
        with guarded("write", self._location.url, {}):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        refuse_existing(self._location, self._overwrite)
        self._location.put_file(self._path, "")


class OutputFolder(_Output):
    """Files of a folder that are written one after another and stand there when all are complete.

    A context manager: on an error the files that were put are removed again. They are put in the
    order of :meth:`path`, so the last one says that all are there.

    Args:
        location: the folder.
        patterns: files of these names are those of an earlier export.
        overwrite: replace an earlier export. Its last file goes first, so that a reader who waits
            for that file never takes a mixture for a whole.

    Raises:
        DatasetExistsError: an earlier export is there, and `overwrite` is False.
    """

    def __init__(self, location: Location, patterns: tuple[str, ...], overwrite: bool) -> None:
        self._location = location
        names = [name for name, _ in location.files()]
        self._before = [n for n in names if any(fnmatchcase(n, p) for p in patterns)]
        if self._before and not overwrite:
            _refuse(location, f"{self._before[0]} in it")
        root = location.local_path
        with guarded("write", root or tempfile.gettempdir(), {}):
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
            with contextlib.suppress(OSError):  # it holds the export
                os.rmdir(root)

    def path(self, name: str) -> str:
        """A local path for the file that is going to be `name`; the files are put in this order."""
        self._names.append(name)
        return os.path.join(self._staging, name)

    def _finish(self) -> None:
        put: list[str] = []
        last = self._names[-1]
        if last in self._before:  # it says that all are there, which does not hold from here on
            self._location.remove(last)
        try:
            for name in self._names:
                if name == last:  # what an earlier export left does not outlive the new one's mark
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
    """Raises :class:`DatasetExistsError` if something is there and must stay.

    A folder always stays.
    """
    if location.is_dir():
        _refuse(location, "a folder")
    if not overwrite and location.exists():
        _refuse(location, "a file")


def _refuse(location: Location, found: str) -> None:
    do = "Name another place, or replace it (overwrite=True, --overwrite)"
    if found == "a folder":
        do = "Name a file"
    raise DatasetExistsError(sentence(location.display, "must not exist yet", found, do))
