"""Joins columns of side datasets to packs, by example id."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from packstore.errors import CompatibilityError, ConfigError, quote
from packstore.format.arrays import (
    Int64,
    Packs,
    concat_token_values,
    ragged_indices,
    take_token_values,
    to_offsets,
)
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.side_manifest import (
    PER_SEQUENCE,
    REF_LOGPS,
    Span,
    covered_spans,
    require_covered,
    spans_of_lineages,
    token_type,
)
from packstore.io.side.parts import open_sides
from packstore.io.side.side import Side
from packstore.io.side.table import SideTable


class _Match(NamedTuple):
    """The examples of a batch that one span of a side dataset covers.

    A span is a range of example ids: all of them, or a part of a combined dataset.

    Attributes:
        table: the values of the side dataset.
        places: int64 `[n]`, index of each example in the batch.
        rows: int64 `[n]`, row of each example in the table.
    """

    table: SideTable
    places: Int64
    rows: Int64


class _Coverage:
    """The example ids that the side datasets of a column cover, in disjoint spans.

    Args:
        spans: the spans of each side dataset, by its index.

    Attributes:
        firsts: int64 `[n]`, first id of each span, ascending.
        lasts: int64 `[n]`, its last id.
        sides: index of its side dataset.
    """

    def __init__(self, spans: Mapping[int, Sequence[Span]]) -> None:
        sorted_spans = sorted((span, side) for side in spans for span in spans[side])
        self.firsts = np.array([span.first for span, _ in sorted_spans], np.int64)
        self.lasts = np.array([span.last for span, _ in sorted_spans], np.int64)
        self.sides = [side for _, side in sorted_spans]


class SideColumns:
    """The columns of side datasets, joined to packs by example id.

    The side datasets are loaded into memory when the first packs are read; to join a
    batch is then one lookup for each span. For a combined dataset, several side
    datasets may share a column, each for some of its parts.

    Attributes:
        columns: name -> indices of the side datasets that have the column.
        types: name -> type of the column, such as ``float32``.

    Raises:
        ConfigError: a column has the name of a carried column, or of a column of
            another type in another side dataset.
        CompatibilityError: a side dataset does not belong to the dataset, or the side
            datasets of a column do not cover it.
    """

    def __init__(
        self, dataset: Dataset, sides: Sequence[Side | str | PathLike[str]]
    ) -> None:
        manifest = dataset.manifest
        self._sides = open_sides(sides, manifest, dataset.location.storage_options)
        lineages = {side.manifest.lineage for side in self._sides}
        runs = spans_of_lineages(lineages, manifest)
        spans_of_sides = [
            covered_spans(side.manifest, manifest, runs, side.url)
            for side in self._sides
        ]
        self._tables: list[SideTable] = []

        # By the indices of side datasets, as columns mostly come together.
        self._coverage: dict[tuple[int, ...], _Coverage] = {}
        self.types: dict[str, str] = {}
        self.columns: dict[str, list[int]] = {}
        for number, side in enumerate(self._sides):
            for name in side.manifest.known_columns:
                self.columns.setdefault(name, []).append(number)

        for name, numbers in self.columns.items():
            type_names = {self._type_name(number, name) for number in numbers}
            if name in manifest.carried or len(type_names) > 1:
                urls = [self._sides[number].url for number in numbers]
                raise ConfigError(
                    f"two columns of the joined packs are named {quote(name)}: see "
                    f"{', '.join(urls)}. Join one of them at a time."
                )
            self.types[name] = type_names.pop()
            spans = {number: spans_of_sides[number] for number in numbers}
            require_covered(name, [*chain(*spans.values())], manifest)
            self._coverage[tuple(numbers)] = _Coverage(spans)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tables": []}

    def _type_name(self, number: int, column: str) -> str:
        """Return the type of a column in a side dataset, such as ``float32``."""
        return self._sides[number].manifest.known_columns[column]

    def join_all(self, batches: Iterable[list[Packs]]) -> Iterator[list[Packs]]:
        """Yield the packs of each batch with the columns."""
        for packs in batches:
            yield self.join(packs)

    def load(self) -> None:
        """Read the values of all side datasets, unless they were read before."""
        if not self._tables:
            self._tables = [side.load() for side in self._sides]

    def join(
        self, packs: list[Packs], names: Collection[str] | None = None
    ) -> list[Packs]:
        """Return the packs with the columns.

        Args:
            packs: with any number of rows each.
            names: the columns to join; None: all.

        Raises:
            CompatibilityError: an example has no values, or another number of them.
        """
        self.load()
        if not packs:
            return packs

        example_ids = np.concatenate([pack.example_ids for pack in packs])
        matches_of_sides: dict[tuple[int, ...], list[_Match]] = {}
        num_targets: Int64 | None = None
        for name, numbers in self.columns.items():
            if names is not None and name not in names:
                continue
            sides = tuple(numbers)
            if sides not in matches_of_sides:
                matches_of_sides[sides] = self._match(name, sides, example_ids)
            matches = matches_of_sides[sides]
            type_name = self.types[name]
            if token_type(type_name) is not None:
                if num_targets is None:
                    num_targets = np.concatenate([pack.num_targets for pack in packs])
                packs = _join_token_column(packs, name, matches, num_targets)
            elif type_name == PER_SEQUENCE:
                packs = _join_sequence_column(packs, name, matches)
            else:
                packs = _join_example_column(packs, name, matches)
        return packs

    def _match(
        self, name: str, sides: tuple[int, ...], example_ids: Int64
    ) -> list[_Match]:
        """Look up the examples in the side datasets of a column.

        Raises:
            CompatibilityError: an example has no match.
        """
        coverage = self._coverage[sides]
        spans = np.searchsorted(coverage.firsts, example_ids, side="right") - 1
        is_absent = (spans < 0) | (example_ids > coverage.lasts[spans])
        if is_absent.any():
            raise CompatibilityError(
                f"side data {quote(name)} must have every example; found no part with "
                f"example {example_ids[is_absent][0]}."
            )
        matches = []
        # Of many spans, as of many appended parts, a batch is in few.
        for span in np.unique(spans).tolist():
            table = self._tables[coverage.sides[span]]
            places = np.flatnonzero(spans == span)
            rows = table.find(example_ids[places] - coverage.firsts[span])
            matches.append(_Match(table, places, rows))
        return matches


def _join_example_column(
    packs: Sequence[Packs], name: str, matches: Sequence[_Match]
) -> list[Packs]:
    """Return the packs with a column of one value for each example."""
    places = np.concatenate([match.places for match in matches])
    values = np.concatenate([match.table.column(name, match.rows) for match in matches])
    values = values[np.argsort(places)]  # in the order of the batch

    ends = np.cumsum([len(pack.example_ids) for pack in packs])
    parts = np.split(values, ends[:-1])
    return [
        replace(pack, columns={**pack.columns, name: part})
        for pack, part in zip(packs, parts, strict=True)
    ]


def _join_sequence_column(
    packs: Sequence[Packs], name: str, matches: Sequence[_Match]
) -> list[Packs]:
    """Return the packs with a column of one value for each sequence."""
    places = np.concatenate([match.places for match in matches])
    # Each response is one sequence.
    num_sequences = np.concatenate([pack.num_responses for pack in packs])
    values = np.concatenate(
        [
            match.table.sequence_values(name, match.rows, num_sequences[match.places])
            for match in matches
        ]
    )
    # From the order of the matches to the order of the batch.
    offsets = to_offsets(num_sequences[places])
    values = values[ragged_indices(offsets, np.argsort(places))]

    ends = np.cumsum([len(pack.lengths) for pack in packs])
    parts = np.split(values, ends[:-1])
    return [
        _with_sequence_column(pack, name, part)
        for pack, part in zip(packs, parts, strict=True)
    ]


def _join_token_column(
    packs: Sequence[Packs], name: str, matches: Sequence[_Match], num_targets: Int64
) -> list[Packs]:
    """Return the packs with a column of values for each supervised token.

    `num_targets`: int64 `[E]`, supervised tokens of each example of the batch.
    """
    values_of_matches = [
        match.table.token_values(name, match.rows, num_targets[match.places])
        for match in matches
    ]
    values = concat_token_values(values_of_matches)
    if len(matches) > 1:
        # From the order of the matches to the order of the batch.
        places = np.concatenate([match.places for match in matches])
        offsets = to_offsets(num_targets[places])
        indices = ragged_indices(offsets, np.argsort(places))
        values = take_token_values(values, indices)

    offsets_of_targets = to_offsets(num_targets)
    joined = []
    end = 0
    for pack in packs:
        start, end = end, end + len(pack.example_ids)
        targets = slice(offsets_of_targets[start], offsets_of_targets[end])
        part = take_token_values(values, targets)
        joined.append(replace(pack, token_columns={**pack.token_columns, name: part}))
    return joined


def _with_sequence_column(pack: Packs, name: str, values: Any) -> Packs:
    if name == REF_LOGPS:
        return replace(pack, ref_logps=values)
    return replace(pack, sequence_columns={**pack.sequence_columns, name: values})
