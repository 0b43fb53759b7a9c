"""Joins side datasets to the packs of a stream, by example id."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self

import numpy as np

from packstore.errors import ConfigError, quote
from packstore.format.arrays import Int64, Packs, PackSizes, to_offsets
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.side_manifest import REF_LOGPS, check_side
from packstore.io.shards.statistics import Totals
from packstore.io.side.side import Side, open_side
from packstore.io.side.side_table import SideTable
from packstore.torch.data.stream import Identity, PackStream


class JoinedPacks:
    """The packs of a stream with the columns of side datasets.

    A column with one value per example is added to the `columns` of a pack; ``ref_logps``, with one
    value per sequence, sets the pack's `ref_logps`, and so the batch's. A side dataset is read
    whole with the first pack; afterwards every batch of packs is one lookup, in any order.

    Args:
        stream: the packs.
        sides: side datasets, or their URLs. Each must hold all examples of the stream's datasets;
            join side data of a single source of a mix before mixing.

    Raises:
        CompatibilityError: a side dataset is of other examples, or does not hold all of them.
        ConfigError: two columns have the same name.
        DatasetNotFoundError: a side dataset does not exist.
    """

    def __init__(self, stream: PackStream, sides: Sequence[Side | str | PathLike[str]]) -> None:
        self.stream = stream
        self.sides = [s if isinstance(s, Side) else open_side(str(s)) for s in sides]
        taken = {name for dataset in stream.datasets for name in dataset.manifest.carry}
        for side in self.sides:
            for dataset in stream.datasets:
                check_side(side.manifest, dataset.manifest, side.url)
            for name in side.manifest.columns:
                if name in taken:
                    raise ConfigError(f"two columns of the joined packs are named {quote(name)}.")
                taken.add(name)
        self._tables: list[SideTable] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tables": []}

    def __copy__(self) -> Self:
        """Copies the stream; the values are shared in memory."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), stream=copy.copy(self.stream))
        return other

    @property
    def kind(self) -> str:
        """``preference``, ``sft`` or ``ranked``."""
        return self.stream.kind

    @property
    def identity(self) -> Identity:
        """Identity of the stream: side data changes neither packs nor order."""
        return self.stream.identity

    @property
    def datasets(self) -> Sequence[Dataset]:
        """The datasets of the packs."""
        return self.stream.datasets

    @property
    def totals(self) -> Totals:
        """Packs, examples and tokens of the epoch."""
        return self.stream.totals

    def __len__(self) -> int:
        return len(self.stream)

    def set_epoch(self, epoch: int) -> None:
        """Switches to the order of `epoch`."""
        self.stream.set_epoch(epoch)

    def sizes(self, indices: Int64) -> PackSizes:
        """Returns the sizes of the packs at positions `indices`; see :class:`PackStream`."""
        return self.stream.sizes(indices)

    def sources(self, indices: Int64) -> Int64:
        """Returns the sources of the packs at positions `indices`; see :class:`PackStream`."""
        return self.stream.sources(indices)

    def read(self, batches: Iterable[Int64], *, stride: int = 1) -> Iterator[list[Packs]]:
        """Yields the packs at each array of positions; see :class:`PackStream`.

        Raises:
            CompatibilityError: an example has no values, or another number of sequences.
            IntegrityError: a side dataset is damaged, or an id repeats.
        """
        for packs in self.stream.read(batches, stride=stride):
            yield self._join(packs)

    def _join(self, packs: list[Packs]) -> list[Packs]:
        if not self._tables:
            self._tables += map(SideTable, self.sides)
        if not packs:
            return packs
        ids = np.concatenate([p.example_ids for p in packs])
        counts = np.concatenate([p.num_responses for p in packs])
        example_cuts = to_offsets(np.array([len(p.example_ids) for p in packs]))[1:-1]
        sequence_cuts = to_offsets(np.array([len(p.lengths) for p in packs]))[1:-1]
        for side, table in zip(self.sides, self._tables, strict=True):
            rows = table.find(ids)
            for name in side.manifest.columns:
                if name == REF_LOGPS:
                    parts = np.split(table.ref_logps(rows, counts), sequence_cuts)
                    pairs = zip(packs, parts, strict=True)
                    packs = [replace(p, ref_logps=part) for p, part in pairs]
                else:
                    parts = np.split(table.column(name, rows), example_cuts)
                    pairs = zip(packs, parts, strict=True)
                    packs = [replace(p, columns={**p.columns, name: part}) for p, part in pairs]
        return packs
