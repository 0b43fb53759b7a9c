"""A dataset packed anew in every epoch, while it is read.

For data that is stored as single examples (strategy ``none``) or in smaller packs: another pack
size, strategy or layout needs no new dataset, and examples meet others in each epoch. ::

    data = PackedDataset(url, repack=PackConfig(pack_size=8192, layout="shared_prefix"))

The same for records that are token ids already and were never packed, such as a list of dicts or a
Hugging Face ``Dataset``: ``PackedDataset(records, repack=PackConfig(pack_size=8192))``.

The packs of an epoch are planned from lengths alone, before any token is read, so their number and
sizes are known, and any of them can be read at any time: :mod:`packstore.repacking` tells how.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from packstore.config import PackConfig, ReadConfig, fingerprint
from packstore.io.dataset import Dataset
from packstore.io.statistics import NO_TOTALS, Totals
from packstore.records import Int64, Packs, PackSizes
from packstore.torch.stream import Identity
from packstore.version import VERSION

if TYPE_CHECKING:
    from packstore.repacking import EpochPlan, ExampleSizes
    from packstore.repacking.records import Records

_SETTINGS = ("pack_size", "layout", "strategy", "pack_order", "seed", "max_length", "overlong")


class _PlannedPacks:
    """What streams have in common whose packs are planned anew in each epoch, from sizes alone."""

    def __init__(
        self, sizes: ExampleSizes, config: PackConfig, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        self.config, self.seed, self.shuffle, self._sizes = config, seed, shuffle, sizes
        self.left_out = sizes.left_out
        self._plan, self._epoch = self._planned(0), 0

    @property
    def _settings(self) -> Identity:
        """Settings and order; also the version, as a strategy may change with it."""
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
        """Makes this the stream of `epoch`: plans it, if it is not yet."""
        if epoch != self._epoch:
            self._plan, self._epoch = self._planned(epoch), epoch

    def _planned(self, epoch: int) -> EpochPlan:
        from packstore.repacking import plan_epoch

        epoch = epoch if self.shuffle else 0
        config, shuffle = self.config, self.shuffle
        return plan_epoch(self._sizes, config, seed=self.seed, epoch=epoch, shuffle=shuffle)

    def sizes(self, indices: Int64) -> PackSizes:
        """Sizes of the packs at positions `indices`; see :class:`PackStream`."""
        return self._plan.pack_sizes.take(self._plan.locate(indices))

    def sources(self, indices: Int64) -> Int64:
        """All of source 0."""
        return np.zeros_like(indices)


class RepackedPacks(_PlannedPacks):
    """The examples of a dataset in new packs; a :class:`PackStream`.

    Args:
        dataset: of examples in any packs.
        config: its `pack_size`, `layout`, `strategy`, `pack_order`, `seed`, and, for what does not
            fit, `max_length`, `overlong` and `max_drop_rate`. The rest has no meaning here.
        seed: of the order.
        shuffle: False: in file order, and the same packs in every epoch.
        reading: how row groups are fetched.

    Attributes:
        left_out: examples that do not fit.

    Raises:
        ConfigError: a setting contradicts the dataset, or needs its texts.
        RecordError: an example does not fit, and `overlong` is ``error``.
        DropRateError: too many, or all, do not fit.
        StorageError: a shard is missing, or the store refuses.
        IntegrityError: its bytes are not those that were written.
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
        from packstore.repacking import measure  # here, as it brings numba

        self.reading = reading or ReadConfig()
        self.dataset = dataset.cached(self.reading)
        super().__init__(measure(self.dataset, config), config, seed=seed, shuffle=shuffle)

    @property
    def kind(self) -> str:
        """``dpo``, ``sft`` or ``ranked``."""
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
        """The packs at each array of positions; see :class:`PackStream`.

        Ranks that a power of two up to 16 divides read their own lanes only, each row group once.
        """
        from packstore.repacking import read_packs

        return read_packs(batches, self.dataset, self._plan, self.config.layout, self.reading)


class TokenizedPacks(_PlannedPacks):
    """Tokenized records that were never packed, in packs; a :class:`PackStream`.

    For data of a known length, any of whose records can be had at any time: packs, position and
    resume are those of a stored dataset. All records are gone through once, to measure them, by
    every rank. Their fields are told in :mod:`packstore.repacking.tokenized`. Of endless data, see
    :class:`~packstore.torch.unpacked.TokenizedBatches`.

    Args:
        records: a list of dicts, a Hugging Face ``Dataset``, or the like.
        config: its `pack_size`, `layout`, `strategy`, `pack_order`, `seed`, `kind`, `carry`, and,
            for what does not fit, `max_length`, `overlong` and `max_drop_rate`.
        seed: of the order.
        shuffle: False: in the order of the records, and the same packs in every epoch.

    Attributes:
        left_out: records that do not fit.

    Raises:
        RecordError: a record is not of the kind, or does not fit and `overlong` is ``error``.
        DropRateError: too many, or all, do not fit.
        ConfigError: no records, or a setting that needs texts.
    """

    def __init__(
        self, records: Records, config: PackConfig, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        from packstore.repacking import RecordReader  # here, as it brings numba

        self._reader = RecordReader(records, config)
        super().__init__(self._reader.sizes, config, seed=seed, shuffle=shuffle)

    @property
    def kind(self) -> str:
        """``dpo``, ``sft`` or ``ranked``."""
        return self._reader.kind

    @property
    def identity(self) -> Identity:
        """A hash of all records, settings and order."""
        return {"records": self._reader.digest[:16], **self._settings}

    @property
    def datasets(self) -> Sequence[Dataset]:
        """None: they are not stored."""
        return []

    def read(self, batches: Iterable[Int64], *, stride: int = 1) -> Iterator[list[Packs]]:
        """The packs at each array of positions; see :class:`PackStream`.

        Raises:
            RecordError: a record is no longer what it was.
        """
        return self._reader.read(batches, self._plan)
