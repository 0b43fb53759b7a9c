"""Files on the local disk that appear whole, never replace, and survive a power cut."""

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
    """Whether a filesystem is that of the machine itself."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def only_regular(path: str) -> str:
    """`path`, unless a device or pipe is there, which may give bytes without end, or wait for them.

    A link is followed: caches of downloads are made of them, and hashes tell what may be read.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a device or pipe where a file must be")
    return path


def read_part(path: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file, fewer if it is shorter: one system call for most."""
    handle = os.open(path, os.O_RDONLY)
    try:
        data = b""
        while more := os.pread(handle, end - start - len(data), start + len(data)):
            data += more
        return data
    finally:
        os.close(handle)


def will_read(path: str, start: int, end: int) -> None:
    """Has the system fetch bytes `start` to `end` of a file from its disk, without waiting."""
    if not hasattr(os, "posix_fadvise"):
        return
    handle = os.open(only_regular(path), os.O_RDONLY)
    try:
        os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(handle)


def map_part(path: str, start: int, end: int) -> memoryview:
    """Bytes `start` to `end` of a file, as a view of the page cache.

    All pages are mapped at once: one by one they would cost more than copying them.

    Raises:
        OSError: the file cannot be opened.
        IntegrityError: it is too short; its pages could not be touched.
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
    """Makes a folder and those above it; raises NotADirectoryError if a file stands there."""
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(folder) from error


def in_its_folder(full: str, put: Callable[[], None]) -> None:
    """Makes the folder of a file, and calls `put`; again if a job that ends has just removed it."""
    for last in (False, False, True):
        make_folder(os.path.dirname(full))
        try:
            return put()
        except FileNotFoundError:
            if last:
                raise
    return None


def create(full: str, data: bytes) -> None:
    """A temporary file, linked to its name: link refuses to replace, and readers see it whole."""
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
            os.unlink(path)  # ours: it was not there; half a manifest would close the dataset
            raise


def _rename_new(source: str, target: str) -> bool:
    """Renames a file unless the new name is taken; False where the system cannot do that."""
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
    """Closes a file that is complete; with `durable` it survives a power cut."""
    file.flush()
    if durable:
        os.fsync(file.fileno())
    file.close()


def sync_folder(folder: str) -> None:
    """Makes a rename or link survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
