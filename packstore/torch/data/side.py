"""Joins side datasets to packs, by example id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from packstore.errors import ConfigError, quote
from packstore.format.arrays import Packs, to_offsets
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.side_manifest import REF_LOGPS, check_side
from packstore.io.side.side import Side, open_side
from packstore.io.side.side_reader import SideTable


class SideColumns:
    """The columns of side datasets, by example id.

    A column with one value per example is added to the `columns` of a pack; ``ref_logps``, with one
    value per sequence, sets the pack's `ref_logps`, and so the batch's. A side dataset is read
    whole with the first pack; afterwards every batch of packs is one lookup, in any order.

    Args:
        dataset: the dataset of the packs.
        sides: side datasets, or their URLs. Each must hold all examples of the dataset.
    """

    def __init__(self, dataset: Dataset, sides: Sequence[Side | str | PathLike[str]]) -> None:
        self._sides = [s if isinstance(s, Side) else open_side(str(s)) for s in sides]
        taken = set(dataset.manifest.carry)
        for side in self._sides:
            check_side(side.manifest, dataset.manifest, side.url)
            for name in side.manifest.columns:
                if name in taken:
                    raise ConfigError(f"two columns of the joined packs are named {quote(name)}.")
                taken.add(name)
        self._tables: list[SideTable] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tables": []}

    def join(self, packs: list[Packs]) -> list[Packs]:
        """Returns the packs with the columns."""
        if not self._tables:
            self._tables += map(SideTable, self._sides)
        if not packs:
            return packs
        ids = np.concatenate([p.example_ids for p in packs])
        counts = np.concatenate([p.num_responses for p in packs])
        example_cuts = to_offsets(np.array([len(p.example_ids) for p in packs]))[1:-1]
        sequence_cuts = to_offsets(np.array([len(p.lengths) for p in packs]))[1:-1]
        for side, table in zip(self._sides, self._tables, strict=True):
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
