"""The position in an epoch, as a small value that can be saved.

Optimizer steps are yielded in global order, so one number says most of it. Inside a
balanced step packs are yielded in another order: the position then names the step, the
settings that define its batches, and how many of them were yielded.
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

_NONE = np.empty(0, np.int64)
_MAX_WORKERS = 1024
_TIMES_SET, _EPOCH, _NEXT, _YIELDED = range(4)  # cells of a shared start

OTHER_DATASET = (
    "Open the dataset that it was taken from, before an append by "
    "packstore.open(url, version=…), or start anew"
)
"""Remedy for a state of another dataset, or of another version of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """The packs of an epoch that were yielded, on all ranks.

    Attributes:
        next: all packs before this global index were yielded.
        step: number of optimizer steps yielded.
        yielded: int64, ascending, all above `next`: further packs that were. Non-empty
            only after a balanced step was interrupted and resumed with other settings.
        batches: batches yielded on every rank of the step that begins here.
        cut: the settings and number of ranks that define that step's batches; empty
            without `batches`.
        shortfall: examples that the steps before this position are short of the
            requested ones; below 0: in excess. The next steps make up for them.
    """

    next: int = 0
    step: int = 0
    yielded: Int64 = field(default_factory=lambda: _NONE)
    batches: int = 0
    cut: Mapping[str, Any] = field(default_factory=dict)
    shortfall: int = 0

    def to_state(self) -> dict[str, Any]:
        """Returns JSON values; fields at their default are omitted."""
        state: dict[str, Any] = {"next": self.next, "step": self.step}
        if len(self.yielded):
            mask = np.zeros(int(self.yielded[-1]) - self.next + 1, np.bool_)
            mask[self.yielded - self.next] = True
            state["given"] = np.packbits(mask).tobytes().hex()
        if self.batches:
            state |= {"batches": self.batches, "cut": dict(self.cut)}
        if self.shortfall:
            state["shortfall"] = self.shortfall
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any], packs: int) -> Self:
        """Parses the position in `state`, in an epoch of `packs` packs."""
        position, step, batches = (
            state.get("next"),
            state.get("step", 0),
            state.get("batches", 0),
        )
        cut, mask = state.get("cut", {}), state.get("given", "")
        shortfall = state.get("shortfall", 0)
        if not all(isinstance(x, int) and x >= 0 for x in (step, batches)):
            raise stale_state_error(
                "step and batches must be whole numbers from 0", f"{step} and {batches}"
            )
        if not isinstance(shortfall, int):
            raise stale_state_error("shortfall must be a whole number", repr(shortfall))
        if not isinstance(position, int) or not 0 <= position <= packs:
            raise stale_state_error(f"next must lie in 0..{packs}", str(position))
        if not isinstance(cut, Mapping) or bool(cut) != bool(batches):
            raise stale_state_error(
                "cut must be the settings of a step that is partly out", repr(cut)
            )
        try:
            bits = np.unpackbits(np.frombuffer(bytes.fromhex(mask), np.uint8))
        except (TypeError, ValueError) as error:
            raise stale_state_error(
                "given must be bits in hexadecimal", repr(mask)
            ) from error
        yielded = position + np.flatnonzero(bits)
        if len(yielded) and (yielded[0] == position or yielded[-1] >= packs):
            raise stale_state_error(
                f"given must name packs between next and {packs}", repr(mask)
            )
        return cls(position, step, yielded, batches, cut, shortfall)


class Unseen:
    """The packs of an epoch not yet yielded, in order, and those of an
    incomplete step.
    """

    def __init__(self, packs: int, position: Position) -> None:
        self.packs, self.first, self._yielded = packs, position.next, position.yielded
        end = int(self._yielded[-1]) + 1 if len(self._yielded) else self.first
        self._gaps = (
            np.setdiff1d(np.arange(self.first, end), self._yielded) if end else _NONE
        )
        self._shift = end - len(self._gaps)

    def __len__(self) -> int:
        return self.packs - self.first - len(self._yielded)

    def __getitem__(self, places: Int64) -> Int64:
        """Returns the global indices of the packs at `places`."""
        indices: Int64 = places + self._shift
        if len(self._gaps):
            head = places < len(self._gaps)
            indices[head] = self._gaps[places[head]]
        return indices

    def after(self, place: int, step: int, shortfall: int = 0) -> Position:
        """Return the position after all packs before `place` and `step` steps were
        yielded.
        """
        if place >= len(self):
            return Position(self.packs, step)
        if place >= len(self._gaps):
            return Position(place + self._shift, step, shortfall=shortfall)
        first = int(self._gaps[place])
        yielded = self._yielded[self._yielded > first]
        return Position(first, step, yielded, shortfall=shortfall)

    def without(self, places: Int64, step: int, shortfall: int = 0) -> Position:
        """Return the position after the packs at `places` and `step` steps were
        yielded.
        """
        yielded = np.union1d(self._yielded, self[places])
        run = int((yielded == self.first + np.arange(len(yielded))).sum())
        return Position(self.first + run, step, yielded[run:], shortfall=shortfall)


class SharedStart:
    """Epoch and position where the next iteration begins, in memory shared with
    workers.

    One iteration uses a start, in any process; the next one begins at the start of the
    epoch.
    """

    def __init__(self) -> None:
        self._cells = shared_integers(4)
        # Of each process: 0, or the number of processes of the iteration that used the
        # start.
        self._used_by = shared_integers(1 + _MAX_WORKERS)
        self._seen, self._position, self._of_worker = 0, Position(), False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for cells in (self._cells, self._used_by):
            cells.share_memory_()  # type: ignore[no-untyped-call]

    def set(self, epoch: int, position: Position) -> None:
        """Starts the next iteration at `position` of `epoch`; in a worker, for that
        worker only.
        """
        self._position, self._of_worker = position, get_worker_info() is not None
        if not self._of_worker:
            self._cells[_EPOCH], self._cells[_NEXT] = epoch, position.next
            self._cells[_YIELDED] = len(position.yielded)
            self._used_by[:] = 0
            self._cells[_TIMES_SET] += 1
        self._seen = self.times_set

    @property
    def times_set(self) -> int:
        """Number of calls of :meth:`set` in the process that made this object."""
        return int(self._cells[_TIMES_SET])

    def new_epoch(self) -> int | None:
        """Returns the epoch if another process set it since this process's last
        iteration.
        """
        return int(self._cells[_EPOCH]) if self._is_news() else None

    def peek(self) -> Position:
        """Returns the position where the next iteration begins."""
        if self._of_worker and not self._is_news():
            return self._position
        slot, size = _process()
        used_by = self._used_by
        if used_by[slot] or ((used_by != 0) & (used_by != size)).any():
            return Position()
        if not self._is_news():
            return self._position
        if int(self._cells[_YIELDED]):
            raise CompatibilityError(
                "loader state: workers that live on cannot take up a balanced step in "
                "its middle. "
                "Make a new DataLoader after load_state_dict."
            )
        return Position(int(self._cells[_NEXT]))

    def take(self) -> Position:
        """Returns the start of this iteration; the next one begins at the start of the
        epoch.
        """
        position = self.peek()
        slot, size = _process()
        self._used_by[slot] = size
        self._seen, self._position, self._of_worker = self.times_set, Position(), False
        return position

    def _is_news(self) -> bool:
        return self.times_set != self._seen


def _process() -> tuple[int, int]:
    """Index of this process among those of its iteration, and their number; the main
    one is 0.
    """
    worker = get_worker_info()
    return (0, 1) if worker is None else (1 + worker.id, 1 + worker.num_workers)


def shared_integers(n: int) -> torch.Tensor:
    """Returns `n` int64 zeros in memory shared with forked and spawned processes."""
    return torch.zeros(n, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def stale_state_error(
    rule: str,
    found: str,
    remedy: str = "Load it into the dataset, seed and lanes that it was taken from, or "
    "start anew",
) -> CompatibilityError:
    """Returns the error for a state that does not fit the dataset."""
    return CompatibilityError(sentence("loader state", rule, found, remedy))
