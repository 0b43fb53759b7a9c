"""Operations on stores for cleaning, committing and copying datasets."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from packstore.io.store import clients, local
from packstore.io.store.location import Location

AT_ONCE = 16
"""Concurrent small requests (removals)."""


class Found(NamedTuple):
    """A file of a listing: path in the dataset, bytes, and age in seconds if known."""

    path: str
    bytes: int
    age: float | None


class Upload(NamedTuple):
    """An unfinished multipart upload: its target path, age in seconds, and id."""

    path: str
    age: float | None
    id: str


def list_folder(location: Location, folder: str) -> list[Found]:
    """Lists the files directly in a folder of a dataset, hidden ones included, by name.

    Does not follow a link to a folder, which may belong to another program.
    """
    fs, full = location._at(folder)
    if location.local_path is not None and os.path.islink(full):
        return []

    def listed() -> list[dict[str, Any]]:
        fs.invalidate_cache()
        try:
            return list(fs.ls(full, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []

    # Some servers list an empty folder as a file in itself.
    entries = (
        e for e in location.ask("list", folder, listed) if e["name"].strip("/") != full.strip("/")
    )
    files = [e for e in entries if e["type"] != "directory"]
    names = [e["name"].rstrip("/").rsplit("/", 1)[-1] for e in files]
    found = (
        Found(f"{folder}/{n}", int(e["size"] or 0), _age(e))
        for n, e in zip(names, files, strict=True)
    )
    return sorted(found)


def together(calls: Iterable[Callable[[], object]], at_once: int = AT_ONCE) -> None:
    """Runs all calls, `at_once` at a time; raises the first error once none is running."""
    with ThreadPoolExecutor(at_once, "packstore-upkeep") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def remove_all(location: Location, paths: Iterable[str]) -> None:
    """Removes files, if they exist, in any order; raises like :meth:`Location.remove`."""
    together(partial(location.remove, path) for path in sorted(paths))


def replace_bytes(location: Location, path: str, data: bytes) -> None:
    """Writes a small file atomically; replaces an existing one."""
    root = location.local_path
    if root is None:
        fs, full = location._at(path)

        def put() -> None:
            clients.make_parent(fs, full)
            fs.pipe_file(full, data)

        location.ask("write", path, put)
        return
    full = os.path.join(root, path)
    with location.guard("write", path):
        local.in_its_folder(full, partial(_replace, full, data))


def _replace(full: str, data: bytes) -> None:
    temporary = _beside(full)
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, full)


def _beside(full: str) -> str:
    """Returns a random hidden name in the folder of a file."""
    folder, name = os.path.split(full)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex}")


def make_folder(path: str) -> list[str]:
    """Creates a local folder and its parents, durably; returns the new ones, outermost first."""
    if os.path.isdir(path):
        return []
    parent = os.path.dirname(os.path.abspath(path))
    made = make_folder(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(path) from None
        return made
    _sync(parent)
    return [*made, path]


def copy_file(source: Location, path: str, target: Location, to: str) -> bool:
    """Copies a file inside a store, server-side if possible; replaces a file at `to`.

    A local copy is a hard link if the disk supports them. Returns False, and does nothing, if the
    two locations are in different stores.
    """
    fs, full = source._at(path)
    other, there = target._at(to)
    if source.local_path is not None and target.local_path is not None:
        with target.guard("write", to):
            _link(full, there)
        return True
    alike = type(fs) is type(other) and source.storage_options == target.storage_options
    if not alike or not clients.creates_exclusively(fs):  # other clients may differ in their root
        return False
    target.ask("write", to, lambda: fs.cp_file(full, there))
    return True


def uploads(location: Location) -> list[Upload] | None:
    """Lists unfinished multipart uploads below a location; None if its store cannot."""
    if not clients.is_s3(location.url):
        return None
    root = location._open()[1].strip("/") + "/"
    return [
        Upload(u.path[len(root) :], _since(u.began), u.id)
        for u in location.unfinished_uploads()
        if u.path.startswith(root)
    ]


def abort_upload(location: Location, upload: Upload) -> None:
    """Aborts an unfinished upload, and frees its storage."""
    location.give_up(upload.path, upload.id)


@contextlib.contextmanager
def pruned(location: Location) -> Iterator[None]:
    """Removes, after this context, empty local folders of the dataset that it created."""
    root = location.local_path
    made: list[str] = []
    if root is not None:
        with location.guard("write"):
            made = make_folder(root)
            for name in ("_packstore", "data"):
                made += make_folder(os.path.join(root, name))
    try:
        yield
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _link(source: str, target: str) -> None:
    make_folder(os.path.dirname(target))
    temporary = _beside(target)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(temporary, target)
    with contextlib.suppress(FileNotFoundError):  # rename does nothing for links to the same file
        os.unlink(temporary)
    _sync(os.path.dirname(target))


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _age(entry: dict[str, Any]) -> float | None:
    """Returns the age by the latest timestamp: a linked or moved file keeps its `mtime`."""
    names = ("LastModified", "mtime", "last_modified", "updated", "created")
    ages = (_since(entry.get(name)) for name in names)
    return min((age for age in ages if age is not None), default=None)


def _since(when: Any) -> float | None:
    """Returns the seconds since a timestamp of any filesystem's type; None if it has none."""
    if isinstance(when, str):
        with contextlib.suppress(ValueError):
            when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        when = when.timestamp()
    return max(0.0, time.time() - float(when)) if isinstance(when, int | float) else None
