"""The manifest: what a dataset is, in one JSON file whose appearance is the commit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from packstore.config import PackConfig
from packstore.io.commit import commit, read_committed
from packstore.io.shard import PackShape, ShardInfo
from packstore.io.statistics import PackCounter, Statistics, Totals
from packstore.io.storage import Location
from packstore.io.stored_file import StoredFile
from packstore.io.typed_json import Count, Positive, Whole
from packstore.records import Tally
from packstore.schema import FORMAT_VERSION, KINDS, pack_schema


@dataclass(frozen=True, kw_only=True)
class Records:
    """What became of the input: ``read == packed + sum(dropped)``; `noted` ones are in.

    `fields_used` and `fields_not_used` count the records that have a field, by its name.
    """

    read: Count
    packed: Count
    dropped: Mapping[str, Count]
    noted: Mapping[str, Count]
    fields_used: Mapping[str, Count] = field(default_factory=dict)
    fields_not_used: Mapping[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Everything a reader needs to know before it opens a shard.

    Attributes:
        features: required features, which a reader must know.
        file_format: ``parquet`` or ``arrow``.
        provenance: `sources` (path, bytes, sha256, records of each), `tokenizer`, `settings`,
            `package_version`.
        shards: in dataset order.
        pack_index: the sizes of every pack, if the writer left them; see :mod:`.pack_index`.
    """

    kind: str
    layout: str
    pack_size: Positive
    strategy: str
    seed: Whole
    pack_order: str
    file_format: str
    features: tuple[str, ...]
    carry: Mapping[str, str]
    totals: Totals
    statistics: Statistics
    records: Records
    provenance: Mapping[str, Any]
    shards: tuple[ShardInfo, ...]
    pack_index: StoredFile | None = None

    @property
    def num_responses(self) -> int | None:
        """K, the sequences of each example; None for kind ``ranked``, where it varies."""
        return KINDS[self.kind]

    @property
    def num_packs(self) -> int:
        """Packs of the dataset."""
        return self.totals.packs

    @property
    def pairs(self) -> int:
        """Preference pairs: the examples of kind ``dpo``, else 0."""
        return self.totals.examples if self.kind == "dpo" else 0

    @property
    def fill_rate(self) -> float:
        """Share of the packs' room that tokens take, 0 to 1."""
        return self.statistics.fill_rate

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it, if the tokenizer's size was recorded."""
        size = (self.provenance.get("tokenizer") or {}).get("vocab_size")
        return size if isinstance(size, int) else None

    @property
    def lineage(self) -> str:
        """The same for all datasets whose examples have equal tokens under equal ids.

        Repacking keeps it. A dataset that does not tell it has one of its own: its fingerprint.
        """
        return str(self.provenance.get("lineage", self.fingerprint))

    @property
    def schema(self) -> pa.Schema:
        """The logical Arrow schema, with plain `labels`."""
        return pack_schema(self.kind, self.layout, carry=self.carry)

    @property
    def stored_schema(self) -> pa.Schema:
        """The Arrow schema of the shards."""
        spans = "label_spans" in self.features
        return pack_schema(self.kind, self.layout, label_spans=spans, carry=self.carry)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) that identifies the packs and their order, whatever the rest says."""
        what = [FORMAT_VERSION, self.kind, self.layout, self.pack_size, self.file_format]
        parts = [*what, *self.features, *(f"{s.sha256}+{s.example_id_base}" for s in self.shards)]
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def to_json(self) -> bytes:
        """Canonical JSON: the same manifest gives the same bytes.

        Raises:
            FormatError: a text in it is not valid Unicode.
        """
        from packstore.io.manifest_json import dump

        return dump(self)

    @classmethod
    def from_json(cls, data: bytes, where: str = "manifest") -> Manifest:
        """The manifest in `data`; optional fields that are unknown are ignored.

        Raises:
            UnsupportedFormatError: a higher version, or a required feature that is unknown.
            FormatError: anything missing, of the wrong type, or contradictory; names the field.
        """
        from packstore.io.manifest_json import parse

        return parse(data, where)


def build_manifest(
    shape: PackShape,
    config: PackConfig,
    shards: Sequence[ShardInfo],
    counter: PackCounter,
    tally: Tally,
    planning: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Manifest:
    """The manifest of a dataset that was just written.

    Args:
        shape: what all packs have in common.
        config: the settings of the job.
        shards: as :meth:`ShardWriter.close` returned them.
        counter: as the writer counted, :attr:`ShardWriter.counter`.
        tally: what became of the records.
        planning: statistics of the plan.
        provenance: see :class:`Manifest`.

    Raises:
        FormatError: the parts contradict each other.
    """
    from packstore.io.manifest_json import check_manifest

    manifest = Manifest(
        kind=shape.kind,
        layout=shape.layout,
        pack_size=shape.pack_size,
        strategy=config.strategy,
        seed=config.seed,
        pack_order=config.pack_order,
        file_format=config.format,
        features=("label_spans",) if config.labels == "spans" else (),
        carry=dict(shape.carry),
        totals=counter.totals(sum(s.bytes for s in shards)),
        statistics=counter.statistics(shape.pack_size, planning),
        records=Records(
            read=tally.read,
            packed=tally.kept,
            dropped=dict(sorted(tally.dropped.items())),
            noted=dict(sorted(tally.events.items())),
            fields_used=dict(sorted(tally.used.items())),
            fields_not_used=dict(sorted(tally.unused.items())),
        ),
        provenance=provenance,
        shards=tuple(shards),
    )
    check_manifest(manifest, "manifest")
    return manifest


def read_manifest(location: Location, version: int | None = None) -> tuple[Manifest, int]:
    """The manifest of a dataset and its version, by default the current one.

    Raises:
        DatasetNotFoundError: nothing, or no such version, was committed there.
        FormatError: the manifest is not valid.
    """
    data, where, number = read_committed(location, version)
    return Manifest.from_json(data, where), number


def commit_manifest(
    location: Location, manifest: Manifest, overwrite: bool = False, version: int | None = None
) -> int:
    """Makes the dataset visible, in one step; returns its version.

    Args:
        location: the dataset.
        manifest: what it is.
        overwrite: replace a dataset that is there.
        version: the number it must get, as the job saw it when it began; None: the next one.

    Raises:
        DatasetExistsError: a dataset is there and `overwrite` is False, or another writer was
            faster.
        FormatError: the manifest is too large.
    """
    return commit(location, manifest.to_json(), overwrite, version=version)
