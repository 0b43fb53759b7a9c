"""Hugging Face datasets: streaming Parquet and mapped Arrow, in torchdata's stateful
loader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from peers_loading.base import PACKS_PER_BATCH, SEED, Reader, Source, collate
from peers_loading.plain import table

# It sleeps five seconds where its threads end, once an epoch: half of an epoch as short
# as this.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
SHARDS = 8
BUFFER = 1000


class Streaming(Reader):
    """Eight Parquet files of ``to_parquet``, streamed through a shuffle buffer
    of 1000.
    """

    def write(self, source: Source, folder: Path) -> None:
        folder.mkdir()
        data = datasets.Dataset(table(source))
        for i in range(SHARDS):
            shard = data.shard(SHARDS, i, contiguous=True)
            shard.to_parquet(str(folder / f"{i:05d}.parquet"))

    def open(self, folder: Path, scratch: Path) -> Any:
        files = [str(path) for path in sorted(folder.glob("*.parquet"))]
        how = {"split": "train", "streaming": True, "cache_dir": str(scratch)}
        data = datasets.load_dataset("parquet", data_files=files, **how)
        data = data.shuffle(seed=SEED, buffer_size=BUFFER).with_format("numpy")
        return StatefulDataLoader(data, batch_size=PACKS_PER_BATCH, collate_fn=collate)


class Mapped(Reader):
    """``save_to_disk``, mapped, and shuffled by the loader."""

    def write(self, source: Source, folder: Path) -> None:
        datasets.Dataset(table(source)).save_to_disk(str(folder))

    def open(self, folder: Path, scratch: Path) -> Any:
        data = datasets.load_from_disk(str(folder)).with_format("numpy")
        random = {"shuffle": True, "generator": torch.Generator().manual_seed(SEED)}
        return StatefulDataLoader(data, PACKS_PER_BATCH, collate_fn=collate, **random)
