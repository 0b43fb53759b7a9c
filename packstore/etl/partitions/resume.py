"""Finished partitions, and the notes by which a rerun reuses them.

A note is found by the name of its run: settings, tokenizer, sizes of the inputs and the
package's version (``provenance.run_name``). Its partition is reused if its blocks,
duplicates and libraries are the same, and its inputs and shards are unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from packstore.etl.partitions.slices import Item
from packstore.etl.totals import Contents
from packstore.io.inputs.files import Input
from packstore.io.manifest import commit
from packstore.io.manifest.manifest import manifest_bytes
from packstore.io.manifest.partition_notes import FinishedShard, PartitionNotes
from packstore.io.store.location import Location
from packstore.version import VERSION


@dataclass(frozen=True, eq=False)
class Written:
    """The packs of a partition in one dataset."""

    shards: list[FinishedShard]
    planning: dict[str, Any] | None = None  # statistics of their plan


@dataclass(frozen=True, eq=False)
class Partition:
    """A finished partition: `written` has its packs in each dataset, `resumed` if
    reused.
    """

    contents: Contents
    written: list[Written]
    resumed: bool = False

    @property
    def packs(self) -> int:
        """Number of packs, over all datasets."""
        return sum(
            shard.shard.rows for written in self.written for shard in written.shards
        )

    def note(
        self, notes: Sequence[PartitionNotes], item: Item, versions: dict[int, str]
    ) -> None:
        """Puts its note into each dataset, with the versions of its inputs before the
        read.
        """
        for place, written in zip(notes, self.written, strict=True):
            place.put(item[0], Note(identity(item), versions, self.contents, written))


class Note(msgspec.Struct):
    """The note of a partition in one dataset."""

    identity: str
    versions: dict[
        int, str
    ]  # ordinal of an input -> its version in the store, or empty
    contents: Contents
    written: Written


def identity(item: Item) -> str:
    """Hashes all that decides the shards, except the settings and the contents of
    files.
    """
    _, slices, repeated = item
    cut = [
        [s.input.ordinal, s.input.path, s.first, s.step, s.block_bytes] for s in slices
    ]
    made_by = [VERSION, version("pyarrow"), version("numpy"), version("polars")]
    digest = hashlib.sha256(repr([cut, made_by]).encode(errors="surrogatepass"))
    digest.update(b"" if repeated is None else repeated.tobytes())
    return digest.hexdigest()


def reuse_finished_partition(
    notes: Sequence[PartitionNotes], item: Item, hashes: dict[int, str], rejects: bool
) -> Partition | None:
    """Returns the partition of an earlier run; None if it has no note, or anything has
    changed.

    `hashes`, ordinal of an input -> its sha256, grows.
    """
    number, slices, _ = item
    noted = [note for place in notes if (note := place.read(number, Note)) is not None]
    same = identity(item)
    if len(noted) < len(notes) or any(note.identity != same for note in noted):
        return None
    contents, versions = noted[0].contents, noted[0].versions
    if rejects and not contents.rejects:
        return None
    for part in slices:
        ordinal = part.input.ordinal
        if not _is_same(
            part.input, contents.sources[ordinal], versions[ordinal], hashes
        ):
            return None
    partition = Partition(contents, [note.written for note in noted], resumed=True)
    if not all(
        n.are_intact(w.shards) for n, w in zip(notes, partition.written, strict=True)
    ):
        return None
    partition.note(
        notes, item, versions
    )  # again: `clean` takes all files of the run for recent
    return partition


def _is_same(
    item: Input, source: Mapping[str, Any], version: str, hashes: dict[int, str]
) -> bool:
    """Returns True if a file is unchanged, by its version in the store, else by its
    hash.
    """
    if version and item.location.object_version() == version:
        return True
    if item.location.size() != source["bytes"]:
        return False
    if item.ordinal not in hashes:
        with item.location.open_read() as file:
            hashes[item.ordinal] = hashlib.file_digest(file, "sha256").hexdigest()
    return bool(hashes[item.ordinal] == source["sha256"])


def check_growth(first: Partition, partitions: int, places: Sequence[Location]) -> None:
    """Refuses a job whose manifests would be larger than readers accept, by its first
    partition.
    """
    for place, written in zip(places, first.written, strict=True):
        size = partitions * manifest_bytes([shard.shard for shard in written.shards])
        if size > 1.5 * commit.MAX_MANIFEST_BYTES:
            found = f"about {size} from {partitions} partitions"
            raise commit.manifest_too_large(place.display, found)
