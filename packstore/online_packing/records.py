"""Packs tokenized records: of data of known length, or of a part of an endless stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from packstore.config import PackConfig
from packstore.errors import ConfigError
from packstore.format.arrays import Examples, Int64, Packs, range_indices, to_offsets
from packstore.online_packing.plan import EpochPlan
from packstore.online_packing.sizes import ExampleSizes, Measured, check_settings, fitting, joined
from packstore.online_packing.tokenized import Record, Tokenized, examples_of, kind_of, with_types
from packstore.pack.fill import fill
from packstore.pack.layout import sizes
from packstore.pack.plan import plan

CHUNK = 1024
"""Records measured at once."""


class Records(Protocol):
    """Records of known length with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class RecordReader:
    """Measures records once, and fills the packs of a plan with them.

    Pickles as records and settings.

    Args:
        records: a list, a Hugging Face ``Dataset``, or similar.
        config: `pack_size`, `layout` and the policies for records that do not fit; see
            :func:`fitting`.

    Attributes:
        kind: ``preference``, ``sft`` or ``ranked``.
        sizes: sizes of all records; each is a separate row group, so that all of them mix.
        digest: hash of all token ids and their supervision.

    Raises:
        RecordError: a record is not of the kind, or does not fit and `overlong` is ``error``.
        DropRateError: too many records, or all, do not fit.
        ConfigError: there are no records, or a setting needs texts.
    """

    def __init__(self, records: Records, config: PackConfig) -> None:
        check_settings(config)
        if not len(records):
            raise ConfigError("records to pack must be one at least; found none.")
        first = records[0]
        self.records, self.config = records, with_types(config, [first])
        self.kind = kind_of(first, self.config) if config.kind == "auto" else config.kind
        digest = hashlib.sha256()
        parts: list[Measured] = []
        for start in range(0, len(records), CHUNK):
            some = self._take(np.arange(start, min(start + CHUNK, len(records))))
            parts.append(some.measured(config.layout, self.kind))
            for column in (some.examples.input_ids, some.examples.supervised):
                digest.update(column.tobytes())
        self.digest = digest.hexdigest()
        groups = np.arange(len(records) + 1)
        self.sizes: ExampleSizes = fitting(joined(parts), groups, config, "records")

    def read(self, batches: Iterable[Int64], plan: EpochPlan) -> Iterator[list[Packs]]:
        """Yields the packs at each array of positions, each as :class:`Packs` of one row.

        Raises:
            RecordError: a record has changed.
        """
        for indices in batches:
            chosen = plan.locate(indices)
            number = plan.offsets[chosen + 1] - plan.offsets[chosen]
            places = range_indices(plan.offsets[chosen], number)
            some = self._take(plan.order[places].astype(np.int64))
            packs = _filled(some, to_offsets(number), self.config.layout)
            yield [packs.row(i) for i in range(len(packs))]

    def _take(self, numbers: Int64) -> Tokenized:
        wanted = numbers.tolist()
        several = getattr(self.records, "__getitems__", None)  # a protocol of torch and datasets
        found = several(wanted) if several else [self.records[i] for i in wanted]
        return examples_of(found, wanted, self.kind, self.config)


class StepPacker:
    """Packs the records of one optimizer step at a time.

    Args:
        config: `pack_size`, `layout`, `strategy` and the policies for records that do not fit.
    """

    def __init__(self, config: PackConfig) -> None:
        check_settings(config)
        self.config, self._typed = config, False
        self.kind: str | None = None if config.kind == "auto" else config.kind

    def fits(self, record: Record, number: int) -> Tokenized | None:
        """Returns the record as an example; None if it does not fit and is dropped.

        Raises:
            RecordError: the record is not of the kind, or does not fit and `overlong` is ``error``.
        """
        if not self._typed:
            self.config, self._typed = with_types(self.config, [record]), True
        self.kind = self.kind or kind_of(record, self.config)
        one = examples_of([record], [number], self.kind, self.config)
        measured = one.measured(self.config.layout, self.kind)
        tokens, _, longest, _ = measured
        if tokens[0] <= self.config.pack_size and longest[0] <= self.config.sequence_limit:
            return one
        if self.config.overlong == "error":
            fitting(measured, np.arange(2), self.config, f"record {number}")
        return None

    def pack(self, parts: Sequence[Tokenized]) -> Packs:
        """Packs the examples, in the order of the strategy."""
        whole = _joined(parts)
        tokens = sizes(whole.examples, self.config.layout)
        made = plan(
            tokens,
            pack_size=self.config.pack_size,
            strategy=self.config.strategy,
            seed=self.config.seed,
            pack_order="plain",
            shuffle=False,  # all belong to one step
        )
        examples = whole.examples.take(made.order)
        logps = whole.ref_logps
        if logps is not None:
            logps = logps.reshape(-1, 2)[made.order].reshape(-1)
        return _filled(Tokenized(examples, logps), made.offsets, self.config.layout)


def in_one_pack(records: Sequence[Record], kind: str, config: PackConfig) -> Packs:
    """Puts all records in one pack of any length, in their order.

    Raises:
        RecordError: a record is not of the kind.
    """
    some = examples_of(records, range(len(records)), kind, config)
    return _filled(some, np.array([0, len(records)]), config.layout)


def _filled(some: Tokenized, offsets: Int64, layout: str) -> Packs:
    packs = fill(some.examples, offsets, layout)
    return packs if some.ref_logps is None else replace(packs, ref_logps=some.ref_logps)


def _joined(parts: Sequence[Tokenized]) -> Tokenized:
    logps = [part.ref_logps for part in parts if part.ref_logps is not None]
    whole = np.concatenate(logps) if len(logps) == len(parts) else None
    return Tokenized(Examples.concat([part.examples for part in parts]), whole)
