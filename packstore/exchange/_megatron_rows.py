"""Megatron-Bridge's packed Parquet for supervised fine-tuning, and its metadata.

The rules were read in NVIDIA-NeMo/Megatron-Bridge at commit 067f987 (2026-08-22):
``src/megatron/bridge/data/packing/`` (``parquet.py`` and ``gpt_sft.py``, which read the files,
``offline.py`` and ``algorithms.py``, which write them) and ``docs/training/packed-sequences.md``.

- A row holds whole sequences. The reader splits each into inputs (all tokens but the last) and
  targets (all but the first), so a sequence of L tokens occupies L - 1.
- `loss_mask` belongs to the inputs: it is 1 where the *next* token of the sequence is supervised.
- `seq_start_id` holds the start of each sequence, without the end of the last.
- With context or sequence parallelism, the size of each sequence must be a multiple of
  `pad_seq_to_mult`: sequences are padded with EOS. The reader finds their end by it: it treats all
  EOS at the end of the inputs as padding.
- The metadata is a JSON list with one object. With `pad_cu_seqlens` (static shapes for CUDA graphs)
  the reader takes the most sequences of a row, the longest sequence and the shortest row from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.format.arrays import Bool, Examples, Int32, Int64, Packs, range_indices, to_offsets
from packstore.format.schema import list_of
from packstore.io.store.staging import Staging
from packstore.pack.fill import unpack

SCHEMA = pa.schema(
    [
        ("input_ids", list_of(pa.int32())),
        ("loss_mask", list_of(pa.int8())),
        ("seq_start_id", list_of(pa.int32())),
    ]
)


@dataclass
class Figures:
    """Sums over the rows written, in tokens that rows occupy."""

    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    filled: int = 0
    longest: int = 0
    most: int = 0
    shortest: int = 2**31
    moved: int = 0
    hidden: int = 0

    def add(self, sizes: Int64, starts: Int64) -> None:
        """Adds rows: `sizes` of their sequences, `starts` of the rows in these."""
        rows = np.add.reduceat(sizes, starts[:-1])
        self.rows += len(rows)
        self.sequences += len(sizes)
        self.tokens += int(sizes.sum())
        self.longest = max(self.longest, int(sizes.max()))
        self.most = max(self.most, int(np.diff(starts).max()))
        self.shortest = min(self.shortest, int(rows.min()))

    def metadata(self, pack_size: int) -> dict[str, Any]:
        """Returns Megatron-Bridge's metadata of a packed split, with its rounding."""
        return {
            "dataset_max_seqlen": self.longest,
            "max_samples_per_bin": self.most,
            "packing_factor": round(self.sequences / self.rows, 2),
            "packing_efficiency": round(self.tokens / self.rows / pack_size * 100, 2),
            "pack_size": pack_size,
            "min_packed_seqlen": self.shortest,
        }


def write_files(
    batches: Iterator[pa.RecordBatch], staging: Staging, stem: str, limit: int
) -> dict[str, str]:
    """Writes row groups to files of about `limit` bytes; returns the local path of each by name."""
    paths: dict[str, str] = {}
    options: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
    batch = next(batches, None)
    while batch is not None:
        with (
            staging.file() as file,
            pq.ParquetWriter(file, SCHEMA, compression="zstd", **options) as writer,
        ):
            while batch is not None and file.tell() < limit:
                writer.write_table(pa.Table.from_batches([batch]), batch.num_rows)
                batch = next(batches, None)
        paths[f"{stem}-{len(paths):05d}.idx.parquet"] = file.name
    return paths


class RowMaker:
    """Converts packs to rows of at most `pack_size` tokens, counted in `figures`; what is padded
    and no longer fits its row moves to later ones.
    """

    def __init__(self, pack_size: int, multiple: int, pad_id: int) -> None:
        self.figures = Figures()
        self._pack_size, self._multiple, self._pad_id = pack_size, multiple, pad_id
        self._rest = Examples.empty()

    def add(self, packs: Packs) -> pa.RecordBatch:
        """Returns one row per pack, and rows of moved sequences once these fill rows."""
        waiting = self._rest.num_examples
        examples = Examples.concat([self._rest, replace(unpack(packs), columns={})])
        sizes = self._sizes(examples)
        rows: list[list[int]] = []
        over = list(range(waiting))
        for first, last in pairwise((packs.example_offsets + waiting).tolist()):
            room, row = self._pack_size, []
            for i in range(first, last):
                if sizes[i] <= room:
                    row.append(i)
                    room -= int(sizes[i])
                else:
                    over.append(i)
                    self.figures.moved += 1
            rows.append(row)
        *full, rest = self._next_fit(over, sizes)
        self._rest = examples.take(np.array(rest, np.int64))
        return self._batch(examples, sizes, rows + full)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yields the last row, if sequences are left."""
        if left := self._rest.num_examples:
            yield self._batch(self._rest, self._sizes(self._rest), [list(range(left))])

    def _next_fit(self, sequences: list[int], sizes: Int64) -> list[list[int]]:
        """Assigns the sequences to rows, in order; the last row may be empty."""
        rows: list[list[int]] = [[]]
        room = self._pack_size
        for i in sequences:
            if sizes[i] > room:
                rows.append([])
                room = self._pack_size
            rows[-1].append(i)
            room -= int(sizes[i])
        return rows

    def _sizes(self, examples: Examples) -> Int64:
        """Tokens that each sequence occupies: int64 `[S]`.

        The reader treats all EOS at the end of the inputs as padding. A sequence that continues
        after an EOS (templates that end a turn with EOS and a line break) keeps it only if its last
        token is an input too: so it is padded even where its size fits.
        """
        inputs, m = examples.lengths.astype(np.int64) - 1, self._multiple
        sizes = -(-inputs // m) * m
        if m > 1:
            last = examples.sequence_offsets[1:] - 1
            eos = examples.input_ids == self._pad_id
            cut = (sizes == inputs) & eos[last - 1] & ~eos[last] & examples.supervised[last]
            sizes += np.where(cut & (sizes + m <= self._pack_size), m, 0)
        return sizes

    def _batch(self, examples: Examples, sizes: Int64, rows: list[list[int]]) -> pa.RecordBatch:
        order = np.array([i for row in rows for i in row], np.int64)
        starts = to_offsets(np.array([len(row) for row in rows]))
        examples, sizes = examples.take(order), sizes[order]
        lengths = examples.lengths.astype(np.int64)
        offsets = to_offsets(sizes + 1)
        ids = np.full(offsets[-1], self._pad_id, np.int32)
        mask = np.zeros(offsets[-1], np.int8)
        at = range_indices(offsets[:-1], lengths)
        ids[at] = examples.input_ids
        # The first token of a sequence is never supervised, so the shift crosses no border.
        mask[at[:-1]] = examples.supervised[1:]
        if self._multiple > 1:
            hidden = _hidden(ids, offsets, self._pad_id) & (mask != 0)
            mask[hidden] = 0
            self.figures.hidden += int(np.count_nonzero(hidden))
        self.figures.add(sizes, starts)
        self.figures.filled += int((sizes + 1 - lengths).sum())
        tokens = offsets[starts]
        firsts = (offsets[:-1] - np.repeat(tokens[:-1], np.diff(starts))).astype(np.int32)
        columns = [(ids, tokens), (mask, tokens), (firsts, starts)]
        arrays = [
            pa.ListArray.from_arrays(
                pa.array(where.astype(np.int32)), pa.array(values), type=field.type
            )
            for (values, where), field in zip(columns, SCHEMA, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _hidden(ids: Int32, offsets: Int64, pad_id: int) -> Bool:
    """True for tokens after the last input of their sequence that is not EOS: bool `[N]`."""
    inputs = np.ones(len(ids), np.bool_)
    inputs[offsets[1:] - 1] = False
    real = np.where((ids != pad_id) & inputs, np.arange(len(ids)), -1)
    last = np.maximum.reduceat(real, offsets[:-1])
    return np.arange(len(ids)) > np.repeat(last, np.diff(offsets))
