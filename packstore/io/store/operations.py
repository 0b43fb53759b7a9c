"""Operations on stores for cleaning, committing and copying datasets."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from packstore.io.store import clients, local
from packstore.io.store.location import VERSION_FIELDS, Location

AT_ONCE = 16
"""Concurrent small requests (removals)."""

CLOCK_SECONDS = 1.0
"""Tolerance in seconds when two times of one file are compared: a store may round some
of its answers to seconds.
"""

_MARKS = (*VERSION_FIELDS, "ino", "mtime")
_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")


# Listings


class ListedFile(NamedTuple):
    """A file of a listing.

    Attributes:
        path: in the dataset.
        bytes: its size.
        age: in seconds, if known.
        marks: values that change with the content, by name, if the store has any: ETag,
            generation, inode, `mtime`.
    """

    path: str
    bytes: int
    age: float | None
    marks: Mapping[str, str] = MappingProxyType({})


def list_folder(location: Location, folder: str) -> list[ListedFile]:
    """List the files directly in a folder by name, hidden ones included.

    A folder that is a link counts as empty.
    """
    fs, full_path = location.filesystem(folder)
    if location.local_path and os.path.islink(full_path):
        return []
    listing = location.request("list", folder, partial(clients.ls, fs, full_path))
    files = [
        _listed_file(f"{folder}/{name}", info)
        for name, info in listing
        if info["type"] != "directory"
    ]
    return sorted(files, key=attrgetter("path"))


def list_folders(location: Location) -> list[str]:
    """List the names of the folders in a place."""
    fs, full_path = location.filesystem()
    listing = location.request("list", "", partial(clients.ls, fs, full_path))
    return sorted(name for name, info in listing if info["type"] == "directory")


def is_unchanged(location: Location, files: Sequence[ListedFile]) -> bool:
    """Look at files again; return True if they are as they were listed.

    Call it by :meth:`Location.request`, which converts the errors of the client.

    Raises:
        FileNotFoundError: the first one is gone.
    """
    fs, _ = location.filesystem()
    fs.invalidate_cache()
    for number, listed in enumerate(files):
        _, full_path = location.filesystem(listed.path)
        try:
            info = fs.info(full_path)
        except FileNotFoundError:
            if number == 0:
                raise
            return False
        if not _is_same(listed, _listed_file(listed.path, info)):
            return False
    return True


def _is_same(listed: ListedFile, current: ListedFile) -> bool:
    """Return True if a file has the content that it had in a listing."""
    if listed.bytes != current.bytes:
        return False
    if current.marks:
        for name, mark in current.marks.items():
            if listed.marks.get(name, mark) != mark:
                return False
        return True
    # A file that was written again is younger than it was. The age is the weaker sign,
    # as it also changes when a second link to a local file is removed.
    if listed.age is None:
        return True
    return current.age is not None and listed.age <= current.age + CLOCK_SECONDS


def _listed_file(path: str, info: Mapping[str, Any]) -> ListedFile:
    marks = {name: str(info[name]).strip('"') for name in _MARKS if info.get(name)}
    return ListedFile(
        path=path, bytes=int(info["size"] or 0), age=_age(info), marks=marks
    )


def _age(info: Mapping[str, Any]) -> float | None:
    """Return the seconds since the latest timestamp.

    `mtime` alone would not do: a linked or moved file keeps it.
    """
    ages = [_seconds_since(info.get(name)) for name in _TIMES]
    return min((age for age in ages if age is not None), default=None)


def _seconds_since(when: Any) -> float | None:
    """Return the seconds since a timestamp of any filesystem; None for others."""
    if isinstance(when, str):
        with contextlib.suppress(ValueError):
            when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        when = when.timestamp()
    if not isinstance(when, int | float):
        return None
    return max(0.0, time.time() - float(when))


# Unfinished uploads


class Upload(NamedTuple):
    """An unfinished multipart upload: its target, age in seconds if known, and id."""

    path: str
    age: float | None
    id: str


def uploads(location: Location) -> list[Upload] | None:
    """List unfinished uploads below a location, which only S3 keeps and bills.

    Returns:
        None for other stores.
    """
    fs, full_path = location.filesystem("")
    if not clients.is_s3fs(fs):
        return None
    bucket, key, _ = fs.split_path(full_path.strip("/"))
    prefix = f"{key}/" if key else ""

    listed = []
    query = {"Bucket": bucket, "Prefix": prefix}
    while True:
        call = partial(fs.call_s3, "list_multipart_uploads", **query)
        page = location.request("list", "", call)
        for entry in page.get("Uploads", ()):
            upload = Upload(
                path=entry["Key"].removeprefix(prefix),
                age=_seconds_since(entry["Initiated"]),
                id=entry["UploadId"],
            )
            listed.append(upload)
        if not page.get("IsTruncated"):
            return listed
        query["KeyMarker"] = page["NextKeyMarker"]
        query["UploadIdMarker"] = page["NextUploadIdMarker"]


def abort_upload(location: Location, upload: Upload) -> None:
    """Abort an unfinished upload, and free its storage."""
    fs, full_path = location.filesystem(upload.path)
    bucket, key, _ = fs.split_path(full_path)
    call = partial(
        fs.call_s3,
        "abort_multipart_upload",
        Bucket=bucket,
        Key=key,
        UploadId=upload.id,
    )
    location.request("remove", upload.path, call)


# Removal


def run_parallel(calls: Iterable[Callable[[], object]], at_once: int = AT_ONCE) -> None:
    """Run all calls, `at_once` at a time.

    The first error is raised once no call is running; calls that have not begun by then
    are dropped.
    """
    with ThreadPoolExecutor(at_once, "packstore-store") as pool:
        for _ in pool.map(_run, calls):
            pass


def _run(call: Callable[[], object]) -> object:
    return call()


def remove_all(location: Location, paths: Iterable[str]) -> None:
    """Remove files, if they exist, in any order; raise like :meth:`Location.remove`."""
    run_parallel(partial(location.remove, path) for path in sorted(paths))


def remove_empty(location: Location, *folders: str) -> None:
    """Remove folders of a local place if they are empty."""
    root = location.local_path
    if root is None:
        return
    for folder in folders:
        with contextlib.suppress(OSError):  # none, or not empty
            os.rmdir(os.path.join(root, folder))


@contextlib.contextmanager
def removing_empty_folders(location: Location) -> Iterator[None]:
    """Create the folders of a local dataset; remove new ones that stay empty."""
    created: list[str] = []
    root = location.local_path
    if root is not None:
        with location.guard("write"):
            for name in ("_packstore", "data"):
                created += local.make_folder(os.path.join(root, name))
    try:
        yield
    finally:
        remove_empty(location, *reversed(created))


# Writing


def replace_bytes(location: Location, path: str, data: bytes) -> None:
    """Write a small file atomically; replace an existing one."""
    fs, full_path = location.filesystem(path)
    if local.is_local(fs):
        with location.guard("write", path):
            local.put_in_folder(full_path, partial(local.replace, full_path, data))
    else:
        location.request("write", path, partial(clients.put_bytes, fs, full_path, data))


def copy_file(source: Location, path: str, target: Location, to: str) -> bool:
    """Copy a file inside a store, replacing one at `to`.

    Returns:
        False if the places are in different stores: nothing was copied.
    """
    source_fs, source_path = source.filesystem(path)
    target_fs, target_path = target.filesystem(to)
    if local.is_local(source_fs) and local.is_local(target_fs):
        with target.guard("write", to):
            local.link(source_path, target_path)
        return True

    if type(source_fs) is not type(target_fs):
        return False
    if source.storage_options != target.storage_options:
        return False
    if not clients.creates_exclusively(source_fs):
        # Two filesystems of these clients (sftp, …) may have different root folders.
        return False
    copy = partial(source_fs.cp_file, source_path, target_path)
    target.request("write", to, copy)
    return True
