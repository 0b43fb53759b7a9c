"""Keeps tokenized examples on local disk between tokenizing and packing.

A plan (which examples go into which pack) needs the lengths of all examples before the
first pack can be filled, and reads them in another order. Tokens are written to flat
files in segments of about 32 MB of ids, each read once, from end to end. (These are not
the segments of a pack.) If there are several, they are shuffled on disk before packs
are filled: the examples of each segment are distributed to buckets, one for each range
of neighbouring packs. So the disk does not seek, and at most one segment is on disk
twice.

Where the examples of a pack share prefixes, several segments are distributed once
before, to others of examples that begin alike, and read one by one for the plan.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packstore.config import PackConfig
from packstore.format.arrays import (
    Bool,
    Column,
    Examples,
    Int32,
    Int64,
    Packs,
    to_offsets,
)
from packstore.io.store.storage_errors import as_storage_errors
from packstore.pack.chunks import (
    Chunks,
    CommonBeginning,
    beginning_keys,
    cut_chunks,
)
from packstore.pack.fill import fill, gather
from packstore.pack.layout import count_keys, sizes
from packstore.pack.plan import Plan, plan_examples

_DTYPES: dict[str, npt.DTypeLike] = {
    "input_ids": np.int32,
    "supervised": np.bool_,
    "sequence_offsets": np.int64,
    "example_offsets": np.int64,
    "reward": np.float32,
    "example_ids": np.int64,
}
"""Array of :class:`Examples` -> its type on disk."""

SEGMENT_BYTES = 32 << 20
"""Approximate bytes of ids in a segment. A larger input is shuffled on disk, in buckets
of this size.
"""

MAX_BUCKETS = 256
"""Maximum buckets: each gets a piece of every segment, and small pieces are slow to
write.
"""

_NO_BUCKET = np.iinfo(np.uint16).max
"""In place of the number of a bucket, for an example that is in none."""

_EXAMPLES_AT_ONCE = 2048
"""Examples copied from a segment to a bucket at once."""


class Spill:
    """Collects :class:`Examples` in the system's folder for temporary files
    (``TMPDIR``).

    Args:
        config: the settings of the packs: size, layout, and what shares prefixes.
    """

    def __init__(self, config: PackConfig) -> None:
        with as_storage_errors("write", tempfile.gettempdir(), options={}):
            self._folder = tempfile.TemporaryDirectory(prefix="packstore-")
        self._segments: list[_Store] = []
        self._lengths = Path(self._folder.name, "lengths")
        self._keys = Path(self._folder.name, "keys")
        self._beginnings = Path(self._folder.name, "beginnings")
        self._config = config
        self._common = CommonBeginning()
        # The place of each example in the input, once they are sorted.
        self._places: Int64 | None = None
        self.num_examples = 0

    def close(self) -> None:
        """Remove its files."""
        self._folder.cleanup()

    def append(self, examples: Examples) -> None:
        """Append examples that fit a pack."""
        if not examples.num_examples:
            return
        if not self._segments or self._segments[-1].id_bytes >= SEGMENT_BYTES:
            number = len(self._segments)
            self._segments.append(_Store(f"{self._folder.name}/{number}-segment"))
        self._segments[-1].append(examples)
        config = self._config
        lengths = sizes(examples, config.layout, config.pad_to_multiple)
        _append(self._lengths, lengths.data)
        _append(self._keys, count_keys(examples).astype(np.int32).data)
        if config.share_prefixes == "pack":
            self._common.add(examples)
            _append(self._beginnings, beginning_keys(examples, config.seed).data)
        self.num_examples += examples.num_examples

    def plan(self, config: PackConfig, chosen: Bool | None = None) -> Plan:
        """Plan the packs of all examples, or of some; there must be one at least.

        Args:
            config: settings; may differ in seed and limits from those of the spill.
            chosen: bool `[E]`, the examples to plan, in the order of the input, which
                are then numbered among themselves; None: all.
        """
        chunks = None
        if config.share_prefixes == "pack":
            places = self._sorted_places()
            if chosen is not None:
                chosen = chosen[places]
                places = places[chosen]
            chunks = self._cut_chunks(config, chosen).in_input_order(places)
        lengths = np.fromfile(self._lengths, np.int32)
        keys = np.fromfile(self._keys, np.int32)
        if chosen is not None:
            lengths = lengths[chosen]
            keys = keys[chosen]
        return plan_examples(lengths, keys, config, chunks)

    def _cut_chunks(self, config: PackConfig, chosen: Bool | None) -> Chunks:
        """Return the chunks of the chosen examples, or of all."""
        parts = []
        end = 0
        for segment in self._segments:
            examples = segment.examples()
            start = end
            end += examples.num_examples
            if chosen is not None:
                examples = gather(examples, np.flatnonzero(chosen[start:end]))
            if not examples.num_examples:
                continue
            chunks = cut_chunks(
                examples,
                config.pack_size,
                config.key_limit,
                multiple=config.pad_to_multiple,
                common=self._common.tokens(config.pad_to_multiple),
                seed=config.seed,
            )
            parts.append(chunks)
            del examples  # before those of the next segment are read
        return Chunks.concat(parts)

    def _sorted_places(self) -> Int64:
        """Sort the examples by what they begin with, if they lie in several segments.

        Returns:
            int64 `[E]`, the place of each example in the input.
        """
        if self._places is None:
            self._places = np.arange(self.num_examples)
            if len(self._segments) > 1:
                self._places = self._sort_by_beginning()
        return self._places

    def _sort_by_beginning(self) -> Int64:
        """Distribute the examples to segments of those that begin alike.

        The examples are numbered anew.

        Returns:
            int64 `[E]`, the place of each example in the input.
        """
        keys = np.fromfile(self._beginnings, np.uint64)
        order = keys.argsort(kind="stable").astype(np.int32)
        # By tokens, not by examples: those that begin alike may all be long.
        tokens = np.fromfile(self._keys, np.int32)[order]
        bounds = _cut_evenly(np.cumsum(tokens, dtype=np.int64))
        stores = [
            _Store(f"{self._folder.name}/{number}-sorted")
            for number in range(len(bounds) - 1)
        ]
        self._scatter(order, bounds, stores)
        self._segments = stores

        # A segment holds its examples in input order.
        segments = np.split(order, bounds[1:-1])
        places = np.concatenate([np.sort(segment) for segment in segments])
        for path in (self._lengths, self._keys):
            values = np.fromfile(path, np.int32)
            path.unlink()
            _append(path, values[places].data)
        return places.astype(np.int64)

    def packs(self, packing: Plan) -> Iterator[Packs]:
        """Yield the packs in plan order, about a row group at a time.

        Can be called only once, as it removes what it has read.
        """
        config = self._config
        packs_at_once = max(1, config.row_group_tokens // config.pack_size)
        for bucket in self._buckets(packing.order, packing.offsets):
            for first_pack in range(0, len(bucket.offsets) - 1, packs_at_once):
                offsets = bucket.offsets[first_pack : first_pack + packs_at_once + 1]
                order = bucket.order[offsets[0] : offsets[-1]]
                offsets = offsets - offsets[0]
                yield fill(
                    bucket.examples,
                    offsets,
                    config.layout,
                    order,
                    share=config.share_prefixes,
                )
            del bucket  # before the examples of the next bucket are read

    def _buckets(self, order: Int32, offsets: Int64) -> Iterator[_Bucket]:
        """Yield the examples of neighbouring packs, in plan order.

        Args:
            order: int32 `[E]`, numbers of the examples in the spill, pack by pack.
            offsets: int64 `[P + 1]`; pack p has ``order[offsets[p]:offsets[p + 1]]``.
        """
        if len(self._segments) == 1:
            yield _Bucket(self._segments[0].examples(), order, offsets)
            return

        # By tokens, not by packs: some may share prefixes, and hold many more.
        tokens = np.fromfile(self._keys, np.int32)[order]
        first_packs = _cut_evenly(to_offsets(tokens)[offsets[1:]])
        stores = [
            _Store(f"{self._folder.name}/{number}-bucket")
            for number in range(len(first_packs) - 1)
        ]
        self._scatter(order, offsets[first_packs], stores)
        for store, first, end in zip(
            stores, first_packs[:-1], first_packs[1:], strict=True
        ):
            chosen = order[offsets[first] : offsets[end]]
            # A bucket numbers its examples from 0, in input order: replace the numbers
            # in the spill by their ranks. For example [7, 2, 9] becomes [1, 0, 2].
            ranks = np.empty(len(chosen), np.int32)
            ranks[chosen.argsort()] = np.arange(len(chosen), dtype=np.int32)
            bucket_offsets = offsets[first : end + 1] - offsets[first]
            yield _Bucket(store.examples(), ranks, bucket_offsets)
            store.remove()

    def _scatter(self, order: Int32, bounds: Int64, stores: list[_Store]) -> None:
        """Move all segments into the stores of B buckets.

        Args:
            order: int32 `[E]`, numbers of the examples in the spill, pack by pack.
            bounds: int64 `[B + 1]`; bucket b gets the examples
                ``order[bounds[b]:bounds[b + 1]]``, in input order.
            stores: one for each bucket.
        """
        bucket_of = np.full(self.num_examples, _NO_BUCKET, np.uint16)
        for number in range(len(stores)):
            bucket_of[order[bounds[number] : bounds[number + 1]]] = number

        start = 0
        for segment in self._segments:
            examples = segment.examples()
            end = start + examples.num_examples
            for number, store in enumerate(stores):
                chosen = np.flatnonzero(bucket_of[start:end] == number)
                for i in range(0, len(chosen), _EXAMPLES_AT_ONCE):
                    store.append(gather(examples, chosen[i : i + _EXAMPLES_AT_ONCE]))
            start = end
            del examples  # before the next segment is read
            segment.remove()
        self._segments = []


@dataclass(frozen=True, eq=False)
class _Bucket:
    """The examples of neighbouring packs.

    Attributes:
        examples: in input order.
        order: int32 `[E]`, numbers of `examples`, pack by pack.
        offsets: int64 `[P + 1]`; pack p has ``order[offsets[p]:offsets[p + 1]]``.
    """

    examples: Examples
    order: Int32
    offsets: Int64


class _Store:
    """A file per array of some examples, in the order of :meth:`append`.

    Carried columns have one more file, as their types vary.
    """

    def __init__(self, prefix: str) -> None:
        self._paths = {name: Path(f"{prefix}-{name}") for name in _DTYPES}
        self._columns_path = Path(f"{prefix}-columns")
        self._column_dtypes: dict[str, np.dtype] = {}
        self._num_tokens = 0
        self._num_sequences = 0

    @property
    def id_bytes(self) -> int:
        """Bytes of the token ids."""
        return 4 * self._num_tokens

    def append(self, examples: Examples) -> None:
        """Append some examples."""
        # Offsets of the new examples begin at 0: move them behind the earlier ones.
        previous_ends = {
            "sequence_offsets": self._num_tokens,
            "example_offsets": self._num_sequences,
        }
        is_first = self._num_sequences == 0
        for name, dtype in _DTYPES.items():
            array = getattr(examples, name)
            if name in previous_ends:
                array = array + previous_ends[name]
                if not is_first:
                    array = array[1:]  # the file already ends with this offset
            _append(self._paths[name], np.ascontiguousarray(array, dtype).data)
        if examples.columns:
            self._append_columns(examples.columns)
        self._num_tokens += examples.num_tokens
        self._num_sequences += examples.num_sequences

    def _append_columns(self, columns: Mapping[str, Column]) -> None:
        """Append a stream of Arrow with one batch."""
        self._column_dtypes = {name: column.dtype for name, column in columns.items()}
        arrays = {name: pa.array(column) for name, column in columns.items()}
        batch = pa.RecordBatch.from_pydict(arrays)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        _append(self._columns_path, sink.getvalue())

    def examples(self) -> Examples:
        """Return all examples."""
        arrays = {
            name: np.fromfile(self._paths[name], dtype)
            for name, dtype in _DTYPES.items()
        }
        return Examples(**arrays, columns=self._columns())

    def _columns(self) -> dict[str, Column]:
        if not self._column_dtypes:
            return {}
        batches: list[pa.RecordBatch] = []
        with pa.OSFile(os.fsencode(self._columns_path)) as file:
            # The file holds one stream after another, as `_append_columns` wrote them.
            while file.tell() < file.size():
                stream = pa.ipc.open_stream(file)
                batches.extend(stream)
        table = pa.Table.from_batches(batches)
        return {
            name: np.array(table[name].to_pylist(), dtype)
            for name, dtype in self._column_dtypes.items()
        }

    def remove(self) -> None:
        """Remove the files."""
        for path in [*self._paths.values(), self._columns_path]:
            path.unlink(missing_ok=True)


def _cut_evenly(ends: Int64) -> Int64:
    """Cut n examples, or packs, into runs of about :data:`SEGMENT_BYTES` of ids.

    Args:
        ends: int64 `[n]`, tokens of each one and of all before it, together.

    Returns:
        The offsets of at most :data:`MAX_BUCKETS` runs, int64. No run is empty.
    """
    num_tokens = int(ends[-1])
    num_runs = min(-(-4 * num_tokens // SEGMENT_BYTES), MAX_BUCKETS)
    cuts = num_tokens * np.arange(1, num_runs) // num_runs
    inner_offsets = np.searchsorted(ends, cuts, side="right")
    # Several cuts may fall into the same long one.
    return np.unique(np.concatenate([[0], inner_offsets, [len(ends)]]))


def _append(path: Path, data: memoryview | pa.Buffer) -> None:
    folder = tempfile.gettempdir()
    with as_storage_errors("write", folder, options={}), open(path, "ab") as file:
        # Not by numpy's tofile: its error for a full disk lacks the errno.
        file.write(data)
