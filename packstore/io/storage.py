"""Places that hold bytes: a local folder, or any URL that fsspec knows.

A :class:`Location` is a URL with its options. It pickles as just that; the filesystem behind it is
opened by the process that first uses it and is never carried over a fork, where the asynchronous
clients of object stores would hang. Every failure is a :class:`StorageError` of one line that names
the place, without the secrets in its URL or options.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from packstore.errors import DatasetExistsError, FormatError, quote, sentence
from packstore.io.faults import display, guarded, means_exists, missing_filesystem, only_regular

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*")


class Entry(NamedTuple):
    """One file of a listing: its name in the folder, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Location:
    """A file or folder on any store. Paths given to its methods are relative to it, with ``/``.

    Every method raises :class:`StorageError` when the store refuses, and
    :class:`MissingExtraError` when the package of the URL's filesystem is not installed.

    Args:
        url: a local path or an fsspec URL (``s3://bucket/prefix``).
        storage_options: what fsspec's filesystem takes: keys, endpoints, profiles.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", os.fspath(self.url))
        object.__setattr__(self, "storage_options", dict(self.storage_options))

    def __repr__(self) -> str:
        return f"Location({self.display!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "storage_options": self.storage_options}

    @property
    def display(self) -> str:
        """The URL without user, password and query string: for messages and manifests."""
        return display(self.url)

    @property
    def local_path(self) -> str | None:
        """The absolute path if this is on the local disk, else None."""
        fs, root = self._open()
        return root if _is_local(fs) else None

    def join(self, path: str) -> Location:
        """The location at `path` below this one."""
        if not path:
            return self
        base, query = self.url, ""
        if "://" in base and "?" in base:
            base, query = base.split("?", 1)
            query = "?" + query
        return Location(f"{base.rstrip('/')}/{path}{query}", self.storage_options)

    def exists(self, path: str = "") -> bool:
        """Whether a file or folder is there (a refusal to answer is an error, not False)."""
        return self._info(path) is not None

    def is_dir(self, path: str = "") -> bool:
        """Whether a folder is there."""
        info = self._info(path)
        return info is not None and info["type"] == "directory"

    def size(self, path: str = "") -> int:
        """Bytes of the file."""
        fs, full = self._at(path)
        with self.guard("read", path):
            return int(fs.info(full)["size"] or 0)

    def files(self, path: str = "") -> list[Entry]:
        """The files directly in a folder, by name; none if there is no such folder."""
        fs, full = self._at(path)
        with self.guard("list", path):
            fs.invalidate_cache()
            try:
                found = fs.ls(full, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        # Some stores list the folder itself, which they keep as an empty object.
        inside = [e for e in found if e["type"] == "file" and not _same(e["name"], full)]
        return sorted(Entry(e["name"].rsplit("/", 1)[-1], int(e["size"] or 0)) for e in inside)

    def glob(self) -> list[Location]:
        """The files that match the URL as a pattern (``*``, ``**``, ``?``, ``[...]``), by name."""
        fs, full = self._open()
        with self.guard("list"):
            found = fs.glob(full, detail=True)
        paths = sorted(path for path, info in found.items() if info["type"] == "file")
        urls = paths if _is_local(fs) else [fs.unstrip_protocol(p) for p in paths]
        return [Location(url, self.storage_options) for url in urls]

    def open_read(self, path: str = "", **how: Any) -> io.BufferedReader:
        """The file as a binary, seekable stream whose every error is a :class:`StorageError`.

        Args:
            path: relative to this location.
            how: options of fsspec's ``open``, such as ``cache_type``.
        """
        fs, full = self._at(path)
        with self.guard("read", path):
            raw = io.FileIO(only_regular(full)) if _is_local(fs) else fs.open(full, "rb", **how)
        return io.BufferedReader(_GuardedFile(raw, self.join(path)), 1 << 20)

    def read_bytes(self, path: str = "", start: int | None = None, end: int | None = None) -> bytes:
        """Bytes `start` to `end`, exclusive, of the file; fewer if it is shorter."""
        fs, full = self._at(path)
        with self.guard("read", path):
            if _is_local(fs):
                only_regular(full)
            return bytes(fs.cat_file(full, start=start, end=end))

    def put_file(self, local_path: str, path: str) -> None:
        """Makes a finished local file appear at `path`, whole or not at all.

        On a local disk the file is moved (it must lie on the same filesystem), elsewhere it is
        uploaded. What was at `path` is replaced.
        """
        fs, full = self._at(path)
        with self.guard("write", path):
            if not _is_local(fs):
                fs.put_file(local_path, full)
                return
            _make_folder(os.path.dirname(full))
            os.replace(local_path, full)
            _sync_folder(os.path.dirname(full))

    def create_bytes(self, path: str, data: bytes) -> None:
        """Writes a small file only if nothing is there: of many writers at once exactly one wins.

        Raises:
            DatasetExistsError: something is there already, and stays as it is.
        """
        fs, full = self._at(path)
        with self.guard("write", path):
            if _is_local(fs):
                _make_folder(os.path.dirname(full))
            try:
                if _is_local(fs):
                    _create_local(full, data)
                else:
                    fs.pipe_file(full, data, mode="create")
            except Exception as error:
                if not means_exists(error):
                    raise
                raise DatasetExistsError(
                    sentence(self.join(path).display, "must not exist yet", "it does")
                ) from error

    def remove(self, path: str) -> None:
        """Removes the file, if it is there."""
        fs, full = self._at(path)
        with self.guard("remove", path), contextlib.suppress(FileNotFoundError):
            fs.rm_file(full)

    def guard(self, verb: str, path: str = "") -> contextlib.AbstractContextManager[None]:
        """A context in which whatever a filesystem raises becomes a :class:`StorageError`."""
        return guarded(verb, self.join(path).url, self.storage_options)

    def _open(self) -> tuple[Any, str]:
        """The filesystem of this process, and the path in it."""
        cached = self.__dict__.get("_filesystem")
        if cached is None or cached[0] != os.getpid():
            from fsspec.core import url_to_fs

            with self.guard("open"):
                try:
                    fs, root = url_to_fs(self.url, **self.storage_options)
                except ImportError as error:
                    raise missing_filesystem(self.url, error) from error
            cached = (os.getpid(), fs, root)
            object.__setattr__(self, "_filesystem", cached)
        return cached[1], cached[2]

    def _at(self, path: str) -> tuple[Any, str]:
        fs, root = self._open()
        return fs, f"{root.rstrip('/')}/{path}" if path else root

    def _info(self, path: str) -> Mapping[str, Any] | None:
        fs, full = self._at(path)
        with self.guard("read", path):
            fs.invalidate_cache()
            try:
                info: Mapping[str, Any] = fs.info(full)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return info


class _GuardedFile(io.RawIOBase):
    """A raw file whose errors name the location."""

    def __init__(self, raw: Any, location: Location) -> None:
        self._raw, self._location = raw, location

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._raw.seekable())

    def readinto(self, buffer: Any) -> int:
        with self._location.guard("read"):
            return int(self._raw.readinto(buffer) or 0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with self._location.guard("read"):
            return int(self._raw.seek(offset, whence))

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def check_relative(path: str, where: str) -> str:
    """`path` if it names a file inside a dataset.

    Raises:
        FormatError: it is absolute, a URL, climbs out with ``..``, or holds odd characters.
    """
    if not all(_PART.fullmatch(part) for part in path.split("/")):
        raise FormatError(
            sentence(where, "a path must be relative and stay inside the dataset", quote(path))
        )
    return path


def _same(path: str, other: str) -> bool:
    return path.strip("/") == other.strip("/")


def _is_local(fs: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(folder) from error


def _create_local(full: str, data: bytes) -> None:
    """A temporary file, linked to its name: link refuses to replace, and readers see it whole."""
    folder, name = os.path.split(full)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
    try:
        _write_new(temporary, data)
        try:
            os.link(temporary, full)
        except FileExistsError:
            raise
        except OSError:  # no hard links on this filesystem: still one winner, but not in one step
            _write_new(full, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    _sync_folder(folder)


def _write_new(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: str) -> None:
    """Makes a rename or link survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
