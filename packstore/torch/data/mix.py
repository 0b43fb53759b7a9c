"""Mixes datasets in fixed proportions of their examples.

The source of each pack follows from a formula, so the order does not depend on ranks
and workers: pack `k` of a source that gives a share `r` of the packs comes at the time
``(k + phase) / r``, and the packs of all sources are ordered by time. At every position
each source is within a few packs of its share.

Packs are not changed, so each belongs to one source; ``batch.sources`` gives the source
index of each example. Example ids are unique within a source only: source and id
together identify an example.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from packstore.config import fingerprint
from packstore.errors import CompatibilityError, ConfigError, quote
from packstore.format.arrays import Int64, Packs, PackSizes, range_indices
from packstore.registry import choice
from packstore.torch.data.stream import Identity, PackStream, StoredPacks
from packstore.torch.models.compatibility import check_same_tokenizer

log = logging.getLogger("packstore")

Float64 = npt.NDArray[np.float64]

TURNS = 8
"""Pack i of a mix belongs to turn ``i % TURNS``, which uses the packs of each source
with the same remainder: if the number of ranks divides it, each rank reads separate
lanes of every source.
"""

_SMALL = 1024
"""A mix with a source of fewer packs has one turn."""

_BLOCK = 4096
"""Packs of a turn that are ordered at once."""

_LOOK_AHEAD = 1024
"""Batches to search for a source's next packs. Beyond them its reader is reopened,
which costs little for such a rare source.
"""

_CHUNK = 16
_PASS_SHIFT = 32
_OPEN_PASSES = 4


class MixedPacks:
    """A :class:`PackStream` of several; every further pass over one of them has another
    order.
    """

    def __init__(
        self,
        sources: Sequence[PackStream],
        weights: Sequence[float],
        stopping_strategy: str,
    ) -> None:
        choice(
            "stopping_strategy", stopping_strategy, ("first_exhausted", "all_exhausted")
        )
        if not sources or not all(0 < weight < float("inf") for weight in weights):
            raise ConfigError(f"a mix needs weights above 0; found {list(weights)}.")
        _check_compatible(sources)
        self.streams, self.kind = sources, sources[0].kind
        self.datasets = [stream.datasets[0] for stream in sources]
        settings = [[stream.identity for stream in sources], weights, stopping_strategy]
        self.identity: Identity = {"mix": fingerprint(settings)[:16]}
        self._lengths = np.array([len(stream) for stream in sources])
        totals = [dataset.manifest.totals for dataset in self.datasets]
        rates = np.array(weights) * [t.packs / t.examples for t in totals]
        turns = 1 if self._lengths.min() < _SMALL else TURNS
        self._rates = rates / rates.sum()
        self._order = MixOrder(self._rates, turns)
        self._length = self._order.length(self._lengths, stopping_strategy)
        self._epoch = 0
        self._passes: dict[_Key, PackStream] = {}

    def __len__(self) -> int:
        return self._length

    def log_proportions(self) -> None:
        """Logs what an epoch takes of each source, and which columns only some of them
        have.
        """
        for dataset, rate in zip(self.datasets, self._rates, strict=True):
            text = "an epoch of the mix takes about %.0f packs from the %d of %s"
            log.info(text, rate * len(self), len(dataset), dataset.url)
        columns = [
            stream.columns for stream in self.streams if isinstance(stream, StoredPacks)
        ]
        every: set[str] = set().union(*columns)
        if some := every - every.intersection(*columns):
            text = (
                "columns that not all sources of the mix have are left out where "
                "these meet: %s"
            )
            log.warning(text, ", ".join(sorted(some)))

    def set_epoch(self, epoch: int) -> None:
        """Switches to the order of `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._passes = epoch, {}

    def _locate(self, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """Returns of each pack its source, completed passes over that, and position in
        the pass.
        """
        sources, numbers = self._order.locate(indices)
        return sources, *np.divmod(numbers, self._lengths[sources])

    def sources(self, indices: Int64) -> Int64:
        """Returns the index of each pack's source, int64 `[n]`."""
        return self._locate(indices)[0]

    def sizes(self, indices: Int64) -> PackSizes:
        """Returns the sizes of the packs at positions `indices`; see
        :class:`PackStream`.
        """
        parts = next(self._split(iter([indices])))
        sizes = [self._pass(*key).sizes(np.array(at)) for key, (_, at) in parts.items()]
        order = np.argsort(np.concatenate([rows for rows, _ in parts.values()]))
        return PackSizes.concat(sizes).take(order)

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        """Yields the packs at each array of positions; every source has its own
        read-ahead.
        """
        split, ahead = self._split(iter(batches)), deque[_Parts]()
        current = 0  # the batch that is put together, the first of `ahead`

        def batch(number: int) -> _Parts | None:
            while number - current >= len(ahead):
                if (parts := next(split, None)) is None:
                    return None
                ahead.append(parts)
            return ahead[number - current]

        def positions(key: _Key, number: int) -> Iterator[Int64]:
            """Yields positions of `key` in the batches from `number` on, while they are
            near.
            """
            while number - current < _LOOK_AHEAD:
                number = max(number, current)
                if (parts := batch(number)) is None:
                    return
                if key in parts:
                    yield np.array(parts[key][1])
                number += 1

        reading: dict[_Key, Iterator[list[Packs]]] = {}
        while (parts := batch(current)) is not None:
            out: dict[int, Packs] = {}
            for key, (rows, _) in parts.items():
                packs = next(reading.get(key, iter(())), None)
                if packs is None:
                    for old in [
                        k for k in reading if k[0] == key[0] and k[1] < key[1] - 1
                    ]:
                        del reading[old]
                    reading[key] = self._pass(*key).read(positions(key, current))
                    packs = next(reading[key])
                out |= zip(rows, packs, strict=True)
            ahead.popleft()
            current += 1
            yield [out[row] for row in range(len(out))]

    def _split(self, batches: Iterator[Int64]) -> Iterator[_Parts]:
        """Yields for each batch the packs of each pass."""
        while chunk := list(itertools.islice(batches, _CHUNK)):
            packs = zip(
                *(x.tolist() for x in self._locate(np.concatenate(chunk))), strict=True
            )
            for batch in chunk:
                parts: _Parts = {}
                for row, (*key, position) in enumerate(
                    itertools.islice(packs, len(batch))
                ):
                    rows, positions = parts.setdefault(tuple(key), ([], []))
                    rows.append(row)
                    positions.append(position)
                yield parts

    def _pass(self, source: int, number: int) -> PackStream:
        """Returns the source in the order of its pass `number` in this epoch."""
        key = source, number
        if key not in self._passes:
            if len(self._passes) >= _OPEN_PASSES * len(self.streams):
                del self._passes[next(iter(self._passes))]
            self._passes[key] = copy.copy(self.streams[source])
            self._passes[key].set_epoch(self._epoch + (number << _PASS_SHIFT))
        return self._passes[key]


_Key = tuple[int, int]
"""A source, and the number of completed passes over it."""

_Parts = dict[_Key, tuple[list[int], list[int]]]
"""The rows of a batch that come from a pass, and their positions in it."""


class MixOrder:
    """Maps each pack of a mix to a source, and to its number among the packs of that
    source.

    `rates`, float64 `[S]`, are the shares of the sources in the packs. The `turns` are
    interleaved, each with phases of its own, so that their rounding errors partly
    cancel.
    """

    def __init__(self, rates: Float64, turns: int) -> None:
        self._rates, self._turns = rates, turns
        reversed_bits = (0, 4, 2, 6, 1, 5, 3, 7)[:turns]
        odd = 2 * np.arange(len(rates)) + 1
        self._phases = (
            np.outer(reversed_bits, odd) % turns + 0.5
        ) / turns  # [turns, S]
        self._blocks: dict[tuple[int, int], tuple[Int64, Int64]] = {}

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """Returns source and number of the packs at `indices`, int64 `[n]` each."""
        items, turns = np.divmod(indices, self._turns)
        blocks, places = np.divmod(items, _BLOCK)
        sources, numbers = np.empty_like(indices), np.empty_like(indices)
        for turn, block in {*zip(turns.tolist(), blocks.tolist(), strict=True)}:
            here = (turns == turn) & (blocks == block)
            of_block, ranks = self._block(turn, block)
            sources[here] = of_block[places[here]]
            numbers[here] = ranks[places[here]] * self._turns + turn
        return sources, numbers

    def length(self, lengths: Int64, stopping_strategy: str) -> int:
        """Counts the packs before one of a source repeats, or until each came once."""
        repeats, ends = stopping_strategy == "all_exhausted", list[int]()
        for turn in range(self._turns):
            for source, packs in enumerate(lengths.tolist()):
                number = len(range(turn, packs, self._turns)) - repeats
                ends.append(self._place(turn, source, number) * self._turns + turn)
        return max(ends) + 1 if repeats else min(ends)

    def _block(self, turn: int, block: int) -> tuple[Int64, Int64]:
        """Returns source and number of the packs of a block of a turn,
        `[_BLOCK]` each.
        """
        if (turn, block) not in self._blocks:
            if len(self._blocks) >= 4 * self._turns:
                del self._blocks[next(iter(self._blocks))]
            # Rounding moves a pack by at most one place for each source.
            first, margin = block * _BLOCK, len(self._rates)
            begins = self._before(turn, first - margin)
            counts = self._before(turn, first + _BLOCK + margin) + 3 - begins
            sources, times = self._times(turn, begins, counts)
            order = np.argsort(times, kind="stable")[first - begins.sum() :][:_BLOCK]
            numbers = range_indices(begins, counts)
            self._blocks[turn, block] = sources[order], numbers[order]
        return self._blocks[turn, block]

    def _place(self, turn: int, source: int, number: int) -> int:
        """Counts the packs of a turn before a pack of a source: the inverse of
        :meth:`locate`.
        """
        time = (number + self._phases[turn, source]) / self._rates[source]
        begins = self._before(turn, time)
        sources, times = self._times(turn, begins, np.full_like(begins, 4))
        earlier = (times < time) | ((times == time) & (sources < source))
        return int(begins.sum() + earlier.sum())

    def _times(self, turn: int, begins: Int64, counts: Int64) -> tuple[Int64, Float64]:
        """Returns source and time of `counts` packs of each source from `begins` on."""
        sources = np.repeat(np.arange(len(begins)), counts)
        numbers = range_indices(begins, counts)
        return sources, (numbers + self._phases[turn, sources]) / self._rates[sources]

    def _before(self, turn: int, time: float) -> Int64:
        """Counts packs of each source surely before a time: all but its last one or
        two, `[S]`.
        """
        counts: Int64 = np.floor(time * self._rates - self._phases[turn]).astype(
            np.int64
        )
        return np.maximum(counts - 1, 0)


def _check_compatible(sources: Sequence[PackStream]) -> None:
    kinds = [stream.kind for stream in sources]
    if len(set(kinds)) > 1:
        raise CompatibilityError(
            f"sources of the mix must be of one kind; found {quote(kinds)}."
        )
    for i, stream in enumerate(sources):
        if isinstance(stream, MixedPacks) or not len(stream):
            raise ConfigError(
                f"source {i} of the mix must be a dataset that holds packs."
            )
    manifests = [stream.datasets[0].manifest for stream in sources]
    check_same_tokenizer(manifests)
    recorded = [manifest.provenance.get("tokenizer") or {} for manifest in manifests]
    hashes = {tokenizer.get("chat_template_sha256") for tokenizer in recorded}
    if len(hashes - {None}) > 1:
        raise CompatibilityError(
            "sources of the mix must be rendered with one chat template."
        )
