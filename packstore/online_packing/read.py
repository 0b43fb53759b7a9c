"""Reads the row groups of an epoch's windows, each once, and fills whole windows."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from packstore.config import ReadConfig
from packstore.errors import IntegrityError, StorageError, sentence
from packstore.format.arrays import TOKEN_BYTES, Bool, Examples, Int64, Packs, to_offsets
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.fetcher import GroupFetcher
from packstore.io.dataset.thread_pool import Job, ThreadPool
from packstore.online_packing.plan import EpochPlan
from packstore.pack.fill import fill, unpack

_OPEN = 2
"""Largest number of windows kept per lane; the older one is dropped once its packs are yielded."""


def read_packs(
    batches: Iterable[Int64], dataset: Dataset, plan: EpochPlan, layout: str, config: ReadConfig
) -> Iterator[list[Packs]]:
    """Yields the packs at each array of positions, each as :class:`Packs` of one row.

    If a row group is quarantined, other packs replace those with one of its examples.

    Args:
        batches: int64 arrays of positions in the epoch; read ahead of the packs yielded.
        dataset: the dataset of the examples.
        plan: plan of the epoch.
        layout: layout of the packs.
        config: how far to read ahead, and what to do with a row group that cannot be read.

    Raises:
        StorageError: a shard is missing, or the store refuses.
        IntegrityError: a checksum of a shard does not match.
    """
    schedule = _Schedule(batches, plan)
    groups = _read_ahead(dataset, schedule.groups(), config)
    windows = _Windows(plan, layout, dataset)
    while (steps := schedule.next_batch()) is not None:
        yield [windows.give(step, groups) for step in steps]


def _read_ahead(
    dataset: Dataset, groups: Iterator[int], config: ReadConfig
) -> Iterator[Packs | None]:
    """Yields the row groups in order, read ahead by threads; None for a quarantined one."""
    decoders = ThreadPool(1)  # what one thread allocates and drops stays in one heap
    local = dataset.location.local_path is not None
    fetchers = None if local else ThreadPool(config.requests)
    reading = GroupFetcher(dataset, config, decoders.stopping)
    tokens = dataset.row_groups.tokens
    jobs: deque[tuple[int, Job[Packs | None]]] = deque()
    ahead = 0
    with contextlib.ExitStack() as stack:
        for pool in (fetchers, decoders):
            if pool is not None:
                stack.callback(pool.close)
        while True:
            while ahead < config.ahead(local) or not jobs:
                if (group := next(groups, None)) is None:
                    break
                fetched = None
                if fetchers is not None:
                    fetched = fetchers.submit(partial(reading.fetch, group))
                job = decoders.submit(partial(reading.read, group, fetched))
                jobs.append((int(tokens[group] * TOKEN_BYTES), job))
                ahead += jobs[-1][0]
            if not jobs:
                return
            size, job = jobs.popleft()
            ahead -= size
            yield job.result()


@dataclass(frozen=True, slots=True)
class _Step:
    """The work for one pack.

    Attributes:
        pack: its number in the plan.
        window: its window.
        load: row groups to read first, to fill the window; None: the window is in memory.
        goes_on: True if the previous window was the last one filled in its lane.
        drop: windows not needed any more afterwards.
    """

    pack: int
    window: int
    load: list[int] | None
    goes_on: bool
    drop: list[int]


class _Schedule:
    """The steps that the batches need, computed lazily."""

    def __init__(self, batches: Iterable[Int64], plan: EpochPlan) -> None:
        self._batches, self._plan = iter(batches), plan
        self._steps: deque[list[_Step]] = deque()
        self._groups: deque[int] = deque()
        self._left: dict[int, dict[int, int]] = {}
        self._filled: dict[int, int] = {}

    def next_batch(self) -> list[_Step] | None:
        """Returns the steps of the next batch; None after the last."""
        if not self._steps and not self._take():
            return None
        return self._steps.popleft()

    def groups(self) -> Iterator[int]:
        """Yields the row groups of all steps, in order."""
        while self._groups or self._take():
            while self._groups:
                yield self._groups.popleft()

    def _take(self) -> bool:
        indices = next(self._batches, None)
        if indices is None:
            return False
        packs = self._plan.locate(indices)
        windows = self._plan.window_of(packs)
        self._steps.append(list(map(self._step, packs.tolist(), windows.tolist())))
        return True

    def _step(self, pack: int, window: int) -> _Step:
        plan = self._plan
        lane = plan.lane_of(window)
        left = self._left.setdefault(lane, {})
        load, goes_on, drop = None, False, []
        if window not in left:
            goes_on = self._filled.get(lane, -1) == window - 1
            self._filled[lane] = window
            load = plan.groups_of(window, goes_on)
            self._groups.extend(load)
            left[window] = plan.packs_of(window)
            if len(left) > _OPEN:
                drop.append(next(iter(left)))
        left[window] -= 1
        if not left[window]:
            drop.append(window)
        for done in drop:
            del left[done]
        return _Step(pack, window, load, goes_on, drop)


@dataclass(frozen=True, slots=True)
class _Window:
    """A filled window.

    Attributes:
        packs: the packs that could be filled.
        complete: bool per pack of the plan, True if it could be filled.
    """

    packs: Packs
    complete: Bool


class _Windows:
    """The filled windows, and the examples carried over to later ones."""

    def __init__(self, plan: EpochPlan, layout: str, dataset: Dataset) -> None:
        self._plan, self._layout, self._dataset = plan, layout, dataset
        self._open: dict[int, _Window] = {}
        self._waiting: dict[int, tuple[Int64, Examples]] = {}
        self._good: Packs | None = None

    def give(self, step: _Step, groups: Iterator[Packs | None]) -> Packs:
        """Returns the pack of `step`; takes the row groups to read first from `groups`."""
        if step.load is not None:
            self._open[step.window] = self._fill(step, [(g, next(groups)) for g in step.load])
        window = self._open[step.window]
        row = step.pack - int(self._plan.window_offsets[step.window])
        if window.complete.all():
            pack = window.packs.row(row)
        elif window.complete[row]:
            pack = window.packs.row(int(window.complete[:row].sum()))
        else:
            pack = self._stand_in()
        for done in step.drop:
            del self._open[done]
        return pack

    def _fill(self, step: _Step, groups: list[tuple[int, Packs | None]]) -> _Window:
        """Fills the packs of the window, and keeps the examples for the next one."""
        plan, window = self._plan, step.window
        lane = plan.lane_of(window)
        waiting = self._waiting.pop(lane, None)
        parts = [waiting] if waiting is not None and step.goes_on else []
        for group, found in groups:
            if found is not None:
                parts.append((plan.numbers_of(group), _examples(found)))
        numbers = np.concatenate([np.empty(0, np.int64), *(number for number, _ in parts)])
        examples = Examples.concat([part for _, part in parts])
        wanted, offsets = plan.examples_of(window), plan.pack_offsets_of(window)
        there = np.isin(wanted, numbers)
        complete = np.logical_and.reduceat(there, offsets[:-1] - offsets[0])
        number = np.diff(offsets)
        wanted = wanted[np.repeat(complete, number)]
        sorter = np.argsort(numbers)
        places = sorter[np.searchsorted(numbers, wanted, sorter=sorter)]
        packs = fill(examples.take(places), to_offsets(number[complete]), self._layout)
        if window + 1 < plan.lane_offsets[lane + 1]:
            kept = np.flatnonzero(np.isin(numbers, plan.examples_of(window + 1)))
            self._waiting[lane] = numbers[kept], examples.take(kept)
        return _Window(packs, complete)

    def _stand_in(self) -> Packs:
        """Any readable pack, with weight 0."""
        if self._good is None:
            self._good = self._find_good()
        return replace(self._good, stand_in=True)

    def _find_good(self) -> Packs:
        for group in range(len(self._dataset.row_groups)):
            with contextlib.suppress(StorageError, IntegrityError):
                return self._dataset.read_packs(group).row(0)
        must = "at least one row group must be readable"
        raise IntegrityError(sentence(self._dataset.url, must, "none"))


def _examples(packs: Packs) -> Examples:
    """The examples of a row group, as views where each sequence is contiguous."""
    if packs.segment_offsets.any():
        return unpack(packs)
    return Examples(
        input_ids=packs.input_ids,
        supervised=packs.supervised,
        sequence_offsets=to_offsets(packs.lengths),
        example_offsets=to_offsets(packs.num_responses),
        reward=packs.reward,
        example_ids=packs.example_ids,
        columns=packs.columns,
    )
