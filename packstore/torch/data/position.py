"""The position in an epoch, as a small value that can be saved.

Optimizer steps are yielded in the global order of packs, so a position is mostly one
number, `next`. Inside a step that is balanced over the ranks, packs are yielded in
another order: the position then also has the number of yielded batches, and the
settings that define them (`cut`). If such a step goes on with other settings, the packs
that were yielded are listed one by one (`yielded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import get_worker_info

from packstore.errors import CompatibilityError, sentence
from packstore.format.arrays import Int64

_NO_PACKS = np.empty(0, np.int64)

OTHER_DATASET = (
    "Open the dataset that it was taken from, before an append by "
    "packstore.open(url, version=…), or start anew"
)
"""Remedy for a state of another dataset, or of another version of it."""


def stale_state_error(
    rule: str,
    actual: str,
    remedy: str = "Load it into the dataset, seed and lanes that it was taken from, or "
    "start anew",
) -> CompatibilityError:
    """Return the error for a state that does not fit the dataset."""
    return CompatibilityError(
        sentence("loader state", rule=rule, found=actual, remedy=remedy)
    )


def _no_packs() -> Int64:
    return _NO_PACKS


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """The packs of an epoch that were yielded, on all ranks.

    Attributes:
        next: all packs before this index in the global order were yielded.
        step: number of optimizer steps yielded.
        yielded: int64, ascending, all above `next`: further packs that were yielded.
            Non-empty only after a balanced step was interrupted and resumed with other
            settings.
        batches: number of batches that each rank yielded of the step that begins at
            this position.
        cut: the settings and number of ranks that define the batches of that step;
            empty without `batches`.
        shortfall: requested minus actual examples of the steps before this position;
            the next steps make up for it.
    """

    next: int = 0
    step: int = 0
    yielded: Int64 = field(default_factory=_no_packs)
    batches: int = 0
    cut: Mapping[str, Any] = field(default_factory=dict)
    shortfall: int = 0

    def to_state(self) -> dict[str, Any]:
        """Return JSON values; fields at their default are omitted."""
        state: dict[str, Any] = {"next": self.next, "step": self.step}
        if len(self.yielded):
            mask = np.zeros(int(self.yielded[-1]) - self.next + 1, np.bool_)
            mask[self.yielded - self.next] = True
            state["given"] = np.packbits(mask).tobytes().hex()
        if self.batches:
            state["batches"] = self.batches
            state["cut"] = dict(self.cut)
        if self.shortfall:
            state["shortfall"] = self.shortfall
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any], num_packs: int) -> Self:
        """Parse the position in `state`, in an epoch of `num_packs` packs.

        Raises:
            CompatibilityError: a value is of the wrong type or out of range.
        """
        next_pack = state.get("next")
        if not isinstance(next_pack, int) or not 0 <= next_pack <= num_packs:
            raise stale_state_error(f"next must lie in 0..{num_packs}", str(next_pack))

        step = state.get("step", 0)
        batches = state.get("batches", 0)
        if not (_is_natural(step) and _is_natural(batches)):
            rule = "step and batches must be whole numbers from 0"
            raise stale_state_error(rule, f"{step} and {batches}")

        shortfall = state.get("shortfall", 0)
        if not isinstance(shortfall, int):
            raise stale_state_error("shortfall must be a whole number", repr(shortfall))

        cut = state.get("cut", {})
        if not isinstance(cut, Mapping) or bool(cut) != bool(batches):
            rule = "cut must hold the settings of a step that was partly yielded"
            raise stale_state_error(rule, repr(cut))

        return cls(
            next=next_pack,
            step=step,
            yielded=_parse_mask(state.get("given", ""), next_pack, num_packs),
            batches=batches,
            cut=cut,
            shortfall=shortfall,
        )


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _parse_mask(mask: Any, next_pack: int, num_packs: int) -> Int64:
    """Return the packs of a hexadecimal bit mask; its first bit is `next_pack`."""
    try:
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(mask), np.uint8))
    except (TypeError, ValueError) as error:
        rule = "given must be bits in hexadecimal"
        raise stale_state_error(rule, repr(mask)) from error

    packs = next_pack + np.flatnonzero(bits)
    is_inside = (packs > next_pack) & (packs < num_packs)
    if not is_inside.all():
        rule = f"given must name packs between next and {num_packs}"
        raise stale_state_error(rule, repr(mask))
    return packs


class RemainingPacks:
    """The packs of an epoch that were not yet yielded at a position, in global order.

    A place is an index into them: after packs 0, 1 and 3 were yielded, place 0 is pack
    2, and place 1 is pack 4. Of an incomplete step, all packs remain.

    Args:
        num_packs: number of packs of the epoch.
        position: the position.
    """

    def __init__(self, num_packs: int, position: Position) -> None:
        self._num_packs = num_packs
        self._first = position.next
        self._yielded = position.yielded

        # Packs up to the last one that was yielded out of order: only those in the
        # gaps remain. Behind it, index and place differ by a constant.
        end = self._first
        self._gaps = _NO_PACKS
        if len(self._yielded):
            end = int(self._yielded[-1]) + 1
            self._gaps = np.setdiff1d(np.arange(self._first, end), self._yielded)
        self._shift = end - len(self._gaps)

    def __len__(self) -> int:
        return self._num_packs - self._first - len(self._yielded)

    def __getitem__(self, places: Int64) -> Int64:
        """Return the global indices of the packs at `places`, int64 `[n]`."""
        indices: Int64 = places + self._shift
        if len(self._gaps):
            is_in_gap = places < len(self._gaps)
            indices[is_in_gap] = self._gaps[places[is_in_gap]]
        return indices

    def position_at(self, place: int, step: int, shortfall: int = 0) -> Position:
        """Return the position after `step` steps, with all packs before `place`."""
        if place >= len(self):
            return Position(self._num_packs, step)
        if place >= len(self._gaps):
            return Position(place + self._shift, step, shortfall=shortfall)
        next_pack = int(self._gaps[place])
        yielded = self._yielded[self._yielded > next_pack]
        return Position(next_pack, step, yielded, shortfall=shortfall)

    def position_without(
        self, places: Int64, step: int, shortfall: int = 0
    ) -> Position:
        """Return the position after `step` steps and the packs at `places`, in any
        order.
        """
        yielded = np.union1d(self._yielded, self[places])
        # Packs that follow the first one without a gap need no list.
        run = self._first + np.arange(len(yielded))
        run_length = int((yielded == run).sum())
        return Position(
            next=self._first + run_length,
            step=step,
            yielded=yielded[run_length:],
            shortfall=shortfall,
        )


_MAX_WORKERS = 1024

# Indices of the integers that a SharedStart keeps in shared memory.
_TIMES_SET = 0
_EPOCH = 1
_NEXT = 2
_NUM_YIELDED = 3


class SharedStart:
    """Epoch and position where the next iteration begins, shared with workers.

    An iteration, in whatever processes, takes the start once; the iteration after it
    begins at the start of the epoch. Numbers lie in shared memory, so that persistent
    workers, which outlive an iteration, see later calls of :meth:`set`.
    """

    def __init__(self) -> None:
        self._cells = shared_integers(4)
        # For each process that took the start, the number of processes of its
        # iteration; else 0. Index 0 is the main process, 1 + i is worker i.
        self._taken_by = shared_integers(1 + _MAX_WORKERS)
        # In this process: the start, and how many calls of `set` it has seen.
        self._position = Position()
        self._times_seen = 0
        self._is_set_by_worker = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cells.share_memory_()  # type: ignore[no-untyped-call]
        self._taken_by.share_memory_()  # type: ignore[no-untyped-call]

    def set(self, epoch: int, position: Position) -> None:
        """Begin the next iteration at `position` of `epoch`.

        In a worker, only that worker's.
        """
        self._position = position
        self._is_set_by_worker = get_worker_info() is not None
        if not self._is_set_by_worker:
            self._cells[_EPOCH] = epoch
            self._cells[_NEXT] = position.next
            self._cells[_NUM_YIELDED] = len(position.yielded)
            self._taken_by[:] = 0
            self._cells[_TIMES_SET] += 1
        self._times_seen = self.times_set

    @property
    def times_set(self) -> int:
        """Number of calls of :meth:`set` in the process that made this object."""
        return int(self._cells[_TIMES_SET])

    def new_epoch(self) -> int | None:
        """Return the epoch if another process set it since the last iteration."""
        if self._is_set_elsewhere():
            return int(self._cells[_EPOCH])
        return None

    def peek(self) -> Position:
        """Return the position where the next iteration begins."""
        if self._is_set_by_worker and not self._is_set_elsewhere():
            return self._position
        if self._is_taken():
            return Position()
        if not self._is_set_elsewhere():
            return self._position
        # The main process set the start while this persistent worker was running. Of
        # the position, it sees only the numbers in shared memory.
        if int(self._cells[_NUM_YIELDED]):
            raise CompatibilityError(
                "loader state: workers that live on cannot take up a balanced step in "
                "its middle. Make a new DataLoader after load_state_dict."
            )
        return Position(int(self._cells[_NEXT]))

    def take(self) -> Position:
        """Return the start of this iteration; let the next one begin anew."""
        position = self.peek()
        process, num_processes = _process_of_iteration()
        self._taken_by[process] = num_processes
        self._position = Position()
        self._times_seen = self.times_set
        self._is_set_by_worker = False
        return position

    def _is_taken(self) -> bool:
        """Return True if this process took the start, or another iteration did.

        Another iteration is one with another number of processes.
        """
        process, num_processes = _process_of_iteration()
        if self._taken_by[process]:
            return True
        is_of_another = (self._taken_by != 0) & (self._taken_by != num_processes)
        return bool(is_of_another.any())

    def _is_set_elsewhere(self) -> bool:
        """Return True if another process has called `set` since this one looked."""
        return self.times_set != self._times_seen


def _process_of_iteration() -> tuple[int, int]:
    """Return the index of this process in its iteration, and their number.

    The main process has index 0; a loader without workers runs in it alone.
    """
    worker = get_worker_info()
    if worker is None:
        return 0, 1
    return 1 + worker.id, 1 + worker.num_workers


def shared_integers(n: int) -> torch.Tensor:
    """Return `n` int64 zeros in memory shared with forked and spawned processes."""
    return torch.zeros(n, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call, no-any-return]
