"""Streams: the packs of an epoch as a sequence, split by ``PackedDataset`` over ranks.

A stream is a pure function of its arguments, its seed and the epoch. It is independent
of ranks and workers: each reader requests its own positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

# Imported with this module. Opening the first dataset would import it otherwise, which
# takes longer than the rest of opening.
import fsspec.implementations.local  # noqa: F401
import numpy as np

from packstore.config import ReadConfig
from packstore.format.arrays import Int64, Packs, PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.order import LANES, PackOrder
from packstore.io.dataset.read_ahead import ReadAhead
from packstore.io.side.join import SideColumns
from packstore.registry import choice

Identity = dict[str, int | str | bool]
Shuffle = bool | Literal["stratified"]


@runtime_checkable
class PackStream(Protocol):
    """The packs of one epoch, in their global order, with random access.

    A copy, by ``copy.copy``, has an epoch of its own.
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
        """Make this the stream of `epoch`."""

    def sizes(self, indices: Int64) -> PackSizes:
        """Return the sizes of the packs at `indices`, int64 `[n]`.

        They are known without reading the packs.
        """

    def sources(self, indices: Int64) -> Int64:
        """Return the index of the mixed stream that each pack comes from, int64 `[n]`.

        A stream that is no mix returns zeros.
        """

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        """Yield the packs of each array of indices: a list with one-row `Packs` each.

        Args:
            batches: int64 `[n]` each, positions in the order of the epoch.
        """


class StoredPacks:
    """The packs of a dataset as they are stored; threads read ahead.

    A pickle holds neither the order nor packs: the process that loads it computes and
    reads them again.

    Args:
        dataset: the dataset.
        seed: seed of the order.
        shuffle: False for file order; ``stratified`` spreads packs evenly over the
            epoch by their numbers of examples.
        lanes: row groups that are open at once, over all ranks.
        reading: how row groups are fetched, and whether unreadable ones are skipped.
        side: columns of side datasets to join.

    Attributes:
        quarantined: row groups that this process skipped, with other packs in their
            place.
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
        self.seed = seed
        self.shuffle = shuffle
        self.lanes = lanes
        self.reading = reading or ReadConfig()
        self.side = side
        self.dataset = dataset.cached(self.reading)
        self.datasets = [self.dataset]
        self.kind = dataset.manifest.kind
        self.identity: Identity = {
            "dataset": dataset.manifest.fingerprint,
            "seed": seed,
            "shuffle": shuffle,
            "lanes": lanes,
        }
        self.quarantined: set[int] = set()
        self._epoch = 0
        self._cached_order: PackOrder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached_order": None}

    def __len__(self) -> int:
        return self.dataset.manifest.num_packs

    def set_epoch(self, epoch: int) -> None:
        """Make this the stream of `epoch`."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._cached_order = None

    @property
    def columns(self) -> set[str]:
        """Names of the carried columns, and of the joined side data."""
        names = set(self.dataset.manifest.carried)
        if self.side is not None:
            names.update(self.side.columns)
        return names

    @property
    def _order(self) -> PackOrder:
        """The order of the epoch, computed on first access."""
        if self._cached_order is None:
            strata = None
            if self.shuffle == "stratified":
                strata = self.dataset.pack_index.examples  # a count for each pack
            self._cached_order = PackOrder(
                self.dataset.group_rows,
                seed=self.seed,
                epoch=self._epoch,
                lanes=self.lanes,
                shuffle=bool(self.shuffle),
                strata=strata,
            )
        return self._cached_order

    def sources(self, indices: Int64) -> Int64:
        """Return 0 for each pack: there is one source."""
        return np.zeros_like(indices)

    def sizes(self, indices: Int64) -> PackSizes:
        """Return the sizes of the packs at `indices`; see :class:`PackStream`."""
        groups, rows = self._order.locate(indices)
        return self.dataset.sizes(self.dataset.group_offsets[groups] + rows)

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        """Yield the packs of each array of indices; see :class:`PackStream`."""
        reader = ReadAhead(
            self.dataset, self._order, batches, self.reading, self.quarantined
        )
        if self.side is None:
            return iter(reader)
        return self.side.join_all(reader)
