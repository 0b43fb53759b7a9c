"""Exports packed Parquet for supervised fine-tuning by Megatron-Bridge.

The rules were read in NVIDIA-NeMo/Megatron-Bridge at commit 067f987 (2026-08-22):
``src/megatron/bridge/data/packing/`` (``parquet.py`` and ``gpt_sft.py``, which read the
files, ``offline.py`` and ``algorithms.py``, which write them) and
``docs/training/packed-sequences.md``.

- A row holds whole sequences. The reader (Megatron-Bridge) splits each into inputs (all
  tokens but the last) and targets (all but the first), so a sequence of L tokens
  *occupies* L - 1 tokens of a row.
- `loss_mask` belongs to the inputs: it is 1 where the *next* token of the sequence is
  supervised.
- `seq_start_id` holds the start of each sequence, without the end of the last.
- With context or sequence parallelism, the size of each sequence must be a multiple of
  `pad_seq_to_mult`: sequences are padded with EOS. The reader treats all EOS at the end
  of the inputs as padding.
- The metadata, a file of its own, is a JSON list with one object. With `pad_cu_seqlens`
  (static shapes for CUDA graphs) the reader takes from it the maximum number of
  sequences in a row, the longest sequence and the shortest row.

The dataset is of kind ``sft``, so each example is one sequence. In layout ``concat``,
a row is a pack, unless padding makes it too long. A dataset of layout
``shared_prefix`` is planned anew, see :mod:`packstore.exchange._rows`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.config import setting
from packstore.errors import ConfigError, PackstoreError, sentence
from packstore.exchange import Exported, Exporter, ExportOptions, exists_error
from packstore.exchange._rows import plan_rows, rebuilt_examples
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

_Number = TypeVar("_Number", int, Int64)

METADATA = "metadata.json"

FILE_BYTES = 192 << 20
"""Approximate bytes of a Parquet file."""

SCHEMA = pa.schema(
    [
        ("input_ids", list_of(pa.int32())),
        ("loss_mask", list_of(pa.int8())),
        ("seq_start_id", list_of(pa.int32())),
    ]
)


@dataclass(frozen=True, kw_only=True)
class MegatronOptions(ExportOptions):
    """Options of this format; Megatron-Bridge's names have its meaning."""

    pack_size: int | None = setting(
        None, "maximum tokens per row (default: the dataset's)", low=1
    )
    pad_seq_to_mult: int | None = setting(
        None, "multiple to pad to (default: by the parallelism)", low=1
    )
    context_parallel: int = setting(1, "Bridge's context_parallel_size", low=1)
    tensor_parallel: int = setting(1, "Bridge's tensor_model_parallel_size", low=1)
    sequence_parallel: bool = setting(False, "Bridge's sequence_parallel")
    pad_cu_seqlens: bool = setting(False, "static shapes, for CUDA graphs")
    pad_id: int | None = setting(
        None, "padding token id (default: the tokenizer's EOS)", low=0, high=2**31 - 1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_seq_to_mult and self.pad_seq_to_mult % self.parallel_multiple:
            raise ConfigError(
                "setting pad_seq_to_mult must be a multiple of "
                f"{self.parallel_multiple} with this parallelism; found "
                f"{self.pad_seq_to_mult}. Omit it to get that number."
            )

    @property
    def parallel_multiple(self) -> int:
        """The multiple that the parallelism requires.

        It is the least common multiple of 2 * context_parallel (if context_parallel is
        above 1) and context_parallel * tensor_parallel (with sequence_parallel).
        Source: ``docs/training/packed-sequences.md`` of Megatron-Bridge.
        """
        context_multiple = 1
        if self.context_parallel > 1:
            context_multiple = 2 * self.context_parallel
        sequence_multiple = 1
        if self.sequence_parallel and self.tensor_parallel > 1:
            sequence_multiple = self.context_parallel * self.tensor_parallel
        return math.lcm(context_multiple, sequence_multiple)

    @property
    def multiple(self) -> int:
        """Sequences are padded to this multiple; 1: they are not padded."""
        return self.pad_seq_to_mult or self.parallel_multiple


def _export(
    dataset: Dataset, place: Location, options: MegatronOptions, progress: Progress
) -> Exported:
    if not len(dataset):
        raise ConfigError(
            sentence(dataset.url, rule="must hold at least one pack", found="none")
        )
    earlier_files = [
        entry.name for entry in place.files() if _is_export_file(entry.name)
    ]
    if earlier_files and not options.overwrite:
        raise exists_error(place, f"{earlier_files[0]} in it")

    pack_size = _row_size(dataset, options)
    row_maker = RowMaker(pack_size, options.multiple, _pad_id(dataset, options))
    figures = row_maker.figures
    is_new = not place.exists()
    try:
        with Staging(place) as staging:
            batches = row_maker.batches(dataset, progress)
            files = _write_files(batches, staging, f"packed_{pack_size}")
            with staging.file() as file:
                file.write(json.dumps([figures.metadata(pack_size)]).encode())
            files[METADATA] = file.name
            _publish(place, staging, files, earlier_files)
    finally:
        if is_new:
            remove_empty(place, "")

    if figures.hidden:
        log.warning(
            "%s supervised tokens follow nothing but EOS at the end of their sequence; "
            "Megatron-Bridge treats these as padding and does not supervise them",
            f"{figures.hidden:,}",
        )
    return Exported(
        files=[place.join(name).display for name in files],
        facts=_facts(dataset, figures, place, pack_size, options),
    )


def _is_export_file(name: str) -> bool:
    """Return True for the name of a file that this export writes."""
    return name == METADATA or fnmatchcase(name, "packed_*-*.idx.parquet")


def _facts(
    dataset: Dataset,
    figures: Figures,
    place: Location,
    pack_size: int,
    options: MegatronOptions,
) -> dict[str, object]:
    """Return counts, and settings for Megatron-Bridge to read the files."""
    data_path = place.join(f"packed_{pack_size}-*.idx.parquet").display
    facts: dict[str, object] = {
        "rows": figures.rows,
        "sequences": figures.sequences,
        "fill rate": figures.tokens / figures.rows / pack_size,
        "not supervised any more": figures.hidden,
        "padding tokens": figures.padding,
    }
    if dataset.manifest.layout == "concat":  # else rows do not follow packs
        facts["sequences moved to other rows"] = figures.moved_sequences
    facts |= {
        # The matching settings of Megatron-Bridge.
        "packed_sequence_size": pack_size,
        "packed_train_data_path": data_path,
        "packed_metadata_path": place.join(METADATA).display,
        "pad_seq_to_mult": options.multiple,
        "pad_cu_seqlens": options.pad_cu_seqlens,
        "dataset_kwargs.pad_to_max_length": options.pad_cu_seqlens,
    }
    if options.context_parallel > 1:
        # Bridge refuses other values, as a rank whose tokens are all unsupervised would
        # have a loss of NaN: `ConfigContainer.validate` in its `training/config.py`.
        facts["model.context_parallel_size"] = options.context_parallel
        facts["model.calculate_per_token_loss"] = True
        facts["ddp.average_in_collective"] = False
    return facts


def _publish(
    place: Location,
    staging: Staging,
    files: Mapping[str, str],
    earlier_files: Sequence[str],
) -> None:
    """Move or upload new files to `place`, and remove an earlier export.

    The earlier metadata is removed first, and the new metadata written last: metadata
    always mark a complete export. After an error, none of the new files stay.

    Args:
        files: name -> local path, the metadata last.
        earlier_files: names of the files at `place`.
    """
    uploaded: list[str] = []
    try:
        if METADATA in earlier_files:
            place.remove(METADATA)
        for name, path in files.items():
            if name == METADATA:
                for old_name in set(earlier_files) - set(files):
                    place.remove(old_name)
            staging.store(path, name)
            uploaded.append(name)
    except BaseException:
        for name in uploaded:
            with contextlib.suppress(PackstoreError):
                place.remove(name)
        raise


def _row_size(dataset: Dataset, options: MegatronOptions) -> int:
    """Return the maximum tokens per row.

    Raises:
        ConfigError: it is no multiple of the padding, or the longest sequence, padded,
            does not fit.
    """
    size = options.pack_size or dataset.manifest.pack_size
    multiple = options.multiple
    if size % multiple:
        raise ConfigError(
            f"pack_size: must be a multiple of pad_seq_to_mult, {multiple}; found "
            f"{size}. Give pack_size {_round_up(size, multiple)}."
        )
    num_inputs = dataset.manifest.statistics.longest_sequence - 1
    longest = _round_up(num_inputs, multiple)
    if longest > size:
        raise ConfigError(
            f"pack_size: must hold the longest sequence, which takes up {longest}; "
            f"found {size}. Give a larger pack_size."
        )
    return size


def _pad_id(dataset: Dataset, options: MegatronOptions) -> int:
    """Return the token id of padding: as set, else EOS of the dataset's tokenizer."""
    if options.pad_id is not None:
        return options.pad_id
    tokenizer = dataset.manifest.provenance.get("tokenizer") or {}
    eos_id = tokenizer.get("eos_id")
    if isinstance(eos_id, int):
        return eos_id
    if options.multiple == 1:
        return 0  # unused, as no sequence is padded
    raise ConfigError(
        sentence(
            dataset.url,
            rule="its EOS must be known to pad sequences",
            found="none",
            remedy="Give pad_id",
        )
    )


@dataclass
class Figures:
    """Counts of the rows that are written.

    Sizes are tokens that sequences occupy in rows: inputs and padding.

    Attributes:
        rows: number of rows.
        sequences: number of sequences.
        tokens: size of all rows.
        padding: number of padding tokens.
        longest_sequence: size of the longest sequence.
        max_sequences: maximum number of sequences in a row.
        shortest_row: size of the shortest row.
        moved_sequences: number of sequences that, once padded, did not fit the row of
            their pack.
        hidden: number of supervised tokens that the reader treats as padding.
    """

    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    padding: int = 0
    longest_sequence: int = 0
    max_sequences: int = 0
    shortest_row: int = 2**31  # above any size
    moved_sequences: int = 0
    hidden: int = 0

    def add(self, sizes: Int64, row_offsets: Int64) -> None:
        """Add rows.

        Args:
            sizes: int64 `[S]`, tokens that each sequence occupies.
            row_offsets: int64 `[R + 1]`; row r has the sequences
                ``row_offsets[r]:row_offsets[r + 1]``.
        """
        row_sizes = np.add.reduceat(sizes, row_offsets[:-1])
        most_sequences = int(np.diff(row_offsets).max())
        self.rows += len(row_sizes)
        self.sequences += len(sizes)
        self.tokens += int(sizes.sum())
        self.longest_sequence = max(self.longest_sequence, int(sizes.max()))
        self.max_sequences = max(self.max_sequences, most_sequences)
        self.shortest_row = min(self.shortest_row, int(row_sizes.min()))

    def metadata(self, pack_size: int) -> dict[str, Any]:
        """Return Megatron-Bridge's metadata of a packed split, with its rounding."""
        return {
            "dataset_max_seqlen": self.longest_sequence,
            "max_samples_per_bin": self.max_sequences,
            "packing_factor": round(self.sequences / self.rows, 2),
            "packing_efficiency": round(self.tokens / self.rows / pack_size * 100, 2),
            "pack_size": pack_size,
            "min_packed_seqlen": self.shortest_row,
        }


def _write_files(
    batches: Iterator[pa.RecordBatch], staging: Staging, stem: str
) -> dict[str, str]:
    """Write each batch as a row group.

    Returns:
        Name of each file -> its local path.
    """
    files: dict[str, str] = {}
    batch = next(batches, None)
    while batch is not None:
        with (
            staging.file() as file,
            pq.ParquetWriter(
                file,
                SCHEMA,
                compression="zstd",
                use_dictionary=False,
                write_statistics=False,
            ) as writer,
        ):
            while batch is not None and file.tell() < FILE_BYTES:
                writer.write_table(pa.Table.from_batches([batch]), batch.num_rows)
                batch = next(batches, None)
        files[f"{stem}-{len(files):05d}.idx.parquet"] = file.name
    return files


class RowMaker:
    """Converts packs to rows of at most `pack_size` tokens, counted in `figures`.

    Padding can make the sequences of a pack too long for one row. Those that do not fit
    wait until they fill rows of their own.

    Args:
        pack_size: maximum tokens that the sequences of a row occupy.
        multiple: each sequence is padded to this multiple.
        pad_id: token id of padding.
    """

    def __init__(self, pack_size: int, multiple: int, pad_id: int) -> None:
        self.figures = Figures()
        self._pack_size = pack_size
        self._multiple = multiple
        self._pad_id = pad_id
        self._waiting = Examples.empty()

    def batches(self, dataset: Dataset, progress: Progress) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all sequences of a dataset."""
        if dataset.manifest.layout == "concat":
            yield from self._batches_of_packs(dataset, progress)
        else:
            yield from self._planned_batches(dataset, progress)

    def _planned_batches(
        self, dataset: Dataset, progress: Progress
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows that are planned anew."""
        parts = rebuilt_examples(dataset, progress)
        for planned in plan_rows(parts, self._pack_size, self._sizes):
            yield self._batch(planned.examples, planned.sizes, planned.rows)

    def _batches_of_packs(
        self, dataset: Dataset, progress: Progress
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all packs, and then of the sequences that still wait."""
        for number, packs in enumerate(dataset.iter_packs(), 1):
            yield self._convert(packs)
            progress("export", number, len(dataset.row_groups), "row groups")
        num_waiting = self._waiting.num_examples
        if num_waiting:
            sizes = self._sizes(self._waiting)
            # They fit one row: fuller ones have been written.
            yield self._batch(self._waiting, sizes, rows=[list(range(num_waiting))])

    def _convert(self, packs: Packs) -> pa.RecordBatch:
        """Return one row per pack, and full rows of waiting sequences."""
        from packstore.pack.fill import unpack

        num_waiting = self._waiting.num_examples
        new_examples = replace(unpack(packs), columns={})
        examples = Examples.concat([self._waiting, new_examples])
        sizes = self._sizes(examples)

        rows: list[list[int]] = []  # indices of `examples`
        waiting = list(range(num_waiting))
        offsets = (packs.example_offsets + num_waiting).tolist()
        for first, stop in pairwise(offsets):
            row, overflow = self._split(range(first, stop), sizes)
            rows.append(row)
            waiting += overflow
            self.figures.moved_sequences += len(overflow)

        *full_rows, open_row = self._next_fit(waiting, sizes)
        self._waiting = examples.take(np.array(open_row, np.int64))
        return self._batch(examples, sizes, [*rows, *full_rows])

    def _split(
        self, sequences: Iterable[int], sizes: Int64
    ) -> tuple[list[int], list[int]]:
        """Return the sequences that fit one row, taken in order, and the others.

        Args:
            sequences: indices of sequences.
            sizes: int64 `[S]`, tokens that each sequence occupies.
        """
        row = []
        overflow = []
        room = self._pack_size
        for i in sequences:
            if sizes[i] <= room:
                row.append(i)
                room -= int(sizes[i])
            else:
                overflow.append(i)
        return row, overflow

    def _next_fit(self, sequences: Iterable[int], sizes: Int64) -> list[list[int]]:
        """Return rows of sequences in order; the last one may have room.

        Arguments: see :meth:`_split`.
        """
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
        """Return the tokens that each sequence occupies, int64 `[S]`."""
        num_inputs = examples.lengths.astype(np.int64) - 1
        sizes = _round_up(num_inputs, self._multiple)
        if self._multiple == 1:
            return sizes

        # The reader treats all EOS at the end of the inputs as padding, and inputs lack
        # the last token. Some templates end a turn with EOS and a line break: then EOS
        # is the last input, and lost as padding, unless the line break becomes an input
        # behind it. Padding does that, so a sequence that needs none gets some.
        last = examples.sequence_offsets[1:] - 1
        is_eos = examples.input_ids == self._pad_id
        continues = ~is_eos[last] & examples.supervised[last]
        loses_eos = (sizes == num_inputs) & is_eos[last - 1] & continues
        has_room = sizes + self._multiple <= self._pack_size
        sizes += np.where(loses_eos & has_room, self._multiple, 0)
        return sizes

    def _batch(
        self, examples: Examples, sizes: Int64, rows: list[list[int]]
    ) -> pa.RecordBatch:
        """Return rows in Megatron-Bridge's columns, and count them.

        Args:
            examples: sequences, one per example.
            sizes: int64 `[S]`, tokens that each sequence occupies.
            rows: for each row the indices of its sequences.
        """
        order = np.array([i for row in rows for i in row], np.int64)
        row_offsets = to_offsets(np.array([len(row) for row in rows]))
        examples = examples.take(order)
        sizes = sizes[order]
        lengths = examples.lengths.astype(np.int64)

        # Stored are the inputs, the padding, and one more token, the last target.
        offsets = to_offsets(sizes + 1)  # [S + 1]
        places = range_indices(offsets[:-1], lengths)  # of tokens that are no padding
        ids = np.full(offsets[-1], self._pad_id, np.int32)
        ids[places] = examples.input_ids
        mask = np.zeros(offsets[-1], np.int8)
        # The first token of a sequence is never supervised, so that the shift moves no
        # bit into the sequence before.
        mask[places[:-1]] = examples.supervised[1:]

        if self._multiple > 1:
            is_hidden = _is_hidden(ids, offsets, self._pad_id) & (mask != 0)
            mask[is_hidden] = 0
            self.figures.hidden += int(np.count_nonzero(is_hidden))
        self.figures.add(sizes, row_offsets)
        self.figures.padding += int((sizes + 1 - lengths).sum())

        token_offsets = offsets[row_offsets]
        row_starts = np.repeat(token_offsets[:-1], np.diff(row_offsets))
        sequence_starts = (offsets[:-1] - row_starts).astype(np.int32)
        arrays = [
            _lists(ids, token_offsets, "input_ids"),
            _lists(mask, token_offsets, "loss_mask"),
            _lists(sequence_starts, row_offsets, "seq_start_id"),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _lists(values: Any, offsets: Int64, column: str) -> pa.ListArray:
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)),
        pa.array(values),
        type=SCHEMA.field(column).type,
    )


def _is_hidden(ids: Int32, offsets: Int64, pad_id: int) -> Bool:
    """Return the tokens that the reader treats as padding: bool `[N]`.

    In each sequence, these are all tokens after the last input that is not EOS.

    Args:
        ids: int32 `[N]`, stored tokens of all sequences.
        offsets: int64 `[S + 1]`, the sequences in `ids`.
        pad_id: token id of EOS.
    """
    is_input = np.ones(len(ids), np.bool_)
    is_input[offsets[1:] - 1] = False
    real_inputs = np.where((ids != pad_id) & is_input, np.arange(len(ids)), -1)
    last_real = np.maximum.reduceat(real_inputs, offsets[:-1])
    return np.arange(len(ids)) > np.repeat(last_real, np.diff(offsets))


def _round_up(number: _Number, multiple: int) -> _Number:
    """Return the smallest multiple that is not below `number`."""
    rounded: _Number = -(-number // multiple) * multiple
    return rounded


EXPORTER = Exporter(
    help="Megatron-Bridge's packed Parquet and its metadata (kind sft)",
    out_name="FOLDER",
    out_help="the folder to write",
    examples="  packstore export megatron chats-8k bridge-8k\n"
    "  packstore export megatron chats-8k bridge-8k --context-parallel 2 "
    "--tensor-parallel 4 "
    "--sequence-parallel\n"
    "  packstore export megatron chats-8k bridge-8k --pad-seq-to-mult 16 "
    "--pad-cu-seqlens\n",
    kinds=("sft",),
    options=MegatronOptions,
    run=_export,
)
