"""The batches of one rank, made in the training process or in its workers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from packstore.config import BatchConfig
from packstore.errors import PackstoreError
from packstore.format.arrays import Int64
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.collate import collate
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.position import Position, Unseen, shared_integers
from packstore.torch.data.ranks import assign_ranks, cut_of, settled
from packstore.torch.data.steps import Step, StepCutter
from packstore.torch.data.stream import PackStream


@dataclass(frozen=True, slots=True)
class Mark:
    """The loader's position after a batch was yielded.

    Attributes:
        index: index of the step in the epoch.
        start, stop: range of its packs among those not yet yielded when the iteration began.
        done: batches of the step that were yielded.
        batches: batches of the step.
    """

    index: int
    start: int
    stop: int
    done: int
    batches: int

    def position(self, unseen: Unseen, cut: Mapping[str, Any]) -> Position:
        """Returns the mark as a :class:`Position`."""
        if self.done == self.batches:
            return unseen.after(self.stop, self.index + 1)
        at = unseen.after(self.start, self.index)
        return Position(at.next, at.step, at.given, self.done, cut)


_CHUNK = 32
"""Batches whose packs are looked up at once."""

_Ahead = tuple[Step, Int64, int, Mark]
"""A batch being read: its step, the sources of its packs, fillers, mark."""


class Batches(IterableDataset[tuple[PackedBatch, Mark]]):
    """Yields the batches of one rank from a position on; in one of n workers, every n-th."""

    def __init__(self, data: PackedDataset, config: BatchConfig) -> None:
        self.data, self.config = data, config
        self.cut = cut_of(config, data.world_size)
        self._start = Position()
        # Epoch, next, step and batches, in memory shared with persistent workers.
        self._cells = shared_integers(4)

    def begin(self, position: Position) -> Position:
        """Starts the next iteration at `position`; returns it as these settings express it."""
        self._start = start = self._own(position)
        cells = [self.data.epoch, start.next, start.step, start.batches]
        self._cells.copy_(torch.tensor(cells))
        return start

    def count(self, position: Position) -> int:
        """Counts the batches of this rank from `position` on."""
        start, config = self._own(position), self.config
        cutter = self._cutter(start)
        if cutter.fixed is None:
            return sum(len(step.edges) - 1 for step in cutter) - start.batches
        return -(-cutter.end // (self.data.world_size * config.width)) - start.batches

    def __iter__(self) -> Iterator[tuple[PackedBatch, Mark]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch, first, steps, done = self._cells.tolist()
        start = self._start
        if not len(start.given):
            start = Position(first, steps, batches=done)
        stream = self.data.stream
        if self.data.epoch != epoch:
            self.data.epoch = epoch
            stream.set_epoch(epoch)
        ahead: deque[_Ahead] = deque()
        wanted = self._wanted(start, number, workers, ahead)
        reading = stream.read(wanted)
        # The pack index opens while the first packs are read.
        lookup = threading.Thread(target=_look_up, args=(stream, start.next))
        lookup.start()
        for packs in reading:
            lookup.join()
            step, sources, fillers, mark = ahead.popleft()
            info = step.info(mark.index, mark.done - 1, self.data.world_size)
            batch = collate(packs, stream.kind, sources=sources, step=info, fillers=fillers)
            yield batch, mark

    def _wanted(
        self,
        start: Position,
        number: int,
        workers: int,
        ahead: deque[_Ahead],
    ) -> Iterator[Int64]:
        """Yields the indices of each batch's packs; appends its other fields to `ahead`."""
        cutter, skipped = self._cutter(start), start.batches
        turn = 0
        dealt: list[tuple[Step, int, Mark]] = []
        places: list[Int64] = []
        chunk = 1  # the first batch without delay; later ones in chunks, which is cheaper
        for index, step in enumerate(cutter, start=start.step):
            shares = assign_ranks(step, self.data.rank, self.data.world_size, self.config)
            for batch in range(skipped, len(shares)):
                turn += 1
                if (turn - 1) % workers != number:
                    continue
                own, fillers = shares[batch]
                mark = Mark(index, step.start, step.stop, batch + 1, len(step.edges) - 1)
                dealt.append((step, fillers, mark))
                places.append(own)
                if len(places) == chunk:
                    yield from self._located(cutter, dealt, places, ahead)
                    dealt, places, chunk = [], [], _CHUNK
            skipped = 0
        yield from self._located(cutter, dealt, places, ahead)

    def _located(
        self,
        cutter: StepCutter,
        dealt: list[tuple[Step, int, Mark]],
        places: list[Int64],
        ahead: deque[_Ahead],
    ) -> Iterator[Int64]:
        """Yields the indices of each batch's packs, looked up for several batches at once."""
        if not places:
            return
        indices = cutter.unseen[np.concatenate(places)]
        sources, at = self.data.stream.sources(indices), 0
        for (step, fillers, mark), own in zip(dealt, places, strict=True):
            part = slice(at, at := at + len(own))
            ahead.append((step, sources[part], fillers, mark))
            yield indices[part]

    def _own(self, position: Position) -> Position:
        """Converts `position` to the step boundaries of these settings."""
        return position if position.cut == self.cut else settled(self.data.stream, position)

    def _cutter(self, start: Position) -> StepCutter:
        stream = self.data.stream
        unseen = Unseen(len(stream), start)
        return StepCutter(stream, unseen, self.config, self.data.world_size)


def _look_up(stream: PackStream, index: int) -> None:
    if index < len(stream):
        with contextlib.suppress(PackstoreError):  # raised again where the size is needed
            stream.sizes(np.array([index]))
