"""Finds and removes files that no version of a dataset refers to.

These are leftovers of killed jobs, and old versions. Only their age protects the files that a
running job has not committed yet, so files younger than `older_than` are never removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packstore.errors import ConfigError, DatasetBusyError, DatasetNotFoundError, sentence
from packstore.io.maintain.leftovers import Leftover, LeftoverFinder
from packstore.io.manifest.commit import DATA, FOLDER
from packstore.io.manifest.partition_notes import NOTES
from packstore.io.store.location import Location
from packstore.io.store.operations import list_folder
from packstore.io.write.writer_markers import WRITERS, writers

__all__ = ["OLD_SECONDS", "CleanReport", "Leftover", "clean"]

OLD_SECONDS = 7 * 86_400.0
"""Seconds; longer than a job takes from its last write to its commit, retries included."""

_SHARD = re.compile(rf"{DATA}/\.?[0-9a-f]{{12}}(?:-p[0-9]+)?-[0-9]+-[0-9a-f]+\.(?:parquet|arrow)")

YOUNGEST_SECONDS = 3600.0
"""Seconds; a smaller `older_than` is allowed only with `no_writers`."""


@dataclass(frozen=True)
class CleanReport:
    """The result of :func:`clean`.

    Attributes:
        url: of the dataset, without secrets.
        leftovers: all files found; if `deleted`, those not spared were removed.
        deleted: True if called with `delete`.
        writer: the job that is writing there now, if any.
        lists_uploads: True if the store can list unfinished uploads.
    """

    url: str
    leftovers: Sequence[Leftover]
    deleted: bool
    writer: str | None
    lists_uploads: bool

    @property
    def removable(self) -> list[Leftover]:
        """Returns the leftovers that are not spared."""
        return [x for x in self.leftovers if not x.spared]


def clean(
    url: str,
    *,
    delete: bool = False,
    keep_versions: int | None = None,
    older_than: float = OLD_SECONDS,
    no_writers: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> CleanReport:
    """Lists or removes files that no version of a dataset or side dataset refers to.

    May run while jobs write, and several times at once. Reads the versions again right before it
    removes anything.

    Args:
        url: a local folder or an fsspec URL.
        delete: remove the files; by default they are only listed.
        keep_versions: number of newest versions to keep, besides versions replaced less than
            `older_than` ago; None: keep all.
        older_than: seconds; spares younger files and files of unknown age. All files of a run
            count as young as the youngest of them. Below 3600 only with `no_writers`.
        no_writers: asserts that no job writes there, on any machine. Allows any `older_than`; if
            the assertion is wrong, a running job may commit a version that lacks files.
        storage_options: options of the fsspec filesystem.

    Raises:
        ConfigError: `keep_versions` below 1; a small `older_than` without `no_writers`.
        DatasetBusyError: `no_writers`, but a job of this machine is writing there.
        DatasetNotFoundError: no dataset is there, nor an unfinished one.
        FormatError: a manifest is not valid, so its files are not known.
        StorageError: the store refuses.
    """
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1; found {keep_versions}.")
    if older_than < YOUNGEST_SECONDS and not no_writers:
        must = f"older_than must be at least {YOUNGEST_SECONDS:.0f} s, as a job may be at work"
        do = "Where surely none is, anywhere, add no_writers=True (--no-writers)"
        raise ConfigError(f"{must}; found {older_than:g} s. {do}.")
    location = Location(url, storage_options or {})
    if not _is_ours(location):
        must = "must be a dataset, or the place of an unfinished one"
        found = f"no {FOLDER} in it" if location.exists() else "no such folder"
        raise DatasetNotFoundError(sentence(location.display, must, found, "Check the path"))
    finder = LeftoverFinder(location, keep_versions, older_than)
    at_work = writers(location)
    if delete and no_writers and (here := [w for w in at_work if w.process.lives]):
        must = "no job may write there (no_writers)"
        found, do = here[0].text, "Wait for it to end, or leave out no_writers (--no-writers)"
        raise DatasetBusyError(sentence(location.display, must, found, do))
    leftovers = finder.find()
    if delete:
        finder.remove([x for x in leftovers if not x.spared])
    writer = at_work[0].text if at_work else None
    return CleanReport(location.display, leftovers, delete, writer, finder.uploads is not None)


def _is_ours(location: Location) -> bool:
    """Returns True if packstore has written there: a ``data`` folder may be another program's.

    A first job that failed leaves only shards.
    """
    if any(list_folder(location, folder) for folder in (FOLDER, *NOTES, WRITERS)):
        return True
    data = list_folder(location, DATA)
    return bool(data) and all(_SHARD.fullmatch(file.path) for file in data)
