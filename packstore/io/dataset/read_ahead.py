"""Yields packs in a given order; threads fetch their row groups ahead.

The order is fixed, so positions are planned well before their packs are yielded, and
their row groups are submitted to threads in the order of first use. A lane
(:mod:`packstore.io.dataset.order`) reads one row group after another; a row group is
dropped when its lane has moved on to the next one. A row group in which another lane
ends is kept for that lane, as long as such row groups take less than `POOL_BYTES`.

With ``on_error="quarantine"``, a row group that cannot be read is *quarantined*: each
of its packs is replaced by a *stand-in*, a readable pack without weight in losses, so
that steps and ranks stay in line.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from packstore.config import ReadConfig
from packstore.errors import IntegrityError, StorageError, message_with_notes, sentence
from packstore.format.arrays import TOKEN_BYTES, Int64, Packs
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.order import PackOrder
from packstore.io.dataset.reader import POOL_BYTES, GroupBytes
from packstore.io.store.retry import retrying

log = logging.getLogger("packstore")

_PLAN_PACKS = 512
"""Packs looked up in the order at once."""

_MAX_PLANNED = 8 * _PLAN_PACKS
"""Maximum packs planned ahead."""

_MAX_REFUSALS = 4
"""Maximum attempts at an error that a retry seldom cures, such as a refused permission:
access keys may be renewed during a training.
"""


@dataclass(slots=True)
class _OpenGroup:
    """A row group with planned packs, or with a lane in it."""

    num_bytes: int  # approximate, decoded
    is_started: bool = False  # reading has started
    # reads it in a thread; None: it is read when its first pack is due
    job: Future[Packs | None] | None = None
    is_read: bool = False  # its first pack was due
    packs: Packs | None = None  # None if it is not read yet, or quarantined
    pending_packs: int = 0  # planned, and not yet yielded
    num_lanes: int = 0  # lanes that have not moved on to another row group


class ReadAhead:
    """Iterates over the packs at given positions, batch by batch.

    Args:
        dataset: the dataset.
        order: order of its packs.
        batches: positions in the order, int64 `[n]` for each batch.
        config: settings of reading.
        quarantined: a set; unreadable row groups are added, if the settings allow
            stand-ins.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: PackOrder,
        batches: Iterable[Int64],
        config: ReadConfig,
        quarantined: set[int],
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._batches = iter(batches)
        self._reader = _GroupReader(dataset, config, quarantined)
        is_local = dataset.location.local_path is not None
        self._max_bytes_ahead = config.ahead(is_local)
        self._bytes_ahead = 0  # of row groups that are started and not read
        # Row group and row of each pack of the planned batches.
        self._planned: deque[list[tuple[int, int]]] = deque()
        self._num_planned = 0  # packs
        self._open: dict[int, _OpenGroup] = {}
        self._to_start: deque[int] = deque()  # row groups, in the order of first use
        self._group_of_lane: dict[int, int] = {}
        self._lane_ending_in = _last_groups(order)
        self._shared_bytes = 0  # of row groups that stay for a lane that ends in them

    def __iter__(self) -> Iterator[list[Packs]]:
        """Yield the packs of each batch, each as :class:`Packs` of one row.

        Raises:
            StorageError: a row group cannot be fetched.
            IntegrityError: a row group is damaged.
        """
        try:
            # The first batch is planned by itself, so that it waits for nothing else.
            if self._plan(1):
                yield self._next_batch()
            self._start_ahead()
            while self._planned or self._plan(_PLAN_PACKS):
                packs = self._next_batch()
                self._start_ahead()
                yield packs
        finally:
            self._reader.close()

    # Planning

    def _plan(self, min_packs: int) -> bool:
        """Plan batches of at least `min_packs` packs; return False if none follows."""
        batches = self._take_batches(min_packs)
        if not batches:
            return False

        positions = np.concatenate(batches)
        groups, rows = self._order.locate(positions)
        self._open_groups(groups, self._order.lane(positions))
        group_rows = list(zip(groups.tolist(), rows.tolist(), strict=True))
        start = 0
        for batch in batches:
            end = start + len(batch)
            self._planned.append(group_rows[start:end])
            start = end
        self._num_planned += len(positions)
        return True

    def _take_batches(self, min_packs: int) -> list[Int64]:
        batches: list[Int64] = []
        num_packs = 0
        while num_packs < min_packs:
            batch = next(self._batches, None)
            if batch is None:
                break
            batches.append(np.asarray(batch, np.int64))
            num_packs += len(batch)
        return batches

    def _open_groups(self, groups: Int64, lanes: Int64) -> None:
        """Open the row groups of planned packs, and drop those that all lanes have
        left.

        Args:
            groups: int64 `[n]`, row group of each planned pack.
            lanes: int64 `[n]`, lane of each planned pack.
        """
        distinct_groups, first_uses, counts = np.unique(
            groups, return_index=True, return_counts=True
        )
        for i in np.argsort(first_uses).tolist():
            group = int(distinct_groups[i])
            if group not in self._open:
                self._open[group] = self._new_group(group, lanes)
                self._to_start.append(group)
            self._open[group].pending_packs += int(counts[i])
        self._move_lanes(groups, lanes)

    def _new_group(self, group: int, planned_lanes: Int64) -> _OpenGroup:
        tokens = int(self._dataset.row_groups.tokens[group])
        entry = _OpenGroup(num_bytes=tokens * TOKEN_BYTES)
        # A lane that ends in this row group comes back to it at the end of the epoch.
        # It counts as in it from now on, so that the row group stays open and is not
        # read twice. This is for lanes with packs in this plan only: a rank may have
        # no packs of the others.
        ending_lane = self._lane_ending_in.get(group, -1)
        is_shared = ending_lane in planned_lanes
        if is_shared and self._shared_bytes < POOL_BYTES:
            self._shared_bytes += entry.num_bytes
            entry.num_lanes = 1
        return entry

    def _move_lanes(self, groups: Int64, lanes: Int64) -> None:
        """Move lanes to the row groups of their last planned packs."""
        # `unique` returns the first pack of each lane: in reverse order, its last pack.
        moving_lanes, last_packs = np.unique(lanes[::-1], return_index=True)
        last_groups = groups[::-1][last_packs]
        for lane, group in zip(
            moving_lanes.tolist(), last_groups.tolist(), strict=True
        ):
            previous_group = self._group_of_lane.get(lane)
            if group == previous_group:
                continue
            self._group_of_lane[lane] = group
            self._open[group].num_lanes += 1
            if previous_group is not None:
                self._open[previous_group].num_lanes -= 1
                self._drop_if_done(previous_group)

    def _drop_if_done(self, group: int) -> None:
        entry = self._open[group]
        if not entry.pending_packs and not entry.num_lanes:
            del self._open[group]

    # Reading

    def _start_ahead(self) -> None:
        """Start reading row groups, as far ahead as the settings allow."""
        while self._bytes_ahead < self._max_bytes_ahead:
            if self._to_start:
                self._start(self._to_start.popleft())
                continue
            if self._num_planned >= _MAX_PLANNED:
                return
            has_planned = self._plan(_PLAN_PACKS)
            if not has_planned:
                return

    def _start(self, group: int) -> None:
        entry = self._open.get(group)
        if entry is None or entry.is_started:
            return
        entry.is_started = True
        self._bytes_ahead += entry.num_bytes
        entry.job = self._reader.start(group)

    def _next_batch(self) -> list[Packs]:
        group_rows = self._planned.popleft()
        self._num_planned -= len(group_rows)
        for group, _ in group_rows:
            if not self._open[group].is_started:
                self._start(group)
        return [self._take_pack(group, row) for group, row in group_rows]

    def _take_pack(self, group: int, row: int) -> Packs:
        entry = self._open[group]
        if not entry.is_read:
            entry.is_read = True
            self._bytes_ahead -= entry.num_bytes
            entry.packs = self._reader.finish(group, entry.job)
            entry.job = None

        if entry.packs is None:
            pack = self._reader.stand_in(group)
        else:
            pack = entry.packs.row(row)
        entry.pending_packs -= 1
        if not entry.pending_packs:
            self._drop_if_done(group)
        return pack


def _last_groups(order: PackOrder) -> dict[int, int]:
    """Return the last row group of each lane -> the lane.

    If several lanes end in one row group, it has only one of them.
    """
    num_packs = len(order)
    # The order takes packs from the lanes in turn, so its last packs are the last ones
    # of each lane.
    last_packs = np.arange(max(num_packs - order.lanes, 0), num_packs)
    groups, _ = order.locate(last_packs)
    lanes = order.lane(last_packs)
    return dict(zip(groups.tolist(), lanes.tolist(), strict=True))


class _GroupReader:
    """Reads row groups in threads, again if bytes were damaged on their way.

    Args:
        dataset: the dataset.
        config: settings of reading.
        quarantined: a set; unreadable row groups are added.
    """

    def __init__(
        self, dataset: Dataset, config: ReadConfig, quarantined: set[int]
    ) -> None:
        self._dataset = dataset
        self._may_quarantine = config.on_error == "quarantine"
        self._quarantined = quarantined
        self._readable_packs: Packs | None = None
        # One thread decodes, so that its allocations reuse one heap and memory stays
        # small.
        self._decoder = ThreadPoolExecutor(1, "packstore-decode")
        self._fetchers: ThreadPoolExecutor | None = None
        if dataset.location.local_path is None:
            self._fetchers = ThreadPoolExecutor(config.requests, "packstore-fetch")
        self._stopping = threading.Event()
        self._pid = os.getpid()

    @property
    def _is_forked(self) -> bool:
        """True in a fork of the process, which has none of the threads."""
        return os.getpid() != self._pid

    def start(self, group: int) -> Future[Packs | None] | None:
        """Start reading a row group; return None if :meth:`finish` should read it."""
        if self._dataset.is_mapped:
            # Decoding in a second thread would cost more in GIL switches than it saves.
            self._dataset.prefetch(group)
            return None
        if self._is_forked:
            return None

        data = None
        if self._fetchers is not None:
            data = self._fetchers.submit(self._fetch, group)
        return self._decoder.submit(self._read, group, data)

    def finish(self, group: int, job: Future[Packs | None] | None) -> Packs | None:
        """Return a row group; None if it is quarantined.

        Args:
            group: number of the row group.
            job: result of :meth:`start`.
        """
        if job is None or self._is_forked:
            packs = self._read(group)
        else:
            packs = job.result()
        is_readable = packs is not None and len(packs) > 0
        if is_readable and self._may_quarantine:
            self._readable_packs = packs
        return packs

    def stand_in(self, group: int) -> Packs:
        """Return a readable pack, in place of a pack of an unreadable row group; it has
        no weight in losses.

        Raises:
            IntegrityError: no row group can be read.
        """
        self._quarantined.add(group)
        if self._readable_packs is None:
            self._readable_packs = self._first_readable()
        return replace(self._readable_packs.row(0), stand_in=True)

    def _first_readable(self) -> Packs:
        for group in range(len(self._dataset.row_groups)):
            packs = self._read(group)
            if packs is not None:
                return packs
        raise IntegrityError(
            sentence(
                self._dataset.url,
                rule="at least one row group must be readable",
                found="none",
            )
        )

    def close(self) -> None:
        """Stop the threads, without waiting for them."""
        self._stopping.set()
        if self._fetchers is not None:
            self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._decoder.shutdown(wait=False, cancel_futures=True)

    def _read(self, group: int, data: Future[GroupBytes] | None = None) -> Packs | None:
        """Return a row group; None if it is quarantined.

        Args:
            group: number of the row group.
            data: fetches its bytes in another thread.
        """
        try:
            return self._read_verified(group, data)
        except (StorageError, IntegrityError) as error:
            if not self._may_quarantine:
                raise
            log.warning("left out: %s", message_with_notes(error))
            return None

    def _read_verified(self, group: int, data: Future[GroupBytes] | None) -> Packs:
        try:
            group_bytes = self._fetch(group) if data is None else data.result()
            return self._dataset.decode(group, group_bytes)
        except IntegrityError:
            pass  # bytes may be damaged on their way, so they are fetched again

        try:
            return self._dataset.decode(group, self._fetch(group))
        except IntegrityError as error:
            version = self._object_version(group)
            of_version = f" of {version}" if version else ""
            error.add_note(f"Fetched 2 times{of_version}.")
            raise

    def _object_version(self, group: int) -> str:
        """Return the version of a row group's shard in the store, if the store has
        versions.
        """
        shard = self._dataset.row_groups.shard[group]
        path = self._dataset.manifest.shards[shard].path
        return self._dataset.location.object_version(path)

    def _fetch(self, group: int) -> GroupBytes:
        retries = self._dataset.location.retries
        # If the user limits attempts, the limit is for refusals, too; by default it is
        # None.
        max_refusals = retries.attempts or _MAX_REFUSALS
        return retrying(
            partial(self._dataset.fetch, group),
            retries,
            max_refusals=max_refusals,
            pause=self._pause,
        )

    def _pause(self, seconds: float) -> bool:
        """Wait; return True if results are not needed any more."""
        end = time.monotonic() + seconds
        # At exit, the interpreter waits for these threads: they give up as soon as the
        # main thread is over.
        while threading.main_thread().is_alive() and time.monotonic() < end:
            if self._stopping.wait(min(0.5, seconds)):
                return True
        return not threading.main_thread().is_alive()
