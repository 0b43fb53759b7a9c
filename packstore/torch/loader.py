"""Batches of packs in the global order, with a position that can be saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from packstore.errors import ConfigError, quote
from packstore.torch.collate import PackedBatch, collate
from packstore.torch.dataset import PackedDataset

Tail = Literal["drop", "pad", "uneven"]


class PackedDataLoader:
    """Batches of `packs_per_batch` packs: batch g of the epoch holds the same packs on any machine.

    With W ranks, global batch g is the packs ``g * W * packs_per_batch`` and following of the
    global order, dealt out in turn. The batches come in order for any number of workers.

    Args:
        data: the dataset.
        packs_per_batch: packs of one batch on one rank.
        num_workers: processes that read; 0, in this one, is the fastest unless reading is slow.
        tail: what becomes of the packs that do not fill a last batch on every rank. ``drop``: left
            out. ``pad``: filled up with packs of weight 0, which count neither in losses nor in
            metrics. ``uneven``: a smaller last batch, or one batch fewer, on some ranks (for
            evaluation; collective calls in the loop would hang). Every rank gets the same number of
            batches with the first two.
        pin_memory: put batches into page-locked memory, for copies to a GPU.
        multiprocessing_context: ``fork``, ``spawn`` or ``forkserver``; default: torch's.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        data: PackedDataset,
        *,
        packs_per_batch: int = 1,
        num_workers: int = 0,
        tail: Tail = "drop",
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
    ) -> None:
        if packs_per_batch < 1 or num_workers < 0:
            raise ConfigError(
                "packs_per_batch must be at least 1 and num_workers at least 0; "
                f"found {packs_per_batch} and {num_workers}."
            )
        if tail not in get_args(Tail):
            raise ConfigError(
                f"tail must be one of: {', '.join(get_args(Tail))}; found {quote(tail)}."
            )
        self.data, self.packs_per_batch, self.tail = data, packs_per_batch, tail
        self._options: dict[str, Any] = {
            "batch_size": None,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "multiprocessing_context": multiprocessing_context if num_workers else None,
        }

    def __len__(self) -> int:
        """Batches that the next iteration gives on this rank, exactly."""
        return len(_Batches(self.data, self.data.start, self.packs_per_batch, self.tail))

    def __iter__(self) -> Iterator[PackedBatch]:
        """The batches from the loaded position, or from the beginning of the epoch."""
        begin = self.data.begin()
        batches = _Batches(self.data, begin, self.packs_per_batch, self.tail)
        # A generator of its own: torch's loader would draw from the global one, and so change
        # whatever the training draws after it.
        loader = DataLoader(batches, generator=torch.Generator(), **self._options)
        for i, batch in enumerate(loader, start=1):
            self.data.advance(begin + i * batches.stride)
            yield batch
        self.data.advance(self.data.num_packs)

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of `epoch`; within the current epoch it changes nothing."""
        self.data.set_epoch(epoch)

    def state_dict(self) -> dict[str, int | str | bool]:
        """The position after the batches that were given out (not those that were prepared)."""
        return self.data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken, with any number of ranks, workers and packs a batch.

        Raises:
            CompatibilityError: the state is of another dataset, version, seed or order.
        """
        self.data.load_state_dict(state)


class _Batches(IterableDataset[PackedBatch]):
    """The batches of one rank from `begin` on; in a worker, every n-th of them."""

    def __init__(self, data: PackedDataset, begin: int, packs: int, tail: str) -> None:
        self.data, self.begin, self.packs, self.tail = data, begin, packs, tail
        self.stride = packs * data.world_size

    def __len__(self) -> int:
        left = self.data.num_packs - self.begin
        if self.tail == "drop":
            return left // self.stride
        if self.tail == "pad":
            return math.ceil(left / self.stride)
        mine = len(range(self.data.rank, left, self.data.world_size))
        return math.ceil(mine / self.packs)

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        places = self.data.rank + self.data.world_size * np.arange(self.packs)
        total = self.data.num_packs
        for g in range(number, len(self), workers):
            indices = self.begin + g * self.stride + places
            if self.tail == "uneven":
                indices = indices[indices < total]
            fillers = int((indices >= total).sum())
            packs = self.data.read(indices % total)
            yield collate(packs, self.data.kind, fillers=fillers)
