"""Mixes datasets in fixed proportions of their examples.

The source of each pack follows from a formula, so the order does not depend on ranks
and workers: pack `k` of a source that gives a share `r` of the packs (its rate) comes
at the time ``(k + phase) / r``, in packs of the mix, and the packs of all sources are
ordered by time. With rates 3/4 and 1/4 and phases 1/2, times are 0.67, 2, 3.33, ... and
2, 6, ...: the order begins a, a, b, a. At every position each source is within a few
packs of its share. A source that is exhausted before the epoch ends begins another
pass, in another order.

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
from typing import NamedTuple

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
"""Number of interleaved suborders, called turns. Pack i of a mix belongs to turn
``i % TURNS``, which takes the packs of each source with the same remainder. If
the number of ranks divides it, no two ranks read the same row groups of a source.
"""

_SMALL = 1024
"""A mix that has a source with fewer packs has one turn only."""

_BLOCK = 4096
"""Packs of a turn that are ordered at once."""

_LOOK_AHEAD = 1024
"""Batches to search for a source's next packs. Beyond them its reader is reopened,
which costs little for such a rare source.
"""

_CHUNK = 16
"""Number of batches for which packs are located at once."""

_PASS_SHIFT = 32
"""A source is read in the order of epoch ``epoch + (pass << _PASS_SHIFT)``."""

_OPEN_PASSES = 4
"""Number of streams that are cached for each source, one a pass."""


class MixedPacks:
    """A :class:`PackStream` of several sources, in proportion to their weights.

    A source that is exhausted before the epoch ends begins another pass, in another
    order.

    Args:
        sources: the streams to mix, each of one dataset.
        weights: weight of each source, which counts examples.
        stopping_strategy: ``first_exhausted`` or ``all_exhausted``: when an epoch ends.

    Raises:
        ConfigError: a value is out of range, or a source is a mix or has no packs.
        CompatibilityError: sources differ in kind, tokenizer or chat template.
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

        self.streams = sources
        self.kind = sources[0].kind
        self.datasets = [stream.datasets[0] for stream in sources]
        settings = [[stream.identity for stream in sources], weights, stopping_strategy]
        self.identity: Identity = {"mix": fingerprint(settings)[:16]}

        totals = [dataset.manifest.totals for dataset in self.datasets]
        packs_per_example = [total.packs / total.examples for total in totals]
        pack_weights = np.array(weights) * packs_per_example
        self._rates = pack_weights / pack_weights.sum()
        self._lengths = np.array([len(stream) for stream in sources])
        turns = 1 if self._lengths.min() < _SMALL else TURNS
        self._order = MixOrder(self._rates, turns)
        self._length = self._order.length(self._lengths, stopping_strategy)

        self._epoch = 0
        self._streams_of_passes: dict[_Pass, PackStream] = {}

    def __len__(self) -> int:
        return self._length

    def log_proportions(self) -> None:
        """Log the packs that an epoch takes of each source.

        Warn about columns that only some sources have.
        """
        for dataset, rate in zip(self.datasets, self._rates, strict=True):
            log.info(
                "an epoch of the mix takes about %.0f packs from the %d of %s",
                rate * len(self),
                len(dataset),
                dataset.url,
            )
        columns = [
            stream.columns for stream in self.streams if isinstance(stream, StoredPacks)
        ]
        all_columns: set[str] = set().union(*columns)
        partial_columns = all_columns - all_columns.intersection(*columns)
        if partial_columns:
            log.warning(
                "columns that not all sources of the mix have are left out where these "
                "meet: %s",
                ", ".join(sorted(partial_columns)),
            )

    def set_epoch(self, epoch: int) -> None:
        """Switch to the order of `epoch`."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._streams_of_passes = {}

    def sources(self, indices: Int64) -> Int64:
        """Return the index of each pack's source, int64 `[n]`."""
        sources, _ = self._order.locate(indices)
        return sources

    def sizes(self, indices: Int64) -> PackSizes:
        """Return the sizes of the packs at `indices`; see :class:`PackStream`."""
        parts = next(self._split([indices]))
        sizes = []
        rows: list[int] = []
        for source_pass, part in parts.items():
            sizes.append(self._stream_of(source_pass).sizes(np.array(part.positions)))
            rows += part.rows
        return PackSizes.concat(sizes).take(np.argsort(rows))

    def read(self, batches: Iterable[Int64]) -> Iterator[list[Packs]]:
        """Yield the packs of each array of indices; see :class:`PackStream`.

        Each pass over a source has its own read-ahead.
        """
        upcoming = _UpcomingParts(self._split(batches))
        readers: dict[_Pass, Iterator[list[Packs]]] = {}
        while True:
            parts = upcoming.current()
            if parts is None:
                return
            packs_by_row: dict[int, Packs] = {}
            for source_pass, part in parts.items():
                packs = self._read_pass(source_pass, upcoming, readers)
                packs_by_row.update(zip(part.rows, packs, strict=True))
            upcoming.advance()
            yield [packs_by_row[row] for row in range(len(packs_by_row))]

    def _read_pass(
        self,
        source_pass: _Pass,
        upcoming: _UpcomingParts,
        readers: dict[_Pass, Iterator[list[Packs]]],
    ) -> list[Packs]:
        """Return the packs of the current batch that come from a pass.

        `readers` holds the open passes; others are opened and closed as needed.
        """
        if source_pass in readers:
            packs = next(readers[source_pass], None)
            if packs is not None:
                return packs

        # These are the first packs of the pass, or were too far ahead for its reader.
        # The previous pass stays open, as the two overlap.
        for open_pass in list(readers):
            is_same_source = open_pass.source == source_pass.source
            if is_same_source and open_pass.number < source_pass.number - 1:
                del readers[open_pass]
        positions = upcoming.positions(source_pass)
        readers[source_pass] = self._stream_of(source_pass).read(positions)
        return next(readers[source_pass])

    def _split(self, batches: Iterable[Int64]) -> Iterator[_Parts]:
        """Divide the packs of each batch by the passes that they come from."""
        batches = iter(batches)
        while True:
            chunk = list(itertools.islice(batches, _CHUNK))
            if not chunk:
                return
            sources, numbers = self._order.locate(np.concatenate(chunk))
            passes, positions = np.divmod(numbers, self._lengths[sources])
            places = zip(
                sources.tolist(), passes.tolist(), positions.tolist(), strict=True
            )
            for batch in chunk:
                parts: _Parts = {}
                places_of_batch = itertools.islice(places, len(batch))
                for row, (source, number, position) in enumerate(places_of_batch):
                    part = parts.setdefault(_Pass(source, number), _Part([], []))
                    part.rows.append(row)
                    part.positions.append(position)
                yield parts

    def _stream_of(self, source_pass: _Pass) -> PackStream:
        """Return a copy of the pass's source, in the order of that pass."""
        streams = self._streams_of_passes
        if source_pass not in streams:
            if len(streams) >= _OPEN_PASSES * len(self.streams):
                oldest = next(iter(streams))
                del streams[oldest]
            streams[source_pass] = copy.copy(self.streams[source_pass.source])
            streams[source_pass].set_epoch(
                self._epoch + (source_pass.number << _PASS_SHIFT)
            )
        return streams[source_pass]


class _Pass(NamedTuple):
    """A source, and the number of completed passes over it in the epoch."""

    source: int
    number: int


class _Part(NamedTuple):
    """The packs of a batch that come from one pass: rows of the batch, and positions
    in the pass.
    """

    rows: list[int]
    positions: list[int]


_Parts = dict[_Pass, _Part]


class _UpcomingParts:
    """The parts of the batch that is read next, and of batches after it.

    The readers of passes iterate over :meth:`positions`, and so refer to this object.
    It must not refer to them in turn: in a circle of references, their threads would
    outlive the iteration.
    """

    def __init__(self, parts_of_batches: Iterator[_Parts]) -> None:
        self._source = parts_of_batches
        self._parts: deque[_Parts] = deque()  # from the current batch on
        self._current = 0  # index of the current batch

    def current(self) -> _Parts | None:
        """Return the parts of the current batch; None after the last."""
        return self._get(self._current)

    def advance(self) -> None:
        """Go to the next batch."""
        self._parts.popleft()
        self._current += 1

    def positions(self, source_pass: _Pass) -> Iterator[Int64]:
        """Yield the positions of a pass in each batch that has any.

        From the current batch on, up to `_LOOK_AHEAD` batches ahead of it.
        """
        batch = self._current
        while batch - self._current < _LOOK_AHEAD:
            batch = max(batch, self._current)
            parts = self._get(batch)
            if parts is None:
                return
            if source_pass in parts:
                yield np.array(parts[source_pass].positions)
            batch += 1

    def _get(self, batch: int) -> _Parts | None:
        while batch - self._current >= len(self._parts):
            parts = next(self._source, None)
            if parts is None:
                return None
            self._parts.append(parts)
        return self._parts[batch - self._current]


class MixOrder:
    """Maps each pack of a mix to its source, and its number among that source's packs.

    Numbers count on over all passes: divide by the packs of the source for the pass.
    The turns (:data:`TURNS`) are interleaved, each with phases of its own, so that
    their rounding errors partly cancel.

    Args:
        rates: float64 `[S]`, share of each source in the packs.
        turns: number of turns, at most 8; see :data:`TURNS`.
    """

    def __init__(self, rates: Float64, turns: int) -> None:
        self._rates = rates
        self._turns = turns
        # Phases in 0..1, evenly spread over the turns of each source. In bit-reversed
        # order, neighboring turns are far apart; odd multiples make sources differ.
        reversed_bits = (0, 4, 2, 6, 1, 5, 3, 7)[:turns]
        odd = 2 * np.arange(len(rates)) + 1
        self._phases = (
            np.outer(reversed_bits, odd) % turns + 0.5
        ) / turns  # [turns, S]
        # (turn, block) -> sources and numbers; the newest blocks only
        self._blocks: dict[tuple[int, int], tuple[Int64, Int64]] = {}

    def locate(self, indices: Int64) -> tuple[Int64, Int64]:
        """Return source and number of the packs at `indices`, int64 `[n]` each."""
        items, turns = np.divmod(indices, self._turns)
        blocks, places = np.divmod(items, _BLOCK)
        sources = np.empty_like(indices)
        numbers = np.empty_like(indices)
        for turn, block in set(zip(turns.tolist(), blocks.tolist(), strict=True)):
            is_inside = (turns == turn) & (blocks == block)
            block_sources, block_numbers = self._block(turn, block)
            sources[is_inside] = block_sources[places[is_inside]]
            numbers[is_inside] = block_numbers[places[is_inside]] * self._turns + turn
        return sources, numbers

    def length(self, lengths: Int64, stopping_strategy: str) -> int:
        """Count the packs before one of a source repeats, or until each came once.

        Args:
            lengths: int64 `[S]`, packs of each source.
            stopping_strategy: ``first_exhausted`` or ``all_exhausted``.
        """
        needs_all = stopping_strategy == "all_exhausted"
        ends = []
        for turn in range(self._turns):
            for source, num_packs in enumerate(lengths.tolist()):
                number = len(range(turn, num_packs, self._turns))
                if needs_all:
                    number -= 1  # the last pack of the source, not its first repetition
                place = self._place(turn, source, number)
                ends.append(place * self._turns + turn)
        return max(ends) + 1 if needs_all else min(ends)

    def _block(self, turn: int, block: int) -> tuple[Int64, Int64]:
        """Return source and number of the packs of a block of a turn.

        Both are `[_BLOCK]`; numbers count in the turn.
        """
        key = (turn, block)
        if key not in self._blocks:
            if len(self._blocks) >= 4 * self._turns:
                oldest = next(iter(self._blocks))
                del self._blocks[oldest]
            # Rounding moves a pack by at most one place for each source.
            margin = len(self._rates)
            first = block * _BLOCK
            # Packs that surely come before the block are skipped. At its end, 3 more of
            # each source make up for the ones that `_count_before` leaves out.
            starts = self._count_before(turn, first - margin)
            counts = self._count_before(turn, first + _BLOCK + margin) + 3 - starts
            sources, times = self._times(turn, starts, counts)
            order = np.argsort(times, kind="stable")
            order = order[first - starts.sum() :][:_BLOCK]
            numbers = range_indices(starts, counts)
            self._blocks[key] = (sources[order], numbers[order])
        return self._blocks[key]

    def _place(self, turn: int, source: int, number: int) -> int:
        """Count the packs of a turn before a pack: the inverse of :meth:`locate`."""
        time = (number + self._phases[turn, source]) / self._rates[source]
        starts = self._count_before(turn, time)
        # Packs that `_count_before` leaves out are among the next 4 of each source.
        sources, times = self._times(turn, starts, np.full_like(starts, 4))
        is_earlier = (times < time) | ((times == time) & (sources < source))
        return int(starts.sum() + is_earlier.sum())

    def _times(self, turn: int, starts: Int64, counts: Int64) -> tuple[Int64, Float64]:
        """Return source and time of `counts` packs of each source from `starts` on."""
        sources = np.repeat(np.arange(len(starts)), counts)
        numbers = range_indices(starts, counts)
        times = (numbers + self._phases[turn, sources]) / self._rates[sources]
        return sources, times

    def _count_before(self, turn: int, time: float) -> Int64:
        """Count the packs of each source that surely come before a time, `[S]`.

        The last one or two are left out, as rounding may change their order.
        """
        counts: Float64 = np.floor(time * self._rates - self._phases[turn])
        return np.maximum(counts.astype(np.int64) - 1, 0)


def _check_compatible(sources: Sequence[PackStream]) -> None:
    """Raise unless all sources have packs, one kind, one tokenizer and one template."""
    kinds = [stream.kind for stream in sources]
    if len(set(kinds)) > 1:
        raise CompatibilityError(
            f"sources of the mix must be of one kind; found {quote(kinds)}."
        )
    for number, stream in enumerate(sources):
        if isinstance(stream, MixedPacks) or not len(stream):
            raise ConfigError(
                f"source {number} of the mix must be a dataset that holds packs."
            )
    manifests = [stream.datasets[0].manifest for stream in sources]
    check_same_tokenizer(manifests)
    tokenizers = [manifest.provenance.get("tokenizer") or {} for manifest in manifests]
    templates = {tokenizer.get("chat_template_sha256") for tokenizer in tokenizers}
    if len(templates - {None}) > 1:
        raise CompatibilityError(
            "sources of the mix must be rendered with one chat template."
        )
