"""Streams: the packs of an epoch as a sequence, which a dataset distributes to ranks.

A stream is a pure function of its arguments, its seed and the epoch. It is independent of ranks and
workers: each reader requests its own positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, Protocol

import fsspec.implementations.local  # noqa: F401  (taking longer than opening a dataset does)
import numpy as np

from packstore.config import ReadConfig
from packstore.errors import ConfigError, quote
from packstore.format.arrays import Int64, Packs, PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.order import LANES, PackOrder
from packstore.io.dataset.read_ahead import ReadAhead
from packstore.io.manifest.side_manifest import REF_LOGPS, check_side
from packstore.io.side.side import Side, SideTable, open_side

Identity = dict[str, int | str | bool]
Shuffle = bool | Literal["stratified"]


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
        """Returns the sizes of the packs at `indices`, int64 `[n]`, without reading the packs."""

    def sources(self, indices: Int64) -> Int64:
        """Returns the source index of each pack at `indices`, int64 `[n]`; 0 without a mix."""

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        """Yields for each array of positions its packs, each as :class:`Packs` of one row."""


class SideColumns:
    """The columns of side datasets, by example id; ``ref_logps`` has one value per sequence.

    A side dataset is read whole with the first pack; each batch of packs is then one lookup.
    """

    def __init__(self, dataset: Dataset, sides: Sequence[Side | str | PathLike[str]]) -> None:
        self.sides = [s if isinstance(s, Side) else open_side(str(s)) for s in sides]
        taken = set(dataset.manifest.carried)
        for side in self.sides:
            check_side(side.manifest, dataset.manifest, side.url)
            for name in side.manifest.known:
                if name in taken:
                    raise ConfigError(f"two columns of the joined packs are named {quote(name)}.")
                taken.add(name)
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
        for side, table in zip(self.sides, self._tables, strict=True):
            rows = table.find(ids)
            for name in side.manifest.known:
                if name == REF_LOGPS:
                    values = np.split(table.ref_logps(rows, counts), sequences)
                    pairs = zip(packs, values, strict=True)
                    packs = [replace(p, ref_logps=x) for p, x in pairs]
                else:
                    values = np.split(table.column(name, rows), examples)
                    pairs = zip(packs, values, strict=True)
                    packs = [replace(p, columns={**p.columns, name: x}) for p, x in pairs]
        return packs


class StoredPacks:
    """The packs of a dataset as they are stored; threads read ahead. Pickles its arguments only.

    `quarantined` holds the row groups that this process skipped, with other packs in their place.
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
        if shuffle not in (True, False, "stratified"):
            raise ConfigError(f"shuffle must be True, False or 'stratified'; found {shuffle!r}.")
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
        self._made: PackOrder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def __len__(self) -> int:
        return self.dataset.manifest.num_packs

    def set_epoch(self, epoch: int) -> None:
        """Makes this the stream of `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._made = epoch, None

    @property
    def columns(self) -> set[str]:
        """Names of the columns that packs carry, and of those that are joined to them."""
        sides = [] if self.side is None else self.side.sides
        return {*self.dataset.manifest.carried}.union(*(side.manifest.known for side in sides))

    @property
    def _order(self) -> PackOrder:
        """The order of the epoch, made on first access."""
        if self._made is None:
            self._made = PackOrder(
                self.dataset.group_rows,
                seed=self.seed,
                epoch=self._epoch,
                lanes=self.lanes,
                shuffle=bool(self.shuffle),
                strata=self.dataset.pack_index.examples if self.shuffle == "stratified" else None,
            )
        return self._made

    def sources(self, indices: Int64) -> Int64:
        """Returns 0 for each pack: there is one source."""
        return np.zeros_like(indices)

    def sizes(self, indices: Int64) -> PackSizes:
        """Returns the sizes of the packs at positions `indices`; see :class:`PackStream`."""
        groups, rows = self._order.locate(indices)
        return self.dataset.sizes(self.dataset.group_offsets[groups] + rows)

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        """Yields the packs at each array of positions; see :class:`PackStream`."""
        order, skipped = self._order, self.quarantined
        packs = iter(ReadAhead(self.dataset, order, batches, self.reading, skipped))
        return packs if self.side is None else map(self.side.join, packs)
