"""Reads and writes files in a local folder or at any fsspec URL.

A :class:`Location` is a URL with its options, and pickles as these. Each process opens
its own filesystem. All errors are a :class:`StorageError` of one line that names the
location, without the secrets in its URL or options.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

from packstore.config import RetryConfig
from packstore.errors import (
    DatasetExistsError,
    FormatError,
    StorageError,
    display,
    quote,
    sentence,
)
from packstore.io.store import clients, local
from packstore.io.store.retry import retrying
from packstore.io.store.storage_errors import (
    as_storage_errors,
    check_url,
    means_exists,
    missing_filesystem,
)
from packstore.secrets import without_secrets

T = TypeVar("T")

VERSIONS = ("VersionId", "version_id", "generation", "ETag", "etag", "e_tag", "md5Hash")
"""Fields of a client's answer that change with the content of an object."""
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*")


class PerProcess(Generic[T]):
    """A value that each process makes for itself: after a fork, clients of
    stores hang.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._pid = make, 0
        self._value: T

    def get(self) -> T:
        """Returns the value of this process."""
        if self._pid != os.getpid():
            self._value, self._pid = self._make(), os.getpid()
        return self._value


class Entry(NamedTuple):
    """One file of a listing: its name in the folder, and its size in bytes."""

    name: str
    size: int
    is_folder: bool = False


@dataclass(frozen=True)
class Location:
    """A file or folder on any store. Paths given to its methods are relative to it,
    with ``/``.

    Every method raises :class:`StorageError` when the store refuses, and
    :class:`MissingExtraError` when the package of its filesystem is missing. `url` is a
    local path or an fsspec URL; `storage_options` are of its filesystem, and of retries
    (:class:`RetryConfig`).
    """

    url: str
    storage_options: Mapping[str, Any] = field(
        default_factory=dict, repr=False, hash=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", check_url(os.fspath(self.url)))
        object.__setattr__(self, "storage_options", dict(self.storage_options))

    def __repr__(self) -> str:
        return f"Location({self.display!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "storage_options": self.storage_options}

    @property
    def display(self) -> str:
        """The URL without user, password and query string: for messages and
        manifests.
        """
        return display(self.url)

    @property
    def digest(self) -> str:
        """A hash by which places differ: of the URL, and of options such as the
        endpoint's.

        Credentials, which may change with time, do not count.
        """
        options = json.dumps(
            without_secrets(self.storage_options), sort_keys=True, default=repr
        )
        query = self.url.partition("?")[2] if "://" in self.url else ""
        text = f"{self.local_path or self.display}?{query}\n{options}"
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

    @property
    def local_path(self) -> str | None:
        """The absolute path on the local disk; None for other stores."""
        fs, root = self.filesystem()
        return root if local.is_local(fs) else None

    @property
    def creates_exclusively(self) -> bool:
        """True if exactly one of many concurrent :meth:`create_bytes` is known to
        succeed.
        """
        fs, _ = self.filesystem()
        return local.is_local(fs) or clients.creates_exclusively(fs)

    def join(self, path: str) -> Location:
        """Returns the location at `path` below this one."""
        if not path:
            return self
        base, query = self.url, ""
        if "://" in base and "?" in base:
            base, query = base.split("?", 1)
            query = "?" + query
        return Location(f"{base.rstrip('/')}/{path}{query}", self.storage_options)

    def exists(self, path: str = "") -> bool:
        """Returns True if a file or folder exists; raises if the store refuses to
        answer.
        """
        return self._info(path) is not None

    def is_dir(self, path: str = "") -> bool:
        """Returns True if a folder exists."""
        info = self._info(path)
        return info is not None and info["type"] == "directory"

    def size(self, path: str = "") -> int:
        """Returns the bytes of the file."""
        fs, full = self.filesystem(path)
        return int(self.request("read", path, lambda: fs.info(full))["size"] or 0)

    def files(self, path: str = "") -> list[Entry]:
        """Lists the files directly in a folder, by name; empty if the folder is
        missing.
        """
        return [entry for entry in self.entries(path) if not entry.is_folder]

    def entries(self, path: str = "") -> list[Entry]:
        """Lists files and folders directly in a folder, by name; follows links.

        Raises :class:`StorageError` for what is neither, unless it is hidden.
        """
        fs, full = self.filesystem(path)
        listed = []
        for name, info in self.request(
            "list", path, partial(clients.ls, fs, full, self.url)
        ):
            if info["type"] in ("file", "directory") or not name.startswith("."):
                relative = f"{path}/{name}".lstrip("/")
                is_file = self._is_file(
                    fs, f"{full.rstrip('/')}/{name}", info, relative
                )
                listed.append(Entry(name, int(info["size"] or 0), not is_file))
        return sorted(listed)

    def _is_file(self, fs: Any, full: str, info: Mapping[str, Any], path: str) -> bool:
        return self.request("read", path, lambda: clients.is_file(fs, full, info))

    def glob(self) -> list[Location]:
        """Lists the files that match the URL as a pattern (``*``, ``**``, ``?``,
        ``[...]``).

        Links are followed; raises :class:`StorageError` for what is neither file nor
        folder.
        """
        fs, full = self.filesystem()
        matches = self.request("list", "", lambda: clients.glob(fs, full, self.url))
        spell = str if local.is_local(fs) else fs.unstrip_protocol
        places = (
            (p, Location(spell(p), self.storage_options)) for p in sorted(matches)
        )
        return [place for p, place in places if place._is_file(fs, p, matches[p], "")]

    def open_read(self, path: str = "") -> io.BufferedReader:
        """Opens the file as a binary stream whose errors are all
        :class:`StorageError`.
        """
        fs, full = self.filesystem(path)

        def opened() -> Any:
            if local.is_local(fs):
                return io.FileIO(local.require_regular_file(full))
            return fs.open(full, "rb")

        raw = self.request("read", path, opened)
        return io.BufferedReader(_RetriedFile(raw, self, path), 1 << 20)

    def read_bytes(
        self, path: str = "", start: int | None = None, end: int | None = None
    ) -> bytes:
        """Reads bytes `start` to `end` (exclusive) of the file; fewer if it is
        shorter.
        """
        fs, full = self.filesystem(path)

        def read() -> bytes:
            if local.is_local(fs):
                with open(local.require_regular_file(full), "rb") as file:
                    file.seek(start or 0)
                    return file.read(-1 if end is None else end - (start or 0))
            return bytes(fs.cat_file(full, start=start, end=end))

        return self.request("read", path, read)

    def put_file(self, local_path: str, path: str) -> None:
        """Moves (on one disk) or uploads a finished local file to `path`; replaces a
        file there.
        """
        fs, full = self.filesystem(path)
        if local.is_local(fs):
            with self.guard("write", path):
                local.put_in_folder(full, partial(os.replace, local_path, full))
                local.sync_folder(os.path.dirname(full))
        else:
            self.request("write", path, lambda: clients.put_file(fs, local_path, full))

    def create_bytes(self, path: str, data: bytes) -> None:
        """Writes a small file only if it does not exist; of many writers exactly one
        succeeds.

        A file with just these bytes counts as this put's, which is sent again if an
        answer is lost; with others it raises :class:`DatasetExistsError`.
        """
        fs, full = self.filesystem(path)

        def create() -> None:
            try:
                if local.is_local(fs):
                    local.put_in_folder(full, partial(local.create, full, data))
                else:
                    clients.create(fs, full, data)
            except Exception as error:
                if not means_exists(error):
                    raise
                fs.invalidate_cache()  # a listing from before the put lacks the file
                if fs.cat_file(full) != data:
                    where = self.join(path).display
                    message = sentence(where, "must not exist yet", "it does")
                    raise DatasetExistsError(message) from error

        self.request("write", path, create)

    def remove(self, path: str, condition: Callable[[], bool] = lambda: True) -> bool:
        """Removes the file, if any; returns False if `condition`, asked at each try, is
        false.
        """
        fs, full = self.filesystem(path)

        def remove() -> bool:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if not condition():
                    return False
                fs.rm_file(full)
            return True

        return self.request("remove", path, remove)

    def object_version(self, path: str = "") -> str:
        """Returns the version id or ETag of the file, with its label; empty if there is
        none.
        """
        try:
            info = self._info(path) or {}
        except StorageError:
            return ""
        for name in VERSIONS:
            if (value := str(info.get(name) or "null").strip('"')) != "null":
                return f"{name} {value}"
        return ""

    def request(self, verb: str, path: str, call: Callable[[], T]) -> T:
        """Returns the result of `call`, a request about `path`; retries, raises storage
        errors.
        """

        def named() -> T:
            with self.guard(verb, path):
                return call()

        return retrying(named, self.retries)

    def guard(
        self, verb: str, path: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        """Turns all errors of a filesystem in this context into a
        :class:`StorageError`.
        """
        return as_storage_errors(
            verb, lambda: self.join(path).url, self.storage_options
        )

    def filesystem(self, path: str = "") -> tuple[Any, str]:
        """Returns the filesystem of this process, and the full path of `path` in it."""
        fs, root = self._opened.get()
        return fs, f"{root.rstrip('/')}/{path}" if path else root

    @cached_property
    def _opened(self) -> PerProcess[tuple[Any, str]]:
        return PerProcess(self._open)

    def _open(self) -> tuple[Any, str]:
        with self.guard("open"):
            try:
                return clients.open_filesystem(self.url, self._split_options[1])
            except ImportError as error:
                raise missing_filesystem(self.url, error) from error

    @property
    def retries(self) -> RetryConfig:
        """The settings of retries, from the storage options."""
        return self._split_options[0]

    @cached_property
    def _split_options(self) -> tuple[RetryConfig, dict[str, Any]]:
        return RetryConfig.split(self.storage_options)

    def _info(self, path: str) -> Mapping[str, Any] | None:
        fs, full = self.filesystem(path)

        def info() -> Mapping[str, Any] | None:
            fs.invalidate_cache()
            try:
                return dict(fs.info(full))
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self.request("read", path, info)


class _RetriedFile(io.RawIOBase):
    """A file of a filesystem that retries reads and raises only storage errors."""

    def __init__(self, raw: Any, location: Location, path: str) -> None:
        self._raw, self._location, self._path = raw, location, path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:  # the response of a plain web server may not be
        return bool(self._raw.seekable())

    def readinto(self, buffer: Any) -> int:
        if not self.seekable():
            with self._location.guard("read", self._path):
                return int(self._raw.readinto(buffer) or 0)
        position = self._raw.tell()

        def read() -> int:
            self._raw.seek(position)  # a failed read may have moved the position
            return int(self._raw.readinto(buffer) or 0)

        return self._location.request("read", self._path, read)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        seek = partial(self._raw.seek, offset, whence)
        return int(self._location.request("read", self._path, seek))

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def check_relative(path: str, where: str) -> str:
    """Returns `path`; raises FormatError if it is no valid path inside a dataset."""
    if not all(_PART.fullmatch(part) for part in path.split("/")):
        rule = "a path must be relative and stay inside the dataset"
        raise FormatError(sentence(where, rule, quote(path)))
    return path
