"""LitData: chunks written by ``optimize``, read in place by its own dataset and loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import litdata
import numpy as np

from peers_loading.base import PACKS_PER_BATCH, SEED, Loader, Reader, Source, collate


class LitData(Reader):
    """Raw chunks of 64 MB, shuffled."""

    def write(self, source: Source, folder: Path) -> None:
        litdata.optimize(
            fn=_Sample(source),
            inputs=list(range(len(source))),
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=1,
            verbose=False,
        )

    def open(self, folder: Path, scratch: Path) -> Loader:
        data = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False, seed=SEED)
        loader: Any = litdata.StreamingDataLoader(
            data, batch_size=PACKS_PER_BATCH, collate_fn=collate
        )
        return loader


class _Sample:
    """The function that LitData's worker calls with a position."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __call__(self, index: int) -> dict[str, Any]:
        return {name: np.array(column) for name, column in self._source[index].items()}
