"""Finds and removes files that no version of a dataset names: of killed jobs, and of
old versions.

Only the age by the store's timestamps protects what a running job has not committed
yet, as a job whose marker looks dead may be suspended. Files that packstore does not
name so are kept, and right before its removal each file is looked at again. R1 to R6
are rules of ``schemas/format.md``.
"""

from __future__ import annotations

import contextlib
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
    list_versions,
    manifest_path,
    read_committed,
)
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.partition_notes import PARTITIONS
from packstore.io.manifest.side_manifest import PART_FOLDER, SIDE, SideManifest
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
from packstore.io.versions.write_job import WRITERS, writers

OLD_SECONDS = 7 * 86_400.0
"""Seconds; longer than a job takes from its last write to its commit, retries included.
"""

YOUNGEST_SECONDS = 3600.0
"""Seconds; a smaller `older_than` is allowed only with `no_writers`."""

BATCH, LOOK_SECONDS = 1000, 60.0
"""Files removed, and seconds, between two looks at versions and ages (R4)."""

_UPLOAD, _FOREIGN = "unfinished upload", "not a name of packstore's"
_MANIFEST = rf"(?:{DATASET}|{SIDE})-(?:[0-9]{{6}}|[1-9][0-9]{{6,}})\.json"
_NAMES = {
    FOLDER: (
        rf"{_MANIFEST}|packs-[0-9]{{6,}}-[0-9a-f]{{16}}\.index"
        r"|\.packstore-[0-9a-f]{32}"
    ),
    WRITERS: r"[0-9a-f]{32}\.json",
    PARTITIONS: r"[0-9a-f]{12}-[0-9]{5,}\.json",
    rf"{PART_FOLDER}[0-9a-f]{{16}}": r"[0-9]{5}-[0-9a-f]{64}\.npz",
}
"""Folder -> names of the files that packstore makes there; hidden while they are
written.
"""

_OWN = re.compile(
    rf"{SHARD.pattern}|{FOLDER}/{re.escape(PREFIX)}[a-z0-9_]{{8}}|"
    + "|".join(
        rf"{at}/(?:{name}|\.(?:{name})\.[0-9a-f]{{32}})" for at, name in _NAMES.items()
    )
)
_VERSION = re.compile(rf"{FOLDER}/{_MANIFEST}")
_RUN = re.compile(
    rf"(?:{DATA}|{PARTITIONS})/\.?([0-9a-f]{{12}})(?:-p([0-9]+))?-.*|({PART_FOLDER}[0-9a-f]{{16}})/.*"
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
        leftovers: all files found, also those of others, which are spared; if
            `deleted`, those not spared were removed.
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

    May run while jobs write, and several times at once. Reads the versions again right
    before it removes anything.

    Args:
        url: a local folder or an fsspec URL.
        delete: remove the files; by default they are only listed.
        keep_versions: number of newest versions to keep, besides versions replaced less
            than `older_than` ago; None: keep all.
        older_than: seconds; spares younger files and files of unknown age. All files of
            a run count as young as the youngest of them. Below 3600 only with
            `no_writers`.
        no_writers: asserts that no job writes there, on any machine. Allows any
            `older_than`; if the assertion is wrong, a running job may commit a version
            that lacks files.
        storage_options: options of the fsspec filesystem.

    Raises:
        ConfigError: `keep_versions` below 1; a small `older_than` without `no_writers`.
        DatasetBusyError: `no_writers`, but a job of this machine is writing there.
        DatasetNotFoundError: no dataset is there, nor an unfinished one.
        FormatError: a manifest is not valid, or of a later release: its files are not
            known.
        StorageError: the store refuses.
    """
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1; found {keep_versions}.")
    if older_than < YOUNGEST_SECONDS and not no_writers:
        rule = (
            f"older_than must be at least {YOUNGEST_SECONDS:.0f} s, as a job may "
            "be "
            "at work"
        )
        remedy = "Where surely none is, anywhere, add no_writers=True (--no-writers)"
        raise ConfigError(f"{rule}; found {older_than:g} s. {remedy}.")
    location = Location(url, storage_options or {})
    where = location.display
    if not _is_ours(location):
        rule = "must be a dataset, or the place of an unfinished one"
        found = f"no {FOLDER} in it" if location.exists() else "no such folder"
        raise DatasetNotFoundError(sentence(where, rule, found, "Check the path"))
    jobs = writers(location)
    if delete and no_writers and (here := [job for job in jobs if job.is_running]):
        remedy = "Wait for it to end, or leave out no_writers (--no-writers)"
        rule = "no job may write there (no_writers)"
        raise DatasetBusyError(sentence(where, rule, here[0].text, remedy))
    cleaner = _Cleaner(location, keep_versions, older_than)
    leftovers = cleaner.find()
    if delete:
        changed = cleaner.remove([x for x in leftovers if not x.spared])
        leftovers = [
            replace(x, spared=changed.get(x.path, x.spared)) for x in leftovers
        ]
    writer = jobs[0].text if jobs else None
    return CleanReport(where, leftovers, delete, writer, cleaner.uploads is not None)


def _is_ours(location: Location) -> bool:
    """Returns True if packstore wrote there; a first job that failed leaves only
    shards.
    """
    folders = (DATA, FOLDER, WRITERS, PARTITIONS)
    listed = (list_folder(location, folder) for folder in (*folders, *_parts(location)))
    return any(_OWN.fullmatch(file.path) for files in listed for file in files)


def _parts(location: Location) -> list[str]:
    """Returns the folders of the parts of log-probs."""
    return [name for name in list_folders(location) if _RUN.fullmatch(f"{name}/")]


class _Cleaner:
    """Lists and removes files that no version to keep names; `uploads`: as last
    listed.
    """

    def __init__(self, location: Location, keep: int | None, older_than: float) -> None:
        self._location, self._keep, self._older_than = location, keep, older_than
        # Prefix of manifests -> path -> the newest version that names it; and what was
        # read so far.
        self._newest: dict[str, dict[str, int]] = {DATASET: {}, SIDE: {}}
        self._read = set[tuple[str, int]]()
        self._listed = dict[str, ListedFile]()
        self.uploads: list[Upload] | None = None

    def find(self) -> list[Leftover]:
        """Lists all leftovers in order of removal: manifests first, notes last (R5)."""
        folder, data, jobs, notes = (
            list_folder(self._location, name)
            for name in (FOLDER, DATA, WRITERS, PARTITIONS)
        )
        staged = list(self._staging_folders())
        parts = [
            f
            for name in _parts(self._location)
            for f in list_folder(self._location, name)
        ]
        self._listed = {
            f.path: f for f in (*folder, *data, *jobs, *notes, *staged, *parts)
        }
        self.uploads = uploads(self._location)
        begun = [
            ListedFile(upload.path, 0, upload.age) for upload in self.uploads or ()
        ]
        youngest: dict[str, float] = {}
        for file in (*data, *notes, *begun, *parts):
            run = _run_of(file.path)
            youngest[run] = min(youngest.get(run, math.inf), _age(file))
        old, named = self._versions(folder)
        unnamed = [
            (file, _why(file.path))
            for file in (*data, *folder, *jobs, *staged, *notes, *parts)
            if file.path not in named and not _VERSION.fullmatch(file.path)
        ]
        unnamed += [(file, _UPLOAD) for file in begun]
        leftovers = {item.path: item for item in old}
        for file, why in unnamed:
            age = min(_age(file), youngest.get(_run_of(file.path), math.inf))
            spared = self._spared(age) if _OWN.fullmatch(file.path) else _FOREIGN
            leftovers[file.path] = Leftover(file.path, file.bytes, why, spared)
        return list(leftovers.values())

    def remove(self, leftovers: Sequence[Leftover]) -> dict[str, str]:
        """Removes leftovers; returns path and reason of those that may no longer be
        removed.
        """
        kept = dict[str, str]()
        for rank in range(3):
            waiting = [item for item in leftovers if _rank(item.path) == rank]
            while waiting:
                batch, waiting = waiting[:BATCH], waiting[BATCH:]
                found = {item.path: item for item in self.find()}
                going = [item for x in batch if (item := found.get(x.path))]
                kept |= {item.path: item.spared for item in going if item.spared}
                waiting += self._remove_soon(
                    [item for item in going if not item.spared], kept
                )
        remove_empty(self._location, PARTITIONS, WRITERS, *_parts(self._location))
        return kept

    def _remove_soon(
        self, items: Sequence[Leftover], kept: dict[str, str]
    ) -> list[Leftover]:
        """Removes items, unless they are new; returns those left once the look is too
        long ago.
        """
        looked, late = time.time(), list[Leftover]()

        def remove(item: Leftover) -> None:
            if not 0 <= time.time() - looked <= LOOK_SECONDS:
                late.append(item)
            elif not self._remove(item):
                kept[item.path] = "it changed meanwhile"

        run_parallel(partial(remove, item) for item in items)
        return late

    def _remove(self, item: Leftover) -> bool:
        """Removes a leftover that is still what was listed; returns False for another
        (R6).
        """
        if item.why == _UPLOAD:
            for upload in self.uploads or ():
                if upload.path == item.path:
                    abort_upload(self._location, upload)
            return True
        listed = self._listed[item.path]
        if item.path.startswith(f"{FOLDER}/{PREFIX}"):
            now = {file.path: _age(file) for file in self._staging_folders()}
            if now.get(item.path, math.inf) < _age(listed):
                return False
            shutil.rmtree(
                self._location.join(item.path).local_path or "", ignore_errors=True
            )
            return True
        # Who takes over an old shard puts its note anew, and removes it once that is
        # committed.
        run = _RUN.fullmatch(item.path)
        note = self._listed.get(f"{PARTITIONS}/{run[1]}-{run[2]}.json") if run else None
        watched = [listed] if note is None else [listed, note]
        return self._location.remove(
            item.path, partial(is_unchanged, self._location, watched)
        )

    def _versions(
        self, folder: Sequence[ListedFile]
    ) -> tuple[list[Leftover], set[str]]:
        """Returns the versions that are not to be kept, and the files of all that stay
        (R1).

        The age of a version is that of its successor: until then it was the current one
        (R3).
        """
        ages = {file.path: _age(file) for file in folder}
        old, named = list[Leftover](), set[str]()
        for name in (DATASET, SIDE):
            sizes = list_versions(self._location, name)
            numbers = list(sizes)
            first, spared = 0, ""  # of those that stay: all behind one that is spared
            for n, number in enumerate(numbers[: -self._keep] if self._keep else ()):
                spared = spared or self._spared(
                    ages.get(manifest_path(numbers[n + 1], name), -1)
                )
                first += not spared
                path = manifest_path(number, name)
                old.append(Leftover(path, sizes[number], f"version {number}", spared))
            for number in numbers[first:]:
                self._read_version(name, number, sizes)
            oldest, newest = min(numbers[first:], default=0), self._newest[name].items()
            named |= {path for path, last in newest if last >= oldest}
        return old, named

    def _read_version(self, name: str, number: int, sizes: Mapping[int, int]) -> None:
        """Notes the files of a version, which never change; none if it was removed
        meanwhile.
        """
        if (name, number) in self._read:
            return
        try:
            text, where, _ = read_committed(self._location, number, name, sizes)
            read = SideManifest if name == SIDE else Manifest
            manifest = read.from_json(text, where)
            if isinstance(manifest, Manifest):
                manifest.require_writable(where)
        except PackstoreError:
            if self._location.exists(manifest_path(number, name)):
                raise
            return
        self._read.add((name, number))
        for path in manifest.files:
            self._newest[name][path] = max(number, self._newest[name].get(path, 0))

    def _spared(self, age: float) -> str:
        if self._older_than <= 0 or age >= self._older_than:
            return ""
        return "its age is not known" if age < 0 else "it is too young"

    def _staging_folders(self) -> Iterator[ListedFile]:
        """Yields the folders of unfinished files in a local dataset; the newest file is
        its age.

        In place of a folder with files of others it yields these.
        """
        root = self._location.local_path
        if root is None:
            return
        for folder in sorted(Path(root, FOLDER).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError):  # its job has just removed it
                files = {path.name: path.lstat() for path in folder.iterdir()}
                age = time.time() - max(
                    s.st_mtime for s in (folder.lstat(), *files.values())
                )
                size, path = (
                    sum(stat.st_size for stat in files.values()),
                    f"{FOLDER}/{folder.name}",
                )
                foreign = [name for name in files if not name.isdecimal()]
                for name in foreign or ("",):
                    at = f"{path}/{name}" if name else path
                    yield ListedFile(
                        at, files[name].st_size if name else size, max(0.0, age)
                    )


def _age(file: ListedFile) -> float:
    """Returns the age in seconds; -1: unknown."""
    return -1 if file.age is None else file.age


def _run_of(path: str) -> str:
    """Returns the run that wrote a shard, a note or a part; the path itself for other
    files.
    """
    match = _RUN.fullmatch(path)
    return match[1] or match[3] if match else path


def _why(path: str) -> str:
    if path.startswith(f"{WRITERS}/"):
        return "marker of a job"
    if path.startswith(f"{PARTITIONS}/") and _RUN.fullmatch(path):
        return f"note of the interrupted run {_run_of(path)}"
    if path.rpartition("/")[2].startswith("."):
        return "unfinished file"
    return "no version names it"


def _rank(path: str) -> int:
    """Returns the rank in the order of removal, in which the rest stays valid if
    killed.
    """
    return 0 if _VERSION.fullmatch(path) else 1 + path.startswith(f"{PARTITIONS}/")
