"""Mixes several streams in fixed proportions, counted in pairs or in tokens.

The source of each pack follows from a formula (:mod:`packstore.torch.data.mix_schedule`), so the
packs of each source before any position are known at once, the order does not depend on ranks and
workers, and the position is one number. At every position each source is within a few packs of its
share. ::

    data = PackedDataset.mix([Source("chat", 3), Source("code", 1, repeat=2)], unit="pairs")

Packs are not changed, so each belongs to one source; ``batch.sources`` gives the source index of
each example. Example ids are unique within a source only: source and id together identify an
example.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from packstore.config import fingerprint
from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.format.arrays import Int64, Packs, PackSizes
from packstore.format.loss_counts import COUNTS
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.shards.statistics import NO_TOTALS, Totals
from packstore.torch.data.mix_reader import Uses, read_mixed
from packstore.torch.data.mix_schedule import Schedule
from packstore.torch.data.stream import Identity, PackStream, StoredPacks
from packstore.torch.models.compatibility import check_same_tokenizer

Float64 = npt.NDArray[np.float64]
Unit = Literal["pairs", "tokens"]
TURNS = 8
"""If the number of ranks divides it, each rank reads separate lanes of every source."""

_TURN_PACKS = 128


@dataclass(frozen=True)
class Source:
    """A source of a mix.

    Attributes:
        stream: a stream, a dataset opened by ``packstore.open``, or a dataset's URL or local
            folder.
        weight: share of the mix relative to the other weights, in pairs or tokens.
        repeat: number of passes over the source per epoch of the mix, each in another order; after
            them it is exhausted.
        cap: most examples (pairs) that an epoch takes from it, by the mean of its packs; the other
            sources then go on without it.
    """

    stream: PackStream | Dataset | str | PathLike[str]
    weight: float = 1.0
    repeat: int = 1
    cap: int | None = None


@dataclass(frozen=True, eq=False)
class SourceCounts:
    """Packs, examples and tokens of each of the S sources of a mix, before some position.

    Attributes:
        packs: int64 `[S]`, exact.
        examples: float64 `[S]`, expected from the mean of its packs.
        tokens: float64 `[S]`, expected from the mean of its packs.
    """

    packs: Int64
    examples: Float64
    tokens: Float64


class MixedPacks:
    """The packs of several sources in proportion to their weights; a :class:`PackStream`.

    Weights count pairs or tokens, not packs, and are converted by the mean of each source's packs.
    Every epoch restarts each source, in the order of that epoch; each further pass over a source
    within an epoch has another order.

    Args:
        sources: at least one; all of one kind and one tokenizer. Layouts and pack sizes may differ.
        unit: unit of the weights: ``pairs`` (examples) or ``tokens``.
        until: length of an epoch. ``first``: until the first source is exhausted. ``all``: until
            all are, while smaller ones repeat. With large sources both hold to within about ten
            packs, see ``mix_schedule.Schedule``. A number: that many packs.
        seed: seed of the order of sources that are not streams.

    Raises:
        ConfigError: there are no sources, or a value is out of range.
        CompatibilityError: sources differ in kind, tokenizer or chat template.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        unit: Unit = "pairs",
        until: Literal["first", "all"] | int = "first",
        seed: int = 0,
    ) -> None:
        _check(sources, unit, until)
        self.parts, self.unit, self.until = list(sources), unit, until
        self._streams = [_stream(source.stream, seed) for source in sources]
        _check_compatible(self._streams)
        self.set_epoch(0)

    @property
    def kind(self) -> str:
        """``preference``, ``sft`` or ``ranked``."""
        return self._streams[0].kind

    @property
    def identity(self) -> Identity:
        """Digest of all sources and settings."""
        parts = [[p.weight, p.repeat, p.cap] for p in self.parts]
        what = [[s.identity for s in self._streams], parts, self.unit, self.until]
        return {"mix": fingerprint(what)[:16]}

    @property
    def datasets(self) -> Sequence[Dataset]:
        """The datasets of all sources."""
        return [dataset for stream in self._streams for dataset in stream.datasets]

    @property
    def totals(self) -> Totals:
        """Packs of the epoch, and its expected examples and tokens."""
        counts = self.counts(len(self))
        examples, tokens = counts.examples.sum(), counts.tokens.sum()
        packs = len(self)
        return replace(NO_TOTALS, packs=packs, examples=round(examples), tokens=round(tokens))

    def __len__(self) -> int:
        return self._schedule.length

    def set_epoch(self, epoch: int) -> None:
        """Switches to the order of `epoch`."""
        self._uses = [Uses(stream, epoch) for stream in self._streams]
        totals = [uses.stream(0).totals for uses in self._uses]
        self._examples = np.array([t.examples / t.packs for t in totals])
        self._tokens = np.array([t.tokens / t.packs for t in totals])
        means = self._examples if self.unit == "pairs" else self._tokens
        small = min(t.packs for t in totals) < _TURN_PACKS * TURNS
        self._schedule = Schedule(
            weights=[p.weight / mean for p, mean in zip(self.parts, means, strict=True)],
            goals=[u.start(p.repeat) for p, u in zip(self.parts, self._uses, strict=True)],
            caps=[_cap(p, mean) for p, mean in zip(self.parts, self._examples, strict=True)],
            until=self.until,
            turns=1 if small else TURNS,
        )

    def counts(self, index: int) -> SourceCounts:
        """Counts what each source yields before position `index` of the epoch, 0 to ``len(self)``.

        For exact numbers of examples and tokens sum :meth:`sizes`, grouped by :meth:`sources`.

        Raises:
            IndexError: `index` is out of range.
        """
        if not 0 <= index <= len(self):
            raise IndexError(f"a position of the mix must lie in 0..{len(self)}")
        packs = self._schedule.counts(index)
        return SourceCounts(packs, packs * self._examples, packs * self._tokens)

    def locate(self, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """Locates the packs at positions `indices` in their sources.

        Returns:
            Source, number of completed passes over it, and position in it; int64 `[n]` each.

        Raises:
            IndexError: an index is out of range.
        """
        indices = np.asarray(indices, np.int64)
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"pack indices must lie in 0..{len(self) - 1}")
        sources, numbers = self._schedule.locate(indices)
        repeats, positions = np.empty_like(indices), np.empty_like(indices)
        for source in np.unique(sources):
            here = sources == source
            repeats[here], positions[here] = self._uses[source].locate(numbers[here])
        return sources, repeats, positions

    def sources(self, indices: Int64) -> Int64:
        """Returns the index of each pack's source, int64 `[n]`."""
        return self.locate(indices)[0]

    def sizes(self, indices: Int64) -> PackSizes:
        """Returns the sizes of the packs at positions `indices`; see :class:`PackStream`."""
        sources, repeats, positions = self.locate(indices)
        out = PackSizes(*(np.empty(len(positions), np.int64) for _ in range(3)))
        counts: Int64 | None = np.empty((len(positions), len(COUNTS)), np.int64)
        keys, which = np.unique(np.stack([sources, repeats]), axis=1, return_inverse=True)
        for i, (source, repeat) in enumerate(keys.T.tolist()):
            here = np.flatnonzero(which == i)
            found = self._uses[source].stream(repeat).sizes(positions[here])
            out.tokens[here], out.examples[here] = found.tokens, found.examples
            out.squares[here] = found.squares
            if counts is not None and found.counts is not None:
                counts[here] = found.counts
            else:
                counts = None
        return replace(out, counts=counts)

    def read(self, batches: Iterable[Int64], *, stride: int = 1) -> Iterator[list[Packs]]:
        """Yields the packs at each array of positions; see :class:`PackStream`.

        Every source has its own read-ahead. If the number of ranks divides 8, each rank reads
        separate lanes of sources with 1024 packs or more; smaller sources are read whole by every
        rank.
        """
        uses = self._uses
        return read_mixed(batches, self.locate, lambda source, use: uses[source].stream(use))


def _stream(source: PackStream | Dataset | str | PathLike[str], seed: int) -> PackStream:
    if isinstance(source, str | os.PathLike):
        source = open_dataset(os.fspath(source))
    return StoredPacks(source, seed=seed) if isinstance(source, Dataset) else source


def _check(sources: Sequence[Source], unit: str, until: str | int) -> None:
    if not sources:
        raise ConfigError("a mix needs at least one source; found none.")
    if unit not in get_args(Unit):
        raise ConfigError(f"unit must be one of: pairs, tokens; found {quote(unit)}.")
    if until not in ("first", "all") and (not isinstance(until, int) or until < 1):
        raise ConfigError(f"until must be first, all or a number from 1; found {quote(until)}.")
    for i, part in enumerate(sources):
        if not 0 < part.weight < float("inf"):
            raise ConfigError(f"the weight of source {i} must be above 0; found {part.weight}.")
        if part.repeat < 1:
            raise ConfigError(f"repeat of source {i} must be at least 1; found {part.repeat}.")


def _check_compatible(streams: Sequence[PackStream]) -> None:
    do = "Mix only what was made for one training"
    for i, stream in enumerate(streams):
        if stream.kind != streams[0].kind:
            must = f"must be of kind {streams[0].kind!r} as source 0"
            raise CompatibilityError(sentence(f"source {i} of the mix", must, stream.kind, do))
        if not len(stream):
            raise ConfigError(f"source {i} of the mix must hold packs; found none.")
    datasets = [dataset for stream in streams for dataset in stream.datasets]
    check_same_tokenizer(datasets)
    told = (d.manifest.provenance.get("tokenizer") or {} for d in datasets)
    hashes = [t.get("chat_template_sha256") for t in told]
    if len(set(hashes) - {None}) > 1:
        must = "all must be rendered with one chat template"
        raise CompatibilityError(sentence("sources of the mix", must, quote(hashes, 200), do))


def _cap(part: Source, examples: float) -> int | None:
    """Converts a cap in examples to packs, which hold `examples` on average."""
    if part.cap is None:
        return None
    packs = int(part.cap / examples)
    if packs < 1:
        raise ConfigError(
            f"cap of a source must allow one pack, about {examples:.1f} examples; found {part.cap}."
        )
    return packs
