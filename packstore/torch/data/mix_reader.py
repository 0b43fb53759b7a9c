"""Reads a mix: each source through its own read-ahead, merged in the order of the mix."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from packstore.format.arrays import Int64, Packs
from packstore.torch.schedule.stream import PackStream

LOOK_AHEAD = 1024
"""Batches to search for a source's next packs. Beyond them its reader is reopened, which costs
little for such a rare source."""

_CHUNK = 16
_USE_SHIFT = 32
_OPEN = 4

Key = tuple[int, int]
"""A source, and the number of completed passes over it."""


@dataclass(slots=True)
class _Part:
    """A batch's packs from one source: indices in the batch, positions in the source."""

    places: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class _Batches:
    """The batches from the current one on, by number, split by source and read lazily."""

    def __init__(
        self, batches: Iterable[Int64], locate: Callable[[Int64], tuple[Int64, Int64, Int64]]
    ) -> None:
        self._batches, self._locate = iter(batches), locate
        self._known: deque[dict[Key, _Part]] = deque()
        self.current = 0

    def get(self, number: int) -> dict[Key, _Part] | None:
        """Returns batch `number`, which is the current or a later one; None after the last."""
        while number - self.current >= len(self._known):
            if not self._take():
                return None
        return self._known[number - self.current]

    def advance(self) -> None:
        """Drops the current batch."""
        self._known.popleft()
        self.current += 1

    def _take(self) -> bool:
        chunk = list(itertools.islice(self._batches, _CHUNK))
        if not chunk:
            return False
        located = (x.tolist() for x in self._locate(np.concatenate(chunk)))
        packs = zip(*located, strict=True)
        for batch in chunk:
            parts: dict[Key, _Part] = {}
            for place, (source, repeat, position) in enumerate(itertools.islice(packs, len(batch))):
                part = parts.setdefault((source, repeat), _Part())
                part.places.append(place)
                part.positions.append(position)
            self._known.append(parts)
        return True

    def positions(self, key: Key, number: int) -> Iterator[Int64]:
        """Yields positions of `key` in the batches from `number` on, until they end or are far."""
        while number - self.current < LOOK_AHEAD:
            number = max(number, self.current)
            parts = self.get(number)
            if parts is None:
                return
            if key in parts:
                yield np.array(parts[key].positions, np.int64)
            elif any(source == key[0] and repeat > key[1] for source, repeat in parts):
                return
            number += 1


def read_mixed(
    batches: Iterable[Int64],
    locate: Callable[[Int64], tuple[Int64, Int64, Int64]],
    stream: Callable[[int, int], PackStream],
) -> Iterator[list[Packs]]:
    """Yields the packs of each batch, in its order.

    Args:
        batches: int64 arrays of positions in the mix.
        locate: maps such an array to the source of each pack, the number of completed passes over
            it, and the position in its stream.
        stream: maps a source and a number of completed passes to a stream.
    """
    ahead = _Batches(batches, locate)
    reading: dict[Key, Iterator[list[Packs]]] = {}
    for number in itertools.count():
        parts = ahead.get(number)
        if parts is None:
            return
        out: dict[int, Packs] = {}
        for key, part in parts.items():
            packs = next(reading.get(key, iter(())), None)
            if packs is None:
                for done in [k for k in reading if k[0] == key[0] and k[1] < key[1] - 1]:
                    del reading[done]
                reading[key] = stream(*key).read(ahead.positions(key, number))
                packs = next(reading[key])
            out |= zip(part.places, packs, strict=True)
        ahead.advance()
        yield [out[place] for place in range(len(out))]


class Uses:
    """Repeated passes over a source in one epoch of the mix, each in the order of another epoch.

    Args:
        stream: the source; it is not changed.
        epoch: epoch of the mix.
    """

    def __init__(self, stream: PackStream, epoch: int) -> None:
        self._source, self._epoch = stream, epoch
        self._open: OrderedDict[int, PackStream] = OrderedDict()
        self._starts = [0]

    def stream(self, use: int) -> PackStream:
        """Returns the source in the order of pass `use`."""
        if use not in self._open:
            self._open[use] = copy.copy(self._source)
            self._open[use].set_epoch(self._epoch + (use << _USE_SHIFT))
        self._open.move_to_end(use)
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return self._open[use]

    def start(self, use: int) -> int:
        """Counts the packs of all passes before `use`."""
        while len(self._starts) <= use:
            self._starts.append(self._starts[-1] + len(self.stream(len(self._starts) - 1)))
        return self._starts[use]

    def locate(self, numbers: Int64) -> tuple[Int64, Int64]:
        """Returns pass and position in it, int64 `[n]` each, of packs numbered over all passes."""
        while self._starts[-1] <= numbers.max():
            self.start(len(self._starts))
        uses = np.searchsorted(self._starts, numbers, side="right") - 1
        return uses, numbers - np.array(self._starts)[uses]
