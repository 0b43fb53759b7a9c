"""Several streams as one: a mix with fixed shares, in pairs or in tokens.

Which source a pack comes from is a formula (:mod:`packstore.torch.shares`), so the packs of each
source before any position are known at once, the order does not depend on ranks and workers, and
position is one number. At every position each source is within a few packs of its share. ::

    mix = MixedPacks([Source(open("chat"), 3), Source(open("code"), 1, repeat=2)], unit="pairs")
    data = PackedDataset(mix)

Packs stay as they are stored, so each is of one source; ``batch.sources`` tells that of each
example, as its place in the list. Example ids are unique inside a source only: source and id
together name an example.
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
from packstore.io.dataset import Dataset
from packstore.io.dataset import open as open_dataset
from packstore.io.statistics import NO_TOTALS, Totals
from packstore.loss_counts import COUNTS
from packstore.records import Int64, Packs, PackSizes
from packstore.torch.compatibility import check_same_tokenizer
from packstore.torch.mix_reader import Uses, read_mixed
from packstore.torch.shares import Schedule, Terms
from packstore.torch.stream import Identity, PackStream, StoredPacks

Float64 = npt.NDArray[np.float64]
Unit = Literal["pairs", "tokens"]
TURNS = 8
"""Numbers of ranks that divide it read lanes of their own from every source."""

_TURN_PACKS = 128


@dataclass(frozen=True)
class Source:
    """A part of a mix.

    Attributes:
        stream: a stream, what ``packstore.open`` returned, or a dataset's URL or local folder.
        weight: its share of the mix relative to the other weights, in pairs or tokens.
        repeat: how many times an epoch of the mix uses it until it counts as used up. Each time its
            packs come in another order.
        cap: examples (pairs) that an epoch takes from it at most, by the mean of its packs; then it
            leaves, and the others go on.
    """

    stream: PackStream | Dataset | str | PathLike[str]
    weight: float = 1.0
    repeat: int = 1
    cap: int | None = None


@dataclass(frozen=True, eq=False)
class SourceCounts:
    """What each of the S sources of a mix gives before some position.

    Attributes:
        packs: int64 `[S]`, exactly.
        examples: float64 `[S]`, expected, by the mean of its packs.
        tokens: float64 `[S]`, likewise.
    """

    packs: Int64
    examples: Float64
    tokens: Float64


class MixedPacks:
    """The packs of several sources, each as often as its weight says; a :class:`PackStream`.

    Weights count pairs or tokens, not packs, and are converted by the mean of each source's packs.
    Every epoch begins each source anew, in the order of that epoch; a source that an epoch uses for
    the second time comes in an order of its own.

    Args:
        sources: at least one; all of one kind and one tokenizer. Layouts and pack sizes may differ.
        unit: what weights count: ``pairs`` (examples) or ``tokens``.
        until: how long an epoch is. ``first``: until a source that is used up would go on. ``all``:
            until all are used up, while smaller ones go on from their beginning. Of large sources,
            see ``shares.Schedule``, both hold to within some ten packs. A number: so many packs.
        seed: of the order of the sources that are not streams yet.

    Raises:
        ConfigError: no sources, or a value out of range.
        CompatibilityError: sources of different kinds, tokenizers or chat templates.
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
        """``dpo``, ``sft`` or ``ranked``."""
        return self._streams[0].kind

    @property
    def identity(self) -> Identity:
        """A digest of all sources and settings."""
        parts = [[p.weight, p.repeat, p.cap] for p in self.parts]
        what = [[s.identity for s in self._streams], parts, self.unit, self.until]
        return {"mix": fingerprint(what)[:16]}

    @property
    def datasets(self) -> Sequence[Dataset]:
        """Those of all sources."""
        return [dataset for stream in self._streams for dataset in stream.datasets]

    @property
    def totals(self) -> Totals:
        """Packs of the epoch; its examples and tokens as expected."""
        counts = self.counts(len(self))
        examples, tokens = counts.examples.sum(), counts.tokens.sum()
        packs = len(self)
        return replace(NO_TOTALS, packs=packs, examples=round(examples), tokens=round(tokens))

    def __len__(self) -> int:
        return self._schedule.length

    def set_epoch(self, epoch: int) -> None:
        """Makes this the stream of `epoch`."""
        self._uses = [Uses(stream, epoch) for stream in self._streams]
        totals = [uses.stream(0).totals for uses in self._uses]
        self._examples = np.array([t.examples / t.packs for t in totals])
        self._tokens = np.array([t.tokens / t.packs for t in totals])
        means = self._examples if self.unit == "pairs" else self._tokens
        terms = Terms(
            weights=[p.weight / mean for p, mean in zip(self.parts, means, strict=True)],
            goals=[u.start(p.repeat) for p, u in zip(self.parts, self._uses, strict=True)],
            caps=[_cap(p, mean) for p, mean in zip(self.parts, self._examples, strict=True)],
            until=self.until,
        )
        small = min(t.packs for t in totals) < _TURN_PACKS * TURNS
        self._schedule = Schedule(terms, 1 if small else TURNS)

    def counts(self, index: int) -> SourceCounts:
        """What each source gives before position `index` of the epoch, from 0 to ``len(self)``.

        Exact numbers of examples and tokens are sums over :meth:`sizes`, split by :meth:`sources`.

        Raises:
            IndexError: `index` is out of range.
        """
        if not 0 <= index <= len(self):
            raise IndexError(f"a position of the mix must lie in 0..{len(self)}")
        packs = self._schedule.counts(index)
        return SourceCounts(packs, packs * self._examples, packs * self._tokens)

    def locate(self, indices: Int64) -> tuple[Int64, Int64, Int64]:
        """Where the packs at positions `indices` are: int64 `[n]` each.

        Returns:
            Their sources; how many times each was used up before; their positions in it then.

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
        """The source of each pack, int64 `[n]`: its place in the list."""
        return self.locate(indices)[0]

    def sizes(self, indices: Int64) -> PackSizes:
        """Sizes of the packs at positions `indices`; see :class:`PackStream`."""
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
        """The packs at each array of positions; see :class:`PackStream`.

        Every source has its own read-ahead. Of sources with 1024 packs or more, the ranks read
        lanes of their own, if their number divides 8; smaller ones are read whole by every rank.
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
    """Packs at most, for a cap in examples; a pack holds `examples` of them on the average."""
    if part.cap is None:
        return None
    packs = int(part.cap / examples)
    if packs < 1:
        raise ConfigError(
            f"cap of a source must allow one pack, about {examples:.1f} examples; found {part.cap}."
        )
    return packs
