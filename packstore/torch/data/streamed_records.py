"""Batches records that were never packed and have no known length, one optimizer step at a time.

::

    loader = TokenizedBatches(records, PackConfig(pack_size=8192), examples_per_step=64)
    for batch in loader:
        loss_fn(packed_logps(model, batch), batch).loss.backward()

An optimizer step is the next `examples_per_step` records that fit. They are packed into batches of
at most `pack_size` tokens, which are distributed round-robin, equally many to each rank. So the
divisor of a step is exact, every pair comes once, and steps do not depend on the number of ranks.
Every rank reads all records, in their order: shuffle them before. Pass data of known length to
:class:`~packstore.torch.PackedDataset` instead: it shuffles, has a length, and resumes without
rereading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from packstore.config import PackConfig, fingerprint
from packstore.errors import ConfigError, DropRateError, quote, sentence
from packstore.format.arrays import Packs
from packstore.format.loss_counts import COUNTS, count_packs
from packstore.torch.batch.collate import PackedBatch, collate
from packstore.torch.data.dataset import placement
from packstore.torch.schedule.position import stale
from packstore.torch.schedule.steps import StepInfo

if TYPE_CHECKING:
    from packstore.online_packing import StepPacker
    from packstore.online_packing.tokenized import Tokenized

STATE_VERSION = 1

SEEN = 1000
"""Records after which the drop rate is checked, before the end of the data is reached."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Position: the start of a step, and the packs of that step that were yielded.

    Attributes:
        records: records read, including those that do not fit.
        left_out: records that do not fit.
        step: steps completed.
        packs: packs yielded of the step that begins here, over all ranks.
    """

    records: int = 0
    left_out: int = 0
    step: int = 0
    packs: int = 0


class TokenizedBatches:
    """Yields the batches of one rank: packs of at most `pack_size` tokens, one per batch.

    Args:
        records: dicts of token ids, with the fields of :mod:`packstore.online_packing.tokenized`,
            read once per epoch. ``set_epoch`` is called if it exists; ``skip`` (as in Hugging
            Face's ``IterableDataset``) is used for resuming if it exists.
        config: uses `pack_size` (the token budget of a batch), `layout`, `strategy`, `seed`,
            `kind`, `carry`, and, for records that do not fit, `max_length`, `overlong` and
            `max_drop_rate`.
        examples_per_step: examples of one optimizer step, over all its batches and ranks.
        tail: if the last step has fewer records: ``drop`` omits it, ``pad`` keeps it.
        rank, world_size: defaults as in :class:`~packstore.torch.PackedDataset`.

    Attributes:
        left_out: records of this epoch that did not fit.

    Raises:
        ConfigError: a setting is out of range, or needs texts.
    """

    def __init__(
        self,
        records: Iterable[Mapping[str, Any]],
        config: PackConfig | None = None,
        *,
        examples_per_step: int,
        tail: Literal["drop", "pad"] = "drop",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if examples_per_step < 1 or tail not in ("drop", "pad"):
            must = "examples_per_step must be at least 1, and tail drop or pad"
            raise ConfigError(f"{must}; found {examples_per_step} and {quote(tail)}.")
        self.records, self.config = records, config or PackConfig()
        self.examples_per_step, self.tail = examples_per_step, tail
        self.rank, self.world_size = placement(rank, world_size)
        self.epoch = self.left_out = 0
        self._packer = self._new_packer()
        self._at = _Place()
        self._start: _Place | None = None

    def __iter__(self) -> Iterator[PackedBatch]:
        """Yields the batches from the loaded position, or from the beginning of the epoch.

        Raises:
            RecordError: a record is not of the kind, or does not fit and `overlong` is ``error``.
            DropRateError: too many records do not fit.
        """
        self._at, self._start = self._start or _Place(), None
        return self._give()

    def _give(self) -> Iterator[PackedBatch]:
        if self._start is not None:  # frameworks may load a state after making the iterator
            self._at, self._start = self._start, None
        self.left_out = self._at.left_out
        if hasattr(self.records, "set_epoch"):
            self.records.set_epoch(self.epoch)
        source = self._from(self._at.records)
        while (step := self._next_step(source)) is not None:
            parts, end = step
            yield from self._batches(parts, end)
            self._at = end

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of `epoch`; does nothing for the current epoch."""
        if epoch != self.epoch:
            self.epoch, self._at, self._start = epoch, _Place(), None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches yielded so far; equal on all ranks."""
        at = self._start or self._at
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "records": at.records,
            "left_out": at.left_out,
            "step": at.step,
            "packs": at.packs,
            "cut": self._cut(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state` was taken, with any number of ranks.

        Records are not compared: they must be the same, in the same order.

        Raises:
            CompatibilityError: the state was taken inside a step of other settings, or is not a
                state of this class.
        """
        names = ("epoch", "records", "left_out", "step", "packs")
        values = [state.get(name) for name in names]
        if state.get("version") != STATE_VERSION or not all(
            isinstance(value, int) and value >= 0 for value in values
        ):
            must = f"it must hold {', '.join(names)} of version {STATE_VERSION}"
            raise stale(must, quote(dict(state), 200))
        if state["packs"] and state.get("cut") != self._cut():
            raise stale("in a step, examples_per_step and config must stay", quote(state["cut"]))
        self.epoch = state["epoch"]
        self._start = _Place(*(state[name] for name in names[1:]))

    def _cut(self) -> str:
        names = ("pack_size", "layout", "strategy", "seed", "max_length", "overlong", "kind")
        settings = [getattr(self.config, name) for name in names]
        return fingerprint([self.examples_per_step, *settings])[:16]

    def _new_packer(self) -> StepPacker:
        from packstore.online_packing import StepPacker  # here, as it brings numba

        return StepPacker(self.config)

    def _from(self, place: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yields the records from `place` on, with their numbers."""
        if place and hasattr(self.records, "skip"):
            return enumerate(iter(self.records.skip(place)), place)
        return islice(enumerate(self.records), place, None)

    def _next_step(
        self, source: Iterator[tuple[int, Mapping[str, Any]]]
    ) -> tuple[list[Tokenized], _Place] | None:
        """Returns the examples of the next step and its end position; None after the last step."""
        parts: list[Tokenized] = []
        seen = self._at.records
        for number, record in source:
            seen = number + 1
            one = self._packer.fits(record, number)
            if one is None:
                self.left_out += 1
                self._check_drops(seen, SEEN)
            else:
                parts.append(one)
            if len(parts) == self.examples_per_step:
                break
        else:
            self._check_drops(seen, 1)
            if not parts or self.tail == "drop":
                return None
        return parts, _Place(seen, self.left_out, self._at.step + 1)

    def _batches(self, parts: list[Tokenized], end: _Place) -> Iterator[PackedBatch]:
        """Yields this rank's batches of a step, without packs already yielded."""
        packs = self._packer.pack(parts)
        begin, ranks = self._at, self.world_size
        out, done = begin.packs, -(-begin.packs // ranks)
        if out >= len(packs):
            raise stale(f"packs must be below {len(packs)}, those of its step", str(out))
        batches = -(-(len(packs) - out) // ranks)
        kind = self._packer.kind
        assert kind is not None
        counts = dict(zip(COUNTS, count_packs(packs, kind).sum(0).tolist(), strict=True))
        for batch in range(batches):
            place = out + batch * ranks + self.rank
            real = place < len(packs)
            pack = packs.row(place if real else place % len(packs))
            info = StepInfo(
                *(begin.step, done + batch, done + batches, len(parts), ranks, len(packs)), counts
            )
            given = out + (batch + 1) * ranks
            self._at = end if info.last else replace(begin, packs=given)
            yield collate(pack, kind, step=info, fillers=0 if real else 1)

    def _check_drops(self, seen: int, least: int) -> None:
        if seen >= least and self.left_out > self.config.max_drop_rate * seen:
            must = f"a record must fit pack_size {self.config.pack_size}"
            found = f"{self.left_out:,} of {seen:,} that do not"
            do = "Raise pack_size or max_length, or allow more with max_drop_rate"
            raise DropRateError(sentence("records", must, found, do))


def lay_end_to_end(records: Sequence[Any], kind: str, config: PackConfig) -> Packs:
    """Lays records of token ids end to end as one pack of any length, in their order.

    Raises:
        RecordError: a record is not of the kind.
    """
    from packstore.online_packing import in_one_pack

    return in_one_pack(records, kind, config)
