"""Notes of finished partitions, for a rerun of the same job.

``_packstore/partitions/<run>-<number>.json`` lists the shards of a partition and the
other values that the manifest needs. It is written in one put after the shards, as
object stores can neither append nor rename. It has two lines: the hash of the second,
and a JSON object. The commit removes the notes of its job; ``packstore clean`` removes
those of jobs that never commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

from packstore.errors import PackstoreError, StorageError
from packstore.format.arrays import PackSizes
from packstore.format.typed_json import Checksums
from packstore.io.manifest.commit import FOLDER
from packstore.io.shards.shard import PackCounter, ShardInfo
from packstore.io.store.location import Location
from packstore.io.store.operations import remove_all, remove_empty, replace_bytes

PARTITIONS = f"{FOLDER}/partitions"
"""Folder of the notes."""

_NAME = re.compile(r"([0-9a-f]{12})-[0-9]{5,}\.json")
_CHECKS = 4
"""Shards hashed in parallel."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Finished:
    """A stored shard, with the totals and the sizes of its packs."""

    shard: ShardInfo
    counter: PackCounter
    sizes: PackSizes


class PartitionNotes:
    """The notes of one run, 12 hexadecimal digits; safe for concurrent threads and
    machines.
    """

    def __init__(self, location: Location, run: str) -> None:
        self.location, self.run = location, run

    def put(self, number: int, value: object) -> None:
        """Writes or replaces the note of a partition whose shards are all stored."""
        text = msgspec.json.encode(value, enc_hook=lambda array: array.tolist())
        replace_bytes(self.location, self._path(number), _hash_of(text) + text + b"\n")

    def read(self, number: int, kind: type[T]) -> T | None:
        """Returns the note of a partition; None if there is none, or it is damaged."""
        try:
            data = self.location.read_bytes(self._path(number))
        except StorageError as error:
            if error.is_missing:
                return None
            raise
        text = data.partition(b"\n")[2].removesuffix(b"\n")
        with contextlib.suppress(msgspec.DecodeError):  # of another release
            if data.startswith(_hash_of(text)):
                return msgspec.json.decode(text, type=kind, dec_hook=_typed)
        return None

    def are_whole(self, shards: Sequence[Finished]) -> bool:
        """Returns True if every stored shard has the recorded hash."""

        def is_whole(shard: ShardInfo) -> bool:
            try:
                with self.location.open_read(shard.path) as file:
                    return (
                        hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
                    )
            except StorageError as error:
                if error.is_missing:
                    return False
                raise

        with ThreadPoolExecutor(_CHECKS) as pool:
            return all(pool.map(is_whole, (s.shard for s in shards)))

    def count_other_runs(self) -> int:
        """Counts the notes of other runs."""
        return sum(run != self.run for run, _ in self._listed())

    def remove(self) -> None:
        """Removes the notes of this run; leaves those it cannot remove to `clean`."""
        with contextlib.suppress(PackstoreError):
            remove_all(
                self.location, [path for run, path in self._listed() if run == self.run]
            )
        remove_empty(self.location, PARTITIONS)

    def _listed(self) -> list[tuple[str, str]]:
        names = (entry.name for entry in self.location.files(PARTITIONS))
        return [
            (m[1], f"{PARTITIONS}/{m[0]}") for n in names if (m := _NAME.fullmatch(n))
        ]

    def _path(self, number: int) -> str:
        return f"{PARTITIONS}/{self.run}-{number:05d}.json"


def _hash_of(text: bytes) -> bytes:
    return b'{"sha256":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()


def _typed(kind: Any, value: Any) -> Any:
    """Converts the types that msgspec does not support: counters and numpy arrays."""
    if get_origin(kind) is Counter:
        return Counter(value)
    return np.array(value, np.uint32 if kind == Checksums else np.int64)
