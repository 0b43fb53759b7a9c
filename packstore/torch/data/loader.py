"""Yields batches of packs in the global order, with a position that can be saved and
loaded.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
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
from packstore.format.arrays import Int64
from packstore.torch.batch.batch import PackedBatch, collate
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.position import Position, Unseen, shared_integers
from packstore.torch.data.steps import (
    WINDOW,
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
"""Batches whose packs are looked up at once."""

_LONGEST_FOLDER = 70
"""Characters of TMPDIR up to which torch's Unix sockets there have names that Linux
takes (108): beyond about 75 its workers wait for ever.
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
    """A framework asks for a part of torch's DataLoader; to `hasattr` there is none."""


class _Planned(NamedTuple):
    """A batch, and the range of its step among the packs not yet yielded as the
    iteration began.
    """

    batch: PackedBatch
    step_start: int
    step_stop: int
    shortfall_before: int
    shortfall_after: int


class PackedDataLoader:
    """Yields batches grouped by optimizer step: a step holds the same packs on any
    machine.

    The plan is a pure function of the dataset's order, the settings and the number of
    ranks. It divides the epoch into steps, each a contiguous part of the global order,
    and distributes each step over the ranks. Every rank gets the same number of
    batches, in the same order for any number of workers. ``batch.step`` gives the
    batch's index in its step and the step's number of examples.

    It begins at the epoch and position of `data`, and then has its own: it never moves
    `data`, and no other loader moves it. ``data.set_epoch`` and
    ``data.load_state_dict`` do, as its own.

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

    batch_sampler = (
        None  # as torch's loader has it without a batch size; Lightning looks
    )

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
        if num_workers < 0 or (prefetch_factor is not None and prefetch_factor < 1):
            raise ConfigError(
                "num_workers must be at least 0 and prefetch_factor at least 1; "
                f"found {num_workers} and {prefetch_factor}."
            )
        if num_workers == 0 and (prefetch_factor is not None or persistent_workers):
            raise ConfigError(
                "prefetch_factor and persistent_workers need num_workers above 0."
            )
        if num_workers and len(folder := tempfile.gettempdir()) > _LONGEST_FOLDER:
            rule = f"its workers need a TMPDIR of at most {_LONGEST_FOLDER} characters"
            remedy = "Set TMPDIR to a shorter folder, or take num_workers=0"
            raise ConfigError(
                sentence("PackedDataLoader", rule, str(len(folder)), remedy)
            )
        data = data.copy_for_loader()
        self.data, self.config = data, BatchConfig.of(**batching)
        self._options: dict[str, Any] = {
            "batch_size": None,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context if num_workers else None,
        }
        self._lasting = persistent_workers
        self._batches = _Batches(data, self.config)
        self._loader: DataLoader[Any] | None = None
        self._length: tuple[object, int] = (None, 0)
        self._is_logged = data.rank > 0 or (
            self.config.examples_per_step is None and not self.config.drop_last
        )
        if self.config.tokens_per_batch is not None:
            _check_budget(data.stream, self.config.tokens_per_batch)

    def __len__(self) -> int:
        """Exact number of batches that the next iteration yields on this rank.

        With `tokens_per_batch` or `examples_per_step` it looks up the sizes of all
        packs, once per epoch and position.
        """
        start = self.data.start.peek()
        key = (self.data.epoch, start)
        if self._length[0] != key:
            self._length = key, self._batches.count(start)
        return self._length[1]

    def __iter__(self) -> Iterator[PackedBatch]:
        """Yields batches from the loaded position, or from the beginning of the epoch.

        :meth:`set_epoch` or :meth:`load_state_dict` still takes effect until the first
        batch.
        """
        return self._iterate(self.data.start_iteration(), self.data.start.times_set)

    def _iterate(self, start: Position, moves: int) -> Iterator[PackedBatch]:
        data, cut = self.data, self._batches.cut
        if (
            data.start.times_set != moves
        ):  # frameworks may load a state after making the iterator
            start = data.start_iteration()
        started = start
        if not self._is_logged:
            self._is_logged = True
            log_steps(self.plan(), data.stream, self.config, data.world_size)
        start = self._batches.start_at(start)
        unseen, steps = Unseen(data.num_packs, start), start.step
        for planned in self._running(bool(len(start.yielded))):
            step = planned.batch.step
            assert step is not None
            steps = step.index + 1
            after = unseen.after(planned.step_stop, steps, planned.shortfall_after)
            if not step.last:
                before = unseen.after(
                    planned.step_start, step.index, planned.shortfall_before
                )
                after = replace(before, batches=step.batch + 1, cut=cut)
            data.move_on(started, after)
            yield planned.batch
        data.move_on(started, unseen.after(len(unseen), steps))

    def _running(self, once: bool) -> Iterable[_Planned]:
        """The batches of this process, or of workers; with `once`, not of persistent
        ones.
        """
        if not self._options["num_workers"]:
            if self._options["pin_memory"] and torch.accelerator.is_available():
                return (
                    each._replace(batch=each.batch.pin_memory())
                    for each in self._batches
                )
            return self._batches
        lasting = self._lasting and not once
        if lasting and self._loader is not None:
            return _watched(self._loader)
        # A separate generator: torch's loader would draw from the global one, and so
        # change the random numbers of the training.
        batches = self._batches if lasting else self._batches.detached()
        loader: DataLoader[Any] = DataLoader(
            batches,
            generator=torch.Generator(),
            persistent_workers=lasting,
            **self._options,
        )
        if lasting:
            self._loader = loader
        return _watched(loader)

    def __getattr__(self, name: str) -> Any:
        if name not in _TORCH_ATTRIBUTES:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        rule = f"it batches, orders and deals packs itself, so it has no {name}"
        remedy = (
            "To skip what was trained on, load_state_dict(state); to the "
            "dataset, "
            "loader.data"
        )
        if name in ("generator", "worker_init_fn"):
            remedy = "In Ray Train, prepare_data_loader(loader, add_dist_sampler=False)"
        raise LoaderAttributeError(
            sentence("PackedDataLoader", rule, f"a use of {name}", remedy)
        )

    def __getitem__(self, index: object) -> Any:
        """Refuses to be a dataset, which torch's loader would index."""
        rule = "it loads batches itself, so no other loader may stand around it"
        raise ConfigError(sentence("PackedDataLoader", rule, "one", "Iterate over it"))

    @property
    def sampler(self) -> PackedDataset:
        """Its dataset, whose :meth:`set_epoch` Lightning calls on a loader's
        `sampler`.
        """
        return self.data

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration; after :meth:`load_state_dict` that of the
        state.
        """
        return self.data.epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of `epoch`; do nothing for the current epoch."""
        self.data.set_epoch(epoch)

    def plan(self, epochs: int = 1, *, left: bool = False) -> StepPlan:
        """Plans `epochs` epochs from the current one: from its beginning, or what is
        `left` of it.

        A step that was interrupted counts whole.
        """
        start = self._batches.convert_position(self.data.start.peek()) if left else None
        return self.data.plan_from(self.config, self.data.world_size, epochs, start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches yielded so far; prefetched ones do not
        count.
        """
        return self.data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state` was taken, with any settings, ranks and workers.

        With the settings and number of ranks of the state, the same batches follow as
        without the interruption. With others, the packs not yet yielded are batched by
        the new settings.

        Raises:
            CompatibilityError: the state belongs to another dataset, version, seed or
                order.
        """
        self.data.load_state_dict(state)


class _Batches(IterableDataset[_Planned]):
    """Yields the batches of one rank from a position on; in one of n workers, every
    n-th.
    """

    def __init__(self, data: PackedDataset, config: BatchConfig) -> None:
        self.data, self.config = data, config
        self.cut = {"world_size": data.world_size, **config.changed()}
        self._start = Position()
        # Epoch, next, step, batches, shortfall: in memory shared with persistent
        # workers.
        self._cells = shared_integers(5)

    def start_at(self, position: Position) -> Position:
        """Starts the next iteration at `position`; returns it as these settings express
        it.
        """
        self._start = start = self.convert_position(position)
        cells = [
            self.data.epoch,
            start.next,
            start.step,
            start.batches,
            start.shortfall,
        ]
        self._cells[:] = torch.tensor(cells)
        return start

    def detached(self) -> _Batches:
        """Returns a copy that :meth:`start_at` of this one does not move."""
        other = copy.copy(self)
        other._cells = shared_integers(len(self._cells))
        other._cells.copy_(self._cells)
        return other

    def count(self, position: Position) -> int:
        """Counts the batches of this rank from `position` on."""
        start = self.convert_position(position)
        cutter = self._cutter(start)
        if cutter.fixed is None:
            return sum(len(step.edges) - 1 for step in cutter) - start.batches
        return (
            -(-cutter.end // (self.data.world_size * self.config.width)) - start.batches
        )

    def __iter__(self) -> Iterator[_Planned]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch, first, steps, done, shortfall = self._cells.tolist()
        start = self._start
        if not len(start.yielded):
            start = Position(first, steps, batches=done, shortfall=shortfall)
        stream = copy.copy(self.data.stream)  # another iterator may be in another epoch
        stream.set_epoch(epoch)
        cutter = self._cutter(start, stream)
        turns = itertools.islice(self._turns(cutter, start), number, None, workers)
        planned, ahead = itertools.tee(self._located(stream, cutter.unseen, turns))
        reading = stream.read(indices for _, indices, _ in ahead)
        # The pack index opens while the first packs are read.
        lookup = threading.Thread(target=_look_up, args=(stream, start.next))
        lookup.start()
        for packs, (turn, _, sources) in zip(reading, planned, strict=True):
            lookup.join()
            step, index, number, _, fillers = turn
            info = step.info(index, number, self.data.world_size)
            batch = collate(
                packs, stream.kind, sources=sources, step=info, fillers=fillers
            )
            shortfalls = step.shortfall_before, step.shortfall_after
            yield _Planned(batch, step.start, step.stop, *shortfalls)

    def _turns(self, cutter: StepCutter, start: Position) -> Iterator[_Turn]:
        """Yields the batches of this rank, in all workers."""
        skipped = start.batches
        for index, step in enumerate(cutter, start=start.step):
            shares = assign_ranks(
                step, self.data.rank, self.data.world_size, self.config
            )
            for number, share in enumerate(shares[skipped:], start=skipped):
                yield step, index, number, *share
            skipped = 0

    def _located(
        self, stream: PackStream, unseen: Unseen, turns: Iterator[_Turn]
    ) -> Iterator[tuple[_Turn, Int64, Int64]]:
        """Yields each batch with the indices and the sources of its packs."""
        size = (
            1  # the first batch without delay; later ones in chunks, which is cheaper
        )
        while chunk := list(itertools.islice(turns, size)):
            places = [places for _, _, _, places, _ in chunk]
            indices, edges = (
                unseen[np.concatenate(places)],
                np.cumsum([*map(len, places)])[:-1],
            )
            parts = (
                np.split(values, edges) for values in (indices, stream.sources(indices))
            )
            yield from zip(chunk, *parts, strict=True)
            size = _CHUNK

    def convert_position(self, position: Position) -> Position:
        """Converts `position` to the step boundaries of these settings."""
        same = position.cut == self.cut
        return position if same else to_resumable_position(self.data.stream, position)

    def _cutter(self, start: Position, stream: PackStream | None = None) -> StepCutter:
        return StepCutter(
            stream or self.data.stream, start, self.config, self.data.world_size
        )


_Turn = tuple[Step, int, int, Int64, int]
"""A batch of a rank: its step, indices of both, the places of its packs, how many are
fillers.
"""


def _look_up(stream: PackStream, index: int) -> None:
    if index < len(stream):
        with contextlib.suppress(
            PackstoreError
        ):  # raised again where the size is needed
            stream.sizes(np.array([index]))


def _watched(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields the workers' batches; raises WorkerError if one died, and errors inside
    them as is.
    """
    running = iter(loader)
    try:
        yield from running
    except (RuntimeError, OSError, EOFError) as error:
        text = str(error) or repr(error)
        if isinstance(error, PackstoreError) or "in DataLoader worker process" in text:
            raise  # the error of a worker that lives
        if "(pid" not in text:  # the pipe or shared memory broke before torch noticed
            text += _dead(getattr(running, "_workers", ()))
        if "(pid" not in text:
            raise
        remedy = (
            "Look for the out-of-memory killer and a full /dev/shm; "
            "num_workers=0 "
            "needs none"
        )
        raise WorkerError(
            sentence(
                "PackedDataLoader",
                "workers must live until the epoch ends",
                text,
                remedy,
            )
        ) from error


def _dead(workers: Sequence[BaseProcess]) -> str:
    """Names the workers that have ended or are ending."""
    names = ""
    for worker in workers:
        try:
            worker.join(1)
            names += f" (pid {worker.pid})" if worker.exitcode else ""
        except RuntimeError as error:  # torch's, on the signal that a worker has ended
            names += f" {error}"
    return names


def _check_budget(stream: PackStream, budget: int) -> None:
    """Refuses a budget that a single pack exceeds; reads sizes only if one might."""
    if isinstance(stream, StoredPacks) and stream.dataset.manifest.pack_size <= budget:
        return
    for start in range(0, len(stream), WINDOW):
        places = np.arange(start, min(start + WINDOW, len(stream)))
        check_fits(stream.sizes(places).tokens, places, budget)
