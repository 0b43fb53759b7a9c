"""Checks by listings that all files of a version exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from packstore.errors import MissingFilesError, PackstoreError, StorageError, sentence, told
from packstore.io.manifest.commit import versions
from packstore.io.manifest.manifest import Manifest, read_manifest
from packstore.io.manifest.side_manifest import SideManifest
from packstore.io.store.location import Location


def _missing(location: Location, manifest: Manifest | SideManifest) -> str:
    """Describes the missing files of a manifest, from one listing for each folder; empty: none."""
    named, there = manifest.files, dict[str, int]()
    for folder in sorted({path.rpartition("/")[0] for path in named}):
        there |= {f"{folder}/{entry.name}": entry.size for entry in location.files(folder)}
    absent = [path for path, size in named.items() if there.get(path) != size]
    # A listing may be older than the file.
    paths = [path for path in absent if not _is_there(location, path, named[path])]
    files = f"{len(paths)} of its {len(named)} files"
    return f"{files} missing or of another size (first: {paths[0]})" if paths else ""


def require_files(location: Location, manifest: Manifest, version: int) -> None:
    """Refuses a version that lacks files.

    Raises:
        MissingFilesError: the text names a complete version, if there is one.
        StorageError: the store refuses.
    """
    if found := _missing(location, manifest):
        must = f"must have all files that version {version} names"
        do = f"{_whole_version(location, version)}, or pack it again with overwrite=True"
        raise MissingFilesError(sentence(location.display, must, found, do))


def require_committed(location: Location, manifest: Manifest | SideManifest, version: int) -> None:
    """Checks after a commit that the committed version is complete.

    Raises:
        MissingFilesError: the version is committed, but lacks files.
        StorageError: the store refuses.
    """
    if found := _missing(location, manifest):
        must = f"version {version}, which was just committed, must have all its files"
        do = "Somebody removed them meanwhile: make it again with overwrite=True (--overwrite)"
        raise MissingFilesError(sentence(location.display, must, found, do))


@contextlib.contextmanager
def naming_missing_files(location: Location, manifest: Manifest, version: int) -> Iterator[None]:
    """Turns the error of a missing file in this context into :class:`MissingFilesError`."""
    try:
        yield
    except StorageError as error:
        text = ""
        if error.is_missing:
            with contextlib.suppress(PackstoreError):
                if found := _missing(location, manifest):
                    whole = _whole_version(location, version)
                    text = f"{told(error)} Version {version} lacks files: {found}. {whole}."
        if not text:
            raise
        raise MissingFilesError(text) from error.__cause__


def _whole_version(location: Location, version: int) -> str:
    """Returns a complete version to open instead, for error texts."""
    for number in sorted(versions(location), reverse=True):
        with contextlib.suppress(PackstoreError):
            if number != version and not _missing(location, read_manifest(location, number)[0]):
                which = f"(version={number}, --version {number})"
                return f"Version {number} is whole: open that {which}"
    return "No other version is whole"


def _is_there(location: Location, path: str, size: int) -> bool:
    try:
        return location.size(path) == size
    except StorageError as error:
        if error.is_missing:
            return False
        raise
