"""Finished parts of an unfinished side dataset, from which a killed run resumes, on any ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import torch.distributed as dist

from packstore.errors import DatasetExistsError, IntegrityError, PackstoreError, sentence
from packstore.format.arrays import Float32, Int64
from packstore.io.store.location import Location
from packstore.io.store.operations import remove_all
from packstore.torch.metrics import distributed

T = TypeVar("T")

PARTS = 1024
"""Largest number of parts; a killed run loses one part per rank."""

Values = tuple[Int64, npt.NDArray[np.integer], Float32]
"""Example ids `[E]`, sequences of each `[E]`, log-probs `[S]` in nats."""

_NAME = re.compile(r"([0-9]{5})-([0-9a-f]{64})\.bin")


class Parts:
    """Part files of a run, whose id differs if values would; named by number and hash."""

    def __init__(self, location: Location, run: str) -> None:
        self.location, self.folder = location, f"parts-{run}"

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Returns the `numbers` without a part; removes damaged parts."""
        found = set()
        for number, path, sha256 in self._files():
            if hashlib.sha256(self.location.read_bytes(path)).hexdigest() == sha256:
                found.add(number)
            else:
                self.location.remove(path)
        return sorted(set(numbers) - found)

    def put(self, number: int, values: Values) -> None:
        """Writes a finished part, atomically."""
        ids, counts, logps = values
        head = orjson.dumps([len(ids), len(logps)])
        arrays = (ids.astype("<i8"), counts.astype("<i4"), logps.astype("<f4"))
        data = head + b"\n" + b"".join(a.tobytes() for a in arrays)
        name = f"{number:05d}-{hashlib.sha256(data).hexdigest()}.bin"
        with contextlib.suppress(DatasetExistsError):  # of the same bytes
            self.location.create_bytes(f"{self.folder}/{name}", data)

    def read(self) -> Iterator[Values]:
        """Yields all parts in order, each verified."""
        for _, path, sha256 in self._files():
            data = self.location.read_bytes(path)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise IntegrityError(
                    sentence(
                        self.location.join(path).display,
                        "its hash must be that of its name",
                        "another",
                        "Run the command again",
                    )
                )
            head, _, rest = data.partition(b"\n")
            examples, sequences = orjson.loads(head)
            ids = np.frombuffer(rest, "<i8", examples)
            counts = np.frombuffer(rest, "<i4", examples, 8 * examples)
            yield ids, counts, np.frombuffer(rest, "<f4", sequences, 12 * examples)

    def remove(self) -> None:
        """Removes the parts, after their values were committed."""
        remove_all(self.location, [path for _, path, _ in self._files()])
        if self.location.local_path is not None:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(self.location.local_path, self.folder))

    def _files(self) -> list[tuple[int, str, str]]:
        """Number, path and hash of each part, by number."""
        matches = (_NAME.fullmatch(entry.name) for entry in self.location.files(self.folder))
        return [(int(m[1]), f"{self.folder}/{m[0]}", m[2]) for m in matches if m]


def run_on_rank_zero(make: Callable[[], T]) -> T:
    """Runs `make` on rank 0; returns its result, or raises its error, on all ranks. Collective."""
    if not distributed():
        return make()
    result: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            result[0] = make()
        except PackstoreError as error:
            result[1] = error
        except Exception as error:  # out of memory, say: the others would wait for ever
            failure, result[1] = error, PackstoreError(f"rank 0 ended with {error!r}.")
    dist.broadcast_object_list(result)
    if failure is not None:
        raise failure
    if result[1] is not None:
        raise result[1]
    value: T = result[0]
    return value
