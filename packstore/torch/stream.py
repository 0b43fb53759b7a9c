"""The packs of an epoch as a sequence: what a dataset deals out to ranks, and where it comes from.

A stream is a pure function of what it was made from, its seed and the epoch. It knows nothing of
ranks and workers: whoever holds it asks for the positions that are his.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import fsspec.implementations.local  # noqa: F401  (taking longer than opening a dataset does)
import numpy as np

import packstore.io.manifest_json  # noqa: F401  (likewise)
from packstore.config import ReadConfig
from packstore.errors import ConfigError, quote
from packstore.io.dataset import Dataset
from packstore.io.order import LANES, PackOrder
from packstore.io.read_ahead import ReadAhead
from packstore.io.statistics import Totals
from packstore.records import Int64, Packs, PackSizes

Identity = dict[str, int | str | bool]
Shuffle = bool | Literal["stratified"]


class PackStream(Protocol):
    """The packs of one epoch, in their global order; any of them can be read at any time.

    ``copy.copy`` gives a stream that can be in another epoch.
    """

    @property
    def kind(self) -> str:
        """``dpo``, ``sft`` or ``ranked``."""

    @property
    def identity(self) -> Identity:
        """What a saved position must agree with to mean the same packs; small and JSON-able."""

    def __len__(self) -> int:
        """Packs of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Makes this the stream of `epoch`."""

    @property
    def datasets(self) -> Sequence[Dataset]:
        """Where the packs come from."""

    @property
    def totals(self) -> Totals:
        """Packs, examples and tokens of the epoch, without reading the packs."""

    def sizes(self, indices: Int64) -> PackSizes:
        """Sizes of the packs at positions `indices`, int64 `[n]`, without reading the packs."""

    def sources(self, indices: Int64) -> Int64:
        """Which source of a mix the packs at positions `indices` are of, int64 `[n]`; else 0."""

    def read(self, batches: Iterable[Int64], *, stride: int = 1) -> Iterator[list[Packs]]:
        """For each array of positions the packs there, each pack as :class:`Packs` of one row.

        Looks ahead in `batches`, so these are taken before the packs before them are given out.

        Args:
            batches: int64 arrays of positions, in the order in which they are wanted.
            stride: the process reads every `stride`-th position, about: so many share the lanes.

        Raises:
            StorageError: a shard is missing, or the store refuses.
            IntegrityError: its bytes are not those that were written.
        """


class StoredPacks:
    """The packs of a dataset as they are stored; threads read ahead of who takes them.

    Pickles as what it was made from, without what was read or worked out.

    Args:
        dataset: where they are.
        seed: of the order.
        shuffle: False gives file order. ``stratified``: shuffled so that every stretch of packs has
            about as many examples as any other; needs the sizes of all packs.
        lanes: row groups that are open at once.
        reading: how far to read ahead, and what becomes of a row group that cannot be read.

    Attributes:
        quarantined: row groups that this process has left out: stand-ins of weight 0 were given
            for their packs.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int = 0,
        shuffle: Shuffle = True,
        lanes: int = LANES,
        reading: ReadConfig | None = None,
    ) -> None:
        if shuffle not in (True, False, "stratified"):
            must = "True, False or 'stratified'"
            raise ConfigError(f"shuffle must be {must}; found {quote(shuffle)}.")
        self.reading = reading or ReadConfig()
        self.dataset = dataset.cached(self.reading)
        self.seed, self.shuffle, self.lanes = seed, shuffle, lanes
        self.quarantined: set[int] = set()
        self._epoch = 0
        self._made: PackOrder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    @property
    def kind(self) -> str:
        """``dpo``, ``sft`` or ``ranked``."""
        return self.dataset.manifest.kind

    @property
    def identity(self) -> Identity:
        """Dataset and order."""
        return {
            "dataset": self.dataset.manifest.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "lanes": self.lanes,
        }

    def __len__(self) -> int:
        return self.dataset.manifest.num_packs

    def set_epoch(self, epoch: int) -> None:
        """Makes this the stream of `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._made = epoch, None

    @property
    def _order(self) -> PackOrder:
        """The order of the epoch, made when it is first asked for."""
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

    @property
    def datasets(self) -> Sequence[Dataset]:
        """The one dataset."""
        return [self.dataset]

    @property
    def totals(self) -> Totals:
        """As the manifest tells."""
        return self.dataset.manifest.totals

    def sources(self, indices: Int64) -> Int64:
        """All of source 0."""
        return np.zeros_like(indices)

    def sizes(self, indices: Int64) -> PackSizes:
        """Sizes of the packs at positions `indices`; see :class:`PackStream`."""
        groups, rows = self._order.locate(indices)
        return self.dataset.sizes(self.dataset.group_offsets[groups] + rows)

    def read(self, batches: Iterable[Int64], *, stride: int = 1) -> Iterator[list[Packs]]:
        """The packs at each array of positions; see :class:`PackStream`."""
        order, reading = self._order, self.reading
        return iter(ReadAhead(self.dataset, order, batches, reading, self.quarantined))
