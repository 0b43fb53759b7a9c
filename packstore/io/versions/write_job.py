"""A job that writes the next version of a place.

1. Check that a dataset may be written there, among no files of others and in no other
   dataset, and choose the number of its manifest.
2. Write a marker, and warn if another job has one.
3. Before the commit, check that every shard exists.
4. After the commit or an error, remove the marker. An error removes nothing else.
Of several running jobs, the first to write the manifest of that number commits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from packstore.format.arrays import PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest import commit as versions
from packstore.io.manifest.commit import DATA, DATASET, FOLDER, SHARD, require_files
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
"""Folder of markers, which only warn: the number of the manifest decides which job
commits.
"""

YOUNG_SECONDS = 3600.0
"""Age from which on the job of a marker counts as ended, unless its process is seen
running.
"""


class Writer(msgspec.Struct):
    """A job that is, or may be, writing to a location."""

    call: str  # kind of the job
    machine: str = (
        ""  # hash of boot and process namespace; empty if unknown (without `/proc`)
    )
    pid: int = 0  # of its process
    started: str = (
        ""  # ticks from the boot to the start of the process, as a pid may be reused
    )

    @property
    def is_here(self) -> bool:
        """True for a process of this machine since its last boot."""
        return bool(self.machine) and self.machine == _machine_hash()

    @property
    def is_running(self) -> bool:
        """True if it still runs; False for a process of another machine, which is
        unknown.
        """
        return self.is_here and self.started == _start_ticks(self.pid) != ""

    @property
    def text(self) -> str:
        """Returns a description for messages."""
        where = "this machine" if self.is_here else "another machine"
        return f"{quote(self.call, 16)}, process {self.pid} of {where}"


@contextlib.contextmanager
def writer_marker(location: Location, call: str) -> Iterator[None]:
    """Writes a marker for the context; warns of other jobs. Raises if nothing can be
    written.
    """
    path = f"{WRITERS}/{uuid.uuid4().hex}.json"
    marker = Writer(call, _machine_hash(), os.getpid(), _start_ticks(os.getpid()))
    try:
        location.create_bytes(path, msgspec.json.encode(marker))
    except PackstoreError as error:
        log.debug("no marker: %s", error)
        trial = f"{FOLDER}/.packstore-{uuid.uuid4().hex}"
        location.create_bytes(trial, b"")  # raises now, not after tokenizing everything
        location.remove(trial)
    try:
        for other in writers(location, besides=path)[:1]:
            text = (
                "another job may be writing here (%s); the one that commits last "
                "will be refused"
            )
            log.warning(f"%s: {text}", location.display, other.text)
        yield
    finally:
        with contextlib.suppress(PackstoreError):
            location.remove(path)
        remove_empty(location, WRITERS)


def writers(location: Location, besides: str = "") -> list[Writer]:
    """Lists the jobs that run or have a young marker there, but not the one at
    `besides`.
    """
    jobs = []
    with contextlib.suppress(PackstoreError):
        for file in list_folder(location, WRITERS):
            if file.path == besides or not file.path.endswith(".json"):
                continue
            try:
                writer = msgspec.json.decode(
                    location.read_bytes(file.path), type=Writer
                )
            except msgspec.DecodeError:
                writer = Writer("")  # may be of any job
            except PackstoreError:
                continue  # its job has just ended
            young = file.age is not None and file.age < YOUNG_SECONDS
            if writer.is_running or (young and not writer.is_here):
                jobs.append(writer)
    return jobs


def _machine_hash() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        # Only a hash of the ids may leave the machine.
        return hashlib.sha256(
            (boot + os.readlink("/proc/self/ns/pid")).encode()
        ).hexdigest()[:32]
    except OSError:
        return ""


def _start_ticks(pid: int) -> str:
    """Returns the start of a process in ticks; empty if it does not exist, or is a
    zombie.
    """
    with contextlib.suppress(OSError):
        # The name of the program, in parentheses, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return fields[19].decode()
    return ""


class AppendedBefore(DatasetExistsError):
    """Raised when the dataset already has the records to append; the argument says how
    we know.
    """


class WriteJob:
    """The next version of a dataset.

    Attributes:
        version: number of the next manifest.
        extends: the dataset whose packs come first in the next version; None: no other
            packs.
        committed: the version written by :meth:`commit`.
    """

    extends: Dataset | None = None
    committed: Dataset

    def __init__(self, location: Location, version: int) -> None:
        self.location, self.version = location, version

    def check_fits(
        self,
        kind: str,
        carry: Mapping[str, str],
        provenance: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Raises CompatibilityError if the packs cannot be appended to the extended
        dataset.
        """
        if self.extends is not None:
            manifest = self.extends.manifest
            about = {**manifest.provenance, "tokenizer": provenance().get("tokenizer")}
            added = replace(manifest, kind=kind, carry=carry, provenance=about)
            require_mergeable(
                Member(self.extends.url, manifest), Member("what is appended", added)
            )

    def base_sizes(self) -> Iterator[PackSizes]:
        """Yields the sizes of the packs of each shard of the extended dataset."""
        if self.extends is not None:
            for number in range(len(self.extends.manifest.shards)):
                yield self.extends.shard_sizes(number)

    def extended_manifest(self, manifest: Manifest) -> Manifest:
        """Returns the manifest to commit: the extended dataset, then this job's
        shards.
        """
        if self.extends is None:
            return manifest
        merged = merge(
            [Member(self.extends.url, m) for m in (self.extends.manifest, manifest)]
        )
        return replace(merged, pack_index=manifest.pack_index)

    def has_inputs(self, about: Mapping[str, Any]) -> bool:
        """Returns True if the extended dataset was made of all these inputs, by their
        hashes.
        """
        new = _hashes(about)
        return bool(new) and new <= _hashes(self._past)

    @property
    def _past(self) -> Mapping[str, Any]:
        """The provenance of the extended dataset; empty if there is none."""
        return self.extends.manifest.provenance if self.extends else {}

    def refuse_repeated_append(self, about: Mapping[str, Any]) -> None:
        """Refuses to append records twice: AppendedBefore for those that its last part
        has.
        """
        new, old = _hashes(about), _hashes(self._past)
        if not self.has_inputs(about):
            if new & old:
                log.warning(
                    "%d of %d inputs are in the dataset already",
                    len(new & old),
                    len(new),
                )
            return
        last = self._past.get("combined_from")
        if last and last[-1].get("lineage") == about.get("lineage"):
            raise AppendedBefore("same input and settings")
        rule = "records that are appended must not be in it yet"
        found = "these very ones, by the hash of the input"
        remedy = "To have them twice, pack them elsewhere and use concat"
        raise DatasetExistsError(sentence(self.location.display, rule, found, remedy))

    def require_shards(self, shards: Iterable[ShardInfo]) -> None:
        """Raises MissingFilesError unless all shards still exist, right before the
        commit.
        """
        files = {shard.path: shard.bytes for shard in shards}
        rule = "its shards must stay while a job writes there"
        require_files(self.location, files, rule, "Run it again")

    def commit(self, manifest: Manifest) -> None:
        """Writes the manifest under the number of this job, then checks that its files
        exist.
        """
        text = manifest.to_json()
        as_read = Manifest.from_json(
            text, self.location.display
        )  # before it is there for good
        versions.commit(self.location, text, self.version)
        versions.require_committed(self.location, manifest.files, self.version)
        self.committed = Dataset(self.location, as_read, self.version)


def _hashes(provenance: Mapping[str, Any]) -> set[str]:
    """Returns the hashes of the inputs, of those that have one."""
    return {s["sha256"] for s in provenance.get("sources", ()) if s.get("sha256")}


@contextlib.contextmanager
def writing(
    location: Location, overwrite: bool, call: str = "pack", name: str = DATASET
) -> Iterator[WriteJob]:
    """Opens a job that writes to `location`; `call` names it in messages, `name` its
    manifests.
    """
    versions.require_exclusive(location)
    version = versions.next_version(location, overwrite, name)
    if version == 1:
        _refuse_foreign(location)
    if version == 1 and name == DATASET:
        _refuse_inside_dataset(location)
    with removing_empty_folders(location), writer_marker(location, call):
        yield WriteJob(location, version)


def _refuse_foreign(location: Location) -> None:
    """Refuses a new dataset whose shards would lie among files that packstore did not
    make.
    """
    names = [
        file.path
        for file in list_folder(location, DATA)
        if not SHARD.fullmatch(file.path)
    ]
    if foreign := [name for name in names if not name.startswith(f"{DATA}/.")]:
        rule = f"its folder {DATA} must hold only what packstore writes there"
        others = f" and {len(foreign) - 1} others" if foreign[1:] else ""
        remedy = "Name another folder, e.g. a new one"
        raise DatasetExistsError(
            sentence(location.display, rule, foreign[0] + others, remedy)
        )


def _refuse_inside_dataset(location: Location) -> None:
    """Raise if a new dataset would lie in the folder of a committed one.

    Its files would be part of every copy and removal of the outer dataset.
    """
    for folder in _ancestors(location):
        try:
            newest = max(versions.list_versions(folder), default=0)
        except StorageError:
            continue  # rights in a store may end at the folder of the new dataset
        if newest:
            rule = "a new dataset must not lie inside another one"
            found = f"version {newest} of a dataset at {folder.display}"
            raise DatasetExistsError(
                sentence(location.display, rule, found, "Name another place")
            )


def _ancestors(location: Location) -> Iterator[Location]:
    """Yield the folders around a location, the innermost first."""
    path = location.local_path
    if path is not None:
        for parent in Path(os.path.realpath(path)).parents:
            yield Location(str(parent))
        return
    url, mark, query = location.url.partition("?")
    scheme, separator, path = url.rpartition("://")
    names = path.strip("/").split("/")
    for number in range(len(names) - 1, 0, -1):
        folder = scheme + separator + "/".join(names[:number])
        yield Location(folder + mark + query, location.storage_options)
