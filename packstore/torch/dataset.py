"""Packs of a dataset in the global order, split over ranks and workers."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.io.dataset import Dataset
from packstore.io.dataset import open as open_dataset
from packstore.io.order import LANES, PackOrder
from packstore.records import Int64, Packs

STATE_VERSION = 1


class PackedDataset(IterableDataset[Packs]):
    """The packs of one rank, one at a time: every pack once an epoch over all ranks and workers.

    Pack i of the global order goes to rank ``i % world_size``. The order is a pure function of the
    dataset, `seed`, `lanes` and the epoch, and not of the number of ranks or workers. Iterating
    again gives the same epoch again; call :meth:`set_epoch` before each.

    Files are opened in the process that reads them, so the object is safe to fork and to pickle.

    Args:
        source: a dataset's URL or local folder, or what ``packstore.open`` returned.
        seed: of the order.
        shuffle: False gives file order.
        lanes: row groups that are open at once over all ranks.
        rank: of this process; default: torch.distributed's, else the variable RANK, else 0.
        world_size: number of ranks; default likewise, WORLD_SIZE, 1.
        storage_options: what fsspec's filesystem takes, with a URL.

    Raises:
        DatasetNotFoundError: no dataset is there.
        ConfigError: `rank` is not below `world_size`, or only one of them is given.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Dataset,
        *,
        seed: int = 0,
        shuffle: bool = True,
        lanes: int = LANES,
        rank: int | None = None,
        world_size: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(source, Dataset):
            source = open_dataset(os.fspath(source), storage_options)
        self.dataset = source
        self.seed, self.shuffle, self.lanes, self.epoch = seed, shuffle, lanes, 0
        self.rank, self.world_size = _placement(rank, world_size)
        self._start = self._next = 0
        self._cache = _GroupCache(source)
        self._order = self._make_order()

    @property
    def kind(self) -> str:
        """``dpo``, ``sft`` or ``ranked``."""
        return self.dataset.manifest.kind

    @property
    def num_packs(self) -> int:
        """Packs of the dataset, over all ranks."""
        return len(self._order)

    @property
    def start(self) -> int:
        """Global index at which the next iteration begins: 0, or where a loaded state was taken."""
        return self._start

    def __len__(self) -> int:
        """Packs that the next iteration gives on this rank, over all its workers."""
        return len(range(self._start + self.rank, self.num_packs, self.world_size))

    def __iter__(self) -> Iterator[Packs]:
        """The packs, each as :class:`Packs` of one row; in a worker, that worker's share."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        begin, step = self.begin(), self.world_size * workers
        first = begin + self.rank + self.world_size * number
        for i, index in enumerate(range(first, self.num_packs, step), start=1):
            (pack,) = self.read(np.array([index]))
            self.advance(begin + i * step)
            yield pack

    def read(self, indices: Int64) -> list[Packs]:
        """The packs at global `indices` (int64, below :attr:`num_packs`), each as one row.

        Raises:
            StorageError: a shard is missing, or the store refuses.
            IntegrityError: its bytes are not those that were written.
        """
        open_groups = self.lanes // math.gcd(self.lanes, self.world_size) if self.shuffle else 1
        groups, rows = self._order.locate(indices)
        pairs = zip(groups.tolist(), rows.tolist(), strict=True)
        return [self._cache.read(group, open_groups).row(row) for group, row in pairs]

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of `epoch`; within the current epoch it changes nothing."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._order = self._make_order()
            self._start = self._next = 0

    def begin(self) -> int:
        """Begins an iteration: returns its first global index, and rewinds the one after it."""
        begin, self._start = self._start, 0
        self._next = begin
        return begin

    def advance(self, index: int) -> None:
        """Notes that all packs before global `index` were given out, on all ranks."""
        self._next = min(index, self.num_packs)

    def state_dict(self) -> dict[str, int | str | bool]:
        """The position: small, JSON-able, equal on all ranks that took the same number of steps."""
        return {**self._identity(), "epoch": self.epoch, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken, with any number of ranks and workers.

        Raises:
            CompatibilityError: the state is of another dataset, version, seed or order.
        """
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                found = quote(state[name]) if name in state else "none"
                raise _stale(f"{name} must be {quote(expected)}", found)
        epoch, position = state.get("epoch"), state.get("next")
        if not isinstance(epoch, int) or not isinstance(position, int):
            raise _stale("epoch and next must be whole numbers", quote(json.dumps(dict(state))))
        if not 0 <= position <= self.num_packs:
            raise _stale(f"next must lie in 0..{self.num_packs}", str(position))
        self.set_epoch(epoch)
        self._start = self._next = position

    def _identity(self) -> dict[str, int | str | bool]:
        return {
            "version": STATE_VERSION,
            "dataset": self.dataset.manifest.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "lanes": self.lanes,
        }

    def _make_order(self) -> PackOrder:
        return PackOrder(
            self.dataset.group_rows,
            seed=self.seed,
            epoch=self.epoch,
            lanes=self.lanes,
            shuffle=self.shuffle,
        )


class _GroupCache:
    """The row groups that were used last; empty in another process."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._groups: OrderedDict[int, Packs] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return _GroupCache, (self._dataset,)

    def read(self, group: int, keep: int) -> Packs:
        packs = self._groups.get(group)
        if packs is None:
            packs = self._dataset.read_packs(group)
        self._groups[group] = packs
        self._groups.move_to_end(group)
        while len(self._groups) > keep:
            self._groups.popitem(last=False)
        return packs


def _placement(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size as given, or as the launcher says."""
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together; give both or neither.")
    if rank is None or world_size is None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        rank, world_size = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must lie in 0..{world_size - 1}; found {rank}.")
    return rank, world_size


def _stale(must: str, found: str) -> CompatibilityError:
    do = "Load it into the dataset, seed and lanes that it was taken from, or start anew"
    return CompatibilityError(sentence("loader state", must, found, do))
