"""LitData: chunks written by ``optimize``, read in place by its own dataset and
loader.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import litdata
import numpy as np

from peers_loading.base import PACKS_PER_BATCH, SEED, Reader, Source, collate


def _sample(source: Source, index: int) -> dict[str, Any]:
    return {name: np.array(column) for name, column in source[index].items()}


class LitData(Reader):
    """Raw chunks of 64 MB, shuffled."""

    def write(self, source: Source, folder: Path) -> None:
        how = {"chunk_bytes": "64MB", "num_workers": 1, "verbose": False}
        inputs = list(range(len(source)))
        litdata.optimize(
            fn=partial(_sample, source), inputs=inputs, output_dir=str(folder), **how
        )

    def open(self, folder: Path, scratch: Path) -> Any:
        data = litdata.StreamingDataset(
            str(folder), shuffle=True, drop_last=False, seed=SEED
        )
        return litdata.StreamingDataLoader(
            data, batch_size=PACKS_PER_BATCH, collate_fn=collate
        )
