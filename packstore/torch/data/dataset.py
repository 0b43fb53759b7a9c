"""The packs of a dataset in their global order, split over ranks and workers."""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from typing import Any, Literal, Self

import numpy as np
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from packstore.config import BatchConfig, ReadConfig
from packstore.config.settings import check_class
from packstore.errors import ConfigError, quote, sentence
from packstore.format.arrays import Packs
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.dataset.order import LANES
from packstore.io.side.side import Side
from packstore.torch.data.mix import MixedPacks
from packstore.torch.data.position import (
    OTHER_DATASET,
    Position,
    SharedStart,
    Unseen,
    stale_state_error,
)
from packstore.torch.data.steps import StepPlan, plan_steps, to_resumable_position
from packstore.torch.data.stream import (
    Identity,
    PackStream,
    Shuffle,
    SideColumns,
    StoredPacks,
)
from packstore.torch.frameworks import check_dealt_once
from packstore.torch.metrics import is_distributed

logger = logging.getLogger("packstore")

_TOGETHER = 8
"""Packs looked up at once."""


class PackedDataset(IterableDataset[Packs]):
    """Yields the packs of one rank; over all ranks and workers, every pack once per
    epoch.

    Pack i of the global order goes to rank ``i % world_size``. The order is a pure
    function of the dataset, `seed`, `lanes` and the epoch, independent of the number of
    ranks and workers. Iterating again repeats the epoch; call :meth:`set_epoch` before
    each. Persistent workers (``persistent_workers=True``) follow it.

    Its epoch and position are those of its own iterations, and of a torch loader around
    it. A :class:`PackedDataLoader` and a trainer have an epoch and a position of their
    own, and never move the dataset. :meth:`set_epoch` and :meth:`load_state_dict` also
    move the loaders over it.

    :meth:`mix` mixes several datasets.

    Files are opened in the process that reads them, so the object is safe to fork and
    to pickle.

    Args:
        source: a dataset's URL or local folder, a dataset opened by ``packstore.open``,
            or a stream, which has its own order.
        seed: seed of the order.
        shuffle: False reads in file order; ``stratified`` spreads examples evenly over
            the epoch.
        lanes: row groups open at once, over all ranks.
        rank: rank of this process; default: torch.distributed's, else the variable
            RANK, else 0.
        world_size: number of ranks; default: torch.distributed's, else WORLD_SIZE, else
            1.
        storage_options: options of the fsspec filesystem, with a URL.
        reading: how row groups are fetched, and what happens to one that cannot be
            read.
        side: a side dataset, its URL, or several, whose columns join the packs by
            example id.

    Raises:
        DatasetNotFoundError: `source` holds no dataset.
        ConfigError: `rank` is not below `world_size`, or only one of them is given.
        CompatibilityError: a side dataset does not belong to the dataset.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Dataset | PackStream,
        *,
        seed: int = 0,
        shuffle: Shuffle = True,
        lanes: int = LANES,
        rank: int | None = None,
        world_size: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        reading: ReadConfig | None = None,
        side: Side | str | PathLike[str] | Sequence[Side | str | PathLike[str]] = (),
    ) -> None:
        if isinstance(source, str | os.PathLike):
            source = open_dataset(os.fspath(source), storage_options)
        if isinstance(source, Dataset):
            sides = [side] if isinstance(side, Side | str | os.PathLike) else side
            columns = SideColumns(source, sides) if sides else None
            source = StoredPacks(source, seed, shuffle, lanes, reading, columns)
        elif side:
            raise ConfigError(
                "side data joins a dataset; give it to the datasets of the stream."
            )
        check_class(
            "PackedDataset", source, PackStream, "Give a dataset's folder or URL"
        )
        self.stream: PackStream = copy.copy(
            source
        )  # that of the caller stays in its epoch
        self.stream.set_epoch(0)
        self.rank, self.world_size = placement(rank, world_size)
        self._rank_is_detected = rank is None
        self.epoch = 0
        self.position = Position()
        self._newest: Position | None = None  # the start of the iteration started last
        self.start = SharedStart()
        self._is_resumed = False
        self._followers: list[weakref.ref[PackedDataset]] = []

    def __copy__(self) -> Self:
        """Return a dataset of the same packs, with a position of its own.

        Its next iteration begins where the next one of this dataset would.
        """
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__getstate__())
        other.stream = copy.copy(self.stream)
        other.start = SharedStart()
        other._move(self.epoch, self.start.peek())
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_followers": []}  # the loaders of this process

    def copy_at_start(self) -> Self:
        """Return a dataset of the same packs at the start of epoch 0; nothing else
        moves it.
        """
        other = copy.copy(self)
        other._move(0, Position())
        return other

    def copy_for_loader(self) -> Self:
        """Return a dataset of the same packs that is moved with this one, but not the
        reverse.
        """
        follower = copy.copy(self)
        self._followers = [ref for ref in self._followers if ref() is not None]
        self._followers.append(weakref.ref(follower))
        return follower

    @classmethod
    def mix(
        cls,
        weights: Mapping[str | PathLike[str] | Dataset | PackedDataset, float],
        *,
        stopping_strategy: Literal[
            "first_exhausted", "all_exhausted"
        ] = "first_exhausted",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Self:
        """Mixes the packs of several datasets in proportion to their weights, which
        count examples.

        ``PackedDataset.mix({"chat": 3, "code": 1})`` gives three examples of the first
        for each of the second; ``batch.sources`` tells them apart. A key that is a
        :class:`PackedDataset` brings its own seed, options and side data.

        Args:
            weights: dataset, or its URL or local folder -> weight. All of one kind and
                tokenizer; layouts and pack sizes may differ.
            stopping_strategy: when an epoch ends, as in
                ``datasets.interleave_datasets``; smaller sources repeat until all are
                exhausted, each time in another order.
            seed: seed of the order of each dataset.
            rank: see :class:`PackedDataset`.
            world_size: see :class:`PackedDataset`.

        Raises:
            ConfigError: there are no sources, or a value is out of range.
            CompatibilityError: sources differ in kind, tokenizer or chat template.
            DatasetNotFoundError: a URL holds no dataset.
        """
        check_class(
            "argument weights", weights, Mapping, "Give each dataset with its weight"
        )
        sources = [
            (each if isinstance(each, PackedDataset) else cls(each, seed=seed)).stream
            for each in weights
        ]
        stream = MixedPacks(sources, list(weights.values()), stopping_strategy)
        mixed = cls(stream, rank=rank, world_size=world_size)
        place = mixed.rank, mixed.world_size
        for each in weights:
            if not isinstance(each, PackedDataset) or each._rank_is_detected:
                continue
            if (each.rank, each.world_size) != place:
                rule = "rank and world_size must be those of its sources"
                found = "{} of {}, and {} of {}".format(
                    *place, each.rank, each.world_size
                )
                raise ConfigError(sentence("the mix", rule, found))
        if mixed.rank == 0:
            stream.log_proportions()
        return mixed

    @property
    def generator(self) -> None:
        """None; Accelerate looks for it where it is about to deal the packs again:
        refused.
        """
        check_dealt_once(self.world_size)

    @property
    def sampler(self) -> PackedDataset:
        """The dataset itself, whose :meth:`set_epoch` Lightning calls on a loader's
        `sampler`.
        """
        return self

    @property
    def kind(self) -> str:
        """``preference``, ``sft`` or ``scored``."""
        return self.stream.kind

    @property
    def num_packs(self) -> int:
        """Number of packs of the epoch, over all ranks."""
        return len(self.stream)

    @property
    def quarantined(self) -> list[str]:
        """Row groups that this process skipped (`on_error` quarantine), as shard and
        row group.
        """
        streams = getattr(self.stream, "streams", [self.stream])
        stored = [stream for stream in streams if isinstance(stream, StoredPacks)]
        return [
            s.dataset.group_name(group)
            for s in stored
            for group in sorted(s.quarantined)
        ]

    def __len__(self) -> int:
        """Packs that the next iteration yields on this rank, over all its workers."""
        left = len(
            Unseen(
                self.num_packs, to_resumable_position(self.stream, self.start.peek())
            )
        )
        return len(range(self.rank, left, self.world_size))

    def __iter__(self) -> Iterator[Packs]:
        """Yields packs, each as :class:`Packs` of one row; in a worker, that worker's
        share.

        Iterators are independent of each other, and of a later :meth:`set_epoch`. The
        position is that of the one started last; others that still run do not move it.
        """
        check_dealt_once(self.world_size)
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        started = self.start_iteration()
        start = to_resumable_position(self.stream, started)
        self.move_on(started, start)
        return self._packs(copy.copy(self.stream), started, start, number, workers)

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of `epoch`; do nothing for the current epoch.

        Loaders over this dataset are moved in the same way.

        Raises:
            ConfigError: `epoch` is no whole number.
        """
        if not hasattr(epoch, "__index__"):  # of numpy's integers, too
            raise ConfigError(
                sentence("epoch", "it must be a whole number", quote(epoch))
            )
        if epoch != self.epoch:
            if (
                self._is_resumed and epoch < self.epoch
            ):  # a loop over the epochs of another object
                text = (
                    "the position in epoch %d that was loaded is left for the "
                    "start "
                    "of epoch %d"
                )
                text += (
                    "; to go on with it, begin the loop at the epoch of its "
                    "owner, "
                    "loader.epoch"
                )
                logger.warning(text, self.epoch, epoch)
            self._move(epoch, Position())
        for follower in self._loaders():
            follower.set_epoch(epoch)

    def start_iteration(self) -> Position:
        """Begins an iteration: returns its position, and rewinds the next one.

        Raises:
            ConfigError: the ranks started after the dataset was made; all would read
                all packs.
        """
        if self._rank_is_detected and get_worker_info() is None:
            now, before = placement(None, None), (self.rank, self.world_size)
            if now != before and now[1] > 1:
                rule = (
                    "it must be made after the ranks have started, or be given "
                    "rank, world_size"
                )
                found = "rank {} of {}, after {} of {}".format(*now, *before)
                raise ConfigError(sentence("PackedDataset", rule, found))
        epoch = self.start.new_epoch()
        if epoch is not None and epoch != self.epoch:
            self.epoch = epoch
            self.stream.set_epoch(epoch)
        self.position = self._newest = self.start.take()
        self._is_resumed = False
        return self.position

    def move_on(self, started: Position, position: Position) -> None:
        """Moves to `position`, if the iteration that `started` came from is still the
        newest.
        """
        if self._newest is started:
            self.position = position

    def plan(
        self, *, world_size: int | None = None, epochs: int = 1, **batching: Any
    ) -> StepPlan:
        """Plans the steps of a loader with these settings, from the beginning of this
        epoch.

        Works without starting ranks: ``PackedDataset(url).plan(world_size=64,
            packs_per_batch=2)``.

        Args:
            world_size: number of ranks; default: that of the dataset.
            epochs: number of epochs, from this one on.
            batching: fields of :class:`packstore.config.BatchConfig`.

        Raises:
            ConfigError: a setting is out of range, or a pack alone is over
                `tokens_per_batch`.
        """
        return self.plan_from(
            BatchConfig.of(**batching), world_size or self.world_size, epochs
        )

    def plan_from(
        self,
        config: BatchConfig,
        world_size: int,
        epochs: int,
        start: Position | None = None,
    ) -> StepPlan:
        """Plan `epochs` as :meth:`plan` does, from `start` on in the first."""
        numbers = range(self.epoch, self.epoch + epochs)
        stream = copy.copy(self.stream)
        return plan_steps(stream, config, world_size, numbers, start or Position())

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, equal on all ranks after the same number
        of steps.

        All packs before ``next`` were yielded, over all ranks; inside an optimizer step
        also ``batches`` of the step that begins there, with the step boundaries of
        ``cut``. The steps so far are ``shortfall`` examples short of those requested,
        which the next ones make up for.
        """
        return {**self._identity(), "epoch": self.epoch, **self.position.to_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken, with any number of ranks and workers.

        Loaders over this dataset resume there, too.

        Raises:
            CompatibilityError: the state belongs to another dataset, version, seed or
                order.
        """
        check_class("argument state", state, Mapping)
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                value = quote(state[name]) if name in state else "none"
                rule = f"{name} must be {quote(expected)}"
                if name in ("dataset", "mix"):
                    raise stale_state_error(rule, value, OTHER_DATASET)
                raise stale_state_error(rule, value)
        epoch = state.get("epoch")
        if not isinstance(epoch, int):
            raise stale_state_error("epoch must be a whole number", quote(epoch))
        stream = copy.copy(self.stream)
        stream.set_epoch(epoch)
        position = Position.from_state(state, self.num_packs)
        to_resumable_position(stream, position)
        for dataset in (self, *self._loaders()):
            dataset._move(epoch, position)
            dataset._is_resumed = True

    def _move(self, epoch: int, position: Position) -> None:
        self.epoch = epoch
        self.position = position
        self._newest = None
        self._is_resumed = False
        self.stream.set_epoch(epoch)
        self.start.set(epoch, position)

    def _loaders(self) -> list[PackedDataset]:
        """Return the datasets of the loaders over this one that are still in use."""
        followers = [ref() for ref in self._followers]
        return [follower for follower in followers if follower is not None]

    def _packs(
        self,
        stream: PackStream,
        started: Position,
        start: Position,
        number: int,
        workers: int,
    ) -> Iterator[Packs]:
        """The share of worker `number` of a stream, from `start` on."""
        unseen = Unseen(len(stream), start)
        step, turn = self.world_size * workers, start.step
        share = range(self.rank + self.world_size * number, len(unseen), step)
        # The first pack alone, so that it does not wait for others.
        cuts = [0, *range(1, len(share), _TOGETHER), len(share)] if share else []
        places = (np.array(share[a:b]) for a, b in pairwise(cuts))
        yielded = 0
        for packs in stream.read(map(unseen.__getitem__, places)):
            for pack in packs:
                yielded += 1
                self.move_on(started, unseen.after(yielded * step, turn))
                yield pack
        self.move_on(started, unseen.after(len(unseen), turn))

    def _identity(self) -> Identity:
        return {"version": 1, **self.stream.identity}


def placement(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Returns rank and world size: the arguments, or those of the launcher."""
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together; give both or neither.")
    if rank is None or world_size is None:
        if is_distributed():
            return dist.get_rank(), dist.get_world_size()
        rank, world_size = (
            int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        if (
            world_size > 1 and "RANK" not in os.environ
        ):  # all ranks would read the share of one
            rule = "the environment must give RANK beside WORLD_SIZE"
            remedy = "Start the ranks by torchrun, or give rank and world_size"
            raise ConfigError(
                sentence("PackedDataset", rule, f"WORLD_SIZE={world_size}", remedy)
            )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must lie in 0..{world_size - 1}; found {rank}.")
    return rank, world_size
