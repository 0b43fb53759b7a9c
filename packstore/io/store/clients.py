"""Opens the fsspec filesystem of a URL, with the settings that each client needs.

The clients are s3fs, gcsfs and adlfs; docs/storage.md has the measurements behind the
choice. Each retries failed requests itself. For S3 this is switched off, so that all
retries follow :mod:`packstore.io.store.retry`: if the response to a create-only put got
lost, a hidden second try would find the file of the first, and report a lost race.
gcsfs cannot switch it off, and adlfs can only for a put (see :func:`create`): errors of
other requests come after a few retries.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packstore.errors import StorageError, display, sentence
from packstore.io.store.local import LinkFollowingFileSystem
from packstore.io.store.storage_errors import BUCKETS, NO_BUCKET, is_transient

PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs", "http": "aiohttp"}
"""Extra -> package of its client."""

CONNECTIONS = 32
"""Concurrent requests of a process to a store; reading ahead uses up to 24."""

PART_BYTES = 8 << 20
"""Bytes of a file sent in one request."""

PARTS_AT_ONCE = 4
"""Parts of one file that are sent at the same time."""

_MEMORY_LOCK = threading.Lock()


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the fsspec filesystem of `url`, and the path in it."""
    from fsspec.core import url_to_fs

    # A local path may hold ``::``, which fsspec would take for a chain.
    if "://" not in url:
        local = LinkFollowingFileSystem(**options)
        return local, local._strip_protocol(url)

    if not _is_s3_url(url):
        fs, path = url_to_fs(url, **options)
        _limit_single_put(fs)
        return fs, path

    fs, path = url_to_fs(url, **_with_s3_settings(options))
    sets_retries = "retries" in options.get("config_kwargs", {})
    if not sets_retries:
        # s3fs tries a request several times, besides botocore. In spite of its name
        # this is the number of attempts: 1 means no retry. Setting an attribute affects
        # nobody else: fsspec caches instances by their options, and packstore's are
        # unique.
        fs.retries = 1
    return fs, path


def _is_s3_url(url: str) -> bool:
    """Return True if s3fs opens a URL; not for a chain such as ``simplecache::s3://``."""
    from fsspec import get_filesystem_class

    if not url.startswith(("s3://", "s3a://")):
        return False
    return is_s3fs(get_filesystem_class("s3"))


def _with_s3_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of s3fs, with no retries of botocore unless requested."""
    settings = {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "max_pool_connections": CONNECTIONS,
    }
    return {
        **options,
        "config_kwargs": {**settings, **options.get("config_kwargs", {})},
    }


def _limit_single_put(fs: Any) -> None:
    """Make Azure's client send large files in parts.

    By default it sends up to 64 MB at once, and keeps three copies of it.
    """
    config: Any = getattr(getattr(fs, "service_client", None), "_config", None)
    if hasattr(config, "max_single_put_size"):
        config.max_single_put_size = PART_BYTES


def _package_of(fs: Any) -> str:
    """Return the package of a filesystem or its class, or ``memory``."""
    kind = fs if isinstance(fs, type) else type(fs)
    if kind.__module__ == "fsspec.implementations.memory":
        return "memory"
    return kind.__module__.partition(".")[0]


def creates_exclusively(fs: Any) -> bool:
    """Return True if exactly one of many concurrent :func:`create` succeeds."""
    return _package_of(fs) in ("s3fs", "gcsfs", "adlfs", "memory")


def is_s3fs(fs: Any) -> bool:
    """Return True for s3fs; another filesystem may be registered for S3."""
    return _package_of(fs) == "s3fs"


# Writing


def put_file(fs: Any, local_path: str, path: str) -> None:
    """Upload a file, a few parts in memory at a time."""
    package = _package_of(fs)
    if package == "memory":
        # Its `put_file` would show readers an unfinished file.
        put_bytes(fs, path, Path(local_path).read_bytes())
        return
    options: dict[str, int] = {}
    if package in ("s3fs", "gcsfs"):
        options["chunksize"] = PART_BYTES
    if package in ("s3fs", "adlfs"):
        options["max_concurrency"] = PARTS_AT_ONCE
    fs.put_file(local_path, path, **options)


def put_bytes(fs: Any, path: str, data: bytes, **options: Any) -> None:
    """Put bytes, by default over any file that is there."""
    # Stores that create exclusively are object stores, which have no folders. Others,
    # such as sftp, need the folder first.
    is_object_store = creates_exclusively(fs)
    if not is_object_store:
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, data, **options)


def create(fs: Any, path: str, data: bytes) -> None:
    """Put bytes only if no file is there; otherwise raise the client's error."""
    package = _package_of(fs)
    if package == "adlfs":
        # No retries in adlfs, see above: a second try would find the file of the first.
        put_bytes(fs, path, data, mode="create", retry_total=0)
    elif package == "memory":
        # Its check and its write are two steps: without a lock, threads would race.
        with _MEMORY_LOCK:
            put_bytes(fs, path, data, mode="create")
    else:
        put_bytes(fs, path, data, mode="create")


# Listing


def ls(fs: Any, path: str, url: str = "") -> list[tuple[str, dict[str, Any]]]:
    """List a folder; empty if it is missing.

    Args:
        fs: the filesystem.
        path: the folder in it.
        url: of the folder, for the error if the bucket is missing; empty: a missing
            bucket is no error.

    Returns:
        Name and details of each entry.
    """
    listing = []
    for entry in _list(fs, path, url, detail=True):
        name = _name_in(path, entry["name"])
        if name:
            listing.append((name, entry))
    return listing


def ls_names(fs: Any, path: str, url: str = "") -> list[str]:
    """List the names in a folder, as :func:`ls` does; local files are not looked up."""
    entries = _list(fs, path, url, detail=False)
    return [name for name in (_name_in(path, entry) for entry in entries) if name]


def _list(fs: Any, path: str, url: str, *, detail: bool) -> list[Any]:
    fs.invalidate_cache()
    try:
        return list(fs.ls(path, detail=detail))
    except (FileNotFoundError, NotADirectoryError):
        if url:
            refuse_missing_bucket(fs, path, url)
        return []


def _name_in(folder: str, path: str) -> str:
    """Return the name of an entry; empty for the folder itself.

    Some stores also list the folder, an empty object.
    """
    full_name = path.strip("/")
    return "" if full_name == folder.strip("/") else full_name.rpartition("/")[2]


def is_file(fs: Any, path: str, info: Mapping[str, Any]) -> bool:
    """Return True for a file or a link to one, False for a folder.

    Raises:
        OSError: it is neither.
    """
    kind = info["type"]
    if kind not in ("file", "directory"):
        try:
            kind = fs.info(path)["type"]  # follows links
        except FileNotFoundError:
            raise OSError(errno.EINVAL, "a link to nothing") from None
    if kind not in ("file", "directory"):
        raise OSError(errno.EINVAL, "a device or pipe where a file must be")
    return bool(kind == "file")


def glob(fs: Any, pattern: str, url: str) -> dict[str, Any]:
    """Return the details of matches by path; raise if the bucket is missing."""
    try:
        matches = fs.glob(pattern, detail=True)
    except FileNotFoundError:  # raised by gcsfs
        matches = {}
    if matches:
        return dict(matches)
    refuse_missing_bucket(fs, pattern, url)
    return {}


def _require_bucket(fs: Any, bucket: str) -> None:
    """Raise FileNotFoundError for a missing bucket, not for an empty one."""
    try:
        fs.info(bucket)
    except FileNotFoundError:
        # s3fs 2025.3 raises it for an empty bucket too, but lists that one.
        fs.ls(bucket, detail=False)


def refuse_missing_bucket(fs: Any, path: str, url: str) -> None:
    """Raise StorageError if `path` was not found because its bucket is missing."""
    scheme = url.partition("://")[0]
    if scheme not in BUCKETS:
        return
    bucket = path.partition("/")[0]
    try:
        _require_bucket(fs, bucket)
    except FileNotFoundError:
        text = sentence(
            where=display(url),
            rule="cannot list",
            found=NO_BUCKET.reason,
            remedy=NO_BUCKET.remedy,
        )
        raise StorageError(text) from None
    except Exception as error:
        if is_transient(error):
            raise
        # The bucket exists, or these credentials may not see it: either way it is not
        # proven to be missing, and the folder in it counts as empty.
