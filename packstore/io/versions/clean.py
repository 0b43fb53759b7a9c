"""Finds and removes *leftovers*, files that no version of a dataset names.

Killed jobs leave such files, and so do old versions that are no longer kept. A leftover
is *spared* if it may belong to a running job that has not committed yet: if it is
younger than jobs take, by the timestamps of the store. (The markers of jobs do not
count, as a suspended job looks dead.) Files with names that packstore never gives are
spared, too. All is checked again right before each removal. R1 to R6 are the rules of
"Removing" in ``schemas/annex-c-many-writers.md``.

All files of a *run* (a job, or an equal job that repeats it) have its name in their
paths, and count as young as the youngest of them. A *part* is a piece of a side dataset
(reference log-probs) that is not finished.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from packstore.errors import (
    ConfigError,
    DatasetBusyError,
    DatasetNotFoundError,
    PackstoreError,
    sentence,
)
from packstore.io.manifest.commit import (
    DATA,
    DATASET,
    FOLDER,
    SHARD,
    list_splits,
    list_versions,
    manifest_path,
    read_committed,
    splits_instead_of_dataset,
)
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.partition_notes import PARTITIONS
from packstore.io.manifest.side_manifest import (
    PART_FOLDER,
    SIDE,
    SideManifest,
    list_part_folders,
)
from packstore.io.store.location import Location
from packstore.io.store.operations import (
    ListedFile,
    Upload,
    abort_upload,
    is_unchanged,
    list_folder,
    list_folders,
    remove_empty,
    run_parallel,
    uploads,
)
from packstore.io.store.staging import PREFIX
from packstore.io.versions.write_job import WRITERS, Writer, list_writers

OLD_SECONDS = 7 * 86_400.0
"""Default of `older_than`: longer than a job takes from its last write to its commit,
retries included.
"""

YOUNGEST_SECONDS = 3600.0
"""A smaller `older_than` is allowed only with `no_writers`."""

BATCH = 1000
"""Maximum number of files removed between two looks at versions and ages (R4)."""

LOOK_SECONDS = 60.0
"""Maximum seconds between a look at versions and ages and a removal (R4)."""

_UPLOAD = "unfinished upload"
_FOREIGN = "not a name of packstore's"
_UNKNOWN_AGE = -1.0

_MANIFEST = rf"(?:{DATASET}|{SIDE})-(?:[0-9]{{6}}|[1-9][0-9]{{6,}})\.json"

# Folder -> names of the files that packstore makes there; both are patterns.
_NAMES_IN_FOLDER = {
    FOLDER: (
        rf"{_MANIFEST}|packs-[0-9]{{6,}}-[0-9a-f]{{16}}\.index"
        r"|\.packstore-[0-9a-f]{32}"
    ),
    WRITERS: r"[0-9a-f]{32}\.json",
    PARTITIONS: r"[0-9a-f]{12}-[0-9]{5,}\.json",
    rf"{PART_FOLDER}[0-9a-f]{{16}}": r"[0-9]{5}-[0-9a-f]{64}\.npz",
}
_PATHS = [SHARD.pattern, rf"{FOLDER}/{re.escape(PREFIX)}[a-z0-9_]{{8}}"]
for _folder, _name in _NAMES_IN_FOLDER.items():
    # A file is hidden, and has a random suffix, while it is written.
    _PATHS.append(rf"{_folder}/(?:{_name}|\.(?:{_name})\.[0-9a-f]{{32}})")
_PACKSTORE_PATH = re.compile("|".join(_PATHS))
_VERSION_PATH = re.compile(rf"{FOLDER}/{_MANIFEST}")
_RUN_PATH = re.compile(
    rf"(?:{DATA}|{PARTITIONS})/\.?(?P<run>[0-9a-f]{{12}})(?:-p(?P<partition>[0-9]+))?-.*"
    rf"|(?P<part_folder>{PART_FOLDER}[0-9a-f]{{16}})/.*"
)


@dataclass(frozen=True)
class Leftover:
    """A file, folder or upload that no version refers to.

    Attributes:
        path: relative to the dataset.
        bytes: its size; 0 for unfinished uploads, where it is unknown.
        why: description of the leftover.
        spared: reason to keep it; empty if it can be removed.
    """

    path: str
    bytes: int
    why: str
    spared: str = ""


@dataclass(frozen=True)
class CleanReport:
    """The result of :func:`clean`.

    Attributes:
        url: of the dataset, without secrets.
        leftovers: all leftovers, spared ones included; if `deleted`, those not spared
            were removed.
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
        """The leftovers that are not spared."""
        return [leftover for leftover in self.leftovers if not leftover.spared]


def clean(
    url: str,
    *,
    delete: bool = False,
    keep_versions: int | None = None,
    older_than: float = OLD_SECONDS,
    no_writers: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> CleanReport:
    """List or remove files that no version of a dataset or side dataset refers to.

    In a folder of the values that jobs wrote with the parts of a dataset, each of their
    side datasets is cleaned.

    May run while jobs write, and several times at once. Reads the versions again right
    before it removes anything.

    Args:
        url: a local folder or an fsspec URL.
        delete: remove the files; by default they are only listed.
        keep_versions: number of newest versions to keep, besides versions replaced less
            than `older_than` ago; None: keep all.
        older_than: minimum age in seconds of files to remove; files of unknown age are
            spared. All files of a run count as young as the youngest of them. Below
            3600 only with `no_writers`.
        no_writers: asserts that no job writes there, on any machine. Allows any
            `older_than`; if the assertion is wrong, a running job may commit a version
            that lacks files.
        storage_options: options of the fsspec filesystem.

    Returns:
        The leftovers, and the reasons for which some are spared.

    Raises:
        ConfigError: `keep_versions` below 1; a small `older_than` without `no_writers`.
        DatasetBusyError: `no_writers`, but a job of this machine is writing there.
        DatasetNotFoundError: no dataset is there, nor an unfinished one.
        FormatError: a manifest is not valid, or of a later release, so that the files
            it names are not known.
        StorageError: the store refuses.
    """
    _check_settings(keep_versions, older_than, no_writers)
    location = Location(url, storage_options or {})
    clean_folder = partial(
        _clean_folder,
        delete=delete,
        keep_versions=keep_versions,
        older_than=older_than,
        no_writers=no_writers,
    )
    if _has_packstore_files(location):
        return clean_folder(location)
    part_folders = sorted(list_part_folders(location))
    if not part_folders:
        raise _not_found(location)
    reports = {name: clean_folder(location.join(name)) for name in part_folders}
    return _joined(reports, location)


def _clean_folder(
    location: Location,
    *,
    delete: bool,
    keep_versions: int | None,
    older_than: float,
    no_writers: bool,
) -> CleanReport:
    """Clean one place; see :func:`clean`."""
    writers = list_writers(location)
    if delete and no_writers:
        _require_none_running(writers, location.display)

    cleaner = _Cleaner(location, keep_versions, older_than)
    leftovers = cleaner.find()
    if delete:
        removable = [leftover for leftover in leftovers if not leftover.spared]
        reasons = cleaner.remove(removable)
        leftovers = [
            replace(leftover, spared=reasons.get(leftover.path, leftover.spared))
            for leftover in leftovers
        ]
    return CleanReport(
        url=location.display,
        leftovers=leftovers,
        deleted=delete,
        writer=writers[0].text if writers else None,
        lists_uploads=cleaner.uploads is not None,
    )


def _joined(reports: Mapping[str, CleanReport], location: Location) -> CleanReport:
    """Return one report of the folders of a place, by their names."""
    leftovers = [
        replace(leftover, path=f"{name}/{leftover.path}")
        for name, report in reports.items()
        for leftover in report.leftovers
    ]
    writers = [report.writer for report in reports.values() if report.writer]
    return CleanReport(
        url=location.display,
        leftovers=leftovers,
        deleted=any(report.deleted for report in reports.values()),
        writer=writers[0] if writers else None,
        lists_uploads=all(report.lists_uploads for report in reports.values()),
    )


def _check_settings(
    keep_versions: int | None, older_than: float, no_writers: bool
) -> None:
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1; found {keep_versions}.")
    if older_than < YOUNGEST_SECONDS and not no_writers:
        raise ConfigError(
            f"older_than must be at least {YOUNGEST_SECONDS:.0f} s, as a job may be at "
            f"work; found {older_than:g} s. Where surely none is, anywhere, add "
            "no_writers=True (--no-writers)."
        )


def _has_packstore_files(location: Location) -> bool:
    """Return True if packstore ever wrote to a place."""
    # A first job that failed leaves nothing but shards.
    folders = [DATA, FOLDER, WRITERS, PARTITIONS, *_part_folders(location)]
    for folder in folders:
        for file in list_folder(location, folder):
            if _PACKSTORE_PATH.fullmatch(file.path):
                return True
    return False


def _not_found(location: Location) -> DatasetNotFoundError:
    """Return the error for a place without a dataset, finished or not."""
    splits = list_splits(location)
    if splits:
        return splits_instead_of_dataset(location, splits)
    text = sentence(
        where=location.display,
        rule="must be a dataset, or the place of an unfinished one",
        found=f"no {FOLDER} in it" if location.exists() else "no such folder",
        remedy="Check the path",
    )
    return DatasetNotFoundError(text)


def _require_none_running(writers: Sequence[Writer], where: str) -> None:
    for writer in writers:
        if not writer.is_running:
            continue
        text = sentence(
            where=where,
            rule="no job may write there (no_writers)",
            found=writer.text,
            remedy="Wait for it to end, or leave out no_writers (--no-writers)",
        )
        raise DatasetBusyError(text)


class _Cleaner:
    """Lists and removes files that the versions to keep do not name.

    Attributes:
        uploads: unfinished uploads of the last listing; None if the store cannot list
            them.
    """

    def __init__(
        self, location: Location, keep_versions: int | None, older_than: float
    ) -> None:
        self._location = location
        self._keep_versions = keep_versions
        self._older_than = older_than

        # Prefix of manifests -> path of a file -> the newest version that names it. A
        # place may hold a dataset and a side dataset, each with versions of its own.
        self._newest_version: dict[str, dict[str, int]] = {DATASET: {}, SIDE: {}}
        self._versions_read: set[tuple[str, int]] = set()
        self._listed: dict[str, ListedFile] = {}
        self.uploads: list[Upload] | None = None

    def find(self) -> list[Leftover]:
        """Return leftovers in order of removal: manifests first, notes last (R5)."""
        # Files are listed before the versions: a file that is committed in between has
        # a name in a version that is read below.
        listing = _list_place(self._location)
        self._listed = {file.path: file for file in listing.files}
        self.uploads = listing.uploads
        age_of_runs = _youngest_by_run(listing.files_of_runs)

        leftovers: dict[str, Leftover] = {}
        paths_of_versions: set[str] = set()
        for name in (DATASET, SIDE):
            old_versions, paths = self._split_versions(name, listing.manifests)
            leftovers.update((version.path, version) for version in old_versions)
            paths_of_versions |= paths
        for file in listing.files:
            is_version = _VERSION_PATH.fullmatch(file.path) is not None
            if not is_version and file.path not in paths_of_versions:
                why = _why(file.path)
                leftovers[file.path] = self._leftover(file, why, age_of_runs)
        for file in listing.unfinished:
            leftovers[file.path] = self._leftover(file, _UPLOAD, age_of_runs)
        return list(leftovers.values())

    def _leftover(
        self, file: ListedFile, why: str, age_of_runs: Mapping[str, float]
    ) -> Leftover:
        """Return a file as a leftover, as young as the youngest file of its run."""
        if _PACKSTORE_PATH.fullmatch(file.path):
            age = min(_age(file), age_of_runs.get(_run_of(file.path), math.inf))
            spared = self._reason_to_spare(age)
        else:
            spared = _FOREIGN
        return Leftover(path=file.path, bytes=file.bytes, why=why, spared=spared)

    def _reason_to_spare(self, age: float) -> str:
        """Return the reason to keep a leftover of this age; empty if there is none."""
        if self._older_than <= 0 or age >= self._older_than:
            return ""
        return "its age is not known" if age < 0 else "it is too young"

    # Versions

    def _split_versions(
        self, name: str, manifests: Sequence[ListedFile]
    ) -> tuple[list[Leftover], set[str]]:
        """Return the versions not to be kept, and the files of all that stay (R1).

        Args:
            name: prefix of the names of the manifests.
            manifests: all files of the folder of manifests.
        """
        sizes = list_versions(self._location, name)  # version -> bytes, oldest first
        old_versions = self._old_versions(name, sizes, manifests)

        # Spared versions are behind removable ones in the list, as they are newer.
        num_removable = sum(not version.spared for version in old_versions)
        staying_versions = list(sizes)[num_removable:]
        for number in staying_versions:
            self._read_version(name, number, sizes)

        # All versions from the oldest on stay, so a file stays if the newest version
        # that names it is not older. (An earlier look may have read older versions.)
        oldest = min(staying_versions, default=0)
        newest_versions = self._newest_version[name]
        paths = {path for path, newest in newest_versions.items() if newest >= oldest}
        return old_versions, paths

    def _old_versions(
        self, name: str, sizes: Mapping[int, int], manifests: Sequence[ListedFile]
    ) -> list[Leftover]:
        """Return the versions that are not among the newest to keep, oldest first."""
        if self._keep_versions is None:
            return []
        ages = {file.path: _age(file) for file in manifests}
        numbers = list(sizes)

        old_versions = []
        spared = ""
        for index, number in enumerate(numbers[: -self._keep_versions]):
            # The age of a version is the age of its successor: until then it was the
            # current one (R3). All versions behind a spared one are spared, too.
            if not spared:
                successor = manifest_path(numbers[index + 1], name)
                spared = self._reason_to_spare(ages.get(successor, _UNKNOWN_AGE))
            version = Leftover(
                path=manifest_path(number, name),
                bytes=sizes[number],
                why=f"version {number}",
                spared=spared,
            )
            old_versions.append(version)
        return old_versions

    def _read_version(self, name: str, number: int, sizes: Mapping[int, int]) -> None:
        """Note the files of a version; none if it was removed meanwhile."""
        if (name, number) in self._versions_read:  # a version never changes
            return
        try:
            paths = self._paths_of_version(name, number, sizes)
        except PackstoreError:
            if self._location.exists(manifest_path(number, name)):
                raise
            return
        self._versions_read.add((name, number))
        newest_versions = self._newest_version[name]
        for path in paths:
            newest_versions[path] = max(number, newest_versions.get(path, 0))

    def _paths_of_version(
        self, name: str, number: int, sizes: Mapping[int, int]
    ) -> list[str]:
        text, where, _ = read_committed(self._location, number, name, sizes)
        if name == SIDE:
            return list(SideManifest.from_json(text, where).files)
        manifest = Manifest.from_json(text, where)
        manifest.require_writable(where)
        return list(manifest.files)

    # Removal

    def remove(self, leftovers: Sequence[Leftover]) -> dict[str, str]:
        """Remove leftovers.

        Returns:
            Path -> reason of the leftovers that turned out not to be removable.
        """
        spared: dict[str, str] = {}
        for stage in range(3):
            pending = [
                leftover
                for leftover in leftovers
                if _removal_stage(leftover.path) == stage
            ]
            while pending:
                batch = pending[:BATCH]
                pending = pending[BATCH:]
                removable = self._look_again(batch, spared)
                pending += self._remove_soon(removable, spared)
        remove_empty(
            self._location, PARTITIONS, WRITERS, *_part_folders(self._location)
        )
        return spared

    def _look_again(
        self, batch: Sequence[Leftover], spared: dict[str, str]
    ) -> list[Leftover]:
        """Return the leftovers that are still removable; add the others to `spared`."""
        current = {leftover.path: leftover for leftover in self.find()}

        removable = []
        for item in batch:
            leftover = current.get(item.path)
            if leftover is None:  # removed by somebody, or in a version by now
                continue
            if leftover.spared:
                spared[leftover.path] = leftover.spared
            else:
                removable.append(leftover)
        return removable

    def _remove_soon(
        self, items: Sequence[Leftover], spared: dict[str, str]
    ) -> list[Leftover]:
        """Remove leftovers; add the ones that changed to `spared`.

        Returns:
            Leftovers that have to be looked at again, as the last look is too long ago.
        """
        look_time = time.time()
        too_late: list[Leftover] = []

        def remove(item: Leftover) -> None:
            seconds = time.time() - look_time
            if not 0 <= seconds <= LOOK_SECONDS:  # below 0: the clock was set
                too_late.append(item)
            elif not self._remove(item):
                spared[item.path] = "it changed meanwhile"

        run_parallel(partial(remove, item) for item in items)
        return too_late

    def _remove(self, item: Leftover) -> bool:
        """Remove a leftover; return False if it is not the listed one any more (R6)."""
        if item.why == _UPLOAD:
            for upload in self.uploads or ():
                if upload.path == item.path:
                    abort_upload(self._location, upload)
            return True
        if item.path.startswith(f"{FOLDER}/{PREFIX}"):
            return self._remove_staging_folder(item.path)
        return self._remove_file(item.path)

    def _remove_staging_folder(self, path: str) -> bool:
        """Remove a folder of unfinished files, unless its job has written meanwhile."""
        ages = {file.path: _age(file) for file in _list_staging_folders(self._location)}
        listed_age = _age(self._listed[path])
        if ages.get(path, math.inf) < listed_age:
            return False
        folder = self._location.join(path).local_path or ""
        shutil.rmtree(folder, ignore_errors=True)
        return True

    def _remove_file(self, path: str) -> bool:
        """Remove a file, unless it or the note of its partition has changed.

        A rerun that reuses an old shard first writes the note of its partition anew,
        and removes it after the commit. So a note that has changed or is gone means
        that the shard is in use.
        """
        unchanged_files = [self._listed[path]]
        match = _RUN_PATH.fullmatch(path)
        if match is not None:
            note = f"{PARTITIONS}/{match['run']}-{match['partition']}.json"
            if note in self._listed:
                unchanged_files.append(self._listed[note])
        condition = partial(is_unchanged, self._location, unchanged_files)
        return self._location.remove(path, condition)


# Files of a place


@dataclass(frozen=True)
class _Listing:
    """The files of a place.

    Attributes:
        shards: files of the folder ``data``.
        manifests: files of the folder of manifests, pack indices included.
        markers: markers of jobs.
        staged: folders of unfinished files; local places only.
        notes: notes of partitions.
        parts: files of unfinished side datasets.
        uploads: unfinished uploads; None if the store cannot list them.
    """

    shards: list[ListedFile]
    manifests: list[ListedFile]
    markers: list[ListedFile]
    staged: list[ListedFile]
    notes: list[ListedFile]
    parts: list[ListedFile]
    uploads: list[Upload] | None

    @property
    def files(self) -> list[ListedFile]:
        """All files, in order of removal (R5)."""
        return [
            *self.shards,
            *self.manifests,
            *self.markers,
            *self.staged,
            *self.notes,
            *self.parts,
        ]

    @property
    def unfinished(self) -> list[ListedFile]:
        """The unfinished uploads as files."""
        return [
            ListedFile(path=upload.path, bytes=0, age=upload.age)
            for upload in self.uploads or ()
        ]

    @property
    def files_of_runs(self) -> list[ListedFile]:
        """The files with the name of a run in their paths."""
        return [*self.shards, *self.notes, *self.unfinished, *self.parts]


def _list_place(location: Location) -> _Listing:
    manifests = list_folder(location, FOLDER)
    shards = list_folder(location, DATA)
    markers = list_folder(location, WRITERS)
    notes = list_folder(location, PARTITIONS)
    staged = list(_list_staging_folders(location))
    parts = []
    for folder in _part_folders(location):
        parts += list_folder(location, folder)
    return _Listing(
        shards=shards,
        manifests=manifests,
        markers=markers,
        staged=staged,
        notes=notes,
        parts=parts,
        uploads=uploads(location),
    )


def _part_folders(location: Location) -> list[str]:
    """Return the folders with parts of reference log-probs."""
    names = list_folders(location)
    return [name for name in names if _RUN_PATH.fullmatch(f"{name}/")]


def _list_staging_folders(location: Location) -> Iterator[ListedFile]:
    """Yield the folders of unfinished files in a local dataset.

    The age of a folder is the age of its newest file. If it holds files of others, with
    names that packstore never gives, these are yielded instead of the folder, which
    then stays.
    """
    root = location.local_path
    if root is None:
        return
    for folder in sorted(Path(root, FOLDER).glob(f"{PREFIX}*")):
        try:
            stats = {path.name: path.lstat() for path in folder.iterdir()}
            folder_stat = folder.lstat()
        except OSError:  # its job has just removed it
            continue
        newest = max(stat.st_mtime for stat in (folder_stat, *stats.values()))
        age = max(0.0, time.time() - newest)

        path = f"{FOLDER}/{folder.name}"
        foreign = [name for name in stats if not name.isdecimal()]
        for name in foreign:
            yield ListedFile(f"{path}/{name}", stats[name].st_size, age)
        if not foreign:
            size = sum(stat.st_size for stat in stats.values())
            yield ListedFile(path, size, age)


def _youngest_by_run(files: Sequence[ListedFile]) -> dict[str, float]:
    """Return run -> age of its youngest file."""
    ages: dict[str, float] = {}
    for file in files:
        run = _run_of(file.path)
        ages[run] = min(_age(file), ages.get(run, math.inf))
    return ages


def _age(file: ListedFile) -> float:
    """Return the age in seconds; `_UNKNOWN_AGE` if the store does not know it."""
    return _UNKNOWN_AGE if file.age is None else file.age


def _run_of(path: str) -> str:
    """Return the run that wrote a shard, a note or a part; the path for other files."""
    match = _RUN_PATH.fullmatch(path)
    if match is None:
        return path
    return match["run"] or match["part_folder"]


def _why(path: str) -> str:
    """Return a description of a file that no version names, for the report."""
    if path.startswith(f"{WRITERS}/"):
        return "marker of a job"
    if path.startswith(f"{PARTITIONS}/") and _RUN_PATH.fullmatch(path):
        return f"note of the interrupted run {_run_of(path)}"
    if path.rpartition("/")[2].startswith("."):
        return "unfinished file"
    return "no version names it"


def _removal_stage(path: str) -> int:
    """Return 0 for manifests, 2 for notes, 1 for all other files.

    Files are removed in this order, so that versions are valid after each stage (R5).
    """
    if _VERSION_PATH.fullmatch(path):
        return 0
    return 2 if path.startswith(f"{PARTITIONS}/") else 1
