"""Checks by listings that all files of a version exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from packstore.errors import MissingFilesError, PackstoreError, StorageError, sentence, told
from packstore.io.manifest.commit import versions
from packstore.io.manifest.manifest import Manifest, read_manifest
from packstore.io.manifest.side_manifest import SideManifest
from packstore.io.store.location import Location


class Lacking(NamedTuple):
    """The number of files of a version, and its missing files with their sizes."""

    named: int
    paths: list[str]

    @property
    def text(self) -> str:
        """Returns a summary for error texts."""
        files = f"{len(self.paths)} of its {self.named} files"
        return f"{files} missing or of another size (first: {self.paths[0]})"


def lacking(location: Location, manifest: Manifest | SideManifest) -> Lacking:
    """Returns the missing files of a manifest, from one listing for each folder.

    Raises:
        StorageError: the store refuses.
    """
    named = {shard.path: shard.bytes for shard in manifest.shards}
    if isinstance(manifest, Manifest) and manifest.pack_index is not None:
        named[manifest.pack_index.path] = manifest.pack_index.bytes
    there: dict[str, int] = {}
    for folder in sorted({path.rpartition("/")[0] for path in named}):
        there |= {f"{folder}/{entry.name}": entry.size for entry in location.files(folder)}
    absent = [path for path, size in named.items() if there.get(path) != size]
    # A listing may be older than the file.
    return Lacking(len(named), [p for p in absent if not _is_there(location, p, named[p])])


def require_files(location: Location, manifest: Manifest, version: int) -> None:
    """Refuses a version that lacks files.

    Raises:
        MissingFilesError: the text names a complete version, if there is one.
        StorageError: the store refuses.
    """
    found = lacking(location, manifest)
    if found.paths:
        must = f"must have all files that version {version} names"
        do = f"{whole_version(location, version)}, or pack it again with overwrite=True"
        raise MissingFilesError(sentence(location.display, must, found.text, do))


def require_committed(location: Location, manifest: Manifest | SideManifest, version: int) -> None:
    """Checks after a commit that the committed version is complete.

    Raises:
        MissingFilesError: the version is committed, but lacks files.
        StorageError: the store refuses.
    """
    found = lacking(location, manifest)
    if found.paths:
        must = f"version {version}, which was just committed, must have all its files"
        do = "Somebody removed them meanwhile: make it again with overwrite=True (--overwrite)"
        raise MissingFilesError(sentence(location.display, must, found.text, do))


@contextlib.contextmanager
def explaining(location: Location, manifest: Manifest, version: int) -> Iterator[None]:
    """Turns the error of a missing file in this context into :class:`MissingFilesError`."""
    try:
        yield
    except StorageError as error:
        explained = _explained(error, location, manifest, version)
        if explained is None:
            raise
        raise explained from error.__cause__


def _explained(
    error: StorageError, location: Location, manifest: Manifest, version: int
) -> MissingFilesError | None:
    if not isinstance(error.__cause__, FileNotFoundError):
        return None
    with contextlib.suppress(PackstoreError):
        if (found := lacking(location, manifest)).paths:
            lacks = f"Version {version} lacks files: {found.text}"
            return MissingFilesError(f"{told(error)} {lacks}. {whole_version(location, version)}.")
    return None


def whole_version(location: Location, version: int) -> str:
    """Returns a complete version to open instead, for error texts."""
    for number in sorted(versions(location), reverse=True):
        with contextlib.suppress(PackstoreError):
            if (
                number != version
                and not lacking(location, read_manifest(location, number)[0]).paths
            ):
                return (
                    f"Version {number} is whole: open that (version={number}, --version {number})"
                )
    return "No other version is whole"


def _is_there(location: Location, path: str, size: int) -> bool:
    try:
        return location.size(path) == size
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
