"""Streams: the packs of an epoch as a sequence, which a dataset distributes to ranks.

A stream is a pure function of its arguments, its seed and the epoch. It is independent
of ranks and workers: each reader requests its own positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, Protocol, runtime_checkable

import fsspec.implementations.local  # noqa: F401  (taking longer than opening a dataset does)
import numpy as np

from packstore.config import ReadConfig
from packstore.errors import CompatibilityError, ConfigError, quote
from packstore.format.arrays import Int64, Packs, PackSizes, ragged_indices, to_offsets
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.order import LANES, PackOrder
from packstore.io.dataset.read_ahead import ReadAhead
from packstore.io.manifest.side_manifest import (
    PER_SEQUENCE,
    REF_LOGPS,
    covered_spans,
    require_covered,
)
from packstore.io.side.side import Side, SideTable, open_side
from packstore.registry import choice

Identity = dict[str, int | str | bool]
Shuffle = bool | Literal["stratified"]


@runtime_checkable
class PackStream(Protocol):
    """The packs of one epoch, in their global order, with random access.

    ``copy.copy`` returns a stream that can be in another epoch.
    """

    @property
    def kind(self) -> str:
        """``preference``, ``sft`` or ``scored``."""

    @property
    def identity(self) -> Identity:
        """JSON values that must match for a saved position to mean the same packs."""

    @property
    def datasets(self) -> Sequence[Dataset]:
        """The datasets of the packs."""

    def __len__(self) -> int:
        """Number of packs of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Makes this the stream of `epoch`."""

    def sizes(self, indices: Int64) -> PackSizes:
        """Returns the sizes of the packs at `indices`, int64 `[n]`, without reading the
        packs.
        """

    def sources(self, indices: Int64) -> Int64:
        """Returns the source index of each pack at `indices`, int64 `[n]`; 0 without a
        mix.
        """

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        """Yields for each array of positions its packs, each as :class:`Packs` of one
        row.
        """


class SideColumns:
    """The columns of side datasets, by example id; some have one value for each
    sequence.

    A side dataset is read whole with the first pack; each batch of packs is then one
    lookup. For a combined dataset, several may have a column together, each for some of
    its parts.
    """

    def __init__(
        self, dataset: Dataset, sides: Sequence[Side | str | PathLike[str]]
    ) -> None:
        self.sides = [s if isinstance(s, Side) else open_side(str(s)) for s in sides]
        manifest = dataset.manifest
        self._spans = [
            covered_spans(side.manifest, manifest, side.url) for side in self.sides
        ]
        self.columns: dict[str, list[int]] = {}  # name -> the sides that have it
        for number, side in enumerate(self.sides):
            for name in side.manifest.known_columns:
                self.columns.setdefault(name, []).append(number)
        for name, numbers in self.columns.items():
            types = {self.sides[n].manifest.known_columns[name] for n in numbers}
            if name in manifest.carried or len(types) > 1:
                raise ConfigError(
                    f"two columns of the joined packs are named {quote(name)}."
                )
            require_covered(
                name, [span for n in numbers for span in self._spans[n]], manifest
            )
        self._tables: list[SideTable] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tables": []}

    def join(self, packs: list[Packs]) -> list[Packs]:
        """Returns the packs with the columns."""
        if not self._tables:
            self._tables += map(SideTable, self.sides)
        if not packs:
            return packs
        ids = np.concatenate([p.example_ids for p in packs])
        counts = np.concatenate([p.num_responses for p in packs])
        examples = np.cumsum([len(p.example_ids) for p in packs])[:-1]
        sequences = np.cumsum([len(p.lengths) for p in packs])[:-1]
        found = [self._find(number, ids) for number in range(len(self.sides))]
        for name, numbers in self.columns.items():
            parts = [(self._tables[n], *part) for n in numbers for part in found[n]]
            places = np.concatenate([at for _, at, _ in parts])
            if len(places) < len(ids):
                other = np.setdiff1d(np.arange(len(ids)), places)
                rule = f"side data {quote(name)} must have every example"
                raise CompatibilityError(
                    f"{rule}; found no part with example {ids[other[0]]}."
                )
            order = np.argsort(places)
            if self.sides[numbers[0]].manifest.known_columns[name] == PER_SEQUENCE:
                each = [
                    t.sequence_values(name, rows, counts[at]) for t, at, rows in parts
                ]
                values = np.concatenate(each)[
                    ragged_indices(to_offsets(counts[places]), order)
                ]
                pairs = zip(packs, np.split(values, sequences), strict=True)
                packs = [
                    replace(p, ref_logps=x)
                    if name == REF_LOGPS
                    else replace(p, sequence_columns={**p.sequence_columns, name: x})
                    for p, x in pairs
                ]
            else:
                values = np.concatenate([t.column(name, rows) for t, _, rows in parts])[
                    order
                ]
                pairs = zip(packs, np.split(values, examples), strict=True)
                packs = [replace(p, columns={**p.columns, name: x}) for p, x in pairs]
        return packs

    def _find(self, number: int, ids: Int64) -> list[tuple[Int64, Int64]]:
        """Returns, of each span of a side, the places of its examples in `ids`, and
        their rows.
        """
        places = [
            np.flatnonzero((ids >= s.first) & (ids <= s.last))
            for s in self._spans[number]
        ]
        pairs = zip(places, self._spans[number], strict=True)
        return [
            (at, self._tables[number].find(ids[at] - span.first)) for at, span in pairs
        ]


class StoredPacks:
    """The packs of a dataset as they are stored; threads read ahead. Pickles its
    arguments only.

    `quarantined` holds the row groups that this process skipped, with other packs in
    their place.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int = 0,
        shuffle: Shuffle = True,
        lanes: int = LANES,
        reading: ReadConfig | None = None,
        side: SideColumns | None = None,
    ) -> None:
        choice("shuffle", shuffle, (True, False, "stratified"))
        self.reading = reading or ReadConfig()
        self.dataset = dataset.cached(self.reading)
        self.kind, self.datasets = dataset.manifest.kind, [self.dataset]
        self.identity: Identity = {
            "dataset": dataset.manifest.fingerprint,
            "seed": seed,
            "shuffle": shuffle,
            "lanes": lanes,
        }
        self.seed, self.shuffle, self.lanes, self.side = seed, shuffle, lanes, side
        self.quarantined: set[int] = set()
        self._epoch = 0
        self._cached_order: PackOrder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached_order": None}

    def __len__(self) -> int:
        return self.dataset.manifest.num_packs

    def set_epoch(self, epoch: int) -> None:
        """Makes this the stream of `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._cached_order = epoch, None

    @property
    def columns(self) -> set[str]:
        """Names of the columns that packs carry, and of those that are joined
        to them.
        """
        return {
            *self.dataset.manifest.carried,
            *([] if self.side is None else self.side.columns),
        }

    @property
    def _order(self) -> PackOrder:
        """The order of the epoch, made on first access."""
        if self._cached_order is None:
            self._cached_order = PackOrder(
                self.dataset.group_rows,
                seed=self.seed,
                epoch=self._epoch,
                lanes=self.lanes,
                shuffle=bool(self.shuffle),
                strata=self.dataset.pack_index.examples
                if self.shuffle == "stratified"
                else None,
            )
        return self._cached_order

    def sources(self, indices: Int64) -> Int64:
        """Returns 0 for each pack: there is one source."""
        return np.zeros_like(indices)

    def sizes(self, indices: Int64) -> PackSizes:
        """Returns the sizes of the packs at positions `indices`; see
        :class:`PackStream`.
        """
        groups, rows = self._order.locate(indices)
        return self.dataset.sizes(self.dataset.group_offsets[groups] + rows)

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        """Yields the packs at each array of positions; see :class:`PackStream`."""
        order, skipped = self._order, self.quarantined
        packs = iter(ReadAhead(self.dataset, order, batches, self.reading, skipped))
        return packs if self.side is None else map(self.side.join, packs)
