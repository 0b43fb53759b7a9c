"""Versions of a dataset: numbered manifests, each of which appears in one step.

They lie in ``_packstore/`` as ``manifest-000001.json``, ``-000002`` and so on; the highest number
is the current one. Each is created only if its number is free, so that of several writers exactly
one commits, and a reader needs one listing and one read. Side datasets do the same under the name
``side`` (:mod:`packstore.io.side`).
"""

from __future__ import annotations

import contextlib
import re

from packstore.errors import (
    ConfigError,
    DatasetExistsError,
    DatasetNotFoundError,
    FormatError,
    sentence,
)
from packstore.io.seal import seal, unsealed
from packstore.io.storage import Location

FOLDER, DATA = "_packstore", "data"
"""Folders of a dataset: its versions and notes, and its shards."""
MAX_MANIFEST_BYTES = 256 << 20
"""A larger manifest is refused, on write and on read."""

DATASET = "manifest"
"""First part of the names of a dataset's manifests."""


def versions(location: Location, name: str = DATASET) -> dict[int, int]:
    """The committed versions of a dataset -> bytes of their manifest, oldest first."""
    pattern = re.compile(rf"{name}-([0-9]{{6,}})\.json")
    matches = ((pattern.fullmatch(e.name), e.size) for e in location.files(FOLDER))
    return dict(sorted((int(m.group(1)), size) for m, size in matches if m))


def read_committed(
    location: Location, version: int | None = None, name: str = DATASET
) -> tuple[bytes, str, int]:
    """The text of a manifest without its hash, its place for error texts, and its version.

    Raises:
        DatasetNotFoundError: nothing, or no such version, was committed there.
        FormatError: the manifest is too large.
        IntegrityError: it does not have the hash that it names.
    """
    sizes = versions(location, name)
    number = version if version is not None else max(sizes, default=0)
    if number not in sizes:
        raise _not_found(location, version, list(sizes), name)
    path = manifest_path(number, name)
    if sizes[number] > MAX_MANIFEST_BYTES:
        raise _too_large(location, path, sizes[number])
    where = location.join(path).display
    return unsealed(location.read_bytes(path), where), where, number


def require_exclusive(location: Location, single_writer: bool) -> None:
    """Refuses a place where two writers could both commit, unless there is but one.

    Args:
        location: the dataset.
        single_writer: no other job writes there meanwhile.

    Raises:
        ConfigError: exclusive creation is not proved of its filesystem.
    """
    if single_writer or location.creates_exclusively:
        return
    must = "only one writer at a time may commit there"
    found = "a filesystem that is not known to create a file only if it is absent"
    do = "Where no other job writes there, say so: single_writer=True (--single-writer)"
    raise ConfigError(sentence(location.display, must, found, do))


def refuse_existing(location: Location, overwrite: bool, name: str = DATASET) -> int:
    """The number that the next manifest will have.

    Raises:
        DatasetExistsError: a dataset is there, and `overwrite` is False.
    """
    current = max(versions(location, name), default=0)
    if current and not overwrite:
        raise DatasetExistsError(
            sentence(
                location.display,
                "must not hold a dataset yet",
                f"version {current} of one",
                "Name another place, or overwrite it (overwrite=True, --overwrite)",
            )
        )
    return current + 1


def commit(
    location: Location,
    data: bytes,
    overwrite: bool,
    name: str = DATASET,
    version: int | None = None,
) -> int:
    """Puts the text of a manifest, with its hash, if its number is still free.

    Args:
        location: the dataset.
        data: the text.
        overwrite: replace a dataset that is there.
        name: first part of the manifest's name.
        version: the number that :func:`refuse_existing` gave when the job began; None: the next.

    Returns:
        The number. If `version` has this very text already, an equal job was faster, or this put
        was sent twice: that is this version.

    Raises:
        DatasetExistsError: another writer was faster.
    """
    data = seal(data)
    following = refuse_existing(location, overwrite or version is not None, name)
    number = following if version is None else version
    path = manifest_path(number, name)
    if len(data) > MAX_MANIFEST_BYTES:
        raise _too_large(location, path, len(data))
    with contextlib.suppress(DatasetExistsError):
        if number == following:
            location.create_bytes(path, data)
            return number
    if version in versions(location, name) and location.read_bytes(path) == data:
        return number
    raise too_late(location)


def manifest_path(version: int, name: str = DATASET) -> str:
    """Path of a manifest in its dataset."""
    return f"{FOLDER}/{name}-{version:06d}.json"


def _not_found(
    location: Location, version: int | None, known: list[int], name: str
) -> DatasetNotFoundError:
    if known:
        return DatasetNotFoundError(
            sentence(location.display, f"must have version {version}", f"{known[0]} to {known[-1]}")
        )
    missing = not location.exists()
    found = "no such folder" if missing else f"no {FOLDER}/{name}-….json in it"
    command = "pack" if name == DATASET else "ref-logps"
    hint = "Check the path" if missing else f"Name the folder that `packstore {command}` wrote"
    what = "a dataset" if name == DATASET else f"a {name} dataset"
    return DatasetNotFoundError(sentence(location.display, f"must be {what}", found, hint))


def too_late(location: Location) -> DatasetExistsError:
    """The error of a writer that has lost against another."""
    return DatasetExistsError(
        sentence(
            location.display,
            "only one writer may commit at a time",
            "that another one just did",
            "Look at its dataset, then run again if it is not yours",
        )
    )


def _too_large(location: Location, path: str, size: int) -> FormatError:
    return FormatError(
        sentence(
            location.join(path).display,
            f"a manifest must have at most {MAX_MANIFEST_BYTES} bytes",
            str(size),
            "Write larger row groups (row_group_tokens)",
        )
    )
