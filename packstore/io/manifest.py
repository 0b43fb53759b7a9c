"""The manifest: one JSON file that describes a dataset; writing it is the commit."""

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
    """Counts of input records: ``read == packed + sum(dropped)``; `packed` includes `noted`.

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
    """Everything that a reader needs before it opens a shard.

    Attributes:
        features: required features; a reader must support all of them.
        file_format: ``parquet`` or ``arrow``.
        provenance: `sources` (path, bytes, sha256, records of each), `tokenizer`, `settings`,
            `package_version`.
        shards: in dataset order.
        pack_index: the file with the sizes of every pack, if written; see :mod:`.pack_index`.
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
        """Number of sequences K of each example; None for kind ``ranked``, where it varies."""
        return KINDS[self.kind]

    @property
    def num_packs(self) -> int:
        """Number of packs of the dataset."""
        return self.totals.packs

    @property
    def pairs(self) -> int:
        """Number of preference pairs: the examples of kind ``dpo``, else 0."""
        return self.totals.examples if self.kind == "dpo" else 0

    @property
    def fill_rate(self) -> float:
        """Tokens as a fraction of packs x pack size, 0 to 1."""
        return self.statistics.fill_rate

    @property
    def vocab_size(self) -> int | None:
        """Exclusive upper bound of token ids, if the tokenizer's size was recorded."""
        size = (self.provenance.get("tokenizer") or {}).get("vocab_size")
        return size if isinstance(size, int) else None

    @property
    def lineage(self) -> str:
        """Id shared by all datasets whose examples have equal tokens under equal ids.

        Repacking keeps it. By default it is the dataset's fingerprint.
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
        """sha256 (hex) of the packs and their order, independent of the other fields."""
        what = [FORMAT_VERSION, self.kind, self.layout, self.pack_size, self.file_format]
        parts = [*what, *self.features, *(f"{s.sha256}+{s.example_id_base}" for s in self.shards)]
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def to_json(self) -> bytes:
        """Returns canonical JSON: equal manifests give equal bytes.

        Raises:
            FormatError: a text is not valid Unicode.
        """
        from packstore.io.manifest_json import dump

        return dump(self)

    @classmethod
    def from_json(cls, data: bytes, where: str = "manifest") -> Manifest:
        """Parses the manifest in `data`; ignores unknown optional fields.

        Raises:
            UnsupportedFormatError: a higher version, or an unknown required feature.
            FormatError: a field is missing, of the wrong type, or contradicts others; names it.
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
    """Builds the manifest of a dataset that was just written.

    Args:
        shape: properties shared by all packs.
        config: the settings of the job.
        shards: returned by :meth:`ShardWriter.close`.
        counter: :attr:`ShardWriter.counter` of the writer.
        tally: counts of packed, dropped and noted records.
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
    """Reads the manifest of a dataset, by default the current one; returns it and its version.

    Raises:
        DatasetNotFoundError: no dataset, or no such version, was committed there.
        FormatError: the manifest is not valid.
    """
    data, where, number = read_committed(location, version)
    return Manifest.from_json(data, where), number


def commit_manifest(
    location: Location, manifest: Manifest, overwrite: bool = False, version: int | None = None
) -> int:
    """Commits a dataset in one step; returns its version.

    Args:
        location: the dataset.
        manifest: of the new version.
        overwrite: replace an existing dataset.
        version: its number, chosen when the job started; None: the next one.

    Raises:
        DatasetExistsError: a dataset exists and `overwrite` is False, or another writer committed
            first.
        FormatError: the manifest is too large.
    """
    return commit(location, manifest.to_json(), overwrite, version=version)
