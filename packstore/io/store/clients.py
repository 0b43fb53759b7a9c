"""Opens the fsspec filesystem of a URL, with the settings that each client needs.

The clients are s3fs, gcsfs and adlfs; docs/storage.md has the measurements behind the
choice. Each retries failed requests itself. For S3 this is switched off, so that all
retries follow :mod:`packstore.io.store.retry`, and a conditional put whose response got
lost differs from one that lost a race. gcsfs and adlfs cannot switch it off: their
errors come after a few retries.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packstore.errors import StorageError, display, sentence
from packstore.io.store.storage_errors import BUCKETS, NO_BUCKET, is_passing

PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs", "http": "aiohttp"}
"""Extra -> package of its client."""

CONNECTIONS = 32
"""Concurrent requests of a process to a store; reading ahead uses up to 24."""

PART_BYTES = 8 << 20
"""Bytes of a file sent in one request."""

PARTS_AT_ONCE = 4

_MEMORY = threading.Lock()


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the fsspec filesystem of `url`, and the path in it."""
    from fsspec import get_filesystem_class
    from fsspec.core import url_to_fs

    if "://" not in url:  # also with ``::`` in its name, a chain for fsspec
        from packstore.io.store.links import LinkFollowingFileSystem

        local = LinkFollowingFileSystem(**options)
        return local, local._strip_protocol(url)
    # Not a chained URL (``simplecache::s3://``).
    s3 = url.startswith(("s3://", "s3a://")) and is_s3fs(get_filesystem_class("s3"))
    ours = s3 and "config_kwargs" not in options
    if s3:
        settings = {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "max_pool_connections": CONNECTIONS,
        }
        options = {
            **options,
            "config_kwargs": {**settings, **options.get("config_kwargs", {})},
        }
    fs, path = url_to_fs(url, **options)
    if ours:
        fs.retries = (
            1  # this instance is not shared: its settings are unique to packstore
        )
    config: Any = getattr(getattr(fs, "service_client", None), "_config", None)
    if hasattr(config, "max_single_put_size"):
        # By default Azure's client sends up to 64 MB at once and keeps three copies of
        # it.
        config.max_single_put_size = PART_BYTES
    return fs, path


def _client(fs: Any) -> str:
    """Returns the package of a filesystem or its class, or ``memory``."""
    module = (fs if isinstance(fs, type) else type(fs)).__module__
    return (
        "memory"
        if module == "fsspec.implementations.memory"
        else module.partition(".")[0]
    )


def creates_exclusively(fs: Any) -> bool:
    """Returns True if exactly one of many concurrent calls of `create` is known to
    succeed.
    """
    return _client(fs) in ("s3fs", "gcsfs", "adlfs", "memory")


def is_s3fs(fs: Any) -> bool:
    """Returns True for s3fs; another filesystem may be registered for S3."""
    return _client(fs) == "s3fs"


def put_file(fs: Any, local_path: str, path: str) -> None:
    """Uploads a file, a few parts in memory at a time."""
    client, options = _client(fs), dict[str, int]()
    if client == "memory":  # its own way shows the file while it grows
        put_bytes(fs, path, Path(local_path).read_bytes())
        return
    if client in ("s3fs", "gcsfs"):
        options["chunksize"] = PART_BYTES
    if client in ("s3fs", "adlfs"):
        options["max_concurrency"] = PARTS_AT_ONCE
    fs.put_file(local_path, path, **options)


def put_bytes(fs: Any, path: str, data: bytes, **how: Any) -> None:
    """Puts bytes over any file that is there."""
    if not creates_exclusively(fs):  # real folders (sftp, …)
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, data, **how)


def create(fs: Any, path: str, data: bytes) -> None:
    """Puts bytes only if no file is there; otherwise raises the client's error."""
    how = {"retry_total": 0} if _client(fs) == "adlfs" else {}
    # The memory filesystem checks first and writes then: without a lock, threads would
    # race.
    with _MEMORY if _client(fs) == "memory" else contextlib.nullcontext():
        put_bytes(fs, path, data, mode="create", **how)


def ls(fs: Any, path: str, url: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Lists name and details in a folder; with `url`, a missing bucket is refused."""
    fs.invalidate_cache()
    try:
        entries = [
            (entry["name"].strip("/"), entry) for entry in fs.ls(path, detail=True)
        ]
    except (FileNotFoundError, NotADirectoryError):
        if url:
            refuse_missing_bucket(fs, path, url)
        return []
    # Some stores also list the folder itself, an empty object.
    return [
        (name.rpartition("/")[2], entry)
        for name, entry in entries
        if name != path.strip("/")
    ]


def is_file(fs: Any, path: str, info: Mapping[str, Any]) -> bool:
    """Returns True for a file or a link to one, False for folders; raises OSError for
    others.
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
    """Returns matches by path; refuses a missing bucket."""
    with contextlib.suppress(FileNotFoundError):  # raised by gcsfs
        if matches := fs.glob(pattern, detail=True):
            return dict(matches)
    refuse_missing_bucket(fs, pattern, url)
    return {}


def refuse_missing_bucket(fs: Any, path: str, url: str) -> None:
    """Raises :class:`StorageError` if `path` was not found because its bucket is
    missing.
    """
    if url.partition("://")[0] not in BUCKETS:
        return
    try:
        fs.info(path.partition("/")[0])
    except FileNotFoundError:
        message = sentence(
            display(url), "cannot list", NO_BUCKET.reason, NO_BUCKET.remedy
        )
        raise StorageError(message) from None
    except Exception as error:
        if is_passing(error):
            raise
        # The bucket exists, or these credentials may not see it.
