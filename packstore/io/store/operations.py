"""Operations on stores for cleaning, committing and copying datasets."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from packstore.io.store import clients, local
from packstore.io.store.location import VERSIONS, Location

AT_ONCE = 16
"""Concurrent small requests (removals)."""

CLOCK_SECONDS = 1.0
"""Most that two answers may differ in the time of one object: some tell whole seconds.
"""


class ListedFile(NamedTuple):
    """A file of a listing: path in the dataset, bytes, and age in seconds if known.

    `marks` name its content, as far as the store does: an ETag or generation, an inode
    and `mtime`.
    """

    path: str
    bytes: int
    age: float | None
    marks: Mapping[str, str] = MappingProxyType({})


class Upload(NamedTuple):
    """An unfinished multipart upload: its target path, age in seconds if known,
    and id.
    """

    path: str
    age: float | None
    id: str


def list_folder(location: Location, folder: str) -> list[ListedFile]:
    """Lists the files directly in a folder that is no link, hidden ones included, by
    name.
    """
    fs, full = location.filesystem(folder)
    if location.local_path and os.path.islink(full):
        return []
    entries = location.request("list", folder, partial(clients.ls, fs, full))
    files = [(name, e) for name, e in entries if e["type"] != "directory"]
    return [
        _listed(f"{folder}/{name}", e) for name, e in sorted(files, key=itemgetter(0))
    ]


def list_folders(location: Location) -> list[str]:
    """Lists the names of the folders in a place."""
    fs, full = location.filesystem()
    entries = location.request("list", "", partial(clients.ls, fs, full))
    return sorted(name for name, e in entries if e["type"] == "directory")


def is_unchanged(location: Location, files: Sequence[ListedFile]) -> bool:
    """Returns True if files are still those that were listed, by a look at each.

    Raises FileNotFoundError if the first one is gone; a request of the caller's
    retries.
    """
    fs, _ = location.filesystem()
    fs.invalidate_cache()
    for number, old in enumerate(files):
        try:
            now = _listed(old.path, fs.info(location.filesystem(old.path)[1]))
        except FileNotFoundError:
            if not number:
                raise
            return False
        same = all(
            old.marks.get(name, mark) == mark for name, mark in now.marks.items()
        )
        if (
            not now.marks
        ):  # the age of a file changes also when a second link to it is removed
            oldest = -1.0 if now.age is None else now.age + CLOCK_SECONDS
            same = old.age is None or old.age <= oldest
        if not same or now.bytes != old.bytes:
            return False
    return True


def _listed(path: str, entry: Mapping[str, Any]) -> ListedFile:
    names = (*VERSIONS, "ino", "mtime")
    marks = {name: str(entry[name]).strip('"') for name in names if entry.get(name)}
    return ListedFile(path, int(entry["size"] or 0), _age(entry), marks)


def uploads(location: Location) -> list[Upload] | None:
    """Lists unfinished uploads below a location, which only S3 keeps and bills; None
    elsewhere.
    """
    fs, full = location.filesystem("")
    if not clients.is_s3fs(fs):
        return None
    bucket, prefix, _ = fs.split_path(full.strip("/") + "/")
    query, listed = {"Bucket": bucket, "Prefix": prefix}, list[Upload]()
    while True:
        call = partial(fs.call_s3, "list_multipart_uploads", **query)
        page = location.request("list", "", call)
        for upload in page.get("Uploads", ()):
            path = upload["Key"].removeprefix(prefix)
            listed.append(
                Upload(path, _seconds_since(upload["Initiated"]), upload["UploadId"])
            )
        if not page.get("IsTruncated"):
            return listed
        query |= {
            f"{name}Marker": page[f"Next{name}Marker"] for name in ("Key", "UploadId")
        }


def abort_upload(location: Location, upload: Upload) -> None:
    """Aborts an unfinished upload, and frees its storage."""
    fs, full = location.filesystem(upload.path)
    bucket, key, _ = fs.split_path(full)
    target = {"Bucket": bucket, "Key": key, "UploadId": upload.id}
    call = partial(fs.call_s3, "abort_multipart_upload", **target)
    location.request("remove", upload.path, call)


def run_parallel(calls: Iterable[Callable[[], object]], at_once: int = AT_ONCE) -> None:
    """Runs all calls, `at_once` at a time; raises the first error once none is
    running.
    """
    with ThreadPoolExecutor(at_once, "packstore-store") as pool:
        list(pool.map(lambda call: call(), calls))


def remove_all(location: Location, paths: Iterable[str]) -> None:
    """Removes files, if they exist, in any order; raises like
    :meth:`Location.remove`.
    """
    run_parallel(partial(location.remove, path) for path in sorted(paths))


def remove_empty(location: Location, *folders: str) -> None:
    """Removes those of the folders that are empty, on a local disk."""
    root = location.local_path or ""
    for folder in folders if root else ():
        with contextlib.suppress(OSError):  # none, or not empty
            os.rmdir(os.path.join(root, folder))


def replace_bytes(location: Location, path: str, data: bytes) -> None:
    """Writes a small file atomically; replaces an existing one."""
    fs, full = location.filesystem(path)
    if local.is_local(fs):
        with location.guard("write", path):
            local.put_in_folder(full, partial(local.replace, full, data))
    else:
        location.request("write", path, partial(clients.put_bytes, fs, full, data))


def copy_file(source: Location, path: str, target: Location, to: str) -> bool:
    """Copies a file inside a store, replacing one at `to`; False for two different
    stores.
    """
    fs, full = source.filesystem(path)
    target_fs, target_path = target.filesystem(to)
    if local.is_local(fs) and local.is_local(target_fs):
        with target.guard("write", to):
            local.link(full, target_path)
        return True
    alike = (
        type(fs) is type(target_fs) and source.storage_options == target.storage_options
    )
    if not alike or not clients.creates_exclusively(
        fs
    ):  # other clients may differ in their root
        return False
    target.request("write", to, lambda: fs.cp_file(full, target_path))
    return True


@contextlib.contextmanager
def removing_empty_folders(location: Location) -> Iterator[None]:
    """Removes, after this context, empty local folders of the dataset that it
    created.
    """
    root = location.local_path or ""
    created: list[str] = []
    with location.guard("write"):
        for name in ("_packstore", "data") if root else ():
            created += local.make_folder(os.path.join(root, name))
    try:
        yield
    finally:
        remove_empty(location, *reversed(created))


def _age(entry: Mapping[str, Any]) -> float | None:
    """Returns the age by the latest timestamp: a linked or moved file keeps its
    `mtime`.
    """
    names = ("LastModified", "mtime", "last_modified", "updated", "created")
    ages = [_seconds_since(entry.get(name)) for name in names]
    return min((age for age in ages if age is not None), default=None)


def _seconds_since(when: Any) -> float | None:
    """Returns the seconds since a timestamp of any filesystem's type; None if it has
    none.
    """
    if isinstance(when, str):
        with contextlib.suppress(ValueError):
            when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        when = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return (
        max(0.0, time.time() - float(when)) if isinstance(when, int | float) else None
    )
