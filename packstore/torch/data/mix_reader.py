"""Reads a mix: each source through its own read-ahead, merged in the order of the mix."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from packstore.format.arrays import Int64, Packs
from packstore.torch.data.stream import PackStream

LOOK_AHEAD = 1024
"""Batches to search for a source's next packs. Beyond them its reader is reopened, which costs
little for such a rare source."""

_CHUNK = 16
_USE_SHIFT = 32
_OPEN = 4

Key = tuple[int, int]
"""A source, and the number of completed passes over it."""

_Parts = dict[Key, tuple[list[int], list[int]]]


Located = Callable[[Int64], tuple[Int64, Int64, Int64]]
"""Maps positions in the mix to the source of each pack, the number of completed passes over it, and
its position in that pass."""


def read_mixed(
    batches: Iterable[Int64], locate: Located, stream: Callable[[int, int], PackStream]
) -> Iterator[list[Packs]]:
    """Yields the packs of each batch, in its order.

    Args:
        batches: int64 arrays of positions in the mix.
        locate: see :data:`Located`.
        stream: maps a source and a number of completed passes to a stream.
    """
    split, ahead = _split(iter(batches), locate), deque[_Parts]()
    current = 0  # the batch that is put together, the first of `ahead`

    def batch(number: int) -> _Parts | None:
        while number - current >= len(ahead):
            if (parts := next(split, None)) is None:
                return None
            ahead.append(parts)
        return ahead[number - current]

    def positions(key: Key, number: int) -> Iterator[Int64]:
        """Yields positions of `key` in the batches from `number` on, until they end or are far."""
        while number - current < LOOK_AHEAD:
            number = max(number, current)
            if (parts := batch(number)) is None:
                return
            if key in parts:
                yield np.array(parts[key][1], np.int64)
            elif any(source == key[0] and repeat > key[1] for source, repeat in parts):
                return
            number += 1

    reading: dict[Key, Iterator[list[Packs]]] = {}
    while (parts := batch(current)) is not None:
        out: dict[int, Packs] = {}
        for key, (places, _) in parts.items():
            packs = next(reading.get(key, iter(())), None)
            if packs is None:
                for done in [k for k in reading if k[0] == key[0] and k[1] < key[1] - 1]:
                    del reading[done]
                reading[key] = stream(*key).read(positions(key, current))
                packs = next(reading[key])
            out |= zip(places, packs, strict=True)
        ahead.popleft()
        current += 1
        yield [out[place] for place in range(len(out))]


def _split(batches: Iterator[Int64], locate: Located) -> Iterator[_Parts]:
    """Yields for each batch: key -> indices in the batch, and positions in that pass."""
    while chunk := list(itertools.islice(batches, _CHUNK)):
        packs = zip(*(x.tolist() for x in locate(np.concatenate(chunk))), strict=True)
        for batch in chunk:
            parts: _Parts = {}
            for place, (source, repeat, position) in enumerate(itertools.islice(packs, len(batch))):
                places, positions = parts.setdefault((source, repeat), ([], []))
                places.append(place)
                positions.append(position)
            yield parts


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
