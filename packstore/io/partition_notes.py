"""Notes of finished partitions, for a rerun of the same job.

``_packstore/partitions/<run>-<number>.json`` lists the shards of one partition and all else that
the manifest needs of it. It is put at once, when the shards are in their places, as object stores
can neither append nor rename. Two lines: the hash of the second, and a JSON object. The job that
commits removes its notes; ``packstore clean`` removes those of jobs that never do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from packstore.errors import PackstoreError, StorageError
from packstore.io.commit import FOLDER
from packstore.io.manifest_json import dump_shard, parse_shard
from packstore.io.shard import ShardInfo
from packstore.io.statistics import PackCounter
from packstore.io.storage import Location
from packstore.io.upkeep import remove_all, replace_bytes
from packstore.records import PackSizes

PARTITIONS = f"{FOLDER}/partitions"
NOTES = (PARTITIONS, f"{FOLDER}/runs")
"""Folders of notes; the second is that of earlier versions."""

_NAME = re.compile(r"([0-9a-f]{12})-[0-9]{5,}\.json")
_CHECKS = 4
"""Shards that are hashed at a time."""
_CHUNK = 1 << 20

_COUNTED = [f.name for f in dataclasses.fields(PackCounter) if f.name != "histogram"]
_SIZES = ("tokens", "examples", "squares")


@dataclass(frozen=True, eq=False)
class Finished:
    """A shard that is in its place, with the totals and the sizes of its packs."""

    shard: ShardInfo
    counter: PackCounter
    sizes: PackSizes


class PartitionNotes:
    """The notes of one run at a place; safe to use from many threads and machines.

    Args:
        location: the dataset.
        run: 12 hexadecimal digits, the same for a rerun.
    """

    def __init__(self, location: Location, run: str) -> None:
        self.location, self.run = location, run

    def put(self, number: int, shards: Sequence[Finished], about: Mapping[str, Any]) -> None:
        """Notes a partition whose shards are all in their places, over an earlier note.

        Args:
            number: of the partition.
            shards: in order.
            about: further JSON values.
        """
        value = {**about, "shards": [_entry(s) for s in shards]}
        text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        seal = b'{"sha256":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()
        replace_bytes(self.location, self._path(number), seal + text + b"\n")

    def read(self, number: int) -> tuple[list[Finished], dict[str, Any]] | None:
        """What was noted of a partition; None without a note, or one that is not as it was put."""
        try:
            seal, _, text = self.location.read_bytes(self._path(number)).partition(b"\n")
            text = text.removesuffix(b"\n")
            if orjson.loads(seal)["sha256"] != hashlib.sha256(text).hexdigest():
                return None
            about = orjson.loads(text)
            return [_parse(entry) for entry in about.pop("shards")], about
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        except (PackstoreError, ValueError, KeyError, TypeError):  # of another release, or damaged
            return None

    def are_whole(self, shards: Sequence[Finished]) -> bool:
        """Returns whether every shard in the store has the bytes that were written."""
        with ThreadPoolExecutor(_CHECKS) as pool:
            return all(pool.map(self._is_whole, (s.shard for s in shards)))

    def of_others(self) -> int:
        """Counts the notes of other runs at the place."""
        return sum(run != self.run for run, _ in self._listed())

    def remove(self) -> None:
        """Removes the notes of this run; one that cannot be removed stays for `clean`."""
        with contextlib.suppress(PackstoreError):
            own = [path for run, path in self._listed() if run == self.run]
            remove_all(self.location, own)
        if self.location.local_path is not None:
            with contextlib.suppress(OSError):  # none, or not empty
                os.rmdir(os.path.join(self.location.local_path, PARTITIONS))

    def _listed(self) -> list[tuple[str, str]]:
        """Run and path of each note."""
        names = (entry.name for entry in self.location.files(PARTITIONS))
        return [(m[1], f"{PARTITIONS}/{m[0]}") for n in names if (m := _NAME.fullmatch(n))]

    def _path(self, number: int) -> str:
        return f"{PARTITIONS}/{self.run}-{number:05d}.json"

    def _is_whole(self, shard: ShardInfo) -> bool:
        try:
            if self.location.size(shard.path) != shard.bytes:
                return False
            digest = hashlib.sha256()
            with self.location.open_read(shard.path) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return digest.hexdigest() == shard.sha256


def _entry(part: Finished) -> dict[str, Any]:
    counter = {name: int(getattr(part.counter, name)) for name in _COUNTED}
    counts = part.sizes.counts
    return {
        "shard": dump_shard(part.shard),
        "counter": {**counter, "histogram": part.counter.histogram.tolist()},
        "sizes": {name: getattr(part.sizes, name).tolist() for name in _SIZES},
        "counts": [] if counts is None else counts.tolist(),
    }


def _parse(entry: Mapping[str, Any]) -> Finished:
    histogram = np.array(entry["counter"].pop("histogram"), np.int64)
    sizes = {name: np.array(entry["sizes"][name], np.int64) for name in _SIZES}
    return Finished(
        parse_shard(entry["shard"], "shard"),
        PackCounter(**entry["counter"], histogram=histogram),
        PackSizes(**sizes, counts=np.array(entry["counts"], np.int64)),
    )
