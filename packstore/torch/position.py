"""Where an epoch stands: which packs were given out, as a small value that can be saved.

Whole optimizer steps are given out in global order, so that one number tells most of it. Inside a
step packs may go out in another order (balanced, or largest first): then the position names the
step, how it is cut, and how many of its batches are out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import get_worker_info

from packstore.errors import CompatibilityError, sentence
from packstore.records import Int64

_NONE = np.empty(0, np.int64)
_MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """The packs of an epoch that were given out, on all ranks.

    Attributes:
        next: all packs before this global index are out.
        step: optimizer steps that are out.
        given: int64, ascending, all above `next`: further packs that are out. Only after a balanced
            step was left in its middle and taken up with other settings.
        batches: of the step that begins here, the batches that are out on every rank.
        cut: how that step is cut: the settings and the number of ranks; empty without `batches`.
    """

    next: int = 0
    step: int = 0
    given: Int64 = field(default_factory=lambda: _NONE)
    batches: int = 0
    cut: Mapping[str, Any] = field(default_factory=dict)

    def to_state(self) -> dict[str, Any]:
        """JSON values; what is as at the beginning of a step is left out."""
        state: dict[str, Any] = {"next": self.next, "step": self.step}
        if len(self.given):
            mask = np.zeros(int(self.given[-1]) - self.next + 1, np.bool_)
            mask[self.given - self.next] = True
            state["given"] = np.packbits(mask).tobytes().hex()
        if self.batches:
            state |= {"batches": self.batches, "cut": dict(self.cut)}
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any], packs: int) -> Self:
        """The position in `state`, in an epoch of `packs` packs.

        Raises:
            CompatibilityError: a value is missing, of the wrong type or out of range.
        """
        position, step, batches = state.get("next"), state.get("step", 0), state.get("batches", 0)
        cut, mask = state.get("cut", {}), state.get("given", "")
        if not all(isinstance(x, int) and x >= 0 for x in (step, batches)):
            raise stale("step and batches must be whole numbers from 0", f"{step} and {batches}")
        if not isinstance(position, int) or not 0 <= position <= packs:
            raise stale(f"next must lie in 0..{packs}", str(position))
        if not isinstance(cut, Mapping) or bool(cut) != bool(batches):
            raise stale("cut must be the settings of a step that is partly out", repr(cut))
        try:
            bits = np.unpackbits(np.frombuffer(bytes.fromhex(mask), np.uint8))
        except (TypeError, ValueError) as error:
            raise stale("given must be bits in hexadecimal", repr(mask)) from error
        given = position + np.flatnonzero(bits)
        if len(given) and (given[0] == position or given[-1] >= packs):
            raise stale(f"given must name packs between next and {packs}", repr(mask))
        return cls(position, step, given, batches, cut)


class Unseen:
    """The packs of an epoch that are still to come, in order: ``0 .. len(self) - 1``.

    Args:
        packs: of the epoch.
        position: what is out; batches of a step that is partly out count as still to come.
    """

    def __init__(self, packs: int, position: Position) -> None:
        self.packs, self.first, self._given = packs, position.next, position.given
        end = int(self._given[-1]) + 1 if len(self._given) else self.first
        self._gaps = np.setdiff1d(np.arange(self.first, end), self._given) if end else _NONE
        self._shift = end - len(self._gaps)

    def __len__(self) -> int:
        return self.packs - self.first - len(self._given)

    def __getitem__(self, places: Int64) -> Int64:
        """Global indices of the packs at `places`; past the end, the epoch begins again."""
        indices: Int64 = places + self._shift
        if not len(self._gaps) and (not len(indices) or indices.max() < self.packs):
            return indices
        if len(self._gaps):
            head = places < len(self._gaps)
            indices[head] = self._gaps[places[head]]
        beyond = places >= len(self)
        if beyond.any():
            indices[beyond] = (places[beyond] - len(self)) % self.packs
        return indices

    def after(self, place: int, step: int) -> Position:
        """The position when all before `place` are out, `step` steps in all."""
        if place >= len(self):
            return Position(self.packs, step)
        if place >= len(self._gaps):
            return Position(place + self._shift, step)
        first = int(self._gaps[place])
        return Position(first, step, self._given[self._given > first])

    def without(self, places: Int64, step: int) -> Position:
        """The position when those at `places` are out, in any order, `step` steps in all."""
        given = np.union1d(self._given, self[places[places < len(self)]])
        run = int((given == self.first + np.arange(len(given))).sum())
        return Position(self.first + run, step, given[run:])


class SharedStart:
    """Epoch and position at which the next iteration begins, as worker processes see them too.

    Lies in shared memory, so that workers that live on notice :meth:`set`. A start is taken by one
    iteration, whichever processes make it; the iteration after it begins the epoch anew.
    """

    def __init__(self) -> None:
        # How often it was set, the epoch, next, and how many packs are given out beyond; then, for
        # each process, what took the start: 0 nothing yet, else an iteration of so many processes.
        self._cells = shared_integers(5 + _MAX_WORKERS)
        self._seen, self._position, self._of_worker = 0, Position(), False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        share(self._cells)

    def set(self, epoch: int, position: Position) -> None:
        """The next iteration begins at `position` of `epoch`; in a worker, that worker's only."""
        self._position, self._of_worker = position, get_worker_info() is not None
        if not self._of_worker:
            self._cells[1:4] = torch.tensor([epoch, position.next, len(position.given)])
            self._cells[4:] = 0
            self._cells[0] += 1
        self._seen = self.times_set

    @property
    def times_set(self) -> int:
        """How often :meth:`set` was called, in the process that made this."""
        return int(self._cells[0])

    def new_epoch(self) -> int | None:
        """The epoch, if another process has set it since the last iteration of this one."""
        return int(self._cells[1]) if self._is_news() else None

    def peek(self) -> Position:
        """Where the next iteration begins."""
        if self._of_worker and not self._is_news():
            return self._position
        slot, size = _process()
        claims = self._cells[4:]
        if claims[slot] or ((claims != 0) & (claims != size)).any():
            return Position()
        if not self._is_news():
            return self._position
        if int(self._cells[3]):
            must = "workers that live on cannot take up a balanced step in its middle"
            do = "Make a new DataLoader after load_state_dict"
            raise CompatibilityError(sentence("loader state", must, "", do))
        return Position(int(self._cells[2]))

    def take(self) -> Position:
        """Where this iteration begins; the next one begins the epoch."""
        position = self.peek()
        slot, size = _process()
        self._cells[4 + slot] = size
        self._seen, self._position, self._of_worker = self.times_set, Position(), False
        return position

    def _is_news(self) -> bool:
        return self.times_set != self._seen


def _process() -> tuple[int, int]:
    """Place of this process among those of its iteration, which a worker's main process leads."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (1 + worker.id, 1 + worker.num_workers)


def shared_integers(n: int) -> torch.Tensor:
    """`n` zeros, int64, that forked and spawned processes share with this one."""
    cells = torch.zeros(n, dtype=torch.int64)
    share(cells)
    return cells


def share(cells: torch.Tensor) -> None:
    """Moves `cells` to shared memory, unless it lies there."""
    cells.share_memory_()  # type: ignore[no-untyped-call]


def stale(must: str, found: str) -> CompatibilityError:
    """The error for a state that does not belong."""
    do = "Load it into the dataset, seed and lanes that it was taken from, or start anew"
    return CompatibilityError(sentence("loader state", must, found, do))
