"""Writes local files in one step, never over another file, and durable across a power cut."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import uuid
from collections.abc import Callable
from typing import IO, Any

from packstore.errors import IntegrityError


def is_local(fs: Any) -> bool:
    """Returns True for the local filesystem."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def only_regular(path: str) -> str:
    """Returns `path`; raises for a device or pipe, which may block or never end.

    Links are followed: download caches consist of them, and hashes check the bytes.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a device or pipe where a file must be")
    return path


def read_part(path: str, start: int, end: int) -> bytes:
    """Returns bytes `start` to `end` of a file, fewer if it is shorter; mostly one system call."""
    handle = os.open(path, os.O_RDONLY)
    try:
        data = b""
        while more := os.pread(handle, end - start - len(data), start + len(data)):
            data += more
        return data
    finally:
        os.close(handle)


def will_read(path: str, start: int, end: int) -> None:
    """Makes the system prefetch bytes `start` to `end` of a file from disk; does not wait."""
    if not hasattr(os, "posix_fadvise"):
        return
    handle = os.open(only_regular(path), os.O_RDONLY)
    try:
        os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(handle)


def map_part(path: str, start: int, end: int) -> memoryview:
    """Returns bytes `start` to `end` of a file, as a view of the page cache.

    Maps all pages at once: page faults one by one would cost more than a copy.

    Raises:
        OSError: the file cannot be opened.
        IntegrityError: it is too short; access to missing pages would crash.
    """
    aligned = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    handle = os.open(only_regular(path), os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        if size < end:
            raise IntegrityError(f"must have at least {end} bytes; found only {size} bytes")
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        view = mmap.mmap(handle, end - aligned, flags, mmap.PROT_READ, offset=aligned)
    finally:
        os.close(handle)
    return memoryview(view)[start - aligned :]


def make_folder(folder: str) -> None:
    """Creates a folder and its parents; raises NotADirectoryError if a file is in the way."""
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(folder) from error


def in_its_folder(full: str, put: Callable[[], None]) -> None:
    """Creates the folder of a file and calls `put`; repeats if an ending job has removed it."""
    for last in (False, False, True):
        make_folder(os.path.dirname(full))
        try:
            return put()
        except FileNotFoundError:
            if last:
                raise
    return None


def create(full: str, data: bytes) -> None:
    """Writes a temporary file and links it: link never replaces, and readers see it complete."""
    folder, name = os.path.split(full)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
    try:
        _write_new(temporary, data)
        try:
            os.link(temporary, full)
        except FileExistsError:
            raise
        except OSError:  # no hard links on this filesystem
            if not _rename_new(temporary, full):  # still one winner, but not in one step
                _write_new(full, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    sync_folder(folder)


def _write_new(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(path)  # ours; half a manifest would make the dataset unreadable
            raise


def _rename_new(source: str, target: str) -> bool:
    """Renames a file unless the new name is taken; returns False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, no_replace = -100, 1  # AT_FDCWD, RENAME_NOREPLACE
    if rename(here, os.fsencode(source), here, os.fsencode(target), no_replace) == 0:
        return True
    if ctypes.get_errno() == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    return False


def settle(file: IO[bytes], durable: bool) -> None:
    """Closes a complete file; with `durable`, syncs it so that it survives a power cut."""
    file.flush()
    if durable:
        os.fsync(file.fileno())
    file.close()


def sync_folder(folder: str) -> None:
    """Syncs a folder, so that a rename or link in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
