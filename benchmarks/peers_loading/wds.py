"""WebDataset: tar files of ``.npy`` members."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import webdataset

from peers_loading.base import DTYPES, PACKS_PER_BATCH, SEED, Loader, Reader, Replayed, Source
from peers_loading.base import collate as together

BUFFER = 1000
PACKS_PER_SHARD = 1000


class WebDataset(Reader):
    """Shards of 1000 packs, shuffled, then a buffer of 1000; seeded, or resuming could not work."""

    def write(self, source: Source, folder: Path) -> None:
        """See :class:`Reader`."""
        folder.mkdir()
        pattern = str(folder / "%06d.tar")
        with webdataset.ShardWriter(pattern, maxcount=PACKS_PER_SHARD, verbose=0) as out:
            for i, sample in enumerate(source):
                columns = {f"{name}.npy": np.array(column) for name, column in sample.items()}
                out.write({"__key__": f"{i:08d}", **columns})

    def open(self, folder: Path, scratch: Path) -> Loader:
        """It has no position: see :class:`Replayed`."""
        urls = [str(path) for path in sorted(folder.glob("*.tar"))]
        data = (
            webdataset.WebDataset(urls, shardshuffle=len(urls), seed=SEED)
            .shuffle(BUFFER, seed=SEED)
            .decode()
            .to_tuple(*(f"{name}.npy" for name in DTYPES))
            .batched(PACKS_PER_BATCH, collation_fn=_collate)
        )
        return Replayed(webdataset.WebLoader(data, batch_size=None, num_workers=0))


def _collate(samples: list[tuple[np.ndarray, ...]]) -> dict[str, object]:
    return together([dict(zip(DTYPES, sample, strict=True)) for sample in samples])
