"""Yields batches of packs in the global order, with a position that can be saved and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from packstore.config import BatchConfig
from packstore.errors import ConfigError, PackstoreError, WorkerError, sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.batches import Batches, Mark
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.position import Position, Unseen
from packstore.torch.data.steps import WINDOW, StepPlan, check_fits
from packstore.torch.data.stream import PackStream, StoredPacks

_INSIDE = "in DataLoader worker process"
"""Part of torch's message for an error inside a worker."""


class PackedDataLoader:
    """Yields batches grouped by optimizer step: a step holds the same packs on any machine.

    The plan is a pure function of the dataset's order, the settings and the number of ranks. It
    divides the epoch into steps, each a contiguous part of the global order, and distributes each
    step over the ranks. Every rank gets the same number of batches, in the same order for any
    number of workers. ``batch.step`` gives the batch's index in its step and the step's number of
    examples.

    Args:
        data: the dataset.
        num_workers: processes that read; 0, which reads in threads of this process, is the fastest
            unless collation is slow.
        pin_memory: put batches into page-locked memory, for copies to a GPU.
        prefetch: batches that each worker prepares ahead; default: 2.
        persistent_workers: keep the workers from one epoch to the next.
        multiprocessing_context: ``fork``, ``spawn`` or ``forkserver``; default: torch's.
        batching: fields of :class:`packstore.config.BatchConfig`: `packs_per_batch` (default 1) or
            `tokens_per_batch`, and either `accumulation` or `examples_per_step`; `balance`,
            `tail`. See ``docs/loaders.md``.

    Raises:
        ConfigError: a value is out of range, settings exclude each other, or a single pack is
            longer than `tokens_per_batch`.
        UnknownNameError: a setting does not exist.

    Iterating raises the errors of reading a dataset, and WorkerError if a worker process dies.
    """

    def __init__(
        self,
        data: PackedDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | None = None,
        **batching: Any,
    ) -> None:
        if num_workers < 0 or (prefetch is not None and prefetch < 1):
            raise ConfigError(
                "num_workers must be at least 0 and prefetch at least 1; "
                f"found {num_workers} and {prefetch}."
            )
        if num_workers == 0 and (prefetch is not None or persistent_workers):
            raise ConfigError("prefetch and persistent_workers need num_workers of at least 1.")
        self.data, self.config = data, BatchConfig.of(**batching)
        self._options: dict[str, Any] = {
            "batch_size": None,
            "collate_fn": _as_it_is,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch,
            "multiprocessing_context": multiprocessing_context if num_workers else None,
        }
        self._lasting = persistent_workers
        self._batches = Batches(data, self.config)
        self._loader: DataLoader[Any] | None = None
        self._length: tuple[object, int] = (None, 0)
        _check_budget(data.stream, self.config.tokens_per_batch)

    def __len__(self) -> int:
        """Exact number of batches that the next iteration yields on this rank.

        With `tokens_per_batch` or `examples_per_step` it looks up the sizes of all packs, once per
        epoch and position.
        """
        start = self.data.start
        key = (self.data.epoch, start)
        if self._length[0] != key:
            self._length = key, self._batches.count(start)
        return self._length[1]

    def __iter__(self) -> Iterator[PackedBatch]:
        """Yields batches from the loaded position, or from the beginning of the epoch.

        :meth:`set_epoch` or :meth:`load_state_dict` still takes effect until the first batch.
        """
        return self._give(self.data.begin(), self.data.moves)

    def _give(self, start: Position, moves: int) -> Iterator[PackedBatch]:
        data, cut = self.data, self._batches.cut
        if data.moves != moves:  # frameworks may load a state after making the iterator
            start = data.begin()
        start = self._batches.begin(start)
        unseen, steps = Unseen(data.num_packs, start), start.step
        for batch, mark in self._running(bool(len(start.given))):
            data.position, steps = mark.position(unseen, cut), mark.index + 1
            yield batch
        data.position = unseen.after(len(unseen), steps)

    def _running(self, once: bool) -> Iterable[tuple[PackedBatch, Mark]]:
        """The batches of this process, or of workers; with `once`, not of persistent ones."""
        if self._options["num_workers"]:
            return _naming_the_dead(self._torch_loader(once))
        if self._options["pin_memory"] and torch.accelerator.is_available():
            return ((batch.pin_memory(), mark) for batch, mark in self._batches)
        return self._batches

    def _torch_loader(self, once: bool) -> DataLoader[Any]:
        """The torch loader that runs the workers; with `once`, without persistent workers."""
        if self._loader is not None and not once:
            return self._loader
        # A separate generator: torch's loader would draw from the global one, and so change the
        # random numbers of the training.
        generator, lasting = torch.Generator(), self._lasting and not once
        loader: DataLoader[Any] = DataLoader(
            self._batches, generator=generator, persistent_workers=lasting, **self._options
        )
        if lasting:
            self._loader = loader
        return loader

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of `epoch`; does nothing for the current epoch."""
        self.data.set_epoch(epoch)

    def plan(self, epochs: int = 1) -> StepPlan:
        """Plans the steps of `epochs` epochs, from the beginning of the current one."""
        return self.data.plan(epochs=epochs, **self.config.changed())

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches yielded so far; prefetched ones do not count."""
        return self.data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state` was taken, with any settings, ranks and workers.

        With the settings and number of ranks of the state, the same batches follow as without the
        interruption. With others, the packs not yet yielded are batched by the new settings.

        Raises:
            CompatibilityError: the state belongs to another dataset, version, seed or order.
        """
        self.data.load_state_dict(state)


def _naming_the_dead(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields the workers' batches; raises WorkerError if one died, and errors inside them as is."""
    running = iter(loader)
    try:
        yield from running
    except (RuntimeError, OSError, EOFError) as error:
        try:
            found = _of_the_dead(error, getattr(running, "_workers", ()))
        except RuntimeError as later:  # torch's, on the signal that a worker has ended
            found = str(later)
        if not found:
            raise
        must = "workers must live until the epoch ends"
        do = "Look for the out-of-memory killer and a full /dev/shm; num_workers=0 needs no workers"
        raise WorkerError(sentence("PackedDataLoader", must, found, do)) from error


def _of_the_dead(error: Exception, workers: Sequence[BaseProcess]) -> str:
    """The message about workers that died; empty if `error` has another cause."""
    found = str(error) or repr(error)
    if isinstance(error, PackstoreError) or _INSIDE in found:
        return ""
    if "(pid" not in found:  # the pipe or shared memory broke before torch noticed
        found += _dead(workers)
    return found if "(pid" in found else ""


def _dead(workers: Sequence[BaseProcess]) -> str:
    """Names the workers that have ended or are ending."""
    for worker in workers:
        with contextlib.suppress(RuntimeError):  # torch's, on the signal that a worker has ended
            worker.join(1)
    ended = [f" (pid {worker.pid})" for worker in workers if worker.exitcode]
    return "".join(ended)


def _as_it_is(item: Any) -> Any:
    return item


def _check_budget(stream: PackStream, budget: int | None) -> None:
    """Refuses a budget that a single pack exceeds; reads sizes only if one might."""
    if budget is None or (
        isinstance(stream, StoredPacks) and stream.dataset.manifest.pack_size <= budget
    ):
        return
    for start in range(0, len(stream), WINDOW):
        places = np.arange(start, min(start + WINDOW, len(stream)))
        check_fits(stream.sizes(places).tokens, places, budget)
