"""Where examples come from: records that are tokenized, or a dataset that is packed anew."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from typing import Any, Protocol

import numpy as np

from packstore.config import PackConfig, PlanConfig, SelectConfig, WriteConfig
from packstore.engines import ENGINES
from packstore.errors import ConfigError, RecordError, sentence, spelled
from packstore.io.dataset import Dataset, find_dataset
from packstore.io.inputs import BLOCK_BYTES, Block, Input, InputReader
from packstore.io.sampling import Sampling, head_blocks, sample_blocks, sample_groups
from packstore.overlap import no_garbage_collection
from packstore.pack.fill import unpack
from packstore.pack.layout import sizes
from packstore.records import Examples, Rows, Sample, Tally, to_offsets
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


class Intake(Protocol):
    """A source of examples.

    Attributes:
        kind: ``dpo``, ``sft`` or ``ranked``.
        carry: carried columns, name -> type.
        vocab_size: token ids are below it, if known.
    """

    kind: str
    carry: dict[str, str]
    vocab_size: int | None

    def __iter__(self) -> Iterator[Part]:
        """Examples and what became of their records, part by part, in input order."""

    def provenance(self) -> dict[str, Any]:
        """Where everything came from, for the manifest; complete after the last part."""

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
            "settings": self._config.recorded(),
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


class DatasetIntake:
    """Takes the examples of a packed dataset, in its order."""

    def __init__(self, dataset: Dataset, config: PackConfig) -> None:
        manifest = dataset.manifest
        if config.overlong.startswith("truncate"):
            raise ConfigError(
                f"overlong={config.overlong!r} needs the records: a packed dataset no longer knows "
                "its texts. Pack the records again, or set overlong to drop or error."
            )
        if config.selects:
            raise ConfigError(
                "dedup and validation_fraction need the records: a packed dataset no longer knows "
                "its texts. Pack the records again."
            )
        if names := config.needing_records:
            must = f"{', '.join(names)} must be left out, as it is packed anew without tokenizing"
            raise ConfigError(sentence(dataset.url, must, "", "Pack the records again"))
        if config.kind not in ("auto", manifest.kind):
            raise ConfigError(
                f"kind must be auto or that of the dataset, {manifest.kind}; found {config.kind}."
            )
        self.kind = manifest.kind
        self.carry = dict(manifest.carry)
        self.vocab_size = manifest.vocab_size
        self._dataset, self._config = dataset, config
        self._groups: Sequence[int] = range(len(dataset.row_groups))

    def __iter__(self) -> Iterator[Part]:
        rows = to_offsets(self._dataset.row_groups.rows)
        for group in self._groups:
            packs = self._dataset.read_packs(group)
            examples = unpack(packs)
            kept = None if self._config.rejects is None else list[Sample]()
            tally = Tally(read=examples.num_examples, rejected=kept)
            where = f"{self._dataset.url}, packs {rows[group]}–{rows[group + 1] - 1}"
            yield self._fitting(examples, tally, where), tally

    def sample(
        self, records: int, seed: int, report: Callable[[int], None] | None = None
    ) -> Sampling:
        """See :meth:`Intake.sample`."""
        self._groups, sample = sample_groups(self._dataset.row_groups.examples, records, seed)
        return sample

    def _fitting(self, examples: Examples, tally: Tally, where: str) -> Examples:
        """The examples that are not overlong; the others are counted."""
        config = self._config
        longest = np.maximum.reduceat(examples.lengths, examples.example_offsets[:-1])
        tokens = sizes(examples, config.layout, config.pad_to_multiple)
        fits = (longest <= config.sequence_limit) & (tokens <= config.pack_size)
        for i in np.flatnonzero(~fits):
            detail = f"{tokens[i]} tokens, longest sequence {longest[i]}"
            if config.overlong == "error":
                must = f"an example must fit pack_size {config.pack_size}"
                raise RecordError(sentence(where, must, detail, "Raise pack_size or max_length"))
            tally.drop("overlong", where, detail)
        return examples if fits.all() else examples.take(np.flatnonzero(fits))

    def _settings(self) -> dict[str, Any]:
        """The settings that have a meaning without texts."""
        names = {f.name for stage in (SelectConfig, PlanConfig, WriteConfig) for f in fields(stage)}
        names |= {"max_length", "overlong"}
        return {name: v for name, v in self._config.recorded().items() if name in names}

    def provenance(self) -> dict[str, Any]:
        """That of the dataset, with this repacking added."""
        manifest = self._dataset.manifest
        origin = {"path": self._dataset.url, "fingerprint": manifest.fingerprint}
        kept = {k: v for k, v in manifest.provenance.items() if k != "repacked_from"}
        return {
            **kept,
            "repacked_from": origin,
            "settings": {**manifest.provenance.get("settings", {}), **self._settings()},
            "package_version": VERSION,
        }
