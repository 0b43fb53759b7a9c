"""Files of a place on any store without packstore, and moments between a job and its
store.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from packstore.io.store import Location
from packstore.io.store.local import LinkFollowingFileSystem


class Files:
    """What lies at a URL, by its path there."""

    def __init__(self, url: str, **options: Any) -> None:
        self._fs, self._root = fsspec.url_to_fs(url, **options)

    def names(self) -> set[str]:
        return self.sizes().keys()

    def sizes(self) -> dict[str, int]:
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            found = self._fs.find(self._root, detail=True).items()
            sizes = {
                path[len(self._root) :].lstrip("/"): info["size"]
                for path, info in found
            }
            return {name: size for name, size in sizes.items() if name}
        return {}

    def all(self) -> dict[str, bytes]:
        return {name: self.read(name) for name in self.names()}

    def read(self, path: str) -> bytes:
        return self._fs.cat_file(self._full(path))

    def write(self, path: str, data: bytes) -> None:
        full = self._full(path)
        self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(full, data)

    def renew(self, path: str, seconds: float) -> None:
        """Makes a file so much younger: in a folder, or in memory."""
        if isinstance(self._fs, MemoryFileSystem):
            self._fs.store[self._full(path)].created += timedelta(seconds=seconds)
        else:
            when = Path(self._full(path)).stat().st_mtime + seconds
            os.utime(self._full(path), (when, when))

    def remove(self, path: str) -> None:
        self._fs.rm_file(self._full(path))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def manifest_path(version: int, name: str = "manifest") -> str:
    return f"_packstore/{name}-{version:06d}.json"


def edit_manifest(
    url: str | Path, change: Callable[[Any], object], path: str = manifest_path(1)
) -> None:
    """Changes a manifest; its hash goes, as whoever changes the one can change the
    other.
    """
    files = Files(str(url))
    value = json.loads(files.read(path))
    value.pop("sha256", None)
    change(value)
    files.write(path, json.dumps(value).encode())


def nothing(_: object) -> None: ...


def hook_listings(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[str], object] = nothing,
    change: Callable[[dict[str, Any]], object] = nothing,
) -> None:
    """Calls `before` with each folder that is listed, locally or in memory, and
    `change` with each entry.
    """

    def hooked(ls: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def hooked_ls(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
            before(path)
            entries = ls(self, path, *arguments, **options)
            for entry in entries:
                if isinstance(entry, dict):
                    change(entry)
            return entries

        return hooked_ls

    for kind in (LinkFollowingFileSystem, MemoryFileSystem):
        monkeypatch.setattr(kind, "ls", hooked(kind.ls))


@contextlib.contextmanager
def at_each(
    request: str,
    before: Callable[[str], object] = nothing,
    after: Callable[[str], object] = nothing,
) -> Iterator[list[str]]:
    """Calls these with the path of each ``create_bytes``, ``put_file`` or ``remove``.

    What they raise, the request raises. Yields the paths of those that were done. No
    store offers such moments, so packstore's own method is replaced; all other tests
    leave it alone.
    """
    real, done = getattr(Location, request), list[str]()

    def hooked(self: Location, *arguments: Any) -> Any:
        path = arguments[1] if request == "put_file" else arguments[0]
        before(path)
        answer = real(self, *arguments)
        done.append(path)
        after(path)
        return answer

    setattr(Location, request, hooked)
    try:
        yield done
    finally:
        setattr(Location, request, real)
