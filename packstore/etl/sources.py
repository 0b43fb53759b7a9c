"""Opens sources of examples: records to tokenize, or a packed dataset to repack.

A source is read in *blocks*, runs of consecutive records of one file (or row groups of
a dataset). Each block becomes examples, and a tally that counts what happened to its
records. The first two blocks are read when a source is opened: they decide the kind
and the types of carried columns, and show an error before a job begins.

A tokenizer has *engines*, implementations that give equal ids. The *reference* engine,
``tokenizers``, is loaded first; a faster one takes its place for a large input.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from typing import Any

import numpy as np

from packstore.config import PARTITION_BYTES, REASONS, PackConfig, SizeConfig
from packstore.config.remedies import current_door, spell
from packstore.errors import (
    ConfigError,
    InputError,
    RecordError,
    sentence,
    to_unicode,
)
from packstore.etl.engines import engine_with, local
from packstore.etl.tokenize import BlockTokenizer, TokenizedBlock
from packstore.format.arrays import Examples, Rows, to_offsets
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.inputs.files import BLOCK_BYTES, Block, Input, InputReader
from packstore.io.inputs.sampling import Sampling, head_blocks, sample_blocks
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.side_manifest import REF_LOGPS, REF_TOKEN_LOGPS
from packstore.pack.fill import unpack
from packstore.pack.layout import count_keys, sizes
from packstore.tokenizer import (
    RecordTokenizer,
    Tokenizer,
    load_tokenizer,
    parse_carry,
    typed_carry,
)
from packstore.tokenizer.fastest import EngineWatch, is_worthwhile, with_fastest_engine
from packstore.tokenizer.record_tokenizer import Lint
from packstore.tokenizer.records.adapters import Adapter, load_adapter
from packstore.tokenizer.records.describe import (
    describe,
    reading_provenance,
    without_a_kind,
)
from packstore.tokenizer.records.parsed import Parsed
from packstore.tokenizer.records.read import ReadRecord, kind_of_record, require_object
from packstore.tokenizer.records.token_values import check_token_values
from packstore.tokenizer.refusals import Refused, Stop
from packstore.tokenizer.tally import Tally
from packstore.tokenizer.tokenizer import FAST
from packstore.version import VERSION

log = logging.getLogger("packstore")

FEW_CORES = {None: 2, FAST: 2, "tokenizers": 4}
"""Name of a tokenizer engine -> number of threads that run in parallel in one process;
further threads would wait for the GIL, or for each other. None: there is no tokenizer,
as the records hold token ids.
"""

SIZES_AT_ONCE = 16
"""Maximum concurrent requests for the sizes of files."""


def open_examples(
    source: Any,
    tokenizer: Any,
    config: PackConfig,
    storage_options: Mapping[str, Any],
    block_bytes: int = BLOCK_BYTES,
    adapter: Adapter | None = None,
    skip_empty: bool = False,
) -> ExampleReader:
    """Open `source` for packing, its records in blocks of about `block_bytes`.

    `source` and `tokenizer`: see :func:`packstore.pack`. `skip_empty`: see
    :class:`InputReader`.

    Raises:
        NoRecordsError: there is no record.
        ConfigError: a setting does not suit the source.
        RecordError: one of the first records would stop the job.
        PackstoreError: the source cannot be read, or the tokenizer does not load.
    """
    dataset = find_dataset_source(source, storage_options)
    if dataset is None:
        return open_records(
            source,
            tokenizer,
            config,
            dict(storage_options),
            block_bytes,
            adapter,
            skip_empty,
        )
    if tokenizer is not None:
        raise ConfigError(
            f"{dataset.url} is a packed dataset, which is repacked without "
            "tokenizing: leave tokenizer out."
        )
    return DatasetExampleReader(dataset, config)


def find_dataset_source(
    source: Any, storage_options: Mapping[str, Any]
) -> Dataset | None:
    """Return the packed dataset that a source is; None if it is records."""
    if isinstance(source, Dataset):
        return source
    return find_dataset(source, storage_options)


# Records.


@dataclass(frozen=True)
class FirstRecord:
    """The first record that can be read: it shows how the others are read.

    Attributes:
        place: e.g. ``prefs.jsonl, line 1``.
        value: the record, as its file has it.
        read: the form or adapter that reads it, and the columns that were read.
        parsed: its prompt, responses and rewards.
    """

    place: str
    value: Any
    read: ReadRecord
    parsed: Parsed


def open_records(
    source: Any,
    tokenizer: Any,
    config: PackConfig,
    storage_options: dict[str, Any],
    block_bytes: int = BLOCK_BYTES,
    adapter: Adapter | None = None,
    skip_empty: bool = False,
) -> RecordExampleReader:
    """Open a source of records, and read its first blocks.

    A job that cannot succeed shall stop here, before it begins. Arguments: see
    :func:`open_examples`.
    """
    # `carry` names columns of the records that are copied into the packs. Its syntax is
    # checked before anything is read; missing types are inferred below.
    parse_carry(config)
    check_token_values(config)
    if config.token_values:
        _refuse_sequence_column(config)
        _require_repeatable(source)
    input_reader = InputReader(source, storage_options, config, block_bytes, skip_empty)
    blocks = PeekableBlocks(input_reader)
    # There is a first block: InputReader raises for a source without records.
    first_blocks = blocks.peek(2)
    reference_tokenizer = _load_reference_tokenizer(tokenizer, config, blocks)

    first_rows = first_blocks[0].parse()
    if config.carry:
        config = replace(config, carry=typed_carry(config, first_rows.values))
    if adapter is None and config.adapter is not None:
        adapter = load_adapter(config.adapter)
    kind: str = config.kind
    if config.kind == "auto":
        kind = _detect_kind(
            first_rows, config, adapter, prefers_ids=reference_tokenizer is None
        )
    config = config.with_layout_of(kind)
    build_tokenizer = partial(
        RecordTokenizer, reference_tokenizer, config, kind, adapter=adapter
    )
    rows_of_blocks = [first_rows, *(block.parse() for block in first_blocks[1:])]
    first_record = _read_first_blocks(rows_of_blocks, config, build_tokenizer)
    _prepare_rendering(reference_tokenizer, config, first_record)
    return RecordExampleReader(
        input_reader=input_reader,
        blocks=blocks,
        reference_tokenizer=reference_tokenizer,
        tokenizer_path=_path_of(tokenizer),
        config=config,
        adapter=adapter,
        kind=kind,
        first_record=first_record,
    )


def _refuse_sequence_column(config: PackConfig) -> None:
    """Raise ConfigError if values of tokens have the name of a column of sequences."""
    if REF_LOGPS in config.token_values:
        raise ConfigError(
            sentence(
                where="setting token_values",
                rule="a column must not have the name of log-probs of sequences",
                found=REF_LOGPS,
                remedy=f"Name it {REF_TOKEN_LOGPS}",
            )
        )


def _require_repeatable(source: Any) -> None:
    """Raise ConfigError if records can be read only once."""
    is_stream = hasattr(source, "readinto") or hasattr(source, "read_next_batch")
    if isinstance(source, Iterator) or is_stream:
        raise ConfigError(
            sentence(
                where="setting token_values",
                rule="it must be used with files, a list or a table, as records are "
                "read twice",
                found=type(source).__name__,
                remedy="Store the records in a file, or give a list",
            )
        )


class PeekableBlocks:
    """Iterates over blocks, once; the first ones can be read ahead."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = iter(blocks)
        self._ahead: deque[Block] = deque()

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        if self._ahead:
            return self._ahead.popleft()
        return next(self._blocks)

    def peek(self, number: int) -> list[Block]:
        """Return the next `number` blocks, which stay; fewer if there are no more."""
        while len(self._ahead) < number:
            block = next(self._blocks, None)
            if block is None:
                break
            self._ahead.append(block)
        return list(self._ahead)[:number]

    def justify_faster_engine(self, tokenizer_file_bytes: int) -> bool:
        """Return True if the blocks hold enough text for a faster engine to save time.

        Reads ahead until the answer is known.

        Args:
            tokenizer_file_bytes: size of the tokenizer's file. Building the engine from
                it takes time in proportion.
        """
        text_bytes = 0
        for block in self._peek_each():
            text_bytes += _text_bytes(block)
            if is_worthwhile(tokenizer_file_bytes, text_bytes):
                return True
        return False

    def _peek_each(self) -> Iterator[Block]:
        """Yield the next blocks one by one; all of them stay."""
        index = 0
        while True:
            blocks = self.peek(index + 1)
            if index == len(blocks):  # there is no further block
                return
            yield blocks[index]
            index += 1


def _text_bytes(block: Block) -> int:
    """Return the approximate size of a block's text."""
    if isinstance(block.payload, bytes):
        return len(block.payload)
    # Records in memory have no text; their representation is about as long.
    return len(str(block.payload))


def _path_of(tokenizer: Any) -> str | None:
    """Return the path of a tokenizer, for the manifest; None: it is an object."""
    if isinstance(tokenizer, str | PathLike):
        return to_unicode(str(tokenizer))  # without surrogates of undecodable bytes
    return None


def _load_reference_tokenizer(
    tokenizer: Any, config: PackConfig, blocks: PeekableBlocks
) -> Tokenizer | None:
    """Load a tokenizer with the reference engine; None: the records hold token ids."""
    if tokenizer is None:
        return None
    return load_tokenizer(
        tokenizer,
        chat_template=config.chat_template,
        is_worthwhile=blocks.justify_faster_engine,
    )


def _detect_kind(
    rows: Rows, config: PackConfig, adapter: Adapter | None, prefers_ids: bool
) -> str:
    """Return the kind of the first record that is not refused; it must have one.

    Args:
        rows: the first block.
        config: settings.
        adapter: the function that reads records, if there is one.
        prefers_ids: take token ids of a record that has text, too, as there is no
            tokenizer.

    Raises:
        RecordError: a refusal stops the job, all records of the block are refused, or
            the first one that is not refused has no kind.
    """
    refusals: list[tuple[str, Refused]] = []
    for index, value in enumerate(rows.values):
        place = rows.where(index)
        try:
            record = require_object(value)
            kind = kind_of_record(record, config, adapter, prefers_ids)
        except Refused as refusal:
            if _stops_at(refusal, config):
                raise refusal.as_error(place, current_door(), config) from None
            refusals.append((place, refusal))
            continue
        if kind is None:
            raise without_a_kind(record, place)
        return kind

    place, first_refusal = refusals[0]
    door = current_door()  # shell or Python: the remedy is spelt for it
    kind_flag = spell(door, {"kind": "KIND"})
    remedy = first_refusal.spell_remedy(door, config)
    remedy += f", or say the kind of the others ({kind_flag})"
    rule = REASONS[first_refusal.reason].rule
    raise RecordError(
        sentence(where=place, rule=rule, found=first_refusal.detail, remedy=remedy)
    )


def _read_first_blocks(
    rows_of_blocks: Iterable[Rows],
    config: PackConfig,
    build_tokenizer: Callable[..., RecordTokenizer],
) -> FirstRecord | None:
    """Read all records of some blocks, and return the first that can be read.

    Raises:
        RecordError: one of them would stop the job.
    """
    record_tokenizer = build_tokenizer()
    first_record: FirstRecord | None = None
    for rows in rows_of_blocks:
        for index, value in enumerate(rows.values):
            try:
                read, parsed = record_tokenizer.read(value)
            except Refused as refusal:
                if _stops_at(refusal, config):
                    rows_so_far = rows.first(index + 1)
                    _raise_first_error(rows_so_far, build_tokenizer, first_record)
                continue
            if first_record is None:
                first_record = FirstRecord(rows.where(index), value, read, parsed)
    return first_record


def _raise_first_error(
    rows: Rows,
    build_tokenizer: Callable[..., RecordTokenizer],
    first_record: FirstRecord | None,
) -> None:
    """Raise the error of the first record of `rows` that stops the job.

    The last one cannot be read. One before it may be read, and yet stop the job when it
    is tokenized, so all are tokenized.
    """
    record_tokenizer = build_tokenizer(first_place=_place_of(first_record))
    record_tokenizer(rows)


def _place_of(first_record: FirstRecord | None) -> str:
    """Return the place that errors about records of another kind name; may be empty."""
    return first_record.place if first_record else ""


def _prepare_rendering(
    reference_tokenizer: Tokenizer | None,
    config: PackConfig,
    first_record: FirstRecord | None,
) -> None:
    """Start a process that renders chats, and compile their templates.

    Templates are code of others, so only worker processes render them.

    Raises:
        TokenizerError: a template does not compile.
    """
    renders = first_record is not None and first_record.parsed.is_chat
    # The setting `engine` is about workers, not about tokenizers.
    if renders and config.engine == "local":
        local.prepare()
    if reference_tokenizer and (renders or config.chat_template is not None):
        _ = reference_tokenizer.template  # compiled at the first access
        _ = reference_tokenizer.tool_use_template


def _stops_at(refusal: Refused, config: PackConfig) -> bool:
    """Return True for a refusal at which the job stops."""
    if isinstance(refusal, Stop):
        return True
    action = config.on[refusal.reason]
    return action == "error"


class RecordExampleReader:
    """Reads records, and tokenizes them in workers. Made by :func:`open_records`.

    Attributes:
        inputs: the files; none if the records are in memory.
        paths: ordinal of an input -> its path.
        kind: ``preference``, ``sft`` or ``scored``.
        layout: of the packs, ``concat`` or ``shared_prefix``.
        carry: name of each column that is copied into the packs -> its type.
        vocab_size: of the tokenizer; None: the records hold token ids.
    """

    def __init__(
        self,
        *,
        input_reader: InputReader,
        blocks: Iterable[Block],
        reference_tokenizer: Tokenizer | None,
        tokenizer_path: str | None,
        config: PackConfig,
        adapter: Adapter | None,
        kind: str,
        first_record: FirstRecord | None,
    ) -> None:
        self.inputs = input_reader.inputs
        self.paths = input_reader.paths
        self.kind = kind
        self.layout = config.layout
        self.carry = parse_carry(config)
        self.vocab_size = (
            reference_tokenizer.vocab_size if reference_tokenizer else None
        )
        self._input_reader = input_reader
        self._blocks = blocks
        self._reference_tokenizer = reference_tokenizer
        self._tokenizer_path = tokenizer_path
        self._config = config
        self._adapter = adapter
        self._first_record = first_record

    def announce(self) -> None:
        """Log how records are read, before the work begins."""
        first = self._first_record
        if first is None:
            return
        config = self._config
        lines = describe(
            first.read, first.value, self.kind, self._adapter, config, self.carry
        )
        log.info("%s", "\n".join(lines), extra={"lines": lines})

    @property
    def announced_columns(self) -> frozenset[str]:
        """Columns that :meth:`announce` names: carried ones, and the first record's."""
        columns = frozenset(self.carry)
        if self._first_record is not None:
            columns |= frozenset(self._first_record.value)
        return columns

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, with the faster engine if one was found worth loading."""
        if self._reference_tokenizer is None:
            return None
        return with_fastest_engine(self._reference_tokenizer)

    def __iter__(self) -> Iterator[TokenizedBlock]:
        return self.tokenize_with(self.block_tokenizer())

    def tokenize_with(
        self, block_tokenizer: BlockTokenizer
    ) -> Iterator[TokenizedBlock]:
        """Yield the examples and tally of every block, computed in workers."""
        run_in_workers = engine_with(self._config.engine, self._config.num_workers)
        return block_tokenizer.tokenize(run_in_workers, self._blocks)

    def block_tokenizer(self, lint: Lint | None = None) -> BlockTokenizer:
        """Return the picklable function that tokenizes a block.

        Args:
            lint: checks the text of each record; its findings are noted in the tally.
        """
        name = self.tokenizer.engine_name if self.tokenizer else None
        # A template is rendered by Python code, which holds the GIL.
        in_threads = not self._renders and local.cores() <= FEW_CORES.get(name, 0)
        is_quick = not self._renders and name in (None, FAST)
        # Seconds for which only this process works, before others are started.
        seconds_alone = local.SECONDS_ALONE
        if is_quick:
            seconds_alone = local.SECONDS_ALONE_IF_QUICK

        record_tokenizer = RecordTokenizer(
            self.tokenizer,
            self._config,
            self.kind,
            lint=lint,
            adapter=self._adapter,
            first_place=_place_of(self._first_record),
        )
        # Compares engines on the first records of each input, and on a sample.
        watch = EngineWatch(self.tokenizer, self._config, len(self.inputs))
        return BlockTokenizer(
            record_tokenizer, watch, in_threads=in_threads, seconds_alone=seconds_alone
        )

    @property
    def _renders(self) -> bool:
        """True if the first record that can be read is rendered by a chat template."""
        return self._first_record is not None and self._first_record.parsed.is_chat

    def sample(
        self, records: int, seed: int, report: Callable[[int], None] | None = None
    ) -> Sampling:
        """Reduce the source to a sample of blocks, which every iteration then yields.

        Blocks are drawn from all of the source. Of an iterable of unknown length, the
        sample is the first records.

        Args:
            records: maximum number of records.
            seed: seed of the draw.
            report: called with the number of records read.
        """
        blocks = ((block.num_records, block) for block in self._blocks)
        if self._input_reader.is_finite:
            self._blocks, sampling = sample_blocks(blocks, records, seed, report)
        else:
            self._blocks, sampling = head_blocks(blocks, records, seed)
        return sampling

    def resized(self, config: PackConfig) -> RecordExampleReader:
        """Return a reader of the same sample, for packs of another size and layout."""
        reader = copy.copy(self)
        reader._config = _with_size(self._config, config)
        return reader

    @property
    def can_run_in_tasks(self) -> bool:
        """False if other processes cannot import the adapter that reads the records."""
        return self._adapter is None or self._adapter.is_importable

    def read_again(self, sources: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
        """Yield all blocks of the input once more.

        Args:
            sources: path, bytes, sha256 and records of each input when it was packed.

        Raises:
            InputError: the input has changed since then.
        """
        input_reader = copy.copy(self._input_reader)
        yield from input_reader
        for before, now in zip(sources, input_reader.sources, strict=True):
            if before["sha256"] != now["sha256"]:
                raise InputError(
                    sentence(
                        where=now["path"],
                        rule="must stay as it is while it is packed",
                        found="that it changed",
                        remedy="Run it again",
                    )
                )

    def read_through(self) -> None:
        """Read the rest of the input, to hash it; nothing is tokenized."""
        for _ in self._blocks:
            pass

    @property
    def sources(self) -> Sequence[Mapping[str, Any]]:
        """Path, bytes, sha256 and records of each input that was read to its end."""
        return self._input_reader.sources

    @cached_property
    def file_sizes(self) -> list[int]:
        """Bytes of each file."""
        with ThreadPoolExecutor(SIZES_AT_ONCE) as pool:
            requests = [pool.submit(item.location.size) for item in self.inputs]
            return [request.result() for request in requests]

    @property
    def size(self) -> int | None:
        """Total of the progress bar: bytes of the files; without files, the number of
        records, if it is known.
        """
        return sum(self.file_sizes) if self.inputs else self._input_reader.num_records

    @cached_property
    def partitions(self) -> int:
        """Number of partitions: as set, else one per :data:`PARTITION_BYTES` of the
        files.
        """
        if not self.inputs:
            return _single_partition(self._config)
        if self._config.partitions:
            return self._config.partitions
        return max(1, math.ceil(sum(self.file_sizes) / PARTITION_BYTES))

    def provenance(
        self, sources: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return sources, tokenizer, settings and version, for the manifest.

        Args:
            sources: path, bytes, sha256 and records of each input; None: of the inputs
                that this reader has read.
        """
        if sources is None:
            sources = self.sources
        tokenizer: dict[str, Any] | None = None
        if self.tokenizer is not None:
            tokenizer = {}
            if self._tokenizer_path is not None:
                tokenizer["path"] = self._tokenizer_path
            tokenizer |= self.tokenizer.provenance()
        first_read = self._first_record.read if self._first_record else None
        return {
            "reading": reading_provenance(first_read, self._adapter),
            "sources": list(sources),
            "tokenizer": tokenizer,
            "settings": replace(self._config, partitions=self.partitions).recorded(),
            "package_version": VERSION,
        }


def _single_partition(config: PackConfig) -> int:
    """Return 1, the number of partitions of an input that is not files of records.

    Raises:
        ConfigError: the settings request more.
    """
    if (config.partitions or 1) > 1:
        rule = "the input must be files of records"
        raise ConfigError(
            sentence(
                where=f"partitions={config.partitions}",
                rule=rule,
                found="another input",
            )
        )
    return 1


def _with_size(config: PackConfig, size_config: PackConfig) -> PackConfig:
    """Return settings with the size and layout of others."""
    settings = {name: getattr(size_config, name) for name in SizeConfig.names()}
    return replace(config, **settings)


# Packed datasets.


def packing_settings(manifest: Manifest) -> dict[str, Any]:
    """Return the settings that a dataset was packed with.

    They are those of :meth:`PackConfig.names_without_records`, without `partitions` and
    `overwrite`: a dataset that is packed again has them, too, unless others are given.
    """
    recorded = manifest.provenance.get("settings", {})
    names = PackConfig.names_without_records() - {"partitions", "overwrite"}
    values = {name: recorded[name] for name in names if name in recorded}
    return {
        **values,
        "pack_size": manifest.pack_size,
        "layout": manifest.layout,
        "strategy": manifest.strategy,
        "seed": manifest.seed,
        "format": manifest.file_format,
    }


class DatasetExampleReader:
    """Yields the examples of a packed dataset, in its order, a row group at a time.

    Attributes: see :class:`RecordExampleReader`; there are no files of records, so
    `inputs` and `paths` are empty.

    Raises:
        ConfigError: a setting needs records, or another kind.
        UnsupportedFormatError: only a later release can read the dataset.
    """

    def __init__(self, dataset: Dataset, config: PackConfig) -> None:
        manifest = dataset.manifest
        _require_repackable(dataset, config)
        manifest.require_readable(dataset.url)
        config = config.with_layout_of(manifest.kind)
        self.kind = manifest.kind
        self.layout = config.layout
        self.carry = dict(manifest.carry)
        self.vocab_size = manifest.vocab_size
        self.size = int(dataset.row_groups.examples.sum())
        self.inputs: tuple[Input, ...] = ()
        self.paths: dict[int, str] = {}
        self.partitions = _single_partition(config)
        self._dataset = dataset
        self._config = config
        self._groups: Sequence[int] = range(len(dataset.row_groups))

    def __iter__(self) -> Iterator[TokenizedBlock]:
        first_packs = to_offsets(self._dataset.row_groups.rows)  # one row is one pack
        lists_rejects = self._config.rejects is not None
        for group in self._groups:
            examples = unpack(self._dataset.read_packs(group))
            tally = Tally(
                read=examples.num_examples, rejected=[] if lists_rejects else None
            )
            packs = f"{first_packs[group]}–{first_packs[group + 1] - 1}"
            place = f"{self._dataset.url}, packs {packs}"
            yield self._drop_overlong(examples, tally, place), tally

    def sample(
        self, records: int, seed: int, report: Callable[[int], None] | None = None
    ) -> Sampling:
        """Reduce the source to a sample of row groups, which every iteration then
        yields.

        Nothing is read for that, so `report` is not called.
        """
        examples_of_groups = self._dataset.row_groups.examples.tolist()
        groups = zip(examples_of_groups, self._groups, strict=True)
        self._groups, sampling = sample_blocks(groups, records, seed)
        return sampling

    def resized(self, config: PackConfig) -> DatasetExampleReader:
        """Return a reader of the same sample, for packs of another size and layout."""
        reader = copy.copy(self)
        reader._config = _with_size(self._config, config)
        return reader

    def _drop_overlong(self, examples: Examples, tally: Tally, place: str) -> Examples:
        """Return the examples that fit into a pack; count the others in `tally`.

        Raises:
            RecordError: one does not fit, and the setting `on` is to stop.
        """
        config = self._config
        first_sequences = examples.example_offsets[:-1]
        longest = np.maximum.reduceat(examples.lengths, first_sequences)
        tokens = sizes(examples, config.layout, config.pad_to_multiple)
        keys = count_keys(examples)
        fits = (longest <= config.sequence_limit) & (tokens <= config.pack_size)
        fits &= keys <= config.key_limit
        if fits.all():
            return examples

        for i in np.flatnonzero(~fits):
            detail = (
                f"longest sequence {longest[i]} of at most {config.sequence_limit} "
                f"tokens, example {tokens[i]} of at most {config.pack_size}"
            )
            if keys[i] > config.key_limit:
                detail += (
                    f", all sequences {keys[i]} of at most {config.key_limit} "
                    "(max_keys)"
                )
            if config.on["overlong"] == "error":
                rule = REASONS["overlong"].rule
                remedy = "Raise pack_size, max_length or max_keys"
                raise RecordError(
                    sentence(where=place, rule=rule, found=detail, remedy=remedy)
                )
            tally.drop("overlong", place, detail)
        return examples.take(np.flatnonzero(fits))

    def provenance(
        self, sources: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return the dataset's provenance, with this repacking and its settings."""
        manifest = self._dataset.manifest
        recorded = replace(self._config, partitions=self.partitions).recorded()

        # Repacking replaces only the settings that have an effect without records. All
        # others, such as `dedup`, still decide what is appended later.
        settings = dict(manifest.provenance.get("settings", {}))
        actions = dict(settings.get("on", {}))
        overlong = recorded["on"]["overlong"]
        if overlong != PackConfig().on["overlong"]:
            actions["overlong"] = overlong
        settings_of_repacking = PackConfig.names_without_records()
        for name, value in recorded.items():
            if name in settings_of_repacking:
                settings[name] = value
        settings["on"] = actions

        provenance = dict(manifest.provenance)
        # An earlier repacking; the new entry comes after all that remain.
        provenance.pop("repacked_from", None)
        return {
            **provenance,
            "repacked_from": {
                "path": self._dataset.url,
                "fingerprint": manifest.fingerprint,
            },
            "settings": settings,
            "package_version": VERSION,
        }


def _require_repackable(dataset: Dataset, config: PackConfig) -> None:
    """Raise ConfigError for settings that need records, or another kind."""
    forbidden = [*config.needing_records]
    overlong = config.on["overlong"]
    if overlong.startswith("truncate"):
        forbidden.append(f"on overlong={overlong}")
    drops_records = config.selects
    if drops_records:
        forbidden.append("dedup and validation_fraction")
    if forbidden:
        rule = (
            f"{', '.join(forbidden)} must be left out: it is repacked without "
            "tokenizing, as it does not store its texts"
        )
        raise ConfigError(sentence(dataset.url, rule, remedy="Pack the records again"))

    manifest = dataset.manifest
    if "part" in manifest.provenance and config.seed != manifest.seed:
        raise ConfigError(
            sentence(
                where=dataset.url,
                rule=f"seed must be {manifest.seed}, as it decides which records that "
                "are appended go to train and to validation",
                found=str(config.seed),
                remedy="Leave it out",
            )
        )

    kind = manifest.kind
    if config.kind not in ("auto", kind):
        rule = f"kind must be auto or that of the dataset, {kind}"
        raise ConfigError(sentence(where=dataset.url, rule=rule, found=config.kind))


ExampleReader = RecordExampleReader | DatasetExampleReader
"""A source of examples."""
