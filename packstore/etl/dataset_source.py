"""Reads the examples of a packed dataset for repacking, without tokenizing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from packstore.config import PackConfig, PlanConfig, SelectConfig, WriteConfig
from packstore.errors import ConfigError, RecordError, sentence
from packstore.format.arrays import Examples, Sample, Tally, to_offsets
from packstore.io.dataset.dataset import Dataset
from packstore.io.inputs.files import Input
from packstore.io.inputs.sampling import Sampling, sample_groups
from packstore.pack.fill import unpack
from packstore.pack.layout import sizes
from packstore.version import VERSION


def only_one(config: PackConfig) -> int:
    """Refuses `partitions` for input that is not files of records."""
    if (config.partitions or 1) > 1:
        must = "the input must be files of records"
        raise ConfigError(sentence(f"partitions={config.partitions}", must, "another input"))
    return 1


class DatasetExampleReader:
    """Yields the examples of a packed dataset, in its order."""

    def __init__(self, dataset: Dataset, config: PackConfig) -> None:
        manifest = dataset.manifest
        if config.overlong.startswith("truncate"):
            raise ConfigError(
                f"overlong={config.overlong!r} needs the records: a packed dataset does not store "
                "its texts. Pack the records again, or set overlong to drop or error."
            )
        if config.selects:
            raise ConfigError(
                "dedup and validation_fraction need the records: a packed dataset does not store "
                "its texts. Pack the records again."
            )
        if names := config.needing_records:
            must = f"{', '.join(names)} must be left out, as it is repacked without tokenizing"
            raise ConfigError(sentence(dataset.url, must, "", "Pack the records again"))
        if config.kind not in ("auto", manifest.kind):
            raise ConfigError(
                f"kind must be auto or that of the dataset, {manifest.kind}; found {config.kind}."
            )
        self.kind = manifest.kind
        self.carry = dict(manifest.carry)
        self.vocab_size = manifest.vocab_size
        self._dataset, self._config = dataset, config
        self._groups: Sequence[int] = range(len(dataset.row_groups))
        self.inputs: tuple[Input, ...] = ()
        self.paths: dict[int, str] = {}
        self.partitions = only_one(config)

    def __iter__(self) -> Iterator[tuple[Examples, Tally]]:
        rows = to_offsets(self._dataset.row_groups.rows)
        for group in self._groups:
            packs = self._dataset.read_packs(group)
            examples = unpack(packs)
            kept = None if self._config.rejects is None else list[Sample]()
            tally = Tally(read=examples.num_examples, rejected=kept)
            where = f"{self._dataset.url}, packs {rows[group]}–{rows[group + 1] - 1}"
            yield self._fitting(examples, tally, where), tally

    def sample(
        self, records: int, seed: int, report: Callable[[int], None] | None = None
    ) -> Sampling:
        """See :meth:`ExampleReader.sample`."""
        self._groups, sample = sample_groups(self._dataset.row_groups.examples, records, seed)
        return sample

    def _fitting(self, examples: Examples, tally: Tally, where: str) -> Examples:
        """Returns the examples that are not too long; counts the others."""
        config = self._config
        longest = np.maximum.reduceat(examples.lengths, examples.example_offsets[:-1])
        tokens = sizes(examples, config.layout, config.pad_to_multiple)
        fits = (longest <= config.sequence_limit) & (tokens <= config.pack_size)
        for i in np.flatnonzero(~fits):
            detail = f"{tokens[i]} tokens, longest sequence {longest[i]}"
            if config.overlong == "error":
                must = f"an example must fit pack_size {config.pack_size}"
                raise RecordError(sentence(where, must, detail, "Raise pack_size or max_length"))
            tally.drop("overlong", where, detail)
        return examples if fits.all() else examples.take(np.flatnonzero(fits))

    def _settings(self) -> dict[str, Any]:
        """Returns the settings that apply without texts."""
        names = {f.name for stage in (SelectConfig, PlanConfig, WriteConfig) for f in fields(stage)}
        names |= {"max_length", "overlong"}
        recorded = replace(self._config, partitions=self.partitions).recorded()
        return {name: v for name, v in recorded.items() if name in names}

    def provenance(self, sources: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Returns the dataset's provenance, with this repacking added."""
        manifest = self._dataset.manifest
        origin = {"path": self._dataset.url, "fingerprint": manifest.fingerprint}
        kept = {k: v for k, v in manifest.provenance.items() if k != "repacked_from"}
        return {
            **kept,
            "repacked_from": origin,
            "settings": {**manifest.provenance.get("settings", {}), **self._settings()},
            "package_version": VERSION,
        }
