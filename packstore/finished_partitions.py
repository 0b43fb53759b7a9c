"""A finished partition, and its note: what a rerun needs to take it over.

A partition is taken over if it is of the same blocks, duplicates and libraries, its inputs are what
they were, and so is each of its shards.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any

import numpy as np

from packstore.io.inputs import Input
from packstore.io.object_version import object_version
from packstore.io.partition_notes import Finished, PartitionNotes
from packstore.partitions import Item
from packstore.records import Int64, Sample, Tally
from packstore.runs import Contents
from packstore.version import VERSION

_COUNTS = [f.name for f in fields(Tally) if f.name not in ("samples", "rejected")]


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

    def note(
        self,
        notes: Sequence[PartitionNotes],
        number: int,
        identity: str,
        versions: Mapping[str, str],
    ) -> None:
        """Notes it in each dataset.

        Args:
            notes: of each dataset.
            number: of the partition.
            identity: of its item, from :func:`identity`.
            versions: ordinal of an input -> its version in the store before it was read.
        """
        contents, tally = self.contents, self.contents.tally
        shared = {
            "identity": identity,
            "versions": versions,
            "tally": {name: getattr(tally, name) for name in _COUNTS},
            "samples": [asdict(sample) for sample in tally.samples],
            "rejects": b64encode(contents.rejects).decode(),
            "sources": {str(ordinal): source for ordinal, source in contents.sources.items()},
        }
        for one, own, examples in zip(notes, self.written, contents.examples, strict=True):
            about = {"planning": own.planning, "counts": own.counts, "examples": examples}
            one.put(number, own.shards, {**shared, **about})


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
    noted = [found for one in notes if (found := one.read(number)) is not None]
    same = identity(item)
    if len(noted) < len(notes) or any(about.get("identity") != same for _, about in noted):
        return None
    about = noted[0][1]
    sources = {int(ordinal): source for ordinal, source in about["sources"].items()}
    inputs = [(s.input, sources[s.input.ordinal]) for s in slices]
    versions = about["versions"]
    if not all(_is_same(i, source, versions[str(i.ordinal)], hashes) for i, source in inputs):
        return None
    if not all(one.are_whole(shards) for one, (shards, _) in zip(notes, noted, strict=True)):
        return None
    written = [Written(s, a["planning"], np.array(a["counts"], np.int64)) for s, a in noted]
    contents = Contents(
        [a["examples"] for _, a in noted], _tally(about), sources, b64decode(about["rejects"])
    )
    made = Partition(contents, written, resumed=True)
    made.note(notes, number, same, versions)
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


def _tally(value: Mapping[str, Any]) -> Tally:
    samples = [Sample(**sample) for sample in value["samples"]]
    counts = value["tally"]
    told: dict[str, Any] = {n: Counter(v) if isinstance(v, dict) else v for n, v in counts.items()}
    return Tally(**told, samples=samples)
