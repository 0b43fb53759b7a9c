"""Lists files that belong to no version to keep, and decides which can be removed.

Only the age by the store's timestamps decides: a file may belong to a job that is about to commit,
even if its marker looks dead. All files of a run count as young as the youngest of them, so that a
long job keeps its first files.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packstore.errors import PackstoreError
from packstore.io.manifest.commit import DATA, DATASET, FOLDER, manifest_path, versions
from packstore.io.manifest.manifest import read_manifest
from packstore.io.manifest.partition_notes import NOTES
from packstore.io.manifest.side_manifest import SIDE
from packstore.io.side.side_reader import open_side
from packstore.io.store.location import Location
from packstore.io.store.operations import (
    ListedFile,
    Upload,
    abort_upload,
    list_folder,
    remove_empty,
    run_parallel,
    uploads,
)
from packstore.io.store.staging import PREFIX
from packstore.io.write.writer_markers import WRITERS

BATCH = 1000
"""Files removed between two checks of versions and ages."""

_LOOK_SECONDS = 60.0
"""Seconds that a check stays valid: jobs may commit while a cleaner is suspended."""

_UPLOAD = "unfinished upload"
_MANIFEST = re.compile(rf"{FOLDER}/(?:{DATASET}|{SIDE})-[0-9]{{6,}}\.json")
_RUN = re.compile(r"(?:data|_packstore/(?:partitions|runs))/\.?([0-9a-f]{12})-.*")


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


class LeftoverFinder:
    """Lists and removes files that belong to no version to keep.

    Args:
        location: the dataset.
        keep: number of newest versions to keep; None: all.
        older_than: seconds; spares younger files and files of unknown age. 0: spares none.

    Attributes:
        uploads: unfinished uploads, as last listed; None if the store cannot list them.
    """

    def __init__(self, location: Location, keep: int | None, older_than: float) -> None:
        self._location, self._keep, self._older_than = location, keep, older_than
        self._known: dict[tuple[str, int], set[str]] = {}
        self._staying: set[str] = set()
        self._folders: set[str] = set()
        self._young: dict[str, float | None] = {}
        self.uploads: list[Upload] | None = None

    def find(self) -> list[Leftover]:
        """Lists all leftovers in order of removal: manifests first, notes last."""
        folder = list_folder(self._location, FOLDER)
        dropped = dict[str, str]()
        found = [*self._old_versions(DATASET, folder, dropped)]
        found += self._old_versions(SIDE, folder, dropped)
        data = list_folder(self._location, DATA)
        notes = [file for name in NOTES for file in list_folder(self._location, name)]
        self.uploads = uploads(self._location)
        begun = [ListedFile(u.path, 0, u.age) for u in self.uploads or ()]
        self._young = _youngest([*data, *notes, *begun])
        runs = {_run_of(file.path) for file in notes} - {None}
        others = [file for file in folder if not _MANIFEST.fullmatch(file.path)]
        for file in (*data, *others, *list_folder(self._location, WRITERS)):
            if file.path not in self._staying:
                why = dropped.get(file.path) or _why(file.path, runs)
                found.append(self._leftover(file, why))
        for file in sorted(set(begun)):
            run = _run_of(file.path)
            of_run = f" of the interrupted run {run}" if run in runs else ""
            found.append(self._leftover(file, _UPLOAD + of_run))
        found += self._staging_folders()
        for file in notes:
            run = _run_of(file.path)
            why = f"note of the interrupted run {run}" if run else "unfinished file"
            found.append(self._leftover(file, why))
        return list({item.path: item for item in found}.values())

    def remove(self, found: Sequence[Leftover]) -> None:
        """Removes leftovers that can still be removed: manifests first, notes last.

        Checks versions and ages again before each batch, as jobs may be running.
        """
        for _, items in itertools.groupby(sorted(found, key=_rank), _rank):
            waiting = list(items)
            while waiting:
                batch, waiting = waiting[:BATCH], waiting[BATCH:]
                going = {item.path for item in self.find() if not item.spared}
                known = [item for item in batch if item.path in going]
                waiting += self._remove_soon(known, time.time() + _LOOK_SECONDS)
        remove_empty(self._location, *NOTES, WRITERS)

    def _remove_soon(self, items: Sequence[Leftover], until: float) -> list[Leftover]:
        """Removes items until the time `until`; returns those left."""
        late: list[Leftover] = []

        def remove(item: Leftover) -> None:
            if until - _LOOK_SECONDS <= time.time() <= until:
                self._remove(item)
            else:
                late.append(item)

        run_parallel(partial(remove, item) for item in items)
        return late

    def _remove(self, item: Leftover) -> None:
        if item.path in self._folders:
            shutil.rmtree(self._location.join(item.path).local_path or "", ignore_errors=True)
        elif item.why.startswith(_UPLOAD):
            for upload in self.uploads or ():
                if upload.path == item.path:
                    abort_upload(self._location, upload)
        else:
            self._location.remove(item.path)

    def _old_versions(
        self, name: str, folder: Sequence[ListedFile], dropped: dict[str, str]
    ) -> Iterator[Leftover]:
        """Yields versions to remove; records the files of versions to keep, and of removed ones.

        The age of a version is that of its successor: until then it was the current one.
        """
        ages = {file.path: file.age for file in folder}
        sizes = versions(self._location, name)
        numbers = list(sizes)
        gone = numbers[: -self._keep] if self._keep else []
        for place, number in enumerate(numbers):
            if number in gone:
                successor = manifest_path(numbers[place + 1], name)
                spared = self._spared(ages.get(successor))
                path = manifest_path(number, name)
                yield Leftover(path, sizes[number], f"version {number}", spared)
                if not spared:
                    why = f"only of version {number}"
                    dropped |= dict.fromkeys(self._paths(name, number), why)
                    continue
            self._staying |= self._paths(name, number)

    def _paths(self, name: str, number: int) -> set[str]:
        """Returns the files of a version, which never change; empty if it was removed meanwhile."""
        key = (name, number)
        if key not in self._known:
            try:
                if name == SIDE:
                    where = self._location
                    manifest = open_side(where.url, where.storage_options, number).manifest
                    self._known[key] = {*manifest.files}
                else:
                    self._known[key] = {*read_manifest(self._location, number)[0].files}
            except PackstoreError:
                if number in versions(self._location, name):
                    raise
                return set()
        return self._known[key]

    def _leftover(self, file: ListedFile, why: str) -> Leftover:
        """Returns the leftover for a file; spared unless all files of its run are old."""
        age, run = file.age, _run_of(file.path)
        if run in self._young and age is not None:
            of_run = self._young[run]
            age = None if of_run is None else min(age, of_run)
        return Leftover(file.path, file.bytes, why, self._spared(age))

    def _spared(self, age: float | None) -> str:
        if self._older_than <= 0:
            return ""
        if age is None:
            return "its age is not known"
        return "it is too young" if age < self._older_than else ""

    def _staging_folders(self) -> Iterator[Leftover]:
        """Yields the folders of unfinished files in a local dataset; the newest file is its age."""
        root = self._location.local_path
        if root is None:
            return
        for folder in sorted(Path(root, FOLDER).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError):  # its job has just removed it
                stats = [path.lstat() for path in (folder, *folder.iterdir())]
                size = sum(stat.st_size for stat in stats[1:])
                age = max(0.0, time.time() - max(stat.st_mtime for stat in stats))
                listed = ListedFile(f"{FOLDER}/{folder.name}", size, age)
                self._folders.add(listed.path)
                yield self._leftover(listed, "unfinished files")


def _youngest(files: Sequence[ListedFile]) -> dict[str, float | None]:
    """Returns the age of the youngest file of each run; None if the age of one is unknown."""
    ages: dict[str, list[float | None]] = {}
    for file in files:
        if run := _run_of(file.path):
            ages.setdefault(run, []).append(file.age)
    known = {run: [age for age in of_run if age is not None] for run, of_run in ages.items()}
    return {run: min(known[run]) if len(known[run]) == len(ages[run]) else None for run in ages}


def _run_of(path: str) -> str | None:
    match = _RUN.fullmatch(path)
    return match[1] if match else None


def _why(path: str, runs: set[str | None]) -> str:
    if (run := _run_of(path)) in runs:
        return f"of the interrupted run {run}"
    if path.startswith(f"{WRITERS}/"):
        return "marker of a job"
    if path.rpartition("/")[2].startswith("."):
        return "unfinished file"
    return "no version and no note names it"


def _rank(item: Leftover) -> int:
    """Returns the rank in the order of removal, in which the rest stays valid if killed."""
    if _MANIFEST.fullmatch(item.path):
        return 0
    return 2 if item.path.startswith(tuple(f"{name}/" for name in NOTES)) else 1
