"""Yields packs in a given order; threads fetch their row groups ahead.

The order is known, so positions are planned well before their packs are yielded, and
their row groups are submitted to threads in the order of first use. Each is dropped
when its lane has moved on to the next one. If another lane ends in it, it is kept till
then, within `KEPT_BYTES`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from packstore.config import ReadConfig
from packstore.errors import IntegrityError, StorageError, message_with_notes, sentence
from packstore.format.arrays import TOKEN_BYTES, Int64, Packs
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.order import PackOrder
from packstore.io.dataset.reader import KEPT_BYTES, Fetched
from packstore.io.store.retry import retrying

log = logging.getLogger("packstore")

_PLANNED = 512
"""Packs looked up in the order at once."""
_FAR = 8 * _PLANNED
"""Maximum packs planned ahead."""
_REFUSALS = 4
"""Attempts at errors that rarely pass: keys of a running training may be renewed
meanwhile.
"""


@dataclass(slots=True)
class _OpenGroup:
    bytes: int  # approximate, decoded
    is_started: bool = False  # True once reading has started
    job: Future[Packs | None] | None = (
        None  # reads it in a thread; None: reads when yielded
    )
    is_read: bool = False  # True once its first pack is yielded
    packs: Packs | None = None  # what was read; None if it is quarantined
    uses: int = 0  # packs planned from it and not yet yielded
    lanes: int = 0  # lanes that have not moved on to another row group


class ReadAhead:
    """Yields the packs at given positions, batch by batch; quarantined ones go to
    `quarantined`.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: PackOrder,
        batches: Iterable[Int64],
        config: ReadConfig,
        quarantined: set[int],
    ) -> None:
        self._dataset, self._order, self._config = dataset, order, config
        self._quarantined = quarantined
        self._batches = iter(batches)
        local = dataset.location.local_path is not None
        self._far_bytes = config.ahead(local)
        # One thread decodes, so that its allocations reuse one heap and memory stays
        # small.
        self._decoder = ThreadPoolExecutor(1, "packstore-decode")
        self._fetchers = (
            None if local else ThreadPoolExecutor(config.requests, "packstore-fetch")
        )
        self._pid, self._stopping = os.getpid(), threading.Event()
        self._planned: deque[list[tuple[int, int]]] = (
            deque()
        )  # row group and row of each pack
        self._far = self._ahead = 0
        self._open, self._waiting = dict[int, _OpenGroup](), deque[int]()
        self._of_lane: dict[int, int] = {}
        last = np.arange(max(len(order) - order.lanes, 0), len(order))
        groups, lanes = order.locate(last)[0].tolist(), order.lane(last).tolist()
        self._ends = dict(
            zip(groups, lanes, strict=True)
        )  # row group -> lane that ends in it
        self._kept = 0  # bytes
        self._good: Packs | None = None

    def __iter__(self) -> Iterator[list[Packs]]:
        """Yields the packs of each batch, each as :class:`Packs` of one row."""
        try:
            if self._plan(1):
                # planned alone, so that it waits for nothing else
                yield self._next_batch()
            self._go_ahead()
            while self._planned or self._plan(_PLANNED):
                packs = self._next_batch()
                self._go_ahead()
                yield packs
        finally:
            self._stopping.set()
            for pool in (self._fetchers, self._decoder):
                if pool is not None:
                    pool.shutdown(wait=False, cancel_futures=True)

    def _plan(self, packs: int) -> bool:
        """Plans the next batches, of at least `packs` packs; returns False if there are
        none.
        """
        chunk: list[Int64] = []
        while (
            sum(map(len, chunk)) < packs
            and (batch := next(self._batches, None)) is not None
        ):
            chunk.append(np.asarray(batch, np.int64))
        if not chunk:
            return False
        indices = np.concatenate(chunk)
        groups, rows = self._order.locate(indices)
        self._open_groups(groups, self._order.lane(indices))
        places = zip(groups.tolist(), rows.tolist(), strict=True)
        self._planned += [list(itertools.islice(places, len(batch))) for batch in chunk]
        self._far += len(indices)
        return True

    def _open_groups(self, groups: Int64, lanes: Int64) -> None:
        """Opens new row groups, and drops those that all lanes have left."""
        distinct, first, counts = np.unique(
            groups, return_index=True, return_counts=True
        )
        for i in np.argsort(first).tolist():
            group = int(distinct[i])
            if group not in self._open:
                size = int(self._dataset.row_groups.tokens[group]) * TOKEN_BYTES
                keep = self._kept < KEPT_BYTES and self._ends.get(group, -1) in lanes
                self._kept += size * keep
                self._open[group] = _OpenGroup(size, lanes=int(keep))
                self._waiting.append(group)
            self._open[group].uses += int(counts[i])
        visited, last = np.unique(lanes[::-1], return_index=True)
        for lane, group in zip(
            visited.tolist(), groups[::-1][last].tolist(), strict=True
        ):
            left = self._of_lane.get(lane)
            if left != group:
                self._of_lane[lane] = group
                self._open[group].lanes += 1
                if left is not None:
                    self._open[left].lanes -= 1
                    self._close_if_done(left)

    def _go_ahead(self) -> None:
        """Submits row groups for reading, as far ahead as the settings allow."""
        while self._ahead < self._far_bytes:
            if self._waiting:
                self._start_reading(self._waiting.popleft())
            elif self._far >= _FAR or not self._plan(_PLANNED):
                return

    def _start_reading(self, group: int) -> None:
        entry = self._open.get(group)
        if entry is None or entry.is_started:
            return
        entry.is_started = True
        self._ahead += entry.bytes
        if self._dataset.is_mapped:
            # Decoding in a second thread would cost more in GIL switches than it saves.
            self._dataset.prefetch(group)
        elif os.getpid() == self._pid:  # a fork has none of the threads
            pool = self._fetchers
            fetched = None if pool is None else pool.submit(self._fetch, group)
            entry.job = self._decoder.submit(self._read, group, fetched)

    def _next_batch(self) -> list[Packs]:
        places = self._planned.popleft()
        self._far -= len(places)
        for group, _ in places:
            if not self._open[group].is_started:
                self._start_reading(group)
        return [self._take(group, row) for group, row in places]

    def _take(self, group: int, row: int) -> Packs:
        entry = self._open[group]
        if not entry.is_read:
            job, entry.job, entry.is_read = entry.job, None, True
            if job is None or os.getpid() != self._pid:
                entry.packs = self._read(group)
            else:
                entry.packs = job.result()
            self._ahead -= entry.bytes
            if self._config.on_error == "quarantine":
                self._good = entry.packs or self._good
        packs = self._stand_in(group) if entry.packs is None else entry.packs.row(row)
        entry.uses -= 1
        if not entry.uses:
            self._close_if_done(group)
        return packs

    def _close_if_done(self, group: int) -> None:
        entry = self._open[group]
        if not entry.uses and not entry.lanes:
            del self._open[group]

    def _fetch(self, group: int) -> Fetched:
        retries = self._dataset.location.retries
        refusals = retries.attempts or _REFUSALS
        return retrying(
            lambda: self._dataset.fetch(group), retries, refusals, self._pause
        )

    def _pause(self, seconds: float) -> bool:
        """Waits; returns True if results are not needed any more."""
        end = time.monotonic() + seconds
        # At exit, when the main thread is over, the interpreter waits for these
        # threads.
        while threading.main_thread().is_alive() and time.monotonic() < end:
            if self._stopping.wait(min(0.5, seconds)):
                return True
        return not threading.main_thread().is_alive()

    def _read(self, group: int, fetched: Future[Fetched] | None = None) -> Packs | None:
        """Returns a row group, from its `fetched` bytes if given; None if it is
        quarantined.
        """
        try:
            with contextlib.suppress(
                IntegrityError
            ):  # bytes may be damaged on their way
                data = self._fetch(group) if fetched is None else fetched.result()
                return self._dataset.decode(group, data)
            try:
                return self._dataset.decode(group, self._fetch(group))
            except IntegrityError as error:
                shard = self._dataset.manifest.shards[
                    self._dataset.row_groups.shard[group]
                ]
                version = self._dataset.location.object_version(shard.path)
                error.add_note(f"Fetched 2 times{f' of {version}' if version else ''}.")
                raise
        except (StorageError, IntegrityError) as error:
            if self._config.on_error != "quarantine":
                raise
            log.warning("left out: %s", message_with_notes(error))
            return None

    def _stand_in(self, group: int) -> Packs:
        """Returns any readable pack, in place of an unreadable one; it has no weight in
        losses.
        """
        self._quarantined.add(group)
        if self._good is None:
            groups = map(self._read, range(len(self._dataset.group_rows)))
            self._good = next((packs for packs in groups if packs is not None), None)
        if self._good is None:
            where = self._dataset.url
            raise IntegrityError(
                sentence(where, "at least one row group must be readable", "none")
            )
        return replace(self._good.row(0), stand_in=True)
