"""Finished partitions, and the notes by which a rerun reuses them.

A note is a small file beside the shards of a partition. Its name has the name of its
run, a hash of settings, tokenizer, sizes of the inputs and the package's version
(``provenance.run_name``), and the number of the partition. The partition is reused if
its blocks, duplicates and libraries are the same, and its inputs and shards are
unchanged.

A file of an object store has a *version* there, such as its ETag, which changes with
its bytes; of a local file, the sha256 is compared instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from packstore.etl.partitions.slices import Assignment
from packstore.etl.totals import Contents
from packstore.io.inputs.files import Input
from packstore.io.manifest.partition_notes import FinishedShard, PartitionNotes
from packstore.version import VERSION

_DECIDING_LIBRARIES = ("pyarrow", "numpy", "polars")
"""Libraries, a release of which may change the bytes of a shard."""


@dataclass(frozen=True, eq=False)
class WrittenPacks:
    """The packs of a partition in one dataset."""

    shards: list[FinishedShard]
    planning: dict[str, Any] | None = None  # statistics of their plan


@dataclass(frozen=True, eq=False)
class Partition:
    """A finished partition.

    Attributes:
        contents: its records.
        packs: its packs in each dataset.
        is_resumed: True if an earlier run made it.
    """

    contents: Contents
    packs: list[WrittenPacks]
    is_resumed: bool = False

    @property
    def num_packs(self) -> int:
        """Number of packs, over all datasets."""
        shards = [shard for packs in self.packs for shard in packs.shards]
        return sum(shard.shard.rows for shard in shards)

    def put_notes(
        self,
        notes: Sequence[PartitionNotes],
        assignment: Assignment,
        versions: dict[int, str],
    ) -> None:
        """Put a note into each dataset.

        Args:
            notes: the folder of notes of each dataset.
            assignment: the input of the partition.
            versions: ordinal of an input -> its version in the store before it was
                read.
        """
        identity = _identity_of(assignment)
        for dataset_notes, packs in zip(notes, self.packs, strict=True):
            note = Note(
                identity=identity,
                versions=versions,
                contents=self.contents,
                packs=packs,
            )
            dataset_notes.put(assignment.number, note)


class Note(msgspec.Struct):
    """The note of a partition in one dataset.

    Attributes:
        identity: hash of the blocks, duplicates and libraries of the partition.
        versions: ordinal of an input -> its version in the store, or empty.
        contents: the records of the partition.
        packs: its packs in the dataset.
    """

    identity: str
    versions: dict[int, str]
    contents: Contents
    packs: WrittenPacks = msgspec.field(name="written")


def _identity_of(assignment: Assignment) -> str:
    """Return a hash of the blocks, duplicates and libraries of a partition.

    These decide its shards, besides the settings, which are in the name of the run, and
    the contents of files, which are compared when a note is read.
    """
    slices = [
        [part.input.ordinal, part.input.path, part.first, part.step, part.block_bytes]
        for part in assignment.slices
    ]
    releases = [VERSION, *(version(library) for library in _DECIDING_LIBRARIES)]
    text = repr([slices, releases])
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    if assignment.duplicate_ids is not None:
        digest.update(assignment.duplicate_ids.tobytes())
    return digest.hexdigest()


def reuse_finished_partition(
    notes: Sequence[PartitionNotes],
    assignment: Assignment,
    hashes: dict[int, str],
    needs_rejects: bool,
) -> Partition | None:
    """Return the partition of an earlier run.

    Args:
        notes: the folder of notes of each dataset.
        assignment: the input of the partition.
        hashes: ordinal of an input -> its sha256, for all partitions that read it;
            hashes that are computed are added.
        needs_rejects: True if the note must have the dropped records.

    Returns:
        None if a dataset has no note, or anything has changed.
    """
    identity = _identity_of(assignment)
    notes_read: list[Note] = []
    for dataset_notes in notes:
        note = dataset_notes.read(assignment.number, Note)
        if note is None or note.identity != identity:
            return None
        notes_read.append(note)

    # The notes of all datasets have the same contents.
    contents = notes_read[0].contents
    versions = notes_read[0].versions
    if needs_rejects and not contents.rejects:
        return None
    for part in assignment.slices:
        ordinal = part.input.ordinal
        source = contents.sources[ordinal]
        if not _is_unchanged(part.input, source, versions[ordinal], hashes):
            return None
    for dataset_notes, note in zip(notes, notes_read, strict=True):
        if not dataset_notes.are_intact(note.packs.shards):
            return None

    packs = [note.packs for note in notes_read]
    partition = Partition(contents, packs, is_resumed=True)
    # Put them again, so that they are new: `packstore clean` removes the files of a run
    # by the age of its newest file.
    partition.put_notes(notes, assignment, versions)
    return partition


def _is_unchanged(
    item: Input, source: Mapping[str, Any], version: str, hashes: dict[int, str]
) -> bool:
    """Return True if a file has the same version in its store, or the same hash."""
    if version and item.location.object_version() == version:
        return True
    if item.location.size() != source["bytes"]:
        return False
    if item.ordinal not in hashes:
        with item.location.open_read() as file:
            hashes[item.ordinal] = hashlib.file_digest(file, "sha256").hexdigest()
    return bool(hashes[item.ordinal] == source["sha256"])
