"""Opens the fsspec filesystem of a URL, with the settings that each client needs.

The clients are s3fs, gcsfs and adlfs; docs/storage.md has the measurements behind the choice. Each
retries failed requests itself. For S3 this is switched off, so that all retries follow
:mod:`packstore.io.store.retry`, and a conditional put whose response got lost differs from one that
lost a race. gcsfs and adlfs cannot switch it off: their errors come after a few retries.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from packstore.errors import StorageError, display, sentence
from packstore.io.store.error_causes import NO_BUCKET, is_passing

BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""URL schemes of object stores with buckets (containers)."""

CONNECTIONS = 32
"""Concurrent requests of a process to a store; reading ahead uses up to 24."""

PART_BYTES = 8 << 20
"""Bytes of a file sent in one request."""

PARTS_AT_ONCE = 4

_MEMORY = threading.Lock()


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the fsspec filesystem of `url`, and the path in it.

    Raises:
        ImportError: the package of the filesystem is not installed.
    """
    from fsspec import get_filesystem_class
    from fsspec.core import url_to_fs

    s3 = is_s3(url) and is_s3fs(get_filesystem_class("s3"))
    ours = s3 and "config_kwargs" not in options
    if s3:
        settings = {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "max_pool_connections": CONNECTIONS,
        }
        options = {**options, "config_kwargs": {**settings, **options.get("config_kwargs", {})}}
    fs, path = url_to_fs(url, **options)
    if ours:
        fs.retries = 1  # this instance is not shared: its settings are unique to packstore
    config: Any = getattr(getattr(fs, "service_client", None), "_config", None)
    if hasattr(config, "max_single_put_size"):
        # By default Azure's client sends up to 64 MB at once and keeps three copies of it.
        config.max_single_put_size = PART_BYTES
    return fs, path


_EXCLUSIVE = ("s3fs", "gcsfs", "adlfs")


def creates_exclusively(fs: Any) -> bool:
    """Returns True if exactly one of many concurrent calls of `create` is known to succeed.

    Most fsspec filesystems check that the file is missing and then write it, which is a race.
    Local disks are handled in :mod:`packstore.io.store.local`.
    """
    module = type(fs).__module__
    return module.partition(".")[0] in _EXCLUSIVE or module == "fsspec.implementations.memory"


def make_parent(fs: Any, path: str) -> None:
    """Creates the folder of a file on filesystems with real folders (sftp, …)."""
    if not creates_exclusively(fs):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def is_s3(url: str) -> bool:
    """Returns True for a plain S3 URL, False for a chained one (``simplecache::s3://``)."""
    return url.startswith(("s3://", "s3a://"))


def is_s3fs(fs: Any) -> bool:
    """Returns True if a filesystem or its class is s3fs; another may be registered for S3."""
    kind = fs if isinstance(fs, type) else type(fs)
    return kind.__module__.startswith("s3fs")


def asks_again(fs: Any) -> bool:
    """Returns True if the client may retry `create`, so that "exists" may mean its own put."""
    return type(fs).__module__.startswith("gcsfs")


def put_file(fs: Any, local_path: str, path: str) -> None:
    """Uploads a file, a few parts in memory at a time (for S3 see `s3_upload`)."""
    how: dict[str, Any] = {}
    if type(fs).__module__.startswith("gcsfs"):
        how = {"chunksize": PART_BYTES}
    elif type(fs).__module__.startswith("adlfs"):
        how = {"max_concurrency": PARTS_AT_ONCE}
    make_parent(fs, path)
    fs.put_file(local_path, path, **how)


def create(fs: Any, path: str, data: bytes) -> None:
    """Puts bytes only if no file is there; otherwise raises the client's error."""
    how = {"retry_total": 0} if type(fs).__module__.startswith("adlfs") else {}
    make_parent(fs, path)
    # The memory filesystem checks first and writes then: without a lock, threads would race.
    with _MEMORY if type(fs).__module__.endswith(".memory") else contextlib.nullcontext():
        fs.pipe_file(path, data, mode="create", **how)


def glob(fs: Any, pattern: str, url: str) -> dict[str, Any]:
    """Returns matches by path; raises :class:`StorageError` if the bucket is missing."""
    with contextlib.suppress(FileNotFoundError):  # raised by gcsfs
        if found := fs.glob(pattern, detail=True):
            return dict(found)
    refuse_missing_bucket(fs, pattern, url)
    return {}


def refuse_missing_bucket(fs: Any, path: str, url: str) -> None:
    """Raises :class:`StorageError` if `path` was not found because its bucket is missing."""
    if _lacks_bucket(fs, path, url):
        where = display(url)
        raise StorageError(sentence(where, "cannot list", NO_BUCKET.what, NO_BUCKET.do)) from None


def _lacks_bucket(fs: Any, path: str, url: str) -> bool:
    """Returns True if the bucket of `path` is missing."""
    if url.partition("://")[0] not in BUCKETS:
        return False
    try:
        fs.info(path.partition("/")[0])
    except FileNotFoundError:
        return True
    except Exception as error:
        if is_passing(error):
            raise
    return False  # the bucket exists, or these credentials may not see it
