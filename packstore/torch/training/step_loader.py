"""Optimizer steps of a packed dataset: a step is the list of its packed batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.side_manifest import REF_LOGPS
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.data.stream import StoredPacks


class Steps:
    """Yields the packed batches of each optimizer step as one list; adds up the time it waits."""

    def __init__(self, loader: PackedDataLoader) -> None:
        self.loader, self.waited, self.of_epoch = loader, 0.0, 1

    def __len__(self) -> int:
        return self.loader.plan().steps

    def set_epoch(self, epoch: int) -> None:
        """Moves to an epoch; does nothing for that of a loaded position."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        self.of_epoch = max(len(self), 1)  # once, as it looks at all packs
        source, step = iter(self.loader), list[PackedBatch]()
        while True:
            before = time.perf_counter()
            batch = next(source, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                return
            step.append(batch)
            if batch.step is not None and batch.step.last:
                yield step
                step = []


def datasets_of(*given: Any) -> Iterator[Dataset]:
    """Yields the packed datasets in what a trainer was given."""
    for data in given:
        if isinstance(data, PackedDataset):
            yield from data.stream.datasets
        elif isinstance(data, Dataset):
            yield data
        elif isinstance(data, Mapping):
            yield from datasets_of(*data.values())


def is_packed(data: Any) -> bool:
    """Returns True for a packed dataset or a stream of one, or for several by name."""
    return any(True for _ in datasets_of(data))


def has_ref_logps(data: Any) -> bool:
    """Returns True for a stream of packs to which log-probs of a reference are joined."""
    stream = getattr(data, "stream", None)
    return isinstance(stream, StoredPacks) and REF_LOGPS in stream.columns
