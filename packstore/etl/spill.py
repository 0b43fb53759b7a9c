"""Keeps tokenized examples on local disk between tokenizing and packing.

A plan needs the lengths of all examples before the first pack can be filled, and reads them in
another order. Tokens are written to flat files in segments. A single segment is read through a
memory map, in the order of the plan. Several segments are shuffled on disk first: each is read
once, sequentially, and distributed to bucket files of neighbouring packs. So the disk does not
seek, and at most one segment is on disk twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packstore.config import PackConfig
from packstore.errors import StorageError, sentence
from packstore.format.arrays import Column, Examples, Int32, Int64, Packs
from packstore.pack.fill import fill, gather
from packstore.pack.plan import Plan

_DTYPES: dict[str, npt.DTypeLike] = {
    "input_ids": np.int32,
    "supervised": np.bool_,
    "sequence_offsets": np.int64,
    "example_offsets": np.int64,
    "reward": np.float32,
    "example_ids": np.int64,
}

SEGMENT_BYTES = 32 << 20
"""Approximate bytes of ids in a segment; more are shuffled on disk, in buckets of this size."""

MAX_BUCKETS = 256
"""Maximum buckets: each gets a piece of every segment, and small pieces are slow to write."""

_AT_ONCE = 2048
"""Examples copied from a segment to a bucket at once."""

Part = tuple[Examples, Int32, Int64]


class Spill:
    """Collects :class:`Examples` on disk; a context manager that removes its files at the end.

    They are in the system's folder for temporary files (``TMPDIR``).
    """

    def __init__(self) -> None:
        try:
            self._temporary = tempfile.TemporaryDirectory(prefix="packstore-")
        except OSError as error:
            raise _full(error) from error
        self._folder = self._temporary.name
        self._segments: list[_Store] = []
        self._lengths = Path(self._folder, "lengths")
        self.num_examples = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes its files."""
        self._temporary.cleanup()

    def append(self, examples: Examples, lengths: Int32) -> None:
        """Appends `examples`.

        Args:
            examples: E examples.
            lengths: int32 `[E]`, tokens of each in a pack.

        Raises:
            StorageError: the disk is full or unwritable.
        """
        if not examples.num_examples:
            return
        if not self._segments or self._segments[-1].id_bytes >= SEGMENT_BYTES:
            self._segments.append(self._store("segment", len(self._segments)))
        self._segments[-1].append(examples)
        _append(self._lengths, np.ascontiguousarray(lengths, np.int32))
        self.num_examples += examples.num_examples

    def lengths(self) -> Int32:
        """Returns int32 `[E]`, the lengths passed to :meth:`append`."""
        return np.fromfile(self._lengths, np.int32) if self.num_examples else np.empty(0, np.int32)

    def parts(self, order: Int32, offsets: Int64) -> Iterator[Part]:
        """Yields all packs, some at a time. Can be called only once.

        Args:
            order: int32 `[E]`, the examples, pack by pack.
            offsets: int64 `[P + 1]`; pack i has ``order[offsets[i]:offsets[i + 1]]``.

        Returns:
            For each part its examples, their order in its packs, and its offsets.
        """
        if not self.num_examples:
            return
        if len(self._segments) == 1:
            yield self._segments[0].examples(), order, offsets
            return
        size = sum(segment.id_bytes for segment in self._segments)
        number = min(-(-size // SEGMENT_BYTES), MAX_BUCKETS, len(offsets) - 1)
        cuts = np.linspace(0, len(offsets) - 1, number + 1).astype(np.int64)
        buckets = [self._store("bucket", b) for b in range(number)]
        self._scatter(order, offsets[cuts], buckets)
        for bucket, first, last in zip(buckets, cuts[:-1], cuts[1:], strict=True):
            own = order[offsets[first] : offsets[last]]
            # The examples of a bucket are in input order.
            yield bucket.examples(), _ranks(own), _from_zero(offsets[first : last + 1])
            bucket.remove()

    def _scatter(self, order: Int32, cuts: Int64, buckets: list[_Store]) -> None:
        """Moves all segments into the buckets; bucket b gets ``order[cuts[b]:cuts[b + 1]]``."""
        bucket_of = np.full(self.num_examples, MAX_BUCKETS, np.uint16)
        for b in range(len(buckets)):
            bucket_of[order[cuts[b] : cuts[b + 1]]] = b
        first = 0
        for segment in self._segments:
            examples = segment.examples()
            last = first + examples.num_examples
            for b, bucket in enumerate(buckets):
                chosen = np.flatnonzero(bucket_of[first:last] == b)
                for i in range(0, len(chosen), _AT_ONCE):
                    bucket.append(gather(examples, chosen[i : i + _AT_ONCE]))
            first = last
            del examples
            segment.remove()
        self._segments = []

    def _store(self, kind: str, number: int) -> _Store:
        return _Store(Path(self._folder), f"{kind}-{number:05d}")


class _Store:
    """Files with some examples, in the order in which they were added."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._columns: dict[str, np.dtype] = {}
        self._tokens = self._sequences = 0

    @property
    def id_bytes(self) -> int:
        """Bytes of the token ids."""
        return 4 * self._tokens

    def append(self, examples: Examples) -> None:
        """Adds some examples.

        Raises:
            StorageError: the disk is full or unwritable.
        """
        offsets = {
            "sequence_offsets": examples.sequence_offsets + self._tokens,
            "example_offsets": examples.example_offsets + self._sequences,
        }
        for name, dtype in _DTYPES.items():
            array = offsets[name] if name in offsets else getattr(examples, name)
            if name in offsets and self._sequences:
                array = array[1:]  # its first offset is already there
            _append(self._path(name), np.ascontiguousarray(array, dtype))
        if examples.columns:
            self._columns = {name: column.dtype for name, column in examples.columns.items()}
            _append(self._path("columns"), _stream(examples))
        self._tokens += examples.num_tokens
        self._sequences += examples.num_sequences

    def examples(self) -> Examples:
        """Returns all examples as memory-mapped arrays: only pages that are used are read."""
        arrays = {
            name: np.memmap(self._path(name), dtype, mode="r").view(np.ndarray)
            for name, dtype in _DTYPES.items()
        }
        return Examples(**arrays, columns=self._read_columns())

    def remove(self) -> None:
        """Deletes the files."""
        for name in (*_DTYPES, "columns"):
            self._path(name).unlink(missing_ok=True)

    def _read_columns(self) -> dict[str, Column]:
        if not self._columns:
            return {}
        batches: list[pa.RecordBatch] = []
        with pa.OSFile(str(self._path("columns"))) as file:
            while file.tell() < file.size():
                batches += pa.ipc.open_stream(file)
        table = pa.Table.from_batches(batches)
        return {
            name: np.array(table[name].to_pylist(), dtype) for name, dtype in self._columns.items()
        }

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._name}-{name}"


def filled(spill: Spill, packing: Plan, config: PackConfig) -> Iterator[Packs]:
    """Yields the packs in plan order, about a row group at a time."""
    step = max(1, config.row_group_tokens // config.pack_size)
    for examples, order, offsets in spill.parts(packing.order, packing.offsets):
        for first in range(0, len(offsets) - 1, step):
            cut = offsets[first : first + step + 1]
            yield fill(examples, cut - cut[0], config.layout, order[cut[0] : cut[-1]])


def _stream(examples: Examples) -> pa.Buffer:
    """Returns the carried columns as Arrow IPC."""
    batch = pa.RecordBatch.from_pydict({n: pa.array(c) for n, c in examples.columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _ranks(values: Int32) -> Int32:
    """Returns the rank of each value."""
    ranks = np.empty(len(values), np.int32)
    ranks[values.argsort()] = np.arange(len(values), dtype=np.int32)
    return ranks


def _from_zero(offsets: Int64) -> Int64:
    begun: Int64 = offsets - offsets[0]
    return begun


def _append(path: Path, data: Column | pa.Buffer) -> None:
    try:
        with open(path, "ab") as file:
            # Not tofile, whose error for a full disk lacks the errno.
            file.write(data.data if isinstance(data, np.ndarray) else data)
    except OSError as error:
        raise _full(error) from error


def _full(error: OSError) -> StorageError:
    return StorageError(
        sentence(
            tempfile.gettempdir(),
            "temporary files must be writable there",
            error.strerror or str(error),
            "Free some space, or name another folder in the environment (TMPDIR)",
        )
    )
