"""Writes local files in one step, never over another file, and durable across a power
cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from typing import IO, Any

from packstore.errors import IntegrityError


def is_local(fs: Any) -> bool:
    """Returns True for the local filesystem."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def require_regular_file(path: str) -> str:
    """Returns `path`; raises for a device or pipe, which may block or never end."""
    mode = os.stat(path).st_mode  # follows links: download caches consist of them
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a device or pipe where a file must be")
    return path


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def advise_will_read(path: str, start: int, end: int) -> None:
    """Makes the system prefetch bytes `start` to `end` of a file from disk; does not
    wait.
    """
    if hasattr(os, "posix_fadvise"):
        with _opened(require_regular_file(path)) as handle:
            os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_WILLNEED)


def map_part(path: str, start: int, end: int) -> memoryview:
    """Returns bytes `start` to `end` of a file, as a view of the page cache."""
    aligned = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with _opened(require_regular_file(path)) as handle:
        size = os.fstat(handle).st_size
        if size < end:  # access to missing pages would crash
            raise IntegrityError(
                f"must have at least {end} bytes; found only {size} bytes"
            )
        # All pages at once: faults one by one would cost more than a copy.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        view = mmap.mmap(handle, end - aligned, flags, mmap.PROT_READ, offset=aligned)
    return memoryview(view)[start - aligned :]


def make_folder(path: str) -> list[str]:
    """Creates a folder and its parents, durably; returns the new ones,
    outermost first.
    """
    if os.path.isdir(path):
        return []
    parent = os.path.dirname(os.path.abspath(path))
    created = make_folder(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(path) from None
        return created
    sync_folder(parent)
    return [*created, path]


def put_in_folder(full: str, put: Callable[[], None]) -> None:
    """Creates the folder of a file and calls `put`; repeats if an ending job has
    removed it.
    """
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            make_folder(os.path.dirname(full))
            return put()
    make_folder(os.path.dirname(full))
    return put()


class UnsyncedError(OSError):
    """A new file is there, whole, but its folder could not be synced."""


def create(full: str, data: bytes) -> None:
    """Writes a temporary file and links it: link never replaces, and readers see it
    complete.
    """
    temporary = _temporary_name(full)
    try:
        _write_new(temporary, data)
        if not (_link_new(temporary, full) or _rename_new(temporary, full)):
            _write_new(full, data)  # still one winner, but not in one step
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    try:
        sync_folder(os.path.dirname(full))
    except OSError as error:
        raise UnsyncedError(error.errno, error.strerror) from error


def replace(full: str, data: bytes) -> None:
    """Writes a file in one step, over an existing one, but not durably."""
    temporary = _temporary_name(full)
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, full)


def link(source: str, target: str) -> None:
    """Links or copies a file to `target`, in one step and durably; replaces a file
    there.
    """
    make_folder(os.path.dirname(target))
    temporary = _temporary_name(target)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(temporary, target)
    with contextlib.suppress(
        FileNotFoundError
    ):  # rename does nothing for links to the same file
        os.unlink(temporary)
    sync_folder(os.path.dirname(target))


def _temporary_name(full: str) -> str:
    """Returns a random hidden name in the folder of a file."""
    folder, name = os.path.split(full)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex}")


def _write_new(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        try:
            file.write(data)
            finish_file(file, durable=True)
        except BaseException:
            os.unlink(path)  # ours; half a manifest would make the dataset unreadable
            raise


def _link_new(source: str, target: str) -> bool:
    """Links a file under a new name; returns False if the filesystem has no
    hard links.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _rename_new(source: str, target: str) -> bool:
    """Renames a file unless the new name is taken; returns False if the system
    cannot.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, no_replace = -100, 1  # AT_FDCWD, RENAME_NOREPLACE
    paths = here, os.fsencode(source), here, os.fsencode(target)
    done = rename is not None and rename(*paths, no_replace) == 0
    if rename is not None and not done and ctypes.get_errno() == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    return done


def finish_file(file: IO[bytes], durable: bool) -> None:
    """Closes a complete file; with `durable`, syncs it so that it survives a
    power cut.
    """
    file.flush()
    if durable:
        os.fsync(file.fileno())
    file.close()


def sync_folder(folder: str) -> None:
    """Syncs a folder, so that a rename or link in it survives a power cut."""
    with _opened(folder) as handle:
        os.fsync(handle)
