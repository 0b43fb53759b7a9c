"""Opens folders with a side dataset for each part of a dataset.

``packstore pack`` and ``append`` write the values of a part's tokens before they commit
the part, as a side dataset in a subfolder named by the part's lineage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import PathLike
from typing import Any

from packstore.errors import CompatibilityError, sentence
from packstore.io.manifest.commit import list_versions
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.merge import parts_of
from packstore.io.manifest.side_manifest import (
    SIDE,
    list_part_folders,
    spans_of_lineages,
)
from packstore.io.side.side import Side, open_side
from packstore.io.store.location import Location

OPEN_AT_ONCE = 16
"""Side datasets opened concurrently."""


def open_sides(
    sources: Iterable[Side | str | PathLike[str]],
    manifest: Manifest,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Side]:
    """Open side datasets of a dataset.

    Args:
        sources: side datasets; their folders or URLs; or folders with a side dataset
            for each part of a dataset.
        manifest: manifest of the dataset.
        storage_options: options of the fsspec filesystems.

    Raises:
        DatasetNotFoundError: a folder has no side dataset.
        CompatibilityError: a folder has side datasets of other datasets only.
        FormatError: a manifest is not valid.
        StorageError: the store refuses.
    """
    sides: list[Side] = []
    for source in sources:
        if isinstance(source, Side):
            sides.append(source)
            continue
        location = Location(os.fspath(source), storage_options or {})
        lineages = list_part_folders(location)
        if lineages and not list_versions(location, SIDE):
            sides += _open_parts(location, lineages, manifest)
        else:
            sides.append(open_side(location.url, storage_options))
    return sides


def open_all_sides(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    version: int | None = None,
) -> list[Side]:
    """Open the side dataset at `url`, or those of all parts in the folder.

    Args:
        url: folder or URL of a side dataset, or of those of parts.
        storage_options: options of the fsspec filesystem.
        version: number of a version, of each side dataset; None: the current one.

    Raises:
        DatasetNotFoundError: there is no side dataset, or no such version.
        FormatError: a manifest is not valid.
        StorageError: the store refuses.
    """
    location = Location(url, storage_options or {})
    lineages = list_part_folders(location)
    if lineages and not list_versions(location, SIDE):
        return _open_folders(location, sorted(lineages), version)
    return [open_side(url, storage_options, version)]


def _open_parts(
    location: Location, lineages: Set[str], manifest: Manifest
) -> list[Side]:
    """Open the side datasets of a dataset, or of its parts.

    Args:
        location: the folder.
        lineages: names of its subfolders.
        manifest: manifest of the dataset.
    """
    folders = _lineages_to_open(lineages, manifest)
    if not folders:
        raise CompatibilityError(
            sentence(
                where=location.display,
                rule="it must have side data of the dataset, or of its parts",
                found=f"side data of {len(lineages)} others",
                remedy="Name the folder of this dataset's values",
            )
        )
    return _open_folders(location, folders)


def _open_folders(
    location: Location, names: Iterable[str], version: int | None = None
) -> list[Side]:
    """Open the side datasets in subfolders."""
    urls = [location.join(name).url for name in names]
    open_part = partial(
        open_side, storage_options=location.storage_options, version=version
    )
    with ThreadPoolExecutor(OPEN_AT_ONCE, "packstore-side") as pool:
        return list(pool.map(open_part, urls))


def _lineages_to_open(lineages: Set[str], manifest: Manifest) -> list[str]:
    """Return the lineages of the dataset or of its parts, in their order."""
    if manifest.lineage in lineages:
        return [manifest.lineage]
    part_lineages = list(dict.fromkeys(part.lineage for part in parts_of(manifest)))
    if lineages >= set(part_lineages):
        return part_lineages
    # A subfolder may be of several parts that were combined before. To look for these
    # takes time quadratic in the number of parts.
    return list(spans_of_lineages(lineages, manifest))
