"""The filesystem behind a URL: which client, and with which settings of its own.

The clients are s3fs, gcsfs and adlfs; docs/storage.md has the figures for the choice. Each asks
again by itself when a request fails. For S3 that is switched off, so that one place decides how
often and how long (:mod:`packstore.io.retry`), and so that a conditional put whose answer got lost
is told from one that lost a race. gcsfs and adlfs have no such switch: what they raise has been
asked for a few times already.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from packstore.errors import StorageError, display, sentence
from packstore.io.error_causes import NO_BUCKET, is_passing

BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""Schemes of stores that keep objects in buckets (containers)."""

CONNECTIONS = 32
"""Requests that one process makes to a store at a time; reading ahead uses up to 24."""

PART_BYTES = 8 << 20
"""Bytes of a file that are sent in one request."""

PARTS_AT_ONCE = 4

_MEMORY = threading.Lock()


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec filesystem of `url` and the path in it.

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
        fs.retries = 1  # the instance is ours: nobody else asks for one with these settings
    config: Any = getattr(getattr(fs, "service_client", None), "_config", None)
    if hasattr(config, "max_single_put_size"):
        # Azure's client else sends up to 64 MB at once, of which it keeps three copies.
        config.max_single_put_size = PART_BYTES
    return fs, path


_EXCLUSIVE = ("s3fs", "gcsfs", "adlfs")


def creates_exclusively(fs: Any) -> bool:
    """Whether `create` is known to let one of many writers win; local disks have their own way.

    Most filesystems of fsspec look whether the file is there, and then write it.
    """
    module = type(fs).__module__
    return module.partition(".")[0] in _EXCLUSIVE or module == "fsspec.implementations.memory"


def make_parent(fs: Any, path: str) -> None:
    """Makes the folder of a file, on filesystems that may have real ones (sftp, …)."""
    if not creates_exclusively(fs):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def is_s3(url: str) -> bool:
    """Whether the URL is one of S3, and of nothing around it (``simplecache::s3://``)."""
    return url.startswith(("s3://", "s3a://"))


def is_s3fs(fs: Any) -> bool:
    """Whether a filesystem, or a class of them, is s3fs, and not another that was registered."""
    kind = fs if isinstance(fs, type) else type(fs)
    return kind.__module__.startswith("s3fs")


def asks_again(fs: Any) -> bool:
    """Whether `create` may be repeated by the client, so that "exists" may mean its own put."""
    return type(fs).__module__.startswith("gcsfs")


def put_file(fs: Any, local_path: str, path: str) -> None:
    """Uploads a file with a few parts in memory at a time (not for S3: see `s3_upload`)."""
    how: dict[str, Any] = {}
    if type(fs).__module__.startswith("gcsfs"):
        how = {"chunksize": PART_BYTES}
    elif type(fs).__module__.startswith("adlfs"):
        how = {"max_concurrency": PARTS_AT_ONCE}
    make_parent(fs, path)
    fs.put_file(local_path, path, **how)


def create(fs: Any, path: str, data: bytes) -> None:
    """Puts bytes only if nothing is there; raises what the client raises if something is."""
    how = {"retry_total": 0} if type(fs).__module__.startswith("adlfs") else {}
    make_parent(fs, path)
    # In memory it looks first and writes then, which threads could do at the same time.
    with _MEMORY if type(fs).__module__.endswith(".memory") else contextlib.nullcontext():
        fs.pipe_file(path, data, mode="create", **how)


def glob(fs: Any, pattern: str, url: str) -> dict[str, Any]:
    """What matches, by path; raises :class:`StorageError` if the bucket is missing."""
    with contextlib.suppress(FileNotFoundError):  # so says the client of Google
        if found := fs.glob(pattern, detail=True):
            return dict(found)
    refuse_missing_bucket(fs, pattern, url)
    return {}


def refuse_missing_bucket(fs: Any, path: str, url: str) -> None:
    """Raises :class:`StorageError` if what is not found at `path` is missing with its bucket."""
    if _lacks_bucket(fs, path, url):
        where = display(url)
        raise StorageError(sentence(where, "cannot list", NO_BUCKET.what, NO_BUCKET.do)) from None


def _lacks_bucket(fs: Any, path: str, url: str) -> bool:
    """Whether what is not found at `path` is missing because its whole bucket is."""
    if url.partition("://")[0] not in BUCKETS:
        return False
    try:
        fs.info(path.partition("/")[0])
    except FileNotFoundError:
        return True
    except Exception as error:
        if is_passing(error):
            raise
    return False  # it is there, or denied to these credentials, which tells nothing
