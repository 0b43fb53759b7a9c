"""`PackedDataset`: the packs of a dataset in a global order, split over ranks and
workers.

A stream (``stream.py``, ``mix.py``) has the order of one epoch; this class adds the
rank, and the position in the epoch, which each iteration moves and `state_dict` saves.
A loader iterates over a copy, its follower, which moves when its dataset is moved to an
epoch or state.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Self

import numpy as np
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from packstore.config import BatchConfig, ReadConfig
from packstore.config.packing import KEYS_PER_TOKEN
from packstore.config.settings import check_class
from packstore.errors import ConfigError, UnsupportedFormatError, quote, sentence
from packstore.format.arrays import Packs
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.dataset.order import LANES
from packstore.io.side.join import SideColumns
from packstore.io.side.side import Side
from packstore.torch.data.mix import MixedPacks
from packstore.torch.data.position import (
    OTHER_DATASET,
    Position,
    RemainingPacks,
    SharedStart,
    stale_state_error,
)
from packstore.torch.data.steps import StepPlan, plan_steps, to_resumable_position
from packstore.torch.data.stream import (
    Identity,
    PackStream,
    Shuffle,
    StoredPacks,
)
from packstore.torch.frameworks import check_dealt_once

logger = logging.getLogger("packstore")

_CHUNK = 8
"""Packs looked up at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """One iteration over a dataset, in this process.

    Attributes:
        start: the position that it begins at.
        times_moved: how often an epoch or state had been set by then; a higher number
            later shows that the iteration is outdated.
    """

    start: Position
    times_moved: int


class PackedDataset(IterableDataset[Packs]):
    """Yields the packs of one rank.

    Over all ranks and workers, every pack is yielded once per epoch: pack i of the
    global order goes to rank ``i % world_size``. The order is a pure function of the
    dataset, `seed`, `lanes` and the epoch, independent of the number of ranks and
    workers. Iterating again repeats the epoch; call :meth:`set_epoch` before each.
    Persistent workers (``persistent_workers=True``) follow it.

    Its position moves with its own iterations, also in a torch loader around it. A
    :class:`PackedDataLoader` or a trainer has a position of its own, which
    :meth:`set_epoch` and :meth:`load_state_dict` of this dataset move, too.

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
        reading: how row groups are fetched, and whether unreadable ones are skipped.
        side: a side dataset, its URL, or several: their columns are joined to the packs
            by example id.
        max_keys: maximum keys of a pack's attention, the tokens of its logical
            sequences, which take memory; default: 16 x the pack size.
        last_versions: the packs that so many of the newest versions added, see
            :meth:`packstore.Dataset.last_versions`; None: all packs.

    Raises:
        DatasetNotFoundError: `source` holds no dataset.
        ConfigError: `rank` is not below `world_size`, or only one of them is given.
        CompatibilityError: a side dataset does not belong to the dataset.
        UnsupportedFormatError: a pack of the dataset has more than `max_keys`.
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
        max_keys: int | None = None,
        last_versions: int | None = None,
    ) -> None:
        if isinstance(source, str | os.PathLike):
            source = open_dataset(os.fspath(source), storage_options)
        if isinstance(source, Dataset):
            if last_versions is not None:
                source = source.last_versions(last_versions)
            check_keys(source, max_keys)
            sides = [side] if isinstance(side, Side | str | os.PathLike) else side
            columns = SideColumns(source, sides) if sides else None
            source = StoredPacks(source, seed, shuffle, lanes, reading, columns)
        elif side:
            raise ConfigError(
                "side data joins a dataset; give it to the datasets of the stream."
            )
        elif max_keys is not None:
            raise ConfigError(
                "max_keys limits a dataset; give it to the datasets of the stream."
            )
        elif last_versions is not None:
            raise ConfigError(
                "last_versions is of a dataset; give it to the datasets of the stream."
            )
        check_class(
            "PackedDataset", source, PackStream, "Give a dataset's folder or URL"
        )
        # A copy: the caller's stream stays in its epoch.
        self.stream: PackStream = copy.copy(source)
        self.stream.set_epoch(0)
        self.rank, self.world_size = placement(rank, world_size)
        self._rank_is_detected = rank is None
        self.epoch = 0
        # Where the newest iteration is, and where the next one begins.
        self.position = Position()
        self.next_start = SharedStart()
        self._newest: Iteration | None = None
        # True from load_state_dict until the next iteration starts.
        self._is_resumed = False
        # Copies for loaders. Weak references, as a dataset outlives its loaders.
        self._followers: list[weakref.ref[PackedDataset]] = []

    def __copy__(self) -> Self:
        """Return a dataset of the same packs, with a position of its own.

        Its next iteration begins where the next one of this dataset would.
        """
        duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(self.__getstate__())
        duplicate.stream = copy.copy(self.stream)
        duplicate.next_start = SharedStart()
        duplicate._set_start(self.epoch, self.next_start.peek())
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        # The loaders of this process do not follow a copy or a pickle.
        return {**self.__dict__, "_followers": []}

    def copy_at_start(self) -> Self:
        """Return an independent dataset of the same packs, at the start of epoch 0."""
        duplicate = copy.copy(self)
        duplicate._set_start(0, Position())
        return duplicate

    def copy_for_loader(self) -> Self:
        """Return a copy that follows :meth:`set_epoch` and :meth:`load_state_dict`.

        The copy never moves this dataset.
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
        """Mix the packs of several datasets in proportion to their weights.

        Weights count examples: ``PackedDataset.mix({"chat": 3, "code": 1})`` gives
        three examples of the first for each of the second; ``batch.sources`` holds the
        source of each. A key that is a :class:`PackedDataset` brings its own seed,
        options and side data.

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
        datasets = [
            source if isinstance(source, PackedDataset) else cls(source, seed=seed)
            for source in weights
        ]
        stream = MixedPacks(
            sources=[dataset.stream for dataset in datasets],
            weights=list(weights.values()),
            stopping_strategy=stopping_strategy,
        )
        mixed = cls(stream, rank=rank, world_size=world_size)
        for dataset in datasets:
            mixed._check_placement_of_source(dataset)
        if mixed.rank == 0:
            stream.log_proportions()
        return mixed

    def _check_placement_of_source(self, source: PackedDataset) -> None:
        """Raise ConfigError if a source was given another rank than the mix."""
        if source._rank_is_detected:
            return
        placement_of_mix = (self.rank, self.world_size)
        if (source.rank, source.world_size) != placement_of_mix:
            raise ConfigError(
                sentence(
                    where="the mix",
                    rule="rank and world_size must be those of its sources",
                    found=f"{self.rank} of {self.world_size}, and {source.rank} of "
                    f"{source.world_size}",
                )
            )

    @property
    def generator(self) -> None:
        """None; raise if Accelerate reads it in order to distribute the packs over the
        ranks a second time.
        """
        check_dealt_once(self.world_size)

    @property
    def sampler(self) -> PackedDataset:
        """The dataset itself: Lightning calls :meth:`set_epoch` of a loader's
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
        names = []
        for stream in getattr(self.stream, "streams", [self.stream]):
            if isinstance(stream, StoredPacks):
                names += [
                    stream.dataset.group_name(group)
                    for group in sorted(stream.quarantined)
                ]
        return names

    def load_side(self) -> None:
        """Read the joined side data into memory now, not with the first packs.

        Processes that are forked afterwards share it.
        """
        for stream in getattr(self.stream, "streams", [self.stream]):
            if isinstance(stream, StoredPacks) and stream.side is not None:
                stream.side.load()

    def __len__(self) -> int:
        """Packs that the next iteration yields on this rank, over all its workers."""
        start = to_resumable_position(self.stream, self.next_start.peek())
        remaining = RemainingPacks(self.num_packs, start)
        return len(range(self.rank, len(remaining), self.world_size))

    def __iter__(self) -> Iterator[Packs]:
        """Yield packs, each as :class:`Packs` of one row; in a worker, its share.

        Iterators are independent of each other, and of a later :meth:`set_epoch`. Only
        the iterator started last moves the position.
        """
        check_dealt_once(self.world_size)
        iteration = self.start_iteration()
        start = to_resumable_position(self.stream, iteration.start)
        self.move_to(start, iteration)

        worker = get_worker_info()
        return self._read(
            copy.copy(self.stream),
            start,
            iteration,
            worker=0 if worker is None else worker.id,
            num_workers=1 if worker is None else worker.num_workers,
        )

    def _read(
        self,
        stream: PackStream,
        start: Position,
        iteration: Iteration,
        *,
        worker: int,
        num_workers: int,
    ) -> Iterator[Packs]:
        """Yield the packs of `stream` from `start` on that one worker reads."""
        remaining = RemainingPacks(len(stream), start)
        stride = self.world_size * num_workers
        first = self.rank + self.world_size * worker
        chunks = _to_chunks(range(first, len(remaining), stride))

        num_yielded = 0
        for packs in stream.read(remaining[np.array(chunk)] for chunk in chunks):
            for pack in packs:
                num_yielded += 1
                # All workers of all ranks yield one pack in turn.
                place = num_yielded * stride
                self.move_to(remaining.position_at(place, start.step), iteration)
                yield pack
        end = remaining.position_at(len(remaining), start.step)
        self.move_to(end, iteration)

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of `epoch`; do nothing for the current epoch.

        Loaders over this dataset are moved in the same way.

        Raises:
            ConfigError: `epoch` is no whole number.
        """
        if not hasattr(epoch, "__index__"):  # numpy's integers have it, too
            raise ConfigError(
                sentence(
                    where="epoch", rule="it must be a whole number", found=quote(epoch)
                )
            )
        if epoch != self.epoch:
            if self._is_resumed and epoch < self.epoch:
                # Most likely, a loop over epochs begins at 0 after a state was loaded.
                logger.warning(
                    "the position in epoch %d that was loaded is left for the start of "
                    "epoch %d; to go on with it, begin the loop at the epoch of its "
                    "owner, loader.epoch",
                    self.epoch,
                    epoch,
                )
            self._set_start(epoch, Position())
        for follower in self._loader_datasets():
            follower.set_epoch(epoch)

    def start_iteration(self) -> Iteration:
        """Begin an iteration at the next start; the one after it starts the epoch anew.

        Raises:
            ConfigError: the ranks started after the dataset was made; each would read
                all packs.
        """
        if self._rank_is_detected and get_worker_info() is None:
            self._check_rank_is_current()
        epoch = self.next_start.new_epoch()
        if epoch is not None and epoch != self.epoch:
            self.epoch = epoch
            self.stream.set_epoch(epoch)
        start = self.next_start.take()
        self.position = start
        self._is_resumed = False
        self._newest = Iteration(start, times_moved=self.next_start.times_set)
        return self._newest

    def _check_rank_is_current(self) -> None:
        rank, world_size = placement(None, None)
        if world_size == 1 or (rank, world_size) == (self.rank, self.world_size):
            return
        raise ConfigError(
            sentence(
                where="PackedDataset",
                rule="it must be made after the ranks have started, or be given rank, "
                "world_size",
                found=f"rank {rank} of {world_size}, after {self.rank} of "
                f"{self.world_size}",
            )
        )

    def move_to(self, position: Position, iteration: Iteration) -> None:
        """Set the position that `iteration` reached, unless a newer one has started."""
        if self._newest is iteration:
            self.position = position

    def was_moved_since(self, iteration: Iteration) -> bool:
        """Return True if an epoch or state was set after the iteration started."""
        return self.next_start.times_set != iteration.times_moved

    def plan(
        self, *, world_size: int | None = None, epochs: int = 1, **batching: Any
    ) -> StepPlan:
        """Plan the steps of a loader with these settings, from the beginning of this
        epoch.

        Works without starting ranks: ``PackedDataset(url).plan(world_size=64,
        packs_per_batch=2)``.

        Args:
            world_size: number of ranks; default: as the dataset has it.
            epochs: number of epochs, from this one on.
            batching: fields of :class:`packstore.config.BatchConfig`.

        Raises:
            ConfigError: a setting is out of range, or a single pack exceeds
                `tokens_per_batch`.
        """
        config = BatchConfig.of(**batching)
        return self.plan_from(config, world_size or self.world_size, epochs)

    def plan_from(
        self,
        config: BatchConfig,
        world_size: int,
        epochs: int,
        start: Position | None = None,
    ) -> StepPlan:
        """Plan `epochs` as :meth:`plan` does, from `start` on in the first."""
        return plan_steps(
            copy.copy(self.stream),
            config,
            world_size,
            epochs=range(self.epoch, self.epoch + epochs),
            start=start or Position(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values.

        It is the same on all ranks after the same number of steps. All packs before
        index ``next`` were yielded, over all ranks. Inside an optimizer step, so were
        the first ``batches`` batches of the step that begins at ``next``, and ``cut``
        holds the settings that define these. See :class:`Position` for the others.
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
        self._check_identity(state)
        epoch = state.get("epoch")
        if not isinstance(epoch, int):
            raise stale_state_error("epoch must be a whole number", quote(epoch))

        position = Position.from_state(state, self.num_packs)
        stream = copy.copy(self.stream)
        stream.set_epoch(epoch)
        to_resumable_position(stream, position)  # raises if the state is not valid

        for dataset in (self, *self._loader_datasets()):
            dataset._set_start(epoch, position)
            dataset._is_resumed = True

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        for name, expected in self._identity().items():
            if state.get(name) == expected:
                continue
            rule = f"{name} must be {quote(expected)}"
            actual = quote(state[name]) if name in state else "none"
            if name in ("dataset", "mix"):
                raise stale_state_error(rule, actual, OTHER_DATASET)
            raise stale_state_error(rule, actual)

    def _identity(self) -> Identity:
        return {"version": 1, **self.stream.identity}

    def _set_start(self, epoch: int, position: Position) -> None:
        """Begin the next iteration at `position`; ignore the progress of older ones."""
        self.epoch = epoch
        self.position = position
        self._newest = None
        self._is_resumed = False
        self.stream.set_epoch(epoch)
        self.next_start.set(epoch, position)

    def _loader_datasets(self) -> list[PackedDataset]:
        """Return the datasets of the loaders over this one that are still in use."""
        followers = [ref() for ref in self._followers]
        return [follower for follower in followers if follower is not None]


def check_keys(dataset: Dataset, max_keys: int | None) -> None:
    """Raise UnsupportedFormatError if a pack has more keys than `max_keys`.

    None stands for 16 times the pack size.
    """
    manifest = dataset.manifest
    limit = max_keys
    if limit is None:
        limit = KEYS_PER_TOKEN * manifest.pack_size
    most_keys = manifest.statistics.most_keys
    if most_keys > limit:
        raise UnsupportedFormatError(
            sentence(
                where=f"{dataset.url}, statistics.most_keys",
                rule=f"a pack may have at most {limit} keys",
                found=str(most_keys),
                remedy="Pack the dataset again with a lower max_keys; in Python, "
                f"PackedDataset(…, max_keys={most_keys}) allows it",
            )
        )


def _to_chunks(places: range) -> Iterator[range]:
    """Yield the first place alone, so that its pack waits for no other; then chunks."""
    if places:
        yield places[:1]
    for start in range(1, len(places), _CHUNK):
        yield places[start : start + _CHUNK]


def placement(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: the arguments, or the values of the launcher.

    Raises:
        ConfigError: only one of them is given, or `rank` is not below `world_size`.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together; give both or neither.")
    if rank is None or world_size is None:
        rank, world_size = _detect_placement()
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must lie in 0..{world_size - 1}; found {rank}.")
    return rank, world_size


def _detect_placement() -> tuple[int, int]:
    """Return rank and world size of torch.distributed, or of the environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and "RANK" not in os.environ:
        # All ranks would read the share of rank 0.
        raise ConfigError(
            sentence(
                where="PackedDataset",
                rule="the environment must give RANK beside WORLD_SIZE",
                found=f"WORLD_SIZE={world_size}",
                remedy="Start the ranks by torchrun, or give rank and world_size",
            )
        )
    return rank, world_size
