"""Finds and removes what no version of a dataset refers to.

What a killed job left, and versions that nobody needs any more. A running job is never disturbed:
removing takes the lease (:mod:`packstore.io.lease`), which a writer holds, and files that no
journal explains are spared until they are old.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from packstore.errors import ConfigError, DatasetNotFoundError, sentence
from packstore.io.commit import DATASET, FOLDER, manifest_path, versions
from packstore.io.job import DATA
from packstore.io.journal import RUNS, Journal
from packstore.io.lease import LOCK, Lease, holder
from packstore.io.named import paths_of
from packstore.io.owned import SPILL, Abandoned, abandoned, state
from packstore.io.side_manifest import SIDE
from packstore.io.staging import ELSEWHERE, IN_DATASET
from packstore.io.storage import Location
from packstore.io.upkeep import Found, Upload, abort_upload, list_folder, together, uploads

OLD_SECONDS = 86_400.0
"""Files that no journal explains are spared for a day: a job of an older release may run."""

_UPLOAD = "unfinished upload"
_MANIFEST = re.compile(rf"{FOLDER}/(?:{DATASET}|{SIDE})-[0-9]{{6,}}\.json")


@dataclass(frozen=True)
class Leftover:
    """Something that no version refers to.

    Attributes:
        path: relative to the dataset; absolute for temporary folders elsewhere on this machine.
        bytes: what it takes; of an unfinished upload not known, 0.
        why: what it is.
        spared: why it stays, empty if it goes.
    """

    path: str
    bytes: int
    why: str
    spared: str = ""


@dataclass(frozen=True)
class CleanReport:
    """What :func:`clean` found.

    Attributes:
        url: of the dataset, without secrets.
        leftovers: what was found; those that are not spared were removed if `deleted`.
        deleted: whether it was asked to remove them.
        writer: who writes there now, if somebody does (then nothing is removed).
        lists_uploads: whether the store tells of unfinished uploads.
    """

    url: str
    leftovers: Sequence[Leftover]
    deleted: bool
    writer: str | None
    lists_uploads: bool

    @property
    def removable(self) -> list[Leftover]:
        """Those that go."""
        return [x for x in self.leftovers if not x.spared]


def clean(
    url: str,
    *,
    delete: bool = False,
    keep_versions: int | None = None,
    older_than: float = OLD_SECONDS,
    spill_dir: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CleanReport:
    """Lists what no version of a dataset or side dataset refers to, or removes it.

    Args:
        url: a local folder or an fsspec URL.
        delete: remove what is found; else nothing is touched.
        keep_versions: keep so many of the newest versions only; None: all.
        older_than: spare files that no journal explains for so many seconds.
        spill_dir: where jobs put temporary files; None: the system's folder.
        storage_options: what fsspec's filesystem takes.

    Raises:
        ConfigError: `keep_versions` below 1.
        DatasetBusyError: a job is writing there, and `delete` is asked for.
        DatasetNotFoundError: no dataset is there, nor an unfinished one.
        FormatError: a manifest is not valid, so what it names is not known.
        StorageError: the store refuses.
    """
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1; found {keep_versions}.")
    location = Location(url, storage_options or {})
    _refuse_other_places(location)
    survey = _Survey(location, keep_versions, older_than, spill_dir)
    if not delete:
        found = list(survey.leftovers())
        writer = holder(location)
        return CleanReport(location.display, found, False, writer, survey.uploads is not None)
    lease = Lease.acquire(location)
    try:
        found = [Leftover(f.path, f.bytes, "lease of a dead job") for f in lease.forgotten]
        found += survey.leftovers()
        survey.remove([x for x in found if not x.spared])
    finally:
        lease.release()
    return CleanReport(location.display, found, True, None, survey.uploads is not None)


def _refuse_other_places(location: Location) -> None:
    """Raises unless packstore has written there: nobody else's ``data`` is looked at."""
    if not list_folder(location, FOLDER) and not list_folder(location, RUNS):
        must = "must be a dataset, or the place of an unfinished one"
        found = f"no {FOLDER} in it" if location.exists() else "no such folder"
        raise DatasetNotFoundError(sentence(location.display, must, found, "Check the path"))


class _Survey:
    """Everything at a place that is not part of a version that stays."""

    def __init__(
        self, location: Location, keep: int | None, older_than: float, spill_dir: str | None
    ) -> None:
        self._location, self._keep, self._older_than = location, keep, older_than
        self._temporary = {spill_dir or tempfile.gettempdir(), tempfile.gettempdir()}
        self._journal = Journal(location)
        self.uploads: list[Upload] | None = None
        self._folders: set[str] = set()

    def leftovers(self) -> Iterator[Leftover]:
        """All of it; manifests first, journals last: in this order it may be removed."""
        named, dropped = set(), {}
        for name in (DATASET, SIDE):
            sizes = versions(self._location, name)
            numbers = list(sizes)
            gone = numbers[: -self._keep] if self._keep else []
            named |= paths_of(self._location, numbers[len(gone) :], name)
            for number in gone:
                for path in paths_of(self._location, [number], name):
                    dropped[path] = f"only of version {number}"
                yield Leftover(manifest_path(number, name), sizes[number], f"version {number}")
        runs = self._journal.runs()
        explained = {
            path: f"of the interrupted run {run}"
            for run in runs
            for path in self._journal.files_of(run)
        }
        for file in (*list_folder(self._location, DATA), *self._administration()):
            if file.path not in named:
                why = explained.get(file.path) or dropped.get(file.path) or self._run_of(file, runs)
                yield self._judged(file, why)
        yield from self._unfinished_uploads(runs)
        yield from self._folders_here()
        noted = {path: run for run in runs for path in self._journal.paths(run)}
        others = {f.path: f.bytes for f in list_folder(self._location, RUNS)}
        for path in sorted(others.keys() - noted.keys()):
            yield Leftover(path, others[path], "unfinished file")
        for path, run in noted.items():
            yield Leftover(path, others.get(path, 0), f"journal of the interrupted run {run}")

    def remove(self, found: Sequence[Leftover]) -> None:
        """Removes what was found: manifests first, journals last, and of each its head."""
        for _, items in itertools.groupby(sorted(found, key=_turn), _turn):
            together(partial(self._remove, item) for item in items)
        root = self._location.local_path
        if root is not None:
            with contextlib.suppress(OSError):  # none, or not empty
                os.rmdir(os.path.join(root, RUNS))

    def _remove(self, item: Leftover) -> None:
        if item.path in self._folders:
            _remove_local(item.path)
        elif item.why.startswith(_UPLOAD):
            for upload in self.uploads or ():
                if upload.path == item.path:
                    abort_upload(self._location, upload)
        else:
            self._location.remove(item.path)

    @staticmethod
    def _run_of(file: Found, runs: Mapping[str, object]) -> str:
        run = file.path.partition("/")[2].partition("-")[0]
        return f"of the interrupted run {run}" if run in runs else ""

    def _judged(self, file: Found, why: str) -> Leftover:
        """Files that nobody explains go when they are old."""
        name = file.path.rpartition("/")[2]
        if name.startswith("lease-"):
            why = "lease of a dead job"
        if why:
            return Leftover(file.path, file.bytes, why)
        if name.startswith(".") or re.search(r"\.json\.[0-9]+$", name):
            return Leftover(file.path, file.bytes, "unfinished file")
        young = file.age is None or file.age < self._older_than
        spared = "its age is not known" if file.age is None else "it is too young to tell"
        why = "no version and no journal names it"
        return Leftover(file.path, file.bytes, why, spared if young and self._older_than else "")

    def _administration(self) -> Iterator[Found]:
        """Files beside the manifests that may have to go."""
        dead = holder(self._location) is None
        for file in list_folder(self._location, FOLDER):
            name = file.path.rpartition("/")[2]
            if _MANIFEST.fullmatch(file.path):
                continue
            if name.startswith(LOCK):
                root = self._location.local_path
                if root is None or state(os.path.join(root, file.path)) == "held":
                    continue
            if name.startswith("lease-") and not dead:
                continue
            yield file

    def _unfinished_uploads(self, runs: Mapping[str, object]) -> Iterator[Leftover]:
        self.uploads = uploads(self._location)
        newest = {u.path: u for u in sorted(self.uploads or (), key=lambda u: -(u.age or 0))}
        for path, upload in sorted(newest.items()):
            file = Found(path, 0, upload.age)
            why = self._run_of(file, runs)
            text = f"{_UPLOAD} {why}".rstrip()
            yield Leftover(path, 0, text, self._judged(file, why).spared)

    def _folders_here(self) -> Iterator[Leftover]:
        """Temporary folders of dead jobs of this user on this machine."""
        root = self._location.local_path
        places = [(folder, prefix) for folder in self._temporary for prefix in (SPILL, ELSEWHERE)]
        if root is not None:
            places.append((os.path.join(root, FOLDER), IN_DATASET))
        found = {item for folder, prefix in places for item in abandoned(folder, prefix)}
        found |= {lock for folder in self._temporary for lock in _free_locks(folder)}
        for path, size in sorted(found):
            self._folders.add(path)
            yield Leftover(path, size, "temporary files of a dead job")


def _turn(item: Leftover) -> int:
    """When it is removed: what is left by a killed `clean` must still be explained."""
    if _MANIFEST.fullmatch(item.path):
        return 0
    journal = item.path.startswith(f"{RUNS}/")
    return 1 + journal + (journal and item.path.endswith("-head.json"))


def _free_locks(folder: str) -> Iterator[Abandoned]:
    """Lock files of dead jobs."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith(LOCK) and state(path) == "free":
            yield Abandoned(path, 0)


def _remove_local(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)
