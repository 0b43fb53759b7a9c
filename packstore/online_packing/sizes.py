"""Measures the examples of a dataset in a layout, without reading tokens where possible."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from packstore.config import PackConfig
from packstore.errors import ConfigError, DropRateError, IntegrityError, RecordError, sentence
from packstore.format.arrays import Examples, Int32, Int64, to_offsets
from packstore.format.loss_counts import count_examples
from packstore.format.schema import KINDS
from packstore.io.dataset.columns import read_columns
from packstore.io.dataset.dataset import Dataset
from packstore.io.shards.shard import ShardInfo
from packstore.pack.fill import unpack
from packstore.pack.layout import segment_offsets

THREADS = 4
"""Shards or row groups measured at the same time."""

log = logging.getLogger("packstore")

Measured = tuple[Int64, Int64, Int64, Int64 | None]
"""Tokens, sum of squared segment lengths and longest sequence of each example, int64 `[n]` each;
and the columns of :mod:`packstore.format.loss_counts`, int64 `[n, 4]`, or None if unknown."""


@dataclass(frozen=True, eq=False)
class ExampleSizes:
    """Sizes of a dataset's examples in file order, from which an epoch is planned.

    Attributes:
        tokens: int32 `[E]`, tokens that each occupies in a pack; 0: too long, dropped.
        squares: int64 `[E]`, sum of the squared lengths of its segments.
        group_offsets: int64 `[G + 1]`, the first example of each row group.
        left_out: number of examples that are too long.
        counts: int64 `[E, 4]`, the columns of :mod:`packstore.format.loss_counts`; None: unknown,
            as only lengths were read.
    """

    tokens: Int32
    squares: Int64
    group_offsets: Int64
    left_out: int
    counts: Int64 | None = None


def measure(dataset: Dataset, config: PackConfig) -> ExampleSizes:
    """Measures all examples in the layout of `config`; 12 bytes per example.

    Reads the pack index if each pack is one example in that layout, else the columns of lengths.
    Only a change from ``concat`` to ``shared_prefix`` reads the tokens.

    Raises:
        ConfigError: a setting contradicts the dataset, or needs its texts.
        RecordError: an example does not fit, and `overlong` is ``error``.
        DropRateError: too many examples, or all, do not fit.
        StorageError: a shard is missing, or the store refuses.
        IntegrityError: a checksum of a shard does not match.
    """
    manifest = dataset.manifest
    _check(dataset, config)
    if not manifest.totals.examples:
        raise ConfigError(f"{dataset.url} holds no examples to pack.")
    same = manifest.layout == config.layout
    if same and manifest.totals.examples == manifest.totals.packs and config.max_length is None:
        index = dataset.pack_index
        measured: Measured = index.tokens, index.squares, np.zeros_like(index.tokens), index.counts
    else:
        measured = joined(
            _from_tokens(dataset, config)
            if _needs_tokens(dataset, config)
            else _from_lengths(dataset, config)
        )
    if len(measured[0]) != manifest.totals.examples:
        must = f"must hold {manifest.totals.examples} examples, as the manifest says"
        raise IntegrityError(sentence(dataset.url, must, str(len(measured[0]))))
    return fitting(measured, to_offsets(dataset.row_groups.examples), config, dataset.url)


def joined(parts: Iterable[Measured]) -> Measured:
    """Concatenates the measures of all parts, at least one."""
    *sizes, counts = (list(column) for column in zip(*parts, strict=True))
    tokens, squares, longest = (np.concatenate(column) for column in sizes)
    known = all(part is not None for part in counts)
    return tokens, squares, longest, np.concatenate(counts) if known else None


def fitting(
    measured: Measured, group_offsets: Int64, config: PackConfig, where: str
) -> ExampleSizes:
    """Drops the examples that do not fit a pack, and returns all sizes.

    Args:
        measured: the result of :func:`sum_up` for all examples.
        group_offsets: int64 `[G + 1]`, the first example of each row group.
        config: limits, and the policies for examples beyond them.
        where: name of the data in error texts.

    Raises:
        RecordError: an example does not fit, and `overlong` is ``error``.
        DropRateError: too many examples, or all, do not fit.
    """
    tokens, squares, longest, counts = measured
    fits = (tokens <= config.pack_size) & (longest <= config.sequence_limit)
    left_out = int((~fits).sum())
    if left_out:
        _refuse(where, config, int(tokens[~fits].max()), left_out, len(tokens))
    return ExampleSizes(
        tokens=np.where(fits, tokens, 0).astype(np.int32),
        squares=squares,
        group_offsets=group_offsets,
        left_out=left_out,
        counts=counts,
    )


def check_settings(config: PackConfig) -> None:
    """Refuses settings that need texts, and reserved space for padding.

    Raises:
        ConfigError: a setting is for tokenizing or selecting records; `overlong` would truncate; or
            `pad_to_multiple` is above 1.
    """
    names = [name for name in config.needing_records if name not in ("carry", "fields")]
    names += ["dedup"] * (config.dedup != "none")
    names += ["validation_fraction"] * (config.validation_fraction > 0)
    if names:
        raise ConfigError(
            f"{', '.join(names)} must be left out: what is packed while it is read is token ids "
            "already."
        )
    if config.pad_to_multiple > 1:
        raise ConfigError(
            f"pad_to_multiple={config.pad_to_multiple} is for packs that are written: what is "
            "packed while it is read leaves no room for padding. Leave it out, and set a smaller "
            "pack_size."
        )
    if config.overlong.startswith("truncate"):
        raise ConfigError(
            f"overlong={config.overlong!r} needs the records: token ids no longer know their "
            "texts. Set overlong to drop or error."
        )


def _check(dataset: Dataset, config: PackConfig) -> None:
    check_settings(config)
    for name in ("carry", "fields"):
        if getattr(config, name):
            must = f"{name} must be left out, as a dataset has the columns of its packing"
            raise ConfigError(sentence(dataset.url, must, "", "Pack the records again"))
    if config.kind not in ("auto", dataset.manifest.kind):
        raise ConfigError(
            f"kind must be auto or that of the dataset, {dataset.manifest.kind}; "
            f"found {config.kind}."
        )


def _refuse(where: str, config: PackConfig, longest: int, bad: int, number: int) -> None:
    """Raises for examples that do not fit, or logs their number."""
    must = f"an example must fit pack_size {config.pack_size}"
    if config.max_length is not None:
        must += f", and each sequence max_length {config.max_length}"
    found = f"{bad:,} of {number:,} examples that do not, the longest of {longest:,} tokens"
    if config.overlong == "error":
        do = "Raise pack_size or max_length, or set overlong to drop"
        raise RecordError(sentence(where, must, found, do))
    if bad == number or bad > config.max_drop_rate * number:
        do = "Raise pack_size or max_length, or allow more with max_drop_rate"
        raise DropRateError(sentence(where, must, found, do))
    log.warning("%s", sentence(where, must, found, "They are left out"))


def _needs_tokens(dataset: Dataset, config: PackConfig) -> bool:
    """Returns True if tokens are needed to find the prefixes that sequences share."""
    layouts = (dataset.manifest.layout, config.layout)
    return layouts == ("concat", "shared_prefix") and dataset.manifest.kind != "sft"


def _from_tokens(dataset: Dataset, config: PackConfig) -> Iterator[Measured]:
    def of_group(group: int) -> Measured:
        examples = unpack(dataset.read_packs(group))
        return measure_examples(examples, config.layout, dataset.manifest.kind)

    with ThreadPoolExecutor(THREADS) as pool:
        groups = range(len(dataset.row_groups))
        for first in range(0, len(groups), 4 * THREADS):  # so that few results wait in memory
            yield from pool.map(of_group, groups[first : first + 4 * THREADS])


def _from_lengths(dataset: Dataset, config: PackConfig) -> Iterator[Measured]:
    manifest = dataset.manifest
    names = ["lengths"]
    if config.layout == manifest.layout == "shared_prefix":
        names.append("seq_boundaries")
    fixed = KINDS[manifest.kind]
    if fixed is None:
        names.append("num_responses")

    def of_batch(columns: Mapping[str, tuple[Any, Int64]]) -> Measured:
        lengths = physical = columns["lengths"][0].astype(np.int64)
        if "seq_boundaries" in names:
            rises = np.diff(columns["seq_boundaries"][0])
            physical = rises[rises > 0]  # negative only between packs
        if fixed is None:
            counts = columns["num_responses"][0].astype(np.int64)
        else:
            counts = np.full(len(lengths) // fixed, fixed, np.int64)
        if not len(physical) == len(lengths) == counts.sum():
            must = "sequences must be as many as the examples have responses"
            raise IntegrityError(sentence(dataset.url, f"{must} [responses-count]"))
        return sum_up(lengths, physical, to_offsets(counts))

    def of_shard(shard: ShardInfo) -> Measured:
        batches = read_columns(dataset.location, manifest, shard, names)
        return joined(map(of_batch, batches))

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(of_shard, manifest.shards)


def measure_examples(examples: Examples, layout: str, kind: str) -> Measured:
    """Measures examples of a kind in `layout`."""
    physical = examples.lengths - segment_offsets(examples, layout)
    starts = examples.sequence_offsets[:-1]
    supervised = np.add.reduceat(examples.supervised, starts, dtype=np.int64)
    firsts = examples.example_offsets[:-1]
    counts = count_examples(supervised, examples.reward, firsts, kind)
    return sum_up(examples.lengths, physical, examples.example_offsets, counts)


def sum_up(
    lengths: Any, physical: Any, example_offsets: Int64, counts: Int64 | None = None
) -> Measured:
    """Sums over the sequences of each example.

    Args:
        lengths: `[S]`, logical lengths.
        physical: `[S]`, tokens of each segment.
        example_offsets: int64 `[E + 1]`.
        counts: int64 `[E, 4]`, returned unchanged.
    """
    first, physical = example_offsets[:-1], physical.astype(np.int64)
    return (
        np.add.reduceat(physical, first),
        np.add.reduceat(physical**2, first),
        np.maximum.reduceat(lengths.astype(np.int64), first),
        counts,
    )
