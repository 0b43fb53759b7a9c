"""Notes of finished partitions, for a rerun of the same job.

A partition is a section of the input that is packed into shards of its own, so that a
rerun after a failure packs only partitions without a note.
``_packstore/partitions/<run>-<number>.json`` lists the shards of a partition and the
other values that the manifest needs. It is written in one put after the shards, as
object stores can neither append nor rename. It has two lines: the hash of the second,
and a JSON object. The commit removes the notes of its job; ``packstore clean`` removes
the notes of jobs that never commit.
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
import numpy.typing as npt

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
_NUM_HASHED_AT_ONCE = 4

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class FinishedShard:
    """A stored shard, with the totals and the sizes of its packs."""

    shard: ShardInfo
    counter: PackCounter
    sizes: PackSizes


class PartitionNotes:
    """The notes of one run; safe for concurrent threads and machines.

    Args:
        location: of the dataset.
        run: 12 hexadecimal digits, a hash of everything that decides the bytes.
    """

    def __init__(self, location: Location, run: str) -> None:
        self.location = location
        self.run = run

    def put(self, number: int, value: object) -> None:
        """Write or replace the note of a partition after its shards are stored."""
        text = msgspec.json.encode(value, enc_hook=_array_to_list)
        data = _hash_line(text) + text + b"\n"
        replace_bytes(self.location, self._path(number), data)

    def read(self, number: int, kind: type[T]) -> T | None:
        """Return the note of a partition; None if there is none, or it is damaged."""
        try:
            data = self.location.read_bytes(self._path(number))
        except StorageError as error:
            if error.is_missing:
                return None
            raise

        _, _, second_line = data.partition(b"\n")
        text = second_line.removesuffix(b"\n")
        if not data.startswith(_hash_line(text)):
            return None
        try:
            return msgspec.json.decode(text, type=kind, dec_hook=_decode_other_types)
        except msgspec.DecodeError:  # of another release
            return None

    def are_intact(self, shards: Sequence[FinishedShard]) -> bool:
        """Return True if every stored shard has the recorded hash."""
        infos = [finished.shard for finished in shards]
        with ThreadPoolExecutor(_NUM_HASHED_AT_ONCE) as pool:
            return all(pool.map(self._is_intact, infos))

    def _is_intact(self, shard: ShardInfo) -> bool:
        try:
            with self.location.open_read(shard.path) as file:
                digest = hashlib.file_digest(file, "sha256")
        except StorageError as error:
            if error.is_missing:
                return False
            raise
        return digest.hexdigest() == shard.sha256

    def count_other_runs(self) -> int:
        """Return the number of notes of other runs."""
        return sum(run != self.run for run, _ in self._list())

    def remove(self) -> None:
        """Remove the notes of this run; leave failures to `clean`."""
        with contextlib.suppress(PackstoreError):
            paths = [path for run, path in self._list() if run == self.run]
            remove_all(self.location, paths)
        remove_empty(self.location, PARTITIONS)

    def _list(self) -> list[tuple[str, str]]:
        """Return the run and the path of every note."""
        notes = []
        for entry in self.location.files(PARTITIONS):
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                notes.append((match[1], f"{PARTITIONS}/{entry.name}"))
        return notes

    def _path(self, number: int) -> str:
        return f"{PARTITIONS}/{self.run}-{number:05d}.json"


def _hash_line(text: bytes) -> bytes:
    return b'{"sha256":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()


def _array_to_list(array: npt.NDArray[Any]) -> list[Any]:
    values: list[Any] = array.tolist()
    return values


def _decode_other_types(kind: Any, value: Any) -> Any:
    """Convert the types that msgspec does not support: counters and numpy arrays."""
    if get_origin(kind) is Counter:
        return Counter(value)
    dtype = np.uint32 if kind == Checksums else np.int64
    return np.array(value, dtype)
