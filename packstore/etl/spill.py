"""Keeps tokenized examples on local disk between tokenizing and packing.

A plan needs the lengths of all examples before the first pack can be filled, and reads
them in another order. Tokens are written to flat files in segments, each read once, and
whole. Several segments are shuffled on disk first: each is distributed to bucket files
of neighbouring packs. So the disk does not seek, and at most one segment is on disk
twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packstore.config import PackConfig
from packstore.format.arrays import Column, Examples, Int32, Int64, Packs
from packstore.io.store.storage_errors import as_storage_errors
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
"""Approximate bytes of ids in a segment; more are shuffled on disk, in buckets of this
size.
"""

MAX_BUCKETS = 256
"""Maximum buckets: each gets a piece of every segment, and small pieces are slow to
write.
"""

_AT_ONCE = 2048
"""Examples copied from a segment to a bucket at once."""


class Spill:
    """Collects :class:`Examples` in the system's folder for temporary files
    (``TMPDIR``).
    """

    def __init__(self) -> None:
        with as_storage_errors("write", tempfile.gettempdir(), {}):
            self._folder = tempfile.TemporaryDirectory(prefix="packstore-")
        self._segments: list[_Store] = []
        self._lengths = Path(self._folder.name, "lengths")
        self.num_examples = 0

    def close(self) -> None:
        """Removes its files."""
        self._folder.cleanup()

    def append(self, examples: Examples, lengths: Int32) -> None:
        """Appends examples; `lengths`: int32 `[E]`, tokens of each in a pack."""
        if not examples.num_examples:
            return
        if not self._segments or self._segments[-1].id_bytes >= SEGMENT_BYTES:
            self._segments.append(
                _Store(f"{self._folder.name}/{len(self._segments)}-segment")
            )
        self._segments[-1].append(examples)
        _append(self._lengths, np.ascontiguousarray(lengths, np.int32).data)
        self.num_examples += examples.num_examples

    def lengths(self) -> Int32:
        """Returns the lengths passed to :meth:`append`, of at least one example: int32
        `[E]`.
        """
        return np.fromfile(self._lengths, np.int32)

    def packs(self, packing: Plan, config: PackConfig) -> Iterator[Packs]:
        """Yields the packs in plan order, about a row group at a time. Can be called
        only once.
        """
        step = max(1, config.row_group_tokens // config.pack_size)
        for examples, order, offsets in self._buckets(packing.order, packing.offsets):
            for first in range(0, len(offsets) - 1, step):
                cut = offsets[first : first + step + 1]
                yield fill(
                    examples, cut - cut[0], config.layout, order[cut[0] : cut[-1]]
                )
            del examples  # before those of the next bucket are read

    def _buckets(
        self, order: Int32, offsets: Int64
    ) -> Iterator[tuple[Examples, Int32, Int64]]:
        """Yields examples of neighbouring packs, their order in these, and the packs'
        offsets.
        """
        if len(self._segments) == 1:
            yield self._segments[0].examples(), order, offsets
            return
        size = sum(segment.id_bytes for segment in self._segments)
        number = min(-(-size // SEGMENT_BYTES), MAX_BUCKETS, len(offsets) - 1)
        cuts = np.linspace(0, len(offsets) - 1, number + 1).astype(np.int64)
        buckets = [_Store(f"{self._folder.name}/{b}-bucket") for b in range(number)]
        self._scatter(order, offsets[cuts], buckets)
        for bucket, first, last in zip(buckets, cuts[:-1], cuts[1:], strict=True):
            chosen = order[offsets[first] : offsets[last]]
            ranks = np.empty(
                len(chosen), np.int32
            )  # the examples of a bucket are in input order
            ranks[chosen.argsort()] = np.arange(len(chosen), dtype=np.int32)
            yield bucket.examples(), ranks, offsets[first : last + 1] - offsets[first]
            bucket.remove()

    def _scatter(self, order: Int32, cuts: Int64, buckets: list[_Store]) -> None:
        """Moves all segments into the buckets; bucket b gets ``order[cuts[b]:cuts[b +
        1]]``.
        """
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


class _Store:
    """Files with some examples, in the order in which they were added."""

    def __init__(self, prefix: str) -> None:
        self._paths = {name: Path(f"{prefix}-{name}") for name in (*_DTYPES, "columns")}
        self._columns: dict[str, np.dtype] = {}
        self._tokens = self._sequences = 0

    @property
    def id_bytes(self) -> int:
        """Bytes of the token ids."""
        return 4 * self._tokens

    def append(self, examples: Examples) -> None:
        """Adds some examples."""
        begun = {"sequence_offsets": self._tokens, "example_offsets": self._sequences}
        for name, dtype in _DTYPES.items():
            array = getattr(examples, name)
            if name in begun:
                array = array + begun[name]
                if self._sequences:
                    array = array[1:]  # its first offset is already there
            _append(self._paths[name], np.ascontiguousarray(array, dtype).data)
        if examples.columns:
            self._columns = {
                name: column.dtype for name, column in examples.columns.items()
            }
            columns = {
                name: pa.array(column) for name, column in examples.columns.items()
            }
            batch, sink = pa.RecordBatch.from_pydict(columns), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            _append(self._paths["columns"], sink.getvalue())
        self._tokens += examples.num_tokens
        self._sequences += examples.num_sequences

    def examples(self) -> Examples:
        """Returns all examples."""
        arrays = {
            name: np.fromfile(self._paths[name], dtype)
            for name, dtype in _DTYPES.items()
        }
        columns: dict[str, Column] = {}
        if self._columns:
            batches: list[pa.RecordBatch] = []
            with pa.OSFile(str(self._paths["columns"])) as file:
                while file.tell() < file.size():
                    batches += pa.ipc.open_stream(file)
            table = pa.Table.from_batches(batches)
            columns = {
                n: np.array(table[n].to_pylist(), t) for n, t in self._columns.items()
            }
        return Examples(**arrays, columns=columns)

    def remove(self) -> None:
        """Deletes the files."""
        for path in self._paths.values():
            path.unlink(missing_ok=True)


def _append(path: Path, data: memoryview | pa.Buffer) -> None:
    with (
        as_storage_errors("write", tempfile.gettempdir(), {}),
        open(path, "ab") as file,
    ):
        file.write(
            data
        )  # not numpy's tofile, whose error for a full disk lacks the errno
