"""The local filesystem: follows links, and writes files in one step and durably.

*In one step*: a reader sees the complete file or none, as it is written under a hidden
name first. *Durably*: it is synced with its folder, and survives a power cut.
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

from fsspec.implementations.local import LocalFileSystem

from packstore.errors import IntegrityError


def is_local(fs: Any) -> bool:
    """Return True for the local filesystem."""
    return isinstance(fs, LocalFileSystem)


class LinkFollowingFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's filesystem, with links taken for their targets.

    Its listings call a link "other", and its patterns enter no linked folder.
    """

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list[Any]:
        """List a folder; a link has the type of its target, "other" without one."""
        path = self._strip_protocol(path)
        if not os.path.isdir(path):
            return list(super().ls(path, detail=detail, **kwargs))
        if not detail:
            return [f"{path}/{name}" for name in os.listdir(path)]
        entries = []
        with os.scandir(path) as folder:
            for entry in folder:
                # A file may be removed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    entries.append(_entry_info(f"{path}/{entry.name}", entry))
        return entries

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: Any = "raise",
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Yield folder by folder.

        Raises:
            OSError: a folder cannot be listed (fsspec would leave it out), or holds
                itself (fsspec would read its files again and again).
        """
        real_path = os.path.realpath(path)
        ancestors = kwargs.pop("ancestors", ())
        if real_path in ancestors:
            raise OSError(errno.ELOOP, f"a link to a folder that it lies in, {path}")
        kwargs["ancestors"] = (*ancestors, real_path)
        yield from super().walk(path, maxdepth, topdown, "raise", **kwargs)


def _entry_info(path: str, entry: os.DirEntry[str]) -> dict[str, Any]:
    """Return the details of an entry that packstore reads.

    fsspec looks up all details, which takes several times as long, and makes a writer
    wait in a folder of many versions.
    """
    status = entry.stat(follow_symlinks=False)
    mode = status.st_mode
    size = status.st_size
    if entry.is_symlink():
        size = 0
        with contextlib.suppress(OSError):  # dangling, or a link to itself
            target = entry.stat()
            mode = target.st_mode
            size = target.st_size
    if stat.S_ISDIR(mode):
        kind = "directory"
    elif stat.S_ISREG(mode):
        kind = "file"
    else:
        kind = "other"
    return {
        "name": path,
        "type": kind,
        "size": size,
        "mtime": status.st_mtime,
        "created": status.st_ctime,
        "ino": status.st_ino,
        "islink": entry.is_symlink(),
    }


# Reading


def require_regular_file(path: str) -> str:
    """Return `path`; raise for a device or pipe, which may block or never end."""
    mode = os.stat(path).st_mode  # follows links: download caches consist of them
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a device or pipe where a file must be")
    return path


def read_part(path: str, start: int, end: int | None) -> bytes:
    """Read bytes `start` to `end` (None: the end) of a file."""
    length = -1 if end is None else end - start
    with open(require_regular_file(path), "rb") as file:
        file.seek(start)
        return file.read(length)


def advise_will_read(path: str, start: int, end: int) -> None:
    """Make the system prefetch bytes `start` to `end` of a file; do not wait."""
    if hasattr(os, "posix_fadvise"):
        with _open_handle(require_regular_file(path)) as handle:
            os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_WILLNEED)


def map_part(path: str, start: int, end: int) -> memoryview:
    """Return bytes `start` to `end` of a file, as a view of the page cache."""
    with _open_handle(require_regular_file(path)) as handle:
        size = os.fstat(handle).st_size
        if size < end:  # access to missing pages would crash
            raise IntegrityError(
                f"must have at least {end} bytes; found only {size} bytes"
            )
        aligned_start = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        view = mmap.mmap(
            handle,
            end - aligned_start,
            # All pages at once: faults one by one would cost more than a copy.
            flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0),
            prot=mmap.PROT_READ,
            offset=aligned_start,
        )
    return memoryview(view)[start - aligned_start :]


@contextlib.contextmanager
def _open_handle(path: str) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


# Folders


def make_folder(path: str) -> list[str]:
    """Create a folder and its parents, durably; return new ones, outermost first."""
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


def put_in_folder(path: str, put: Callable[[], None]) -> None:
    """Create the folder of the file `path`, and call `put`, which writes the file.

    Repeat it if the folder is gone: an ending job removes its empty folders.
    """
    folder = os.path.dirname(path)
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            make_folder(folder)
            put()
            return
    make_folder(folder)
    put()


def sync_folder(folder: str) -> None:
    """Sync a folder, so that a rename or link in it survives a power cut."""
    with _open_handle(folder) as handle:
        os.fsync(handle)


# Writing


class UnsyncedError(OSError):
    """A new file is complete, but its folder could not be synced."""


def create(path: str, data: bytes) -> None:
    """Write a new file in one step and durably; raise FileExistsError if it exists."""
    temporary = _temporary_path(path)
    try:
        _write_new(temporary, data)
        # A link never replaces a file, and readers see it complete.
        is_created = _link_new(temporary, path) or _rename_new(temporary, path)
        if not is_created:
            # Neither is supported: still only one writer wins, but not in one step.
            _write_new(path, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    try:
        sync_folder(os.path.dirname(path))
    except OSError as error:
        raise UnsyncedError(error.errno, error.strerror) from error


def replace(path: str, data: bytes) -> None:
    """Write a file in one step, over an existing one, but not durably."""
    temporary = _temporary_path(path)
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def link(source: str, target: str) -> None:
    """Link or copy a file in one step and durably; replace a file at `target`."""
    folder = os.path.dirname(target)
    make_folder(folder)
    temporary = _temporary_path(target)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(temporary, target)
    # A rename does nothing if both names are links to the same file.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    sync_folder(folder)


def finish_file(file: IO[bytes], durable: bool) -> None:
    """Close a complete file; if `durable`, sync it to survive a power cut."""
    file.flush()
    if durable:
        os.fsync(file.fileno())
    file.close()


def _temporary_path(path: str) -> str:
    """Return a path with a random hidden name in the folder of the file `path`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex}")


def _write_new(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        try:
            file.write(data)
            finish_file(file, durable=True)
        except BaseException:
            # This call has created it; half a manifest would make a dataset unreadable.
            os.unlink(path)
            raise


def _link_new(source: str, target: str) -> bool:
    """Link a file under a new name; return False without hard links."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _rename_new(source: str, target: str) -> bool:
    """Rename a file unless the new name is taken; return False if that is unsupported.

    Python has no call for it: ``os.rename`` replaces a file.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    current_folder = -100  # AT_FDCWD
    no_replace = 1  # RENAME_NOREPLACE
    result = rename(
        current_folder,
        os.fsencode(source),
        current_folder,
        os.fsencode(target),
        no_replace,
    )
    if result == 0:
        return True
    if ctypes.get_errno() == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    return False
