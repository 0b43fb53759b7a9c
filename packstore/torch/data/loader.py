"""`PackedDataLoader`: batches of packs, grouped by optimizer step, with a position that
can be saved and loaded.

The loader asks ``steps.py`` for the steps and the packs of this rank, here tasks: one
task is one batch to read. Tasks are read by `_Batches`, in this process or in torch's
workers; each batch comes with the position after it, so that prefetched batches do not
count in a saved state.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import multiprocessing
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from packstore.config import BatchConfig
from packstore.config.settings import check_class
from packstore.errors import ConfigError, PackstoreError, WorkerError, sentence
from packstore.format.arrays import Int64, Packs
from packstore.torch.batch.batch import PackedBatch, collate
from packstore.torch.data.dataset import Iteration, PackedDataset
from packstore.torch.data.position import Position, RemainingPacks, shared_integers
from packstore.torch.data.steps import (
    WINDOW,
    Share,
    Step,
    StepCutter,
    StepPlan,
    assign_ranks,
    check_fits,
    log_steps,
    to_resumable_position,
)
from packstore.torch.data.stream import PackStream, StoredPacks

_CHUNK = 32
"""Number of batches for which packs are looked up at once."""

_LONGEST_FOLDER = 70
"""Maximum characters of TMPDIR with workers. torch puts Unix sockets there, and Linux
limits their names to 108: beyond about 75 its workers wait for ever.
"""

_TORCH_ATTRIBUTES = (
    "batch_size",
    "collate_fn",
    "dataset",
    "drop_last",
    "generator",
    "worker_init_fn",
)
"""Attributes of torch's DataLoader that frameworks look for."""


class LoaderAttributeError(ConfigError, AttributeError):
    """A framework reads a part of torch's DataLoader; for `hasattr` there is none."""


class PackedDataLoader:
    """Yields batches grouped by optimizer step: a step holds the same packs on any
    machine.

    The plan is a pure function of the dataset's order, the settings and the number of
    ranks. It divides the epoch into steps, each a contiguous part of the global order,
    and distributes each step over the ranks. Every rank gets the same number of
    batches, in the same order for any number of workers. ``batch.step`` gives the
    batch's index in its step and the step's number of examples.

    It begins at the epoch and position of `data`, and from then on has its own: it
    never moves `data`, and no other loader moves it. ``data.set_epoch`` and
    ``data.load_state_dict`` act on it, like its own methods.

    Attributes:
        data: the same packs, with the epoch and position of this loader.

    Args:
        data: the dataset.
        num_workers: processes that read; 0, which reads in threads of this process, is
            the fastest unless collation is slow.
        pin_memory: put batches into page-locked memory, for copies to a GPU.
        prefetch_factor: batches that each worker prepares ahead; default: 2.
        persistent_workers: keep the workers from one epoch to the next.
        multiprocessing_context: ``fork``, ``spawn`` or ``forkserver``; default:
            torch's.
        batching: fields of :class:`packstore.config.BatchConfig`: `packs_per_batch`
            (default 1) or `tokens_per_batch`; `gradient_accumulation_steps` or
            `examples_per_step`; `balance`, `drop_last`. See ``docs/loaders.md``.

    Raises:
        ConfigError: a value is out of range, settings exclude each other, or a single
            pack is longer than `tokens_per_batch`.
        UnknownNameError: a setting does not exist.

    Iterating raises the errors of reading a dataset, and WorkerError if a worker
    process dies.
    """

    # torch's loader has None without a batch size; Lightning looks at it.
    batch_sampler = None

    def __init__(
        self,
        data: PackedDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | None = None,
        **batching: Any,
    ) -> None:
        check_class("PackedDataLoader", data, PackedDataset, "Give PackedDataset(path)")
        _check_worker_settings(num_workers, prefetch_factor, persistent_workers)
        self.data = data.copy_for_loader()
        self.config = BatchConfig.of(**batching)
        self._options: dict[str, Any] = {
            "batch_size": None,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context if num_workers else None,
        }
        self._has_persistent_workers = persistent_workers
        self._persistent_loader: DataLoader[Any] | None = None
        self._batches = _Batches(self.data, self.config)

        # The number of batches, and the epoch and start that it was counted for.
        self._length: int | None = None
        self._length_key: tuple[int, Position] | None = None

        # Sizes of steps, and dropped examples, are logged before the first batch.
        limits_steps = self.config.examples_per_step is not None
        has_step_log = limits_steps or self.config.drop_last
        self._should_log_steps = has_step_log and self.data.rank == 0
        if self.config.tokens_per_batch is not None:
            _check_budget(self.data.stream, self.config.tokens_per_batch)

    def __len__(self) -> int:
        """Exact number of batches that the next iteration yields on this rank.

        With `tokens_per_batch` or `examples_per_step` it looks up the sizes of all
        packs, once per epoch and position.
        """
        start = self.data.next_start.peek()
        key = (self.data.epoch, start)
        if self._length is None or self._length_key != key:
            self._length = self._batches.count(start)
            self._length_key = key
        return self._length

    def __iter__(self) -> Iterator[PackedBatch]:
        """Yield batches from the loaded position, or from the beginning of the epoch.

        :meth:`set_epoch` or :meth:`load_state_dict` still takes effect until the first
        batch.
        """
        return self._iterate(self.data.start_iteration())

    def _iterate(self, iteration: Iteration) -> Iterator[PackedBatch]:
        if self.data.was_moved_since(iteration):
            # Frameworks may load a state after they have made the iterator.
            iteration = self.data.start_iteration()
        if self._should_log_steps:
            self._should_log_steps = False
            data = self.data
            log_steps(self.plan(), data.stream, self.config, data.world_size)

        position = self._batches.start_at(iteration.start)
        # Persistent workers see only the integers of a start, not its `yielded` packs.
        can_persist = len(position.yielded) == 0
        for batch, position in self._load(can_persist=can_persist):
            self.data.move_to(position, iteration)
            yield batch
        end = Position(self.data.num_packs, position.step)
        self.data.move_to(end, iteration)

    def _load(self, *, can_persist: bool) -> Iterable[_PositionedBatch]:
        """Return the batches from the start on, read in this process or by workers.

        Persistent workers are used, and kept, only if `can_persist`.
        """
        if not self._options["num_workers"]:
            if self._options["pin_memory"] and torch.accelerator.is_available():
                return _pin(self._batches)
            return self._batches

        if can_persist and self._has_persistent_workers:
            if self._persistent_loader is None:
                self._persistent_loader = self._start_workers(
                    self._batches, are_persistent=True
                )
            return _watch_workers(self._persistent_loader)
        # Workers of other iterations may still run: later starts must not move these.
        loader = self._start_workers(self._batches.detach(), are_persistent=False)
        return _watch_workers(loader)

    def _start_workers(
        self, batches: _Batches, *, are_persistent: bool
    ) -> DataLoader[Any]:
        context = self._options["multiprocessing_context"]
        if (context or multiprocessing.get_start_method()) == "fork":
            self.data.load_side()  # once: each worker would read its own otherwise
        return DataLoader(
            batches,
            # Else torch's loader would draw from the global generator, and so change
            # the random numbers of the training.
            generator=torch.Generator(),
            persistent_workers=are_persistent,
            **self._options,
        )

    def __getattr__(self, name: str) -> Any:
        if name not in _TORCH_ATTRIBUTES:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        remedy = (
            "To skip packs already trained on, call load_state_dict(state); for the "
            "dataset, use loader.data"
        )
        if name in ("generator", "worker_init_fn"):
            remedy = "In Ray Train, prepare_data_loader(loader, add_dist_sampler=False)"
        raise LoaderAttributeError(
            sentence(
                where="PackedDataLoader",
                rule=f"it orders and batches packs itself, so it has no {name}",
                found=f"a use of {name}",
                remedy=remedy,
            )
        )

    def __getitem__(self, index: object) -> Any:
        """Raise: torch's DataLoader indexes its dataset, which a loader cannot be."""
        raise ConfigError(
            sentence(
                where="PackedDataLoader",
                rule="it loads batches itself: no DataLoader may be put around it",
                found="one",
                remedy="Iterate over it",
            )
        )

    @property
    def sampler(self) -> PackedDataset:
        """Its dataset: Lightning calls :meth:`set_epoch` of a loader's `sampler`."""
        return self.data

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration; after :meth:`load_state_dict`, the epoch of
        the state.
        """
        return self.data.epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of `epoch`; do nothing for the current epoch."""
        self.data.set_epoch(epoch)

    def plan(self, epochs: int = 1, *, left: bool = False) -> StepPlan:
        """Plan `epochs` epochs from the current one on.

        Args:
            epochs: number of epochs.
            left: plan the current epoch from the position on; default: from its
                beginning. A step that was interrupted counts in full.
        """
        start = None
        if left:
            start = self._batches.convert_position(self.data.next_start.peek())
        return self.data.plan_from(self.config, self.data.world_size, epochs, start)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches yielded so far.

        Prefetched batches do not count.
        """
        return self.data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken, with any settings, ranks and workers.

        With the settings and number of ranks of the state, the same batches follow as
        without the interruption. With others, the packs not yet yielded are batched by
        the new settings.

        Raises:
            CompatibilityError: the state belongs to another dataset, version, seed or
                order.
        """
        self.data.load_state_dict(state)


class _PositionedBatch(NamedTuple):
    """A batch, and the position after it."""

    batch: PackedBatch
    position: Position


class _Task(NamedTuple):
    """A batch of this rank that is to be read.

    Attributes:
        step: its step.
        step_index: index of the step in the epoch.
        batch_index: index of the batch in the step.
        share: its packs, as places among the :class:`RemainingPacks`.
    """

    step: Step
    step_index: int
    batch_index: int
    share: Share


class _LocatedTask(NamedTuple):
    """A task with the global index and the source of each of its packs, int64 `[n]`."""

    task: _Task
    indices: Int64
    sources: Int64


class _Batches(IterableDataset[_PositionedBatch]):
    """Yields the batches of one rank from a start on; in one of n workers, each n-th.

    The integers of the start lie in memory that persistent workers share.
    """

    def __init__(self, data: PackedDataset, config: BatchConfig) -> None:
        self._data = data
        self._config = config
        self._cut = {"world_size": data.world_size, **config.changed()}
        self._start = Position()
        # Epoch; next, step, batches and shortfall of the start.
        self._cells = shared_integers(5)

    def convert_position(self, position: Position) -> Position:
        """Convert `position` to the step boundaries of these settings."""
        if position.cut == self._cut:
            return position
        return to_resumable_position(self._data.stream, position)

    def start_at(self, position: Position) -> Position:
        """Start the next iteration at `position`, converted to these settings."""
        start = self.convert_position(position)
        self._start = start
        self._cells[:] = torch.tensor(
            [self._data.epoch, start.next, start.step, start.batches, start.shortfall]
        )
        return start

    def detach(self) -> _Batches:
        """Return a copy that later calls of :meth:`start_at` do not move."""
        duplicate = copy.copy(self)
        duplicate._cells = shared_integers(len(self._cells))
        duplicate._cells.copy_(self._cells)
        return duplicate

    def count(self, position: Position) -> int:
        """Count the batches of this rank from `position` on."""
        start = self.convert_position(position)
        cutter = self._cutter(self._data.stream, start)
        if cutter.packs_per_step is None:
            return sum(step.num_batches for step in cutter) - start.batches
        # Steps of a fixed number of packs are counted without looking at the packs.
        packs_per_batch = self._data.world_size * self._config.width
        return math.ceil(cutter.end / packs_per_batch) - start.batches

    def __iter__(self) -> Iterator[_PositionedBatch]:
        epoch, start = self._read_start()
        stream = copy.copy(self._data.stream)  # other iterators have other epochs
        stream.set_epoch(epoch)
        cutter = self._cutter(stream, start)

        tasks = _of_this_worker(self._tasks(cutter, start))
        located = _locate(tasks, stream, cutter.remaining)
        # The stream reads ahead of the batches that are yielded here.
        located, located_ahead = itertools.tee(located)
        packs_of_tasks = stream.read(upcoming.indices for upcoming in located_ahead)

        # The pack index opens in a thread while the first packs are read.
        index_opener = threading.Thread(
            target=_open_pack_index,
            args=(stream, start.next),
            name="packstore-pack-index",
        )
        index_opener.start()
        for packs, current in zip(packs_of_tasks, located, strict=True):
            index_opener.join()  # returns at once after the first time
            yield _PositionedBatch(
                batch=self._collate(packs, stream.kind, current),
                position=self._position_after(current.task, cutter.remaining),
            )

    def _collate(
        self, packs: Sequence[Packs], kind: str, located: _LocatedTask
    ) -> PackedBatch:
        task = located.task
        step = task.step.info(
            index=task.step_index,
            batch=task.batch_index,
            ranks=self._data.world_size,
        )
        return collate(
            packs,
            kind,
            sources=located.sources,
            step=step,
            fillers=int(task.share.is_filler),
        )

    def _read_start(self) -> tuple[int, Position]:
        """Return epoch and start of this iteration, in any process."""
        epoch, next_pack, step, batches, shortfall = self._cells.tolist()
        if len(self._start.yielded):
            # No persistent workers read such a start: all have its pickled copy.
            return epoch, self._start
        start = Position(next_pack, step, batches=batches, shortfall=shortfall)
        return epoch, start

    def _cutter(self, stream: PackStream, start: Position) -> StepCutter:
        return StepCutter(stream, start, self._config, self._data.world_size)

    def _tasks(self, cutter: StepCutter, start: Position) -> Iterator[_Task]:
        """Yield the batches of this rank, for all of its workers."""
        num_skipped = start.batches
        for step_index, step in enumerate(cutter, start=start.step):
            shares = assign_ranks(
                step, self._data.rank, self._data.world_size, self._config
            )
            for batch_index in range(num_skipped, len(shares)):
                yield _Task(step, step_index, batch_index, shares[batch_index])
            num_skipped = 0

    def _position_after(self, task: _Task, remaining: RemainingPacks) -> Position:
        """Return the position after the batch of `task`, on all ranks."""
        step = task.step
        num_yielded = task.batch_index + 1
        if num_yielded == step.num_batches:
            return remaining.position_at(
                step.stop, task.step_index + 1, step.shortfall_after
            )
        step_start = remaining.position_at(
            step.start, task.step_index, step.shortfall_before
        )
        return replace(step_start, batches=num_yielded, cut=self._cut)


def _of_this_worker(tasks: Iterator[_Task]) -> Iterator[_Task]:
    """Return each n-th task in one of n workers; all of them without workers."""
    worker = get_worker_info()
    if worker is None:
        return tasks
    return itertools.islice(tasks, worker.id, None, worker.num_workers)


def _locate(
    tasks: Iterator[_Task], stream: PackStream, remaining: RemainingPacks
) -> Iterator[_LocatedTask]:
    """Look up the packs of each task.

    The first task is looked up at once; those after it in chunks, which is cheaper.
    """
    chunk_size = 1
    while True:
        chunk = list(itertools.islice(tasks, chunk_size))
        if not chunk:
            return
        places = [task.share.places for task in chunk]
        indices = remaining[np.concatenate(places)]
        sources = stream.sources(indices)

        ends = np.cumsum([len(places_of_task) for places_of_task in places])
        indices_of_tasks = np.split(indices, ends[:-1])
        sources_of_tasks = np.split(sources, ends[:-1])
        for located in zip(chunk, indices_of_tasks, sources_of_tasks, strict=True):
            yield _LocatedTask(*located)
        chunk_size = _CHUNK


def _open_pack_index(stream: PackStream, index: int) -> None:
    """Open the pack index by looking up the sizes of one pack."""
    if index < len(stream):
        # An error is raised again where the sizes are needed.
        with contextlib.suppress(PackstoreError):
            stream.sizes(np.array([index]))


def _pin(batches: Iterable[_PositionedBatch]) -> Iterator[_PositionedBatch]:
    for batch, position in batches:
        yield _PositionedBatch(batch.pin_memory(), position)


def _watch_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the workers' batches; raise WorkerError if a worker died.

    Errors that a worker raised are raised as they are. torch names a dead worker in the
    text of an error alone, as ``(pid 123)``.
    """
    iterator = iter(loader)
    try:
        yield from iterator
    except (RuntimeError, OSError, EOFError) as error:
        message = str(error) or repr(error)
        is_raised_by_worker = "in DataLoader worker process" in message
        if isinstance(error, PackstoreError) or is_raised_by_worker:
            raise
        if "(pid" not in message:
            # The pipe or shared memory broke before torch noticed the worker's end.
            message += _describe_dead(getattr(iterator, "_workers", ()))
        if "(pid" not in message:
            raise
        raise WorkerError(
            sentence(
                where="PackedDataLoader",
                rule="workers must live until the epoch ends",
                found=message,
                remedy="Look for the out-of-memory killer and a full /dev/shm; "
                "num_workers=0 needs no workers",
            )
        ) from error


def _describe_dead(workers: Sequence[BaseProcess]) -> str:
    """Return the process ids of workers that have failed, as ``(pid 123)`` each."""
    description = ""
    for worker in workers:
        try:
            worker.join(timeout=1)
        except RuntimeError as error:
            # torch's signal handler raises it, with the id, when a worker ends.
            description += f" {error}"
        else:
            if worker.exitcode:
                description += f" (pid {worker.pid})"
    return description


def _check_worker_settings(
    num_workers: int, prefetch_factor: int | None, persistent_workers: bool
) -> None:
    is_prefetch_valid = prefetch_factor is None or prefetch_factor >= 1
    if num_workers < 0 or not is_prefetch_valid:
        raise ConfigError(
            "num_workers must be at least 0 and prefetch_factor at least 1; "
            f"found {num_workers} and {prefetch_factor}."
        )
    if num_workers == 0:
        if prefetch_factor is not None or persistent_workers:
            raise ConfigError(
                "prefetch_factor and persistent_workers need num_workers above 0."
            )
        return
    folder = tempfile.gettempdir()
    if len(folder) > _LONGEST_FOLDER:
        raise ConfigError(
            sentence(
                where="PackedDataLoader",
                rule=f"its workers need a TMPDIR of at most {_LONGEST_FOLDER} "
                "characters",
                found=str(len(folder)),
                remedy="Set TMPDIR to a shorter folder, or take num_workers=0",
            )
        )


def _check_budget(stream: PackStream, budget: int) -> None:
    """Raise ConfigError if a single pack exceeds the budget, in tokens.

    Sizes are read only if the dataset's pack size exceeds it.
    """
    if isinstance(stream, StoredPacks) and stream.dataset.manifest.pack_size <= budget:
        return
    for start in range(0, len(stream), WINDOW):
        places = np.arange(start, min(start + WINDOW, len(stream)))
        check_fits(stream.sizes(places).tokens, places, budget)
