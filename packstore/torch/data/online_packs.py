"""Repacks a dataset in every epoch, while it is read.

For data stored as single examples (strategy ``none``) or in smaller packs: another pack size,
strategy or layout needs no new dataset, and each epoch combines other examples. ::

    data = PackedDataset.repacked(url, PackConfig(pack_size=8192, layout="shared_prefix"))

The same works for tokenized records that were never packed, such as a list of dicts or a Hugging
Face ``Dataset``: ``PackedDataset.from_records(records, PackConfig(pack_size=8192))``.

The packs of an epoch are planned from lengths alone, before any token is read, so their number and
sizes are known and they can be read in any order; see :mod:`packstore.online_packing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from packstore.config import PackConfig, ReadConfig, fingerprint
from packstore.format.arrays import Int64, Packs, PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.io.shards.statistics import NO_TOTALS, Totals
from packstore.torch.schedule.stream import Identity
from packstore.version import VERSION

if TYPE_CHECKING:
    from packstore.online_packing import EpochPlan, ExampleSizes
    from packstore.online_packing.records import Records

_SETTINGS = ("pack_size", "layout", "strategy", "pack_order", "seed", "max_length", "overlong")


class _PlannedPacks:
    """Base of streams whose packs are planned in each epoch, from sizes alone."""

    def __init__(
        self, sizes: ExampleSizes, config: PackConfig, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        self.config, self.seed, self.shuffle, self._sizes = config, seed, shuffle, sizes
        self.left_out = sizes.left_out
        self._plan, self._epoch = self._planned(0), 0

    @property
    def _settings(self) -> Identity:
        """Settings, order and packstore's version, as a strategy may change with it."""
        settings = [VERSION, *(getattr(self.config, name) for name in _SETTINGS)]
        digest = fingerprint(settings)[:16]
        return {"repack": digest, "seed": self.seed, "shuffle": self.shuffle}

    @property
    def totals(self) -> Totals:
        """Packs, examples and tokens of the epoch."""
        tokens = int(self._sizes.tokens.sum(dtype=np.int64))
        examples = len(self._sizes.tokens) - self.left_out
        return replace(NO_TOTALS, packs=len(self), examples=examples, tokens=tokens)

    def __len__(self) -> int:
        return len(self._plan)

    def set_epoch(self, epoch: int) -> None:
        """Switches to `epoch`, and plans its packs."""
        if epoch != self._epoch:
            self._plan, self._epoch = self._planned(epoch), epoch

    def _planned(self, epoch: int) -> EpochPlan:
        from packstore.online_packing import plan_epoch

        epoch = epoch if self.shuffle else 0
        config, shuffle = self.config, self.shuffle
        return plan_epoch(self._sizes, config, seed=self.seed, epoch=epoch, shuffle=shuffle)

    def sizes(self, indices: Int64) -> PackSizes:
        """Returns the sizes of the packs at positions `indices`; see :class:`PackStream`."""
        return self._plan.pack_sizes.take(self._plan.locate(indices))

    def sources(self, indices: Int64) -> Int64:
        """Returns 0 for each pack: there is one source."""
        return np.zeros_like(indices)


class RepackedPacks(_PlannedPacks):
    """The examples of a dataset in new packs; a :class:`PackStream`.

    Args:
        dataset: the dataset, packed in any way.
        config: uses `pack_size`, `layout`, `strategy`, `pack_order`, `seed`, and, for examples that
            do not fit, `max_length`, `overlong` and `max_drop_rate`; ignores the rest.
        seed: seed of the order.
        shuffle: False reads in file order, with the same packs in every epoch.
        reading: how row groups are fetched.

    Attributes:
        left_out: number of examples that do not fit.

    Raises:
        ConfigError: a setting contradicts the dataset, or needs its texts.
        RecordError: an example does not fit, and `overlong` is ``error``.
        DropRateError: too many examples, or all, do not fit.
        StorageError: a shard is missing, or the store refuses.
        IntegrityError: a checksum of a shard does not match.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: PackConfig,
        *,
        seed: int = 0,
        shuffle: bool = True,
        reading: ReadConfig | None = None,
    ) -> None:
        from packstore.online_packing import measure  # here, as it brings numba

        self.reading = reading or ReadConfig()
        self.dataset = dataset.cached(self.reading)
        super().__init__(measure(self.dataset, config), config, seed=seed, shuffle=shuffle)

    @property
    def kind(self) -> str:
        """``preference``, ``sft`` or ``ranked``."""
        return self.dataset.manifest.kind

    @property
    def identity(self) -> Identity:
        """Dataset, settings and order."""
        return {"dataset": self.dataset.manifest.fingerprint, **self._settings}

    @property
    def datasets(self) -> Sequence[Dataset]:
        """The one dataset."""
        return [self.dataset]

    def read(self, batches: Iterable[Int64], *, stride: int = 1) -> Iterator[list[Packs]]:
        """Yields the packs at each array of positions; see :class:`PackStream`.

        If the number of ranks is a power of two up to 16, each rank reads separate lanes, and each
        row group is read once.
        """
        from packstore.online_packing import read_packs

        return read_packs(batches, self.dataset, self._plan, self.config.layout, self.reading)


class TokenizedPacks(_PlannedPacks):
    """Packs tokenized records that were never packed; a :class:`PackStream`.

    For data of known length with random access: packs, position and resume are those of a stored
    dataset. Every rank reads all records once, to measure them. The fields of a record are in
    :mod:`packstore.online_packing.tokenized`. For endless data use
    :class:`~packstore.torch.data.streamed_records.TokenizedBatches`.

    Args:
        records: a list of dicts, a Hugging Face ``Dataset``, or similar.
        config: uses `pack_size`, `layout`, `strategy`, `pack_order`, `seed`, `kind`, `carry`, and,
            for records that do not fit, `max_length`, `overlong` and `max_drop_rate`.
        seed: seed of the order.
        shuffle: False keeps the order of the records, with the same packs in every epoch.

    Attributes:
        left_out: number of records that do not fit.

    Raises:
        RecordError: a record is not of the kind, or does not fit and `overlong` is ``error``.
        DropRateError: too many records, or all, do not fit.
        ConfigError: there are no records, or a setting needs texts.
    """

    def __init__(
        self, records: Records, config: PackConfig, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        from packstore.online_packing import RecordReader  # here, as it brings numba

        self._reader = RecordReader(records, config)
        super().__init__(self._reader.sizes, config, seed=seed, shuffle=shuffle)

    @property
    def kind(self) -> str:
        """``preference``, ``sft`` or ``ranked``."""
        return self._reader.kind

    @property
    def identity(self) -> Identity:
        """Hash of all records, settings and order."""
        return {"records": self._reader.digest[:16], **self._settings}

    @property
    def datasets(self) -> Sequence[Dataset]:
        """Empty: the records are not stored."""
        return []

    def read(self, batches: Iterable[Int64], *, stride: int = 1) -> Iterator[list[Packs]]:
        """Yields the packs at each array of positions; see :class:`PackStream`.

        Raises:
            RecordError: a record has changed.
        """
        return self._reader.read(batches, self._plan)
