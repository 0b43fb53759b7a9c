"""Lance: a scan in file order by its torch dataset, and batches of rows taken at random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
from lance.torch.data import LanceDataset

from peers_loading.arrows import Rows, table
from peers_loading.base import (
    PACKS_PER_BATCH,
    SEED,
    Loader,
    Reader,
    Replayed,
    Source,
    collate,
)


class Scanned(Reader):
    """``LanceDataset``, which has no shuffle of rows and no position."""

    def write(self, source: Source, folder: Path) -> None:
        """See :class:`Reader`."""
        lance.write_dataset(table(source), str(folder))

    def open(self, folder: Path, scratch: Path) -> Loader:
        """See :class:`Reader`."""
        return Replayed(
            LanceDataset(str(folder), batch_size=PACKS_PER_BATCH, to_tensor_fn=_collate)
        )


class Taken(Scanned):
    """``take`` of 8 random rows, as in its map-style dataset, but without its Python lists."""

    def open(self, folder: Path, scratch: Path) -> Loader:
        """See :class:`Reader`."""
        return _Taken(folder)


class _Taken:
    """Batches of rows in a seeded random order."""

    def __init__(self, folder: Path) -> None:
        self._data, self._given = lance.dataset(str(folder)), 0

    def __iter__(self) -> Any:
        order = np.random.default_rng(SEED).permutation(self._data.count_rows()).tolist()
        for start in range(self._given * PACKS_PER_BATCH, len(order), PACKS_PER_BATCH):
            rows = self._data.take(order[start : start + PACKS_PER_BATCH]).combine_chunks()
            self._given = start // PACKS_PER_BATCH + 1
            yield collate(list(Rows(rows.to_batches()[0])))

    def state_dict(self) -> int:
        return self._given

    def load_state_dict(self, state: int) -> None:
        self._given = state


def _collate(batch: Any, **_: Any) -> dict[str, Any]:
    samples: Sequence[Any] = list(Rows(batch))
    return collate(samples)
