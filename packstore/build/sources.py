"""Where examples come from: records that are tokenized, or a dataset that is packed anew."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from os import PathLike
from typing import Any, Protocol

from packstore.build.background import no_garbage_collection
from packstore.build.dataset_source import DatasetIntake, only_one
from packstore.build.engines import ENGINES
from packstore.config import PARTITION_BYTES, PackConfig
from packstore.errors import ConfigError, spelled
from packstore.format.arrays import Examples, Rows, Tally
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.inputs.files import BLOCK_BYTES, Block, Input, InputReader
from packstore.io.inputs.sampling import Sampling, head_blocks, sample_blocks
from packstore.tokenizer import (
    FASTER,
    EngineWatch,
    RecordTokenizer,
    Tokenizer,
    agreeing,
    detect_kind,
    load_tokenizer,
    parse_carry,
    typed_carry,
)
from packstore.version import VERSION

Part = tuple[Examples, Tally]

FEW_CORES = 4
"""The reference library fills so many from one process; with more, its threads wait for others."""


SIZES_AT_ONCE = 16
"""Files whose sizes are asked for side by side."""


class Intake(Protocol):
    """A source of examples.

    Attributes:
        kind: ``dpo``, ``sft`` or ``ranked``.
        carry: carried columns, name -> type.
        vocab_size: token ids are below it, if known.
        inputs: the files that are read; none where the examples come from elsewhere.
        paths: ordinal of each input -> its path, as the manifest names it.
        partitions: how many the input is packed in.
    """

    kind: str
    carry: dict[str, str]
    vocab_size: int | None

    @property
    def inputs(self) -> tuple[Input, ...]: ...  # noqa: D102

    @property
    def paths(self) -> dict[int, str]: ...  # noqa: D102

    @property
    def partitions(self) -> int: ...  # noqa: D102

    def __iter__(self) -> Iterator[Part]:
        """Examples and what became of their records, part by part, in input order."""

    def provenance(self, sources: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Where everything came from, for the manifest.

        Args:
            sources: of the inputs; None: those that were read here, complete after the last part.
        """

    def sample(
        self, records: int, seed: int, report: Callable[[int], None] | None = None
    ) -> Sampling:
        """Leaves at most `records` of them, from all over; iterating then gives those each time.

        An iterable that may have no end keeps its first ones instead.

        Args:
            records: how many are wanted at most; all stay if there are no more.
            seed: decides which.
            report: told how many records were read so far.
        """


def open_intake(
    source: Any,
    tokenizer: Any,
    config: PackConfig,
    storage_options: dict[str, Any],
    block_bytes: int = BLOCK_BYTES,
) -> Intake:
    """The intake for whatever `source` is, its records in blocks of `block_bytes`, about.

    Raises:
        ConfigError: a packed dataset together with a tokenizer.
        PackstoreError: the source or the tokenizer cannot be read.
    """
    dataset = source if isinstance(source, Dataset) else find_dataset(source, storage_options)
    if dataset is None:
        return RecordIntake(source, tokenizer, config, storage_options, block_bytes)
    if tokenizer is not None:
        raise ConfigError(
            f"{dataset.url} is a packed dataset, which is packed anew without tokenizing: "
            "leave tokenizer out."
        )
    return DatasetIntake(dataset, config)


class RecordIntake:
    """Reads records and tokenizes them in workers."""

    def __init__(
        self,
        source: Any,
        tokenizer: Any,
        config: PackConfig,
        storage_options: dict[str, Any],
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.tokenizer: Tokenizer | None = None
        if tokenizer is not None:  # records of token ids need none
            self.tokenizer = load_tokenizer(
                tokenizer, engine=config.tokenizer_engine, chat_template=config.chat_template
            )
        named = isinstance(tokenizer, str | PathLike)
        self._tokenizer_path = spelled(str(tokenizer)) if named else None
        parse_carry(config)
        self._reader = InputReader(source, storage_options, config, block_bytes)
        blocks = iter(self._reader)
        first = next(blocks)  # a block is never without records
        self._blocks: Iterable[Block] = itertools.chain([first], blocks)
        rows = first.parse()
        if config.carry:
            config = replace(config, carry=typed_carry(config, rows.values))
        self._config, self.carry = config, parse_carry(config)
        self.kind: str = config.kind
        if self.kind == "auto":
            self.kind = detect_kind(rows.values[0], config, rows.where(0))
        if self.tokenizer is not None and config.tokenizer_engine == "auto":
            self.tokenizer = agreeing(self.tokenizer, rows, config, self.kind)
        self.vocab_size = self.tokenizer.vocab_size if self.tokenizer else None

    def __iter__(self) -> Iterator[Part]:
        return self.each(self.tokenize())

    def each(self, work: Callable[[Block], Part]) -> Iterator[Part]:
        """What `work` makes of every block, in workers, in input order."""
        run = ENGINES.load(self._config.engine)
        return run(work, self._blocks, self._config.num_workers)

    def sample(
        self, records: int, seed: int, report: Callable[[int], None] | None = None
    ) -> Sampling:
        """See :meth:`Intake.sample`."""
        if self._reader.ends:
            self._blocks, sample = sample_blocks(self._blocks, records, seed, report)
        else:
            self._blocks, sample = head_blocks(self._blocks, records, seed)
        return sample

    def sized(self, pack_size: int, layout: Any) -> RecordIntake:
        """The sample that was taken, for packs of another size and layout."""
        other = copy.copy(self)
        other._config = replace(self._config, pack_size=pack_size, layout=layout)
        return other

    def read_through(self) -> None:
        """Reads what was not read yet, so that its sources are known; nothing is tokenized."""
        for _ in self._blocks:
            pass

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The files that are read; none where the records are in memory."""
        return self._reader.inputs

    @property
    def paths(self) -> dict[int, str]:
        """Ordinal of each input -> its path, as the manifest names it."""
        return self._reader.paths

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each file."""
        with ThreadPoolExecutor(SIZES_AT_ONCE) as pool:
            return list(pool.map(lambda item: item.location.size(), self.inputs))

    @cached_property
    def partitions(self) -> int:
        """As the settings say; else one for each :data:`PARTITION_BYTES` of the files."""
        if self.inputs:
            return self._config.partitions or max(1, -(-sum(self.sizes) // PARTITION_BYTES))
        return only_one(self._config)

    def tokenize(self) -> Tokenize:
        """What turns a block into a part, here or in a worker."""
        name = self.tokenizer and self.tokenizer.engine_name
        few = (os.cpu_count() or 1) <= FEW_CORES
        threads = name is None or name in FASTER or (name == "tokenizers" and few)
        stage = RecordTokenizer(self.tokenizer, self._config, self.kind)
        watch = None
        if self.tokenizer is not None and name in FASTER:
            seed, sources = self._config.seed, len(self.inputs)
            watch = EngineWatch(self.tokenizer, self._config, self.kind, seed, sources)
        return Tokenize(stage, threads, watch)

    def provenance(self, sources: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Sources (those that were read here, or as given), tokenizer, settings and version."""
        path = {} if self._tokenizer_path is None else {"path": self._tokenizer_path}
        return {
            "sources": list(self._reader.sources() if sources is None else sources),
            "tokenizer": self.tokenizer and {**path, **self.tokenizer.provenance()},
            "settings": replace(self._config, partitions=self.partitions).recorded(),
            "package_version": VERSION,
        }


class Tokenize:
    """What a worker does with a block."""

    def __init__(
        self, tokenizer: RecordTokenizer, suits_threads: bool, watch: EngineWatch | None = None
    ) -> None:
        self._tokenizer, self._watch = tokenizer, watch
        self.tokenizer = tokenizer.tokenizer
        self.suits_threads = suits_threads

    def __call__(self, block: Block) -> Part:
        """The examples of a block, and what became of its records."""
        return self.of(block.parse())

    def of(self, rows: Rows) -> Part:
        """The same of records that are parsed already."""
        with no_garbage_collection():
            examples, tally = self._tokenizer(rows)
            if self._watch is not None:
                self._watch(rows, examples)
            return examples, tally
