"""A finished partition, and its note: what a rerun needs to take it over.

A partition is taken over if it is of the same blocks, duplicates and libraries, its inputs are what
they were, and so is each of its shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np

from packstore.build.partitions import Item
from packstore.build.provenance import Contents
from packstore.format.arrays import Int64
from packstore.io.inputs.files import Input
from packstore.io.manifest.partition_notes import Finished, PartitionNotes
from packstore.io.store.object_version import object_version
from packstore.version import VERSION

Versions = dict[int, str]
"""Ordinal of an input -> its version in the store; empty where the store tells none."""


@dataclass(frozen=True, eq=False)
class Written:
    """The packs of a partition in one dataset.

    Attributes:
        shards: in order.
        planning: statistics of the plan; None if there was nothing to pack.
        counts: int64 `[pack_size + 1]`, examples of each padded length; empty likewise.
    """

    shards: list[Finished]
    planning: dict[str, Any] | None = None
    counts: Int64 = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class Partition:
    """A finished partition; `written` to each dataset, `resumed`: by an earlier run."""

    contents: Contents
    written: list[Written]
    resumed: bool = False

    @property
    def packs(self) -> int:
        """In all datasets."""
        return sum(part.shard.rows for one in self.written for part in one.shards)

    def note(self, notes: Sequence[PartitionNotes], item: Item, versions: Versions) -> None:
        """Notes it in each dataset, with the versions of its inputs before they were read."""
        for one, own in zip(notes, self.written, strict=True):
            one.put(item[0], Note(identity(item), versions, self.contents, own))


class Note(msgspec.Struct):
    """A partition in one dataset."""

    identity: str
    versions: Versions
    contents: Contents
    written: Written


def identity(item: Item) -> str:
    """Hash of all that decides the shards, but for the settings and the contents of files."""
    _, slices, repeated = item
    cut = [[s.input.ordinal, s.input.path, s.first, s.step, s.block_bytes] for s in slices]
    made_by = [VERSION, version("pyarrow"), version("numpy")]
    digest = hashlib.sha256(repr([cut, made_by]).encode(errors="surrogatepass"))
    digest.update(b"" if repeated is None else repeated.tobytes())
    return digest.hexdigest()


def taken_over(
    notes: Sequence[PartitionNotes], item: Item, hashes: dict[int, str]
) -> Partition | None:
    """Returns the partition that an earlier run noted; None if it did not, or anything has changed.

    Its notes are put once more, so that `clean` takes all files of the run for young.

    Args:
        notes: of each dataset.
        item: the partition.
        hashes: ordinal of an input -> its sha256, as far as known; more are added.
    """
    number, slices, _ = item
    noted = [found for one in notes if (found := one.read(number, Note)) is not None]
    same = identity(item)
    if len(noted) < len(notes) or any(note.identity != same for note in noted):
        return None
    contents, versions = noted[0].contents, noted[0].versions
    for one in slices:
        ordinal = one.input.ordinal
        if not _is_same(one.input, contents.sources[ordinal], versions[ordinal], hashes):
            return None
    made = Partition(contents, [note.written for note in noted], resumed=True)
    if not all(n.are_whole(w.shards) for n, w in zip(notes, made.written, strict=True)):
        return None
    made.note(notes, item, versions)
    return made


def _is_same(item: Input, source: Mapping[str, Any], version: str, hashes: dict[int, str]) -> bool:
    """Whether a file holds what it held: by its version in the store, else by its hash."""
    if version and object_version(item.location, "") == version:
        return True
    if item.location.size() != source["bytes"]:
        return False
    if item.ordinal not in hashes:
        with item.location.open_read() as file:
            digest = hashlib.file_digest(file, "sha256")
        hashes[item.ordinal] = digest.hexdigest()
    return bool(hashes[item.ordinal] == source["sha256"])
