"""Reads and writes files in a local folder or at any fsspec URL.

A :class:`Location` is a URL with its options. Only these are pickled: each process
opens its own filesystem. Every error is a :class:`StorageError`, one line that names
the location without the secrets in its URL or options.
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
    logins,
    quote,
    sentence,
    to_unicode,
)
from packstore.io.store import clients, local
from packstore.io.store.retry import retrying
from packstore.io.store.storage_errors import (
    as_storage_errors,
    means_exists,
    missing_filesystem,
)
from packstore.secrets import without_secrets

T = TypeVar("T")

VERSION_FIELDS = (
    "VersionId",
    "version_id",
    "generation",
    "ETag",
    "etag",
    "e_tag",
    "md5Hash",
)
"""Fields of a client's answer about a file that change with its content."""

_BUFFER_BYTES = 1 << 20

# A path, or a URL without a login and a query, that cannot be a mistyped URL.
_PLAIN_URL = re.compile(
    r"/|(?:[A-Za-z][A-Za-z0-9+.-]*://|/)?[^:@?#;/]+(?:/[^:@?#;/]+)*/?"
)
_RELATIVE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*")


class Entry(NamedTuple):
    """A file or folder of a listing: its name, and its size in bytes."""

    name: str
    size: int
    is_folder: bool = False


@dataclass(frozen=True)
class Location:
    """A file or folder on any store.

    Paths in its methods are relative to it, with ``/``. Every method raises
    :class:`StorageError` when the store refuses, and :class:`MissingExtraError` when
    the package of its filesystem is missing.

    Attributes:
        url: a local path or an fsspec URL.
        storage_options: of its filesystem, and of retries (:class:`RetryConfig`).
        display: the URL without user, password and query string, for messages and
            manifests.
    """

    url: str
    storage_options: Mapping[str, Any] = field(
        default_factory=dict, repr=False, hash=False
    )
    display: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        url = os.fspath(self.url)
        # A cheap test first: most locations are joined from checked ones.
        if _PLAIN_URL.fullmatch(url):
            display_url = to_unicode(url)
        else:
            _check_url(url)
            display_url = display(url)
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "storage_options", dict(self.storage_options))
        object.__setattr__(self, "display", display_url)

    def __repr__(self) -> str:
        return f"Location({self.display!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "storage_options": self.storage_options,
            "display": self.display,
        }

    @property
    def digest(self) -> str:
        """A hash of the URL, and of options such as the endpoint.

        Logins and secret options do not count, as they may change with time; a query
        does, as it may choose the file.
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
        """True if exactly one of many concurrent :meth:`create_bytes` succeeds."""
        fs, _ = self.filesystem()
        return local.is_local(fs) or clients.creates_exclusively(fs)

    def join(self, path: str) -> Location:
        """Return the location at `path` below this one."""
        if not path:
            return self
        base = self.url
        query = ""
        if "://" in base and "?" in base:
            base, _, query = base.partition("?")
            query = f"?{query}"
        return Location(f"{base.rstrip('/')}/{path}{query}", self.storage_options)

    # Looking

    def exists(self, path: str = "") -> bool:
        """Return True if a file or folder exists."""
        return self._info(path) is not None

    def is_dir(self, path: str = "") -> bool:
        """Return True if a folder exists."""
        info = self._info(path)
        return info is not None and info["type"] == "directory"

    def size(self, path: str = "") -> int:
        """Return the bytes of the file."""
        fs, full_path = self.filesystem(path)
        info = self.request("read", path, partial(fs.info, full_path))
        return int(info["size"] or 0)

    def object_version(self, path: str = "") -> str:
        """Return the version id or ETag of the file, with its label.

        It is empty if the store has none, or refuses.
        """
        try:
            info = self._info(path) or {}
        except StorageError:
            return ""
        for name in VERSION_FIELDS:
            value = str(info.get(name) or "").strip('"')
            if value not in ("", "null"):  # S3 has "null" in buckets without versions
                return f"{name} {value}"
        return ""

    def files(self, path: str = "") -> list[Entry]:
        """List the files directly in a folder, by name; empty if it is missing."""
        return [entry for entry in self.entries(path) if not entry.is_folder]

    def names(self, path: str = "") -> list[str]:
        """List the names of files and folders directly in a folder, in any order."""
        fs, full_path = self.filesystem(path)
        return self.request(
            "list", path, partial(clients.ls_names, fs, full_path, self.url)
        )

    def entries(self, path: str = "") -> list[Entry]:
        """List files and folders directly in a folder, by name.

        Links are followed. Hidden entries of other types (sockets, dangling links) are
        left out.

        Raises:
            StorageError: an entry that is not hidden is of another type.
        """
        fs, full_path = self.filesystem(path)
        listing = self.request(
            "list", path, partial(clients.ls, fs, full_path, self.url)
        )

        entries = []
        for name, info in listing:
            is_plain = info["type"] in ("file", "directory")
            if not is_plain and name.startswith("."):
                continue
            is_file = info["type"] == "file"
            if not is_plain:
                relative_path = f"{path}/{name}".lstrip("/")
                entry_path = f"{full_path.rstrip('/')}/{name}"
                is_file = self._is_file(fs, entry_path, info, relative_path)
            entry = Entry(name, size=int(info["size"] or 0), is_folder=not is_file)
            entries.append(entry)
        return sorted(entries)

    def glob(self) -> list[Location]:
        """List files that match the URL as a pattern (``*``, ``**``, ``?``, ``[...]``).

        Links are followed.

        Raises:
            StorageError: a match is neither file nor folder.
        """
        fs, full_path = self.filesystem()
        matches = self.request(
            "list", "", partial(clients.glob, fs, full_path, self.url)
        )

        locations = []
        for path in sorted(matches):
            url = path if local.is_local(fs) else fs.unstrip_protocol(path)
            location = Location(url, self.storage_options)
            if location._is_file(fs, path, matches[path], ""):
                locations.append(location)
        return locations

    def _is_file(
        self, fs: Any, full_path: str, info: Mapping[str, Any], path: str
    ) -> bool:
        """Return True for a file, False for a folder; raise StorageError otherwise."""
        return self.request("read", path, partial(clients.is_file, fs, full_path, info))

    def _info(self, path: str) -> Mapping[str, Any] | None:
        """Return the client's answer about a file or folder; None if it is missing."""
        fs, full_path = self.filesystem(path)

        def info() -> Mapping[str, Any] | None:
            fs.invalidate_cache()
            try:
                return dict(fs.info(full_path))
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self.request("read", path, info)

    # Reading

    def open_read(self, path: str = "") -> io.BufferedReader:
        """Open the file as a binary stream; its errors are storage errors."""
        fs, full_path = self.filesystem(path)

        def open_raw() -> Any:
            if local.is_local(fs):
                return io.FileIO(local.require_regular_file(full_path))
            return fs.open(full_path, "rb")

        raw = self.request("read", path, open_raw)
        return io.BufferedReader(_RetriedFile(raw, self, path), _BUFFER_BYTES)

    def read_bytes(
        self, path: str = "", start: int | None = None, end: int | None = None
    ) -> bytes:
        """Read bytes `start` to `end` (exclusive), fewer where the file ends before."""
        fs, full_path = self.filesystem(path)

        def read() -> bytes:
            if local.is_local(fs):
                return local.read_part(full_path, start or 0, end)
            return bytes(fs.cat_file(full_path, start=start, end=end))

        return self.request("read", path, read)

    # Writing

    def put_file(self, local_path: str, path: str) -> None:
        """Move a finished local file to `path`, or upload it; replace an existing file.

        Args:
            local_path: of the file, on the same disk if the location is local.
            path: where to put it.
        """
        fs, full_path = self.filesystem(path)
        if not local.is_local(fs):
            upload = partial(clients.put_file, fs, local_path, full_path)
            self.request("write", path, upload)
            return
        with self.guard("write", path):
            local.put_in_folder(full_path, partial(os.replace, local_path, full_path))
            local.sync_folder(os.path.dirname(full_path))

    def create_bytes(self, path: str, data: bytes) -> None:
        """Write a small file only if it does not exist; of many writers one succeeds.

        A file of the same bytes counts as success: an earlier attempt of this call may
        have written it, and lost the answer.

        Raises:
            DatasetExistsError: a file with other bytes exists.
        """
        fs, full_path = self.filesystem(path)

        def create() -> None:
            try:
                if local.is_local(fs):
                    local.put_in_folder(
                        full_path, partial(local.create, full_path, data)
                    )
                else:
                    clients.create(fs, full_path, data)
            except Exception as error:
                if not means_exists(error):
                    raise
                fs.invalidate_cache()  # a listing from before the put lacks the file
                if fs.cat_file(full_path) != data:
                    where = self.join(path).display
                    text = sentence(where, rule="must not exist yet", found="it does")
                    raise DatasetExistsError(text) from error

        self.request("write", path, create)

    def remove(self, path: str, condition: Callable[[], bool] | None = None) -> bool:
        """Remove the file, if any.

        Args:
            path: of the file.
            condition: called before each attempt; False keeps the file. It may raise
                FileNotFoundError if the file is gone.

        Returns:
            False if the condition kept the file.
        """
        fs, full_path = self.filesystem(path)

        def remove() -> bool:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if condition is not None and not condition():
                    return False
                fs.rm_file(full_path)
            return True

        return self.request("remove", path, remove)

    # Requests

    def request(self, verb: str, path: str, call: Callable[[], T]) -> T:
        """Return the result of a request about `path`.

        Failed requests are sent again, and all errors are storage errors.

        Args:
            verb: ``open``, ``read``, ``write``, ``list`` or ``remove``.
            path: for messages.
            call: the request.
        """

        def guarded_call() -> T:
            with self.guard(verb, path):
                return call()

        return retrying(guarded_call, self.retries)

    def guard(
        self, verb: str, path: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        """Turn all errors of a filesystem in this context into storage errors."""

        def url() -> str:  # joined for an error only
            return self.join(path).url

        return as_storage_errors(verb, url, self.storage_options)

    @property
    def retries(self) -> RetryConfig:
        """The settings of retries, from the storage options."""
        retries, _ = self._split_options
        return retries

    @cached_property
    def _split_options(self) -> tuple[RetryConfig, dict[str, Any]]:
        return RetryConfig.split(self.storage_options)

    def filesystem(self, path: str = "") -> tuple[Any, str]:
        """Return the filesystem of this process, and the full path of `path` in it."""
        fs, root = self._filesystem.get()
        return fs, f"{root.rstrip('/')}/{path}" if path else root

    @cached_property
    def _filesystem(self) -> PerProcess[tuple[Any, str]]:
        return PerProcess(self._open_filesystem)

    def _open_filesystem(self) -> tuple[Any, str]:
        _, options = self._split_options
        with self.guard("open"):
            try:
                return clients.open_filesystem(self.url, options)
            except ImportError as error:
                raise missing_filesystem(self.url, error) from error


class PerProcess(Generic[T]):
    """A value that each process makes for itself: clients hang after a fork."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._pid = 0
        self._value: T

    def get(self) -> T:
        """Return the value of this process."""
        if self._pid != os.getpid():
            self._value = self._make()
            self._pid = os.getpid()
        return self._value


class _RetriedFile(io.RawIOBase):
    """A raw file, with its reads retried and its errors as storage errors."""

    def __init__(self, raw: Any, location: Location, path: str) -> None:
        self._raw = raw
        self._location = location
        self._path = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:  # the response of a plain web server may not be
        return bool(self._raw.seekable())

    def readinto(self, buffer: Any) -> int:
        # A read is retried from its position: without seeking it would continue at an
        # unknown one.
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


# Rules of URLs and paths


def _check_url(url: str) -> None:
    """Raise for a URL that a filesystem would take for another place than intended."""
    if not url:
        text = sentence(
            where="storage",
            rule="a place must have a name",
            found="none",
            remedy="Write . for the current folder",
        )
        raise StorageError(text)

    parts = logins(url)  # several for a chain, such as simplecache::s3://bucket/file
    if any(part.is_mistyped for part in parts):
        text = sentence(
            where=display(url),
            rule="a URL must begin with a scheme and two slashes",
            found="something like it",
            remedy="Write scheme://…; for a local path, ./ or one / at its beginning",
        )
        raise StorageError(text)
    if any(part.has_early_end for part in parts):
        text = sentence(
            where=display(url),
            rule="a login in a URL must not hold a slash, question mark or hash",
            found="one",
            remedy=(
                "Write %2F, %3F or %23 for it, and %40 for an @ behind the host and "
                "its port"
            ),
        )
        raise StorageError(text)


def check_relative(path: str, where: str) -> str:
    """Return `path`; raise FormatError if it is not a valid path inside a dataset."""
    for part in path.split("/"):
        if not _RELATIVE_PART.fullmatch(part):
            rule = "a path must be relative and stay inside the dataset"
            raise FormatError(sentence(where, rule, found=quote(path)))
    return path
