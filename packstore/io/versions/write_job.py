"""A job that writes the next version of a place.

1. Check that a dataset may be written there: its folders hold no files of others, and
   it would not lie inside another dataset. Choose the number of its manifest.
2. Write a *marker*, a small file that stands for the running job, and warn if another
   job has one.
3. Before the commit, check that every shard exists.
4. After the commit or an error, remove the marker. An error removes nothing else.

Of several running jobs, the first to write the manifest of that number commits. A job
that *extends* a dataset commits its shards behind the shards that are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from packstore.errors import (
    DatasetExistsError,
    PackstoreError,
    StorageError,
    quote,
    sentence,
)
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.commit import (
    DATA,
    DATASET,
    FOLDER,
    SHARD,
    commit,
    list_versions,
    next_version,
    require_committed,
    require_exclusive,
    require_files,
)
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.merge import Member, merge, require_mergeable
from packstore.io.shards.shard import ShardInfo
from packstore.io.store.location import Location
from packstore.io.store.operations import (
    list_folder,
    remove_empty,
    removing_empty_folders,
)

log = logging.getLogger("packstore")

WRITERS = f"{FOLDER}/writers"
"""Folder of markers. They only warn: the number of the manifest decides which job
commits.
"""

YOUNG_SECONDS = 3600.0
"""Maximum age of a marker from another machine, if its job counts as running; a job of
this machine counts as running as long as its process does.
"""


@contextlib.contextmanager
def writing(
    location: Location, overwrite: bool, call: str = "pack", name: str = DATASET
) -> Iterator[WriteJob]:
    """Open a job that writes the next version.

    Args:
        location: place of the dataset.
        overwrite: allow a dataset to be there; its versions stay, and the new version
            becomes the current one.
        call: name of the job, e.g. ``append``, in the warnings of other jobs.
        name: prefix of the names of its manifests.

    Raises:
        ConfigError: two writers could both commit there.
        DatasetExistsError: there is a version, or files of others, or the place lies in
            another dataset.
        StorageError: nothing can be written there.
    """
    require_exclusive(location)
    version = next_version(location, overwrite, name)
    if version == 1:
        _refuse_foreign(location)
    if version == 1 and name == DATASET:
        _refuse_inside_dataset(location)
    with removing_empty_folders(location), writer_marker(location, call):
        yield WriteJob(location, version)


class WriteJob:
    """The next version of a dataset.

    Attributes:
        version: number of the next manifest.
        extends: the dataset that comes first in the next version; None: the version
            has only packs of this job.
        committed: the version written by :meth:`commit`.
        has_committed: True if it is written, now or by an earlier run of the job.
    """

    extends: Dataset | None = None
    committed: Dataset
    has_committed: bool = False

    def __init__(self, location: Location, version: int) -> None:
        self.location = location
        self.version = version

    @classmethod
    def of_committed(cls, dataset: Dataset) -> WriteJob:
        """Return the job of a version that an earlier run has committed.

        A job of two datasets that was killed between its commits has one.
        """
        job = cls(dataset.location, dataset.version)
        job.committed = dataset
        job.has_committed = True
        return job

    def check_fits(
        self,
        kind: str,
        carry: Mapping[str, str],
        provenance: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Raise CompatibilityError if packs cannot be appended to the extended dataset.

        Args:
            kind: kind of the packs.
            carry: their carried columns, name -> type.
            provenance: returns their provenance, which may be slow to compute; called
                only if there is an extended dataset.
        """
        if self.extends is None:
            return
        manifest = self.extends.manifest
        # Compare two manifests that differ in kind, carried columns and tokenizer only.
        added_provenance = {
            **manifest.provenance,
            "tokenizer": provenance().get("tokenizer"),
        }
        added = replace(manifest, kind=kind, carry=carry, provenance=added_provenance)
        require_mergeable(
            Member(self.extends.url, manifest), Member("what is appended", added)
        )

    def extended_manifest(self, manifest: Manifest) -> Manifest:
        """Return the manifest to commit: the extended dataset, then this job's shards.

        Args:
            manifest: manifest of the packs of this job, but with the pack index of all
                packs.
        """
        if self.extends is None:
            return manifest
        url = self.extends.url
        merged = merge([Member(url, self.extends.manifest), Member(url, manifest)])
        return replace(merged, pack_index=manifest.pack_index)

    def has_inputs(self, provenance: Mapping[str, Any]) -> bool:
        """Return True if the extended dataset has all these inputs, by their hashes."""
        new_hashes = _input_hashes(provenance)
        return bool(new_hashes) and new_hashes <= _input_hashes(self._past_provenance)

    @property
    def _past_provenance(self) -> Mapping[str, Any]:
        """Provenance of the extended dataset; empty if there is none."""
        return self.extends.manifest.provenance if self.extends else {}

    def refuse_repeated_append(
        self, provenance: Mapping[str, Any], drops_duplicates: bool
    ) -> None:
        """Refuse to append files that the extended dataset has.

        Args:
            provenance: of the packs to append.
            drops_duplicates: records that the dataset has were dropped, so that new
                files may have such ones beside them.

        Raises:
            AppendedBefore: they are its last part, so there is nothing to do.
            DatasetExistsError: some are in it, in an earlier part, or under other
                settings.
        """
        repeated = _input_hashes(provenance) & _input_hashes(self._past_provenance)
        if not repeated:
            return
        if self.has_inputs(provenance):
            if self._was_appended_last(provenance):
                raise AppendedBefore("same input and settings")
            files = "these very ones, by the hash of the input"
            remedy = "To have them twice, pack them elsewhere and use concat"
        elif drops_duplicates:
            return
        else:
            paths = _paths_of(provenance, repeated)
            files = f"{len(paths):,} that are: {_first_of(paths)}"
            remedy = "Append the others alone, or drop what is in it (dedup=pair)"
        raise DatasetExistsError(
            sentence(
                where=self.location.display,
                rule="records that are appended must not be in it yet",
                found=files,
                remedy=remedy,
            )
        )

    def require_same_append(self, provenance: Mapping[str, Any]) -> None:
        """Raise DatasetExistsError if an interrupted append was of other records.

        It has extended this dataset, and not yet the other split.
        """
        if self._was_appended_last(provenance):
            return
        num_sources = self._past_provenance["combined_from"][-1]["sources"]
        sources = self._past_provenance["sources"][-num_sources:]
        paths = _first_of([str(source["path"]) for source in sources])
        raise DatasetExistsError(
            sentence(
                where=self.location.display,
                rule="an append that was interrupted must be completed first",
                found=f"that of {paths}",
                remedy="Append them again",
            )
        )

    def _was_appended_last(self, provenance: Mapping[str, Any]) -> bool:
        """Return True if the last part of the extended dataset has this lineage."""
        parts = self._past_provenance.get("combined_from")
        if not parts:
            return False
        return bool(parts[-1].get("lineage") == provenance.get("lineage"))

    def require_shards(self, shards: Iterable[ShardInfo]) -> None:
        """Raise MissingFilesError if a shard is gone, right before the commit."""
        files = {shard.path: shard.bytes for shard in shards}
        require_files(
            self.location,
            files,
            rule="its shards must stay while a job writes there",
            remedy="Run it again",
        )

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest under the number of this job, then check its files."""
        text = manifest.to_json()
        # Parse it again: one that readers refuse must fail here, as a committed
        # manifest cannot be corrected.
        as_read = Manifest.from_json(text, self.location.display)
        commit(self.location, text, self.version)
        require_committed(self.location, manifest.files, self.version)
        self.committed = Dataset(self.location, as_read, self.version)
        self.has_committed = True


class AppendedBefore(DatasetExistsError):
    """The dataset already has the records to append.

    Its argument is the evidence, e.g. ``same input and settings``.
    """


def _input_hashes(provenance: Mapping[str, Any]) -> set[str]:
    """Return the hashes of the inputs that have records."""
    return {source["sha256"] for source in _hashed_inputs(provenance)}


def _paths_of(provenance: Mapping[str, Any], hashes: Container[str]) -> list[str]:
    """Return the paths of the inputs with these hashes."""
    sources = _hashed_inputs(provenance)
    return [str(source["path"]) for source in sources if source["sha256"] in hashes]


def _first_of(paths: Sequence[str]) -> str:
    """Return the first three paths, and the number of the others, as text."""
    text = ", ".join(paths[:3])
    return text if len(paths) <= 3 else f"{text} and {len(paths) - 3:,} more"


def _hashed_inputs(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the inputs with records and a hash; files without records are equal."""
    sources = provenance.get("sources", ())
    return [
        source for source in sources if source.get("sha256") and source.get("records")
    ]


# Places that are refused


def _refuse_foreign(location: Location) -> None:
    """Refuse a place where new shards would lie among files of others."""
    # Hidden files may belong to the system, or to a running job.
    foreign = [
        file.path
        for file in list_folder(location, DATA)
        if not SHARD.fullmatch(file.path) and not file.path.startswith(f"{DATA}/.")
    ]
    if not foreign:
        return
    examples = foreign[0]
    if len(foreign) > 1:
        examples += f" and {len(foreign) - 1} others"
    text = sentence(
        where=location.display,
        rule=f"its folder {DATA} must hold only what packstore writes there",
        found=examples,
        remedy="Name another folder, e.g. a new one",
    )
    raise DatasetExistsError(text)


def _refuse_inside_dataset(location: Location) -> None:
    """Raise if a new dataset would lie in the folder of a committed one.

    Its files would be part of every copy and removal of the outer dataset.
    """
    for folder in _ancestors(location):
        try:
            newest = max(list_versions(folder), default=0)
        except StorageError:
            continue  # rights in a store may end at the folder of the new dataset
        if newest:
            text = sentence(
                where=location.display,
                rule="a new dataset must not lie inside another one",
                found=f"version {newest} of a dataset at {folder.display}",
                remedy="Name another place",
            )
            raise DatasetExistsError(text)


def _ancestors(location: Location) -> Iterator[Location]:
    """Yield the folders around a location, the innermost first."""
    local_path = location.local_path
    if local_path is not None:
        for parent in Path(os.path.realpath(local_path)).parents:
            yield Location(str(parent))
        return

    url, mark, query = location.url.partition("?")
    scheme, separator, path = url.rpartition("://")
    names = path.strip("/").split("/")
    for depth in range(len(names) - 1, 0, -1):
        folder = scheme + separator + "/".join(names[:depth])
        yield Location(folder + mark + query, location.storage_options)


# Markers of running jobs


class Writer(msgspec.Struct):
    """A job that is, or may be, writing to a location."""

    call: str  # name of the job, e.g. "append"
    # hash of the boot and the process namespace; empty if unknown (without `/proc`)
    machine: str = ""
    pid: int = 0  # number of its process
    # ticks from the boot to the start of the process, as a pid may be reused
    started: str = ""

    @property
    def is_here(self) -> bool:
        """True for a process of this machine since its last boot."""
        return bool(self.machine) and self.machine == _machine_hash()

    @property
    def is_running(self) -> bool:
        """True if it still runs; False for other machines, where nobody can know."""
        if not self.is_here:
            return False
        ticks = _start_ticks(self.pid)
        return ticks != "" and ticks == self.started

    @property
    def text(self) -> str:
        """A description for messages."""
        where = "this machine" if self.is_here else "another machine"
        return f"{quote(self.call, 16)}, process {self.pid} of {where}"


@contextlib.contextmanager
def writer_marker(location: Location, call: str) -> Iterator[None]:
    """Have a marker while the context lasts, and warn about other jobs.

    A store that refuses the marker may still take a dataset.

    Raises:
        StorageError: nothing can be written there.
    """
    pid = os.getpid()
    marker = Writer(
        call=call, machine=_machine_hash(), pid=pid, started=_start_ticks(pid)
    )
    path = f"{WRITERS}/{uuid.uuid4().hex}.json"
    try:
        location.create_bytes(path, msgspec.json.encode(marker))
    except PackstoreError as error:
        log.debug("no marker: %s", error)
        _require_rights(location)
    try:
        _warn_about_other_writer(location, path)
        yield
    finally:
        with contextlib.suppress(PackstoreError):
            location.remove(path)
        remove_empty(location, WRITERS)


def _require_rights(location: Location) -> None:
    """Raise, before any record is tokenized, if no file can be written and removed."""
    path = f"{FOLDER}/.packstore-{uuid.uuid4().hex}"
    location.create_bytes(path, b"")
    location.remove(path)


def _warn_about_other_writer(location: Location, our_marker_path: str) -> None:
    writers = list_writers(location, besides=our_marker_path)
    if writers:
        log.warning(
            "%s: another job may be writing here (%s); the one that commits last will "
            "be refused",
            location.display,
            writers[0].text,
        )


def list_writers(location: Location, besides: str = "") -> list[Writer]:
    """Return the jobs that run or have a young marker; none if the store refuses.

    Args:
        location: place of the dataset.
        besides: path of a marker to ignore.
    """
    jobs = []
    with contextlib.suppress(PackstoreError):
        for file in list_folder(location, WRITERS):
            if file.path == besides or not file.path.endswith(".json"):
                continue
            writer = _read_marker(location, file.path)
            if writer is None:
                continue
            is_young = file.age is not None and file.age < YOUNG_SECONDS
            may_run_elsewhere = is_young and not writer.is_here
            if writer.is_running or may_run_elsewhere:
                jobs.append(writer)
    return jobs


def _read_marker(location: Location, path: str) -> Writer | None:
    try:
        return msgspec.json.decode(location.read_bytes(path), type=Writer)
    except msgspec.DecodeError:
        return Writer(call="")  # unreadable: a job of unknown name and machine
    except PackstoreError:
        return None  # its job has just ended, and removed it


def _machine_hash() -> str:
    """Return a hash of this boot and process namespace; empty without ``/proc``."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    # Only a hash of the ids may leave the machine.
    return hashlib.sha256((boot_id + namespace).encode()).hexdigest()[:32]


def _start_ticks(pid: int) -> str:
    """Return the start of a process in ticks; empty if it is gone, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    # The name of the program, in parentheses, may contain any character.
    fields = stat.rpartition(b")")[2].split()
    state = fields[0]
    return "" if state in (b"Z", b"X") else fields[19].decode()
