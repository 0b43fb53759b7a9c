"""Megatron-Bridge's packed Parquet for supervised fine-tuning, and its metadata.

The rules were read in NVIDIA-NeMo/Megatron-Bridge at commit 067f987 (2026-08-22):
``src/megatron/bridge/data/packing/`` (``parquet.py`` and ``gpt_sft.py``, which read the
files, ``offline.py`` and ``algorithms.py``, which write them) and
``docs/training/packed-sequences.md``.

- A row holds whole sequences. The reader splits each into inputs (all tokens but the
  last) and targets (all but the first), so a sequence of L tokens occupies L - 1.
- `loss_mask` belongs to the inputs: it is 1 where the *next* token of the sequence is
  supervised.
- `seq_start_id` holds the start of each sequence, without the end of the last.
- With context or sequence parallelism, the size of each sequence must be a multiple of
  `pad_seq_to_mult`: sequences are padded with EOS. The reader finds their end by it: it
  treats all EOS at the end of the inputs as padding.
- The metadata is a JSON list with one object. With `pad_cu_seqlens` (static shapes for
  CUDA graphs) the reader takes the most sequences of a row, the longest sequence and
  the shortest row from it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import setting
from packstore.errors import ConfigError, PackstoreError, sentence
from packstore.exchange import Exported, Exporter, ExportOptions, exists_error
from packstore.format.arrays import (
    Bool,
    Examples,
    Int32,
    Int64,
    Packs,
    range_indices,
    to_offsets,
)
from packstore.format.schema import list_of
from packstore.io.store.location import Location
from packstore.io.store.operations import remove_empty
from packstore.io.store.staging import Staging

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.progress import Progress

log = logging.getLogger("packstore")

METADATA = "metadata.json"

FILE_BYTES = 192 << 20
"""Bytes of a Parquet file, about."""

_TYPES = {"input_ids": pa.int32(), "loss_mask": pa.int8(), "seq_start_id": pa.int32()}
SCHEMA = pa.schema([(name, list_of(type_)) for name, type_ in _TYPES.items()])


@dataclass(frozen=True, kw_only=True)
class MegatronOptions(ExportOptions):
    """Options of this format; those named as in Megatron-Bridge have its meaning."""

    pack_size: int | None = setting(
        None, "most tokens of a row; default: the dataset's", low=1
    )
    pad_seq_to_mult: int | None = setting(
        None, "pad sequences to it; default: by the parallelism", low=1
    )
    context_parallel: int = setting(1, "Bridge's context_parallel_size", low=1)
    tensor_parallel: int = setting(1, "Bridge's tensor_model_parallel_size", low=1)
    sequence_parallel: bool = setting(False, "Bridge's sequence_parallel")
    pad_cu_seqlens: bool = setting(False, "static shapes, for CUDA graphs")
    pad_id: int | None = setting(
        None, "the padding token; default: the tokenizer's EOS", low=0, high=2**31 - 1
    )

    def __post_init__(self) -> None:
        ExportOptions.__post_init__(self)
        if self.pad_seq_to_mult and self.pad_seq_to_mult % self.parallel_multiple:
            raise ConfigError(
                "setting pad_seq_to_mult must be a multiple of "
                f"{self.parallel_multiple} with this "
                f"parallelism; found {self.pad_seq_to_mult}. Omit it to have that "
                "number."
            )

    @property
    def parallel_multiple(self) -> int:
        """The multiple that the parallelism requires, by
        ``docs/training/packed-sequences.md``.
        """
        cp, tp = self.context_parallel, self.tensor_parallel
        by_context = 2 * cp if cp > 1 else 1
        by_sequence = cp * tp if self.sequence_parallel and tp > 1 else 1
        return math.lcm(by_context, by_sequence)

    @property
    def multiple(self) -> int:
        """The multiple in effect."""
        return self.pad_seq_to_mult or self.parallel_multiple


def _run(
    dataset: Dataset, place: Location, options: MegatronOptions, progress: Progress
) -> Exported:
    if not len(dataset):
        raise ConfigError(sentence(dataset.url, "must hold at least one pack", "none"))
    names = [entry.name for entry in place.files()]
    earlier = [
        n for n in names if n == METADATA or fnmatchcase(n, "packed_*-*.idx.parquet")
    ]
    if earlier and not options.overwrite:
        raise exists_error(place, f"{earlier[0]} in it")
    pack_size, is_new = _pack_size(dataset, options), not place.exists()
    rows = RowMaker(pack_size, options.multiple, _pad_id(dataset, options))
    figures = rows.figures
    try:
        with Staging(place) as staging:
            batches = rows.batches(dataset, progress)
            paths = _write_files(batches, staging, f"packed_{pack_size}")
            with staging.file() as file:
                file.write(json.dumps([figures.metadata(pack_size)]).encode())
            _publish(place, staging, {**paths, METADATA: file.name}, earlier)
    finally:
        if is_new:
            remove_empty(place, "")
    if figures.hidden:
        log.warning(
            "%s supervised tokens follow nothing but EOS at the end of their sequence, "
            "which "
            "Megatron-Bridge takes for filling: they are not supervised there",
            f"{figures.hidden:,}",
        )
    facts: dict[str, object] = {
        "rows": figures.rows,
        "sequences": figures.sequences,
        "fill rate": figures.tokens / figures.rows / pack_size,
        "not supervised any more": figures.hidden,
        "tokens of filling": figures.filled,
        "sequences moved to other rows": figures.moved,
        # The matching settings of Megatron-Bridge.
        "packed_sequence_size": pack_size,
        "packed_train_data_path": place.join(
            f"packed_{pack_size}-*.idx.parquet"
        ).display,
        "packed_metadata_path": place.join(METADATA).display,
        "pad_seq_to_mult": options.multiple,
        "pad_cu_seqlens": options.pad_cu_seqlens,
        "dataset_kwargs.pad_to_max_length": options.pad_cu_seqlens,
    }
    return Exported([place.join(name).display for name in (*paths, METADATA)], facts)


def _publish(
    place: Location, staging: Staging, files: Mapping[str, str], earlier: Sequence[str]
) -> None:
    """Replaces files of an earlier export by `files`, name -> local path, the metadata
    last.

    Earlier metadata go first, so that metadata always mark a whole export.
    """
    stored: list[str] = []
    try:
        if METADATA in earlier:
            place.remove(METADATA)
        for name, path in files.items():
            if name == METADATA:
                for old in set(earlier) - set(files):
                    place.remove(old)
            staging.store(path, name)
            stored.append(name)
    except BaseException:
        for name in stored:
            with contextlib.suppress(PackstoreError):
                place.remove(name)
        raise


def _pack_size(dataset: Dataset, options: MegatronOptions) -> int:
    size, m = options.pack_size or dataset.manifest.pack_size, options.multiple
    if size % m:
        raise ConfigError(
            f"pack_size: must be a multiple of pad_seq_to_mult, {m}; found {size}. "
            f"Give pack_size {-(-size // m) * m}."
        )
    longest = -(-(dataset.manifest.statistics.longest_sequence - 1) // m) * m
    if longest > size:
        raise ConfigError(
            f"pack_size: must hold the longest sequence, which takes up {longest}; "
            f"found {size}. "
            "Give a larger pack_size."
        )
    return size


def _pad_id(dataset: Dataset, options: MegatronOptions) -> int:
    if options.pad_id is not None:
        return options.pad_id
    eos = (dataset.manifest.provenance.get("tokenizer") or {}).get("eos_id")
    if not isinstance(eos, int) and options.multiple > 1:
        rule = "its EOS must be known to fill sequences up"
        raise ConfigError(sentence(dataset.url, rule, "none", "Give pad_id"))
    return eos if isinstance(eos, int) else 0  # unused where nothing is filled up


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


def _write_files(
    batches: Iterator[pa.RecordBatch], staging: Staging, stem: str
) -> dict[str, str]:
    """Writes row groups to files; returns the local path of each by name."""
    paths: dict[str, str] = {}
    options: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
    batch = next(batches, None)
    while batch is not None:
        with (
            staging.file() as file,
            pq.ParquetWriter(file, SCHEMA, compression="zstd", **options) as writer,
        ):
            while batch is not None and file.tell() < FILE_BYTES:
                writer.write_table(pa.Table.from_batches([batch]), batch.num_rows)
                batch = next(batches, None)
        paths[f"{stem}-{len(paths):05d}.idx.parquet"] = file.name
    return paths


class RowMaker:
    """Converts packs to rows of at most `pack_size` tokens, counted in `figures`; what
    is padded and no longer fits its row moves to later ones.
    """

    def __init__(self, pack_size: int, multiple: int, pad_id: int) -> None:
        self.figures = Figures()
        self._pack_size, self._multiple, self._pad_id = pack_size, multiple, pad_id
        self._rest = Examples.empty()

    def batches(self, dataset: Dataset, progress: Progress) -> Iterator[pa.RecordBatch]:
        """Yields the rows of all packs; what was moved follows at the end."""
        for group, packs in enumerate(dataset.iter_packs(), 1):
            yield self._add(packs)
            progress("export", group, len(dataset.row_groups), "row groups")
        if left := self._rest.num_examples:
            yield self._batch(self._rest, self._sizes(self._rest), [list(range(left))])

    def _add(self, packs: Packs) -> pa.RecordBatch:
        """Returns one row per pack, and rows of moved sequences once these fill
        rows.
        """
        from packstore.pack.fill import unpack

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
        room, row = self._pack_size, []
        for i in over:
            if sizes[i] > room:
                rows.append(row)
                room, row = self._pack_size, []
            row.append(i)
            room -= int(sizes[i])
        self._rest = examples.take(np.array(row, np.int64))
        return self._batch(examples, sizes, rows)

    def _sizes(self, examples: Examples) -> Int64:
        """Tokens that each sequence occupies: int64 `[S]`.

        The reader treats all EOS at the end of the inputs as padding. A sequence that
        continues after an EOS (templates that end a turn with EOS and a line break)
        keeps it only if its last token is an input too: so it is padded even where its
        size fits.
        """
        inputs, m = examples.lengths.astype(np.int64) - 1, self._multiple
        sizes = -(-inputs // m) * m
        if m > 1:
            last = examples.sequence_offsets[1:] - 1
            eos = examples.input_ids == self._pad_id
            cut = (
                (sizes == inputs)
                & eos[last - 1]
                & ~eos[last]
                & examples.supervised[last]
            )
            sizes += np.where(cut & (sizes + m <= self._pack_size), m, 0)
        return sizes

    def _batch(
        self, examples: Examples, sizes: Int64, rows: list[list[int]]
    ) -> pa.RecordBatch:
        order = np.array([i for row in rows for i in row], np.int64)
        starts = to_offsets(np.array([len(row) for row in rows]))
        examples, sizes = examples.take(order), sizes[order]
        lengths = examples.lengths.astype(np.int64)
        offsets = to_offsets(sizes + 1)
        ids = np.full(offsets[-1], self._pad_id, np.int32)
        mask = np.zeros(offsets[-1], np.int8)
        places = range_indices(offsets[:-1], lengths)
        ids[places] = examples.input_ids
        # The first token of a sequence is never supervised, so the shift crosses no
        # border.
        mask[places[:-1]] = examples.supervised[1:]
        if self._multiple > 1:
            hidden = _hidden(ids, offsets, self._pad_id) & (mask != 0)
            mask[hidden] = 0
            self.figures.hidden += int(np.count_nonzero(hidden))
        self.figures.add(sizes, starts)
        self.figures.filled += int((sizes + 1 - lengths).sum())
        tokens = offsets[starts]
        firsts = (offsets[:-1] - np.repeat(tokens[:-1], np.diff(starts))).astype(
            np.int32
        )
        columns = [(ids, tokens), (mask, tokens), (firsts, starts)]
        arrays = [
            pa.ListArray.from_arrays(
                pa.array(where.astype(np.int32)), pa.array(values), type=field.type
            )
            for (values, where), field in zip(columns, SCHEMA, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _hidden(ids: Int32, offsets: Int64, pad_id: int) -> Bool:
    """True for tokens after the last input of their sequence that is not EOS: bool
    `[N]`.
    """
    inputs = np.ones(len(ids), np.bool_)
    inputs[offsets[1:] - 1] = False
    real = np.where((ids != pad_id) & inputs, np.arange(len(ids)), -1)
    last = np.maximum.reduceat(real, offsets[:-1])
    return np.arange(len(ids)) > np.repeat(last, np.diff(offsets))


EXPORTER = Exporter(
    help="Megatron-Bridge's packed Parquet and its metadata (kind sft)",
    out=("FOLDER", "the folder to write"),
    examples="  packstore export megatron chats-8k bridge-8k\n"
    "  packstore export megatron chats-8k bridge-8k --context-parallel 2 "
    "--tensor-parallel 4 "
    "--sequence-parallel\n"
    "  packstore export megatron chats-8k bridge-8k --pad-seq-to-mult 16 "
    "--pad-cu-seqlens\n",
    kind="sft",
    options=MegatronOptions,
    run=_run,
)
