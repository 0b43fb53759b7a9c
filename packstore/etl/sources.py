"""Opens sources of examples: records to tokenize, or a packed dataset to repack."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from typing import Any

import numpy as np

from packstore.config import PARTITION_BYTES, REASONS, PackConfig
from packstore.config.remedies import current_door, spell
from packstore.errors import ConfigError, RecordError, sentence, spelled
from packstore.etl.engines import engine_with, local
from packstore.etl.tokenize import Part, Tokenize
from packstore.format.arrays import Examples, Rows, to_offsets
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.inputs.files import BLOCK_BYTES, Block, Input, InputReader
from packstore.io.inputs.sampling import Sampling, head_blocks, sample_blocks
from packstore.pack.fill import unpack
from packstore.pack.layout import sizes
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
from packstore.tokenizer.refusals import Refused, Stop
from packstore.tokenizer.tally import Sample, Tally
from packstore.tokenizer.tokenizer import FAST
from packstore.version import VERSION

log = logging.getLogger("packstore")

FEW_CORES = {None: 2, FAST: 2, "tokenizers": 4}
"""Name of a tokenizer engine -> cores that threads of one process keep busy; more only
wait for the GIL, or for each other.
"""

SIZES_AT_ONCE = 16
"""Files whose sizes are requested concurrently."""


def open_examples(
    source: Any,
    tokenizer: Any,
    config: PackConfig,
    storage_options: Mapping[str, Any],
    block_bytes: int = BLOCK_BYTES,
    adapter: Adapter | None = None,
) -> ExampleReader:
    """Opens `source` for packing, its records in blocks of about `block_bytes`."""
    dataset = (
        source if isinstance(source, Dataset) else find_dataset(source, storage_options)
    )
    if dataset is None:
        options = dict(storage_options)
        return RecordExampleReader(
            source, tokenizer, config, options, block_bytes, adapter
        )
    if tokenizer is not None:
        text = (
            "is a packed dataset, which is repacked without tokenizing: leave "
            "tokenizer out."
        )
        raise ConfigError(f"{dataset.url} {text}")
    return DatasetExampleReader(dataset, config)


class RecordExampleReader:
    """Reads records and tokenizes them in workers; `kind`, `carry`, `vocab_size` as in
    Manifest.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Any,
        config: PackConfig,
        storage_options: dict[str, Any],
        block_bytes: int = BLOCK_BYTES,
        adapter: Adapter | None = None,
    ) -> None:
        named = isinstance(tokenizer, str | PathLike)
        self._tokenizer_path = {"path": spelled(str(tokenizer))} if named else {}
        parse_carry(config)
        self._reader = InputReader(source, storage_options, config, block_bytes)
        # The files to read, none if the records are in memory, and the path of each
        # ordinal.
        self.inputs, self.paths = self._reader.inputs, self._reader.paths
        blocks = iter(self._reader)
        first = [*itertools.islice(blocks, 2)]  # a block is never without records
        self._reference: Tokenizer | None = None
        if tokenizer is not None:  # records of token ids need none
            is_worthwhile = partial(_is_worthwhile, first, blocks)
            self._reference = load_tokenizer(
                tokenizer,
                chat_template=config.chat_template,
                is_worthwhile=is_worthwhile,
            )
        rows = first[0].parse()
        if config.carry:
            config = replace(config, carry=typed_carry(config, rows.values))
        self._config, self.carry = config, parse_carry(config)
        if adapter is None and config.adapter is not None:
            adapter = load_adapter(config.adapter)
        self._adapter = adapter
        self.kind: str = config.kind
        if config.kind == "auto":
            self.kind = self._kind_of(rows)
        self._first: tuple[str, Any, ReadRecord, Parsed] | None = None
        for block_rows in (rows, *(block.parse() for block in first[1:2])):
            self._read_first(block_rows)
        self._renders = self._is_first_chat()
        if self._renders and config.engine == "local":
            local.prepare()
        if self._reference and (self._renders or config.chat_template is not None):
            # A template that does not compile is refused here.
            _ = self._reference.template, self._reference.tool_use_template
        self._blocks: Iterable[Block] = itertools.chain(first, blocks)
        self.vocab_size = self._reference.vocab_size if self._reference else None

    def _is_first_chat(self) -> bool:
        """Return True if the first record that can be read is rendered by a chat
        template.
        """
        return self._first is not None and self._first[3].is_chat

    def _kind_of(self, rows: Rows) -> str:
        """Return the kind of the first record that has one.

        Raises:
            RecordError: no record of the first block has a form, or fields that
                packstore knows.
        """
        refusals: list[tuple[str, Refused]] = []
        for index, value in enumerate(rows.values):
            where = rows.where(index)
            try:
                record = require_object(value)
                prefers_ids = self._reference is None
                kind = kind_of_record(record, self._config, self._adapter, prefers_ids)
            except Refused as refused:
                if self._stops_at(refused):
                    raise refused.as_error(
                        where, current_door(), self._config
                    ) from None
                refusals.append((where, refused))
                continue
            if kind is None:
                raise without_a_kind(record, where)
            return kind
        where, first_refusal = refusals[0]
        rule = REASONS[first_refusal.reason].rule
        door = current_door()
        remedy = first_refusal.spell_remedy(door, self._config)
        remedy += f", or say the kind of the others ({spell(door, {'kind': 'KIND'})})"
        raise RecordError(sentence(where, rule, first_refusal.detail, remedy))

    def _stops_at(self, refused: Refused) -> bool:
        """Return True for a refusal at which the job stops."""
        return isinstance(refused, Stop) or self._config.on[refused.reason] == "error"

    def _read_first(self, rows: Rows) -> None:
        """Read all records of a block, so that a job that cannot succeed stops before
        it begins.

        Raises:
            RecordError: one of them would stop the job.
        """
        stage = self._stage(self._reference)
        for index, value in enumerate(rows.values):
            try:
                read, parsed = stage.read(value)
            except Refused as refused:
                if self._stops_at(refused):
                    # One before it may stop the job later on its way, and is named
                    # first.
                    self._stage(self._reference)(rows.first(index + 1))
                continue
            if self._first is None:
                self._first = rows.where(index), value, read, parsed

    def _stage(
        self, tokenizer: Tokenizer | None, lint: Lint | None = None
    ) -> RecordTokenizer:
        """Return the step that converts records to examples."""
        first_place = "" if self._first is None else self._first[0]
        return RecordTokenizer(
            tokenizer,
            self._config,
            self.kind,
            lint,
            self._adapter,
            first_place=first_place,
        )

    def announce(self) -> None:
        """Log how records are read, before the work begins."""
        if self._first is None:
            return
        _, value, read, _ = self._first
        lines = describe(read, value, self.kind, self._adapter, self._config.ignore)
        log.info("%s", "\n".join(lines), extra={"lines": lines})

    @property
    def announced_columns(self) -> frozenset[str]:
        """Columns of the first record, which :meth:`announce` names."""
        return frozenset() if self._first is None else frozenset(self._first[1])

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, with the engine that suits the size of the input."""
        return self._reference and with_fastest_engine(self._reference)

    def __iter__(self) -> Iterator[Part]:
        return self.parts(self.tokenize())

    def parts(self, tokenize: Tokenize) -> Iterator[Part]:
        """Yields what `tokenize` makes of every block, computed in workers, in input
        order.
        """
        run = engine_with(self._config.engine, self._config.num_workers)
        return tokenize.parts(run, self._blocks)

    def sample(
        self, records: int, seed: int, report: Callable[[int], None] | None = None
    ) -> Sampling:
        """Reduces the source to a sample of all of it, which every iteration then
        yields; of an iterable of unknown length to its first records. `report` gets the
        number of those read.
        """
        blocks = ((block.num_records, block) for block in self._blocks)
        if self._reader.is_finite:
            self._blocks, sample = sample_blocks(blocks, records, seed, report)
        else:
            self._blocks, sample = head_blocks(blocks, records, seed)
        return sample

    def sized(self, pack_size: int, layout: Any) -> RecordExampleReader:
        """Returns the sample, for packs of another size and layout."""
        other = copy.copy(self)
        other._config = replace(self._config, pack_size=pack_size, layout=layout)
        return other

    @property
    def can_run_in_tasks(self) -> bool:
        """True if other processes can read records: not by an adapter that only this
        one has.
        """
        return self._adapter is None or self._adapter.is_importable

    def read_through(self) -> None:
        """Reads the rest of the input, to hash it; nothing is tokenized."""
        deque(self._blocks, maxlen=0)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each file."""
        with ThreadPoolExecutor(SIZES_AT_ONCE) as pool:
            return list(pool.map(lambda item: item.location.size(), self.inputs))

    @property
    def size(self) -> int | None:
        """Bytes of the files; the number of records in memory, if known."""
        return sum(self.sizes) if self.inputs else self._reader.num_records

    @cached_property
    def partitions(self) -> int:
        """Number of partitions: as set, else one per :data:`PARTITION_BYTES` of the
        files.
        """
        if self.inputs:
            return self._config.partitions or max(
                1, -(-sum(self.sizes) // PARTITION_BYTES)
            )
        return _only_one(self._config)

    def tokenize(self, lint: Lint | None = None) -> Tokenize:
        """Returns the picklable function that turns a block into a part."""
        name = self.tokenizer.engine_name if self.tokenizer else None
        # A template is rendered by Python code, which holds the GIL.
        threads = not self._renders and local.cores() <= FEW_CORES.get(name, 0)
        quick = not self._renders and name in (None, FAST)
        alone = local.QUICK_SECONDS if quick else local.WORTH_SECONDS
        stage = self._stage(self.tokenizer, lint)
        watch = EngineWatch(self.tokenizer, self._config, len(self.inputs))
        return Tokenize(stage, watch, in_threads=threads, alone=alone)

    def provenance(
        self, sources: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Returns sources (as passed, else those read here), tokenizer, settings and
        version.
        """
        read = None if self._first is None else self._first[2]
        return {
            "reading": reading_provenance(read, self._adapter),
            "sources": list(self._reader.sources if sources is None else sources),
            "tokenizer": self.tokenizer
            and {**self._tokenizer_path, **self.tokenizer.provenance()},
            "settings": replace(self._config, partitions=self.partitions).recorded(),
            "package_version": VERSION,
        }


def _only_one(config: PackConfig) -> int:
    """Refuses `partitions` for input that is not files of records."""
    if (config.partitions or 1) > 1:
        rule = "the input must be files of records"
        raise ConfigError(
            sentence(f"partitions={config.partitions}", rule, "another input")
        )
    return 1


def _is_worthwhile(first: list[Block], blocks: Iterator[Block], file: int) -> bool:
    """Returns True if the input is large enough for a faster engine to pay; adds to
    `first`.
    """
    number = size = 0
    while not is_worthwhile(file, size):
        if number == len(first):
            if (block := next(blocks, None)) is None:
                return False
            first.append(block)
        payload = first[number].payload
        size += len(payload) if isinstance(payload, bytes) else len(str(payload))
        number += 1
    return True


class DatasetExampleReader:
    """Yields the examples of a packed dataset, in its order."""

    def __init__(self, dataset: Dataset, config: PackConfig) -> None:
        manifest = dataset.manifest
        refused = [*config.needing_records]
        if (overlong := config.on["overlong"]).startswith("truncate"):
            refused.append(f"on overlong={overlong}")
        if config.selects:
            refused.append("dedup and validation_fraction")
        if refused:
            text = "it is repacked without tokenizing, as it does not store its texts"
            rule = f"{', '.join(refused)} must be left out: {text}"
            raise ConfigError(sentence(dataset.url, rule, "", "Pack the records again"))
        if config.kind not in ("auto", manifest.kind):
            rule = f"kind must be auto or that of the dataset, {manifest.kind}"
            raise ConfigError(sentence(dataset.url, rule, config.kind))
        self.kind = manifest.kind
        manifest.require_readable(dataset.url)
        self.carry = dict(manifest.carry)
        self.vocab_size = manifest.vocab_size
        self._dataset, self._config = dataset, config
        self._groups: Sequence[int] = range(len(dataset.row_groups))
        self.size = int(dataset.row_groups.examples.sum())
        self.inputs: tuple[Input, ...] = ()
        self.paths: dict[int, str] = {}
        self.partitions = _only_one(config)

    def __iter__(self) -> Iterator[tuple[Examples, Tally]]:
        rows = to_offsets(self._dataset.row_groups.rows)
        for group in self._groups:
            examples = unpack(self._dataset.read_packs(group))
            rejected = None if self._config.rejects is None else list[Sample]()
            tally = Tally(read=examples.num_examples, rejected=rejected)
            where = f"{self._dataset.url}, packs {rows[group]}–{rows[group + 1] - 1}"
            yield self._fitting(examples, tally, where), tally

    def sample(
        self, records: int, seed: int, report: Callable[[int], None] | None = None
    ) -> Sampling:
        """Reduces the source to a sample of row groups; every iteration then
        yields it.
        """
        groups = zip(
            self._dataset.row_groups.examples.tolist(), self._groups, strict=True
        )
        self._groups, sample = sample_blocks(groups, records, seed)
        return sample

    def _fitting(self, examples: Examples, tally: Tally, where: str) -> Examples:
        """Returns the examples that are not too long; counts the others."""
        config = self._config
        longest = np.maximum.reduceat(examples.lengths, examples.example_offsets[:-1])
        tokens = sizes(examples, config.layout, config.pad_to_multiple)
        fits = (longest <= config.sequence_limit) & (tokens <= config.pack_size)
        for i in np.flatnonzero(~fits):
            detail = f"{tokens[i]} tokens, longest sequence {longest[i]}"
            if config.on["overlong"] == "error":
                rule = f"an example must fit pack_size {config.pack_size}"
                raise RecordError(
                    sentence(where, rule, detail, "Raise pack_size or max_length")
                )
            tally.drop("overlong", where, detail)
        return examples if fits.all() else examples.take(np.flatnonzero(fits))

    def provenance(
        self, sources: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Returns the dataset's provenance, with this repacking and its
        settings added.
        """
        manifest = self._dataset.manifest
        names = PackConfig.names_without_records()
        recorded = replace(self._config, partitions=self.partitions).recorded()
        settings = {name: value for name, value in recorded.items() if name in names}
        kept = {k: v for k, v in manifest.provenance.items() if k != "repacked_from"}
        before = manifest.provenance.get("settings", {})
        settings["on"] = {
            **before.get("on", {}),
            "overlong": recorded["on"]["overlong"],
        }
        return {
            **kept,
            "repacked_from": {
                "path": self._dataset.url,
                "fingerprint": manifest.fingerprint,
            },
            "settings": {**before, **settings},
            "package_version": VERSION,
        }


ExampleReader = RecordExampleReader | DatasetExampleReader
"""A source of examples."""
