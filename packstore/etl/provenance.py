"""Names a run, checks its input, counts its progress, and commits it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packstore.config import MEANINGFUL, PackConfig, fingerprint
from packstore.errors import ConfigError, DropRateError, InputError, sentence
from packstore.etl.dedup_and_split import DUPLICATES, Selection, of_part
from packstore.etl.rejects import RejectsFile
from packstore.etl.sources import ExampleReader, RecordExampleReader
from packstore.format.arrays import Tally
from packstore.io.dataset.pack_index import put_index
from packstore.io.manifest.manifest import build_manifest
from packstore.io.manifest.partition_notes import Finished
from packstore.io.shards.shard import PackShape
from packstore.io.shards.statistics import PackCounter
from packstore.io.write.write_job import WriteJob
from packstore.progress import Progress

_DECIDING_TOKENIZER = (
    "vocab_sha256",
    "probe_sha256",
    "bos_id",
    "eos_id",
    "adds_bos",
    "chat_template_sha256",
    "tool_use_template_sha256",
    "chat_template_date",
)
_DECIDING_SETTINGS = (
    "fields",
    "append_eos",
    "add_bos",
    "template_variables",
    "thinking",
)
_DECIDING_ANSWERS = ("special_tokens", "invalid_unicode")
"""Settings, and answers of the setting `on`, that change the tokens of an example."""

ASKED_TO_GO = (*DUPLICATES.values(), "unpaired_feedback")
"""Reasons to drop that a setting requests; they do not count against `max_drop_rate`."""

log = logging.getLogger("packstore")


def check_input(tally: Tally, config: PackConfig, job: WriteJob) -> None:
    """Refuses an input that contradicts the settings, and logs unused fields.

    Mapped fields are not checked on append: they suited the first records of the dataset.

    Raises:
        ConfigError: no record has a field that is mapped.
        DropRateError: too many records were dropped.
    """
    check_drops(tally, config)
    for name, written in absent_fields(tally, config) if job.extends is None else ():
        must = "a record must have the field that is mapped"
        do = "Correct its name, or map nothing"
        found = f"none of {tally.read:,}"
        raise ConfigError(sentence(f"setting fields, {name}={written}", must, found, do))
    log.info("fields used: %s", ", ".join(sorted(tally.used)))
    counts = {n: f"{n} ({count:,} records)" for n, count in sorted(tally.unused.items())}
    if meaningful := [text for name, text in counts.items() if name in MEANINGFUL]:
        log.warning("fields not used: %s", ", ".join(meaningful))
    if further := counts.keys() - MEANINGFUL:
        log.info("further fields not used: %s", ", ".join(sorted(further)))


def log_drops(tally: Tally) -> None:
    """Logs the number of dropped records for each reason, and the first of them."""
    for reason, count in sorted(tally.dropped.items()):
        first = next((s for s in tally.samples if s.reason == reason), None)
        text = "" if first is None else f"; the first: {first.where}: {first.detail}"
        log.warning("dropped %s records: %s%s", f"{count:,}", reason, text)


def absent_fields(tally: Tally, config: PackConfig) -> list[tuple[str, str]]:
    """Returns the mapped fields that no record has, with their names in the input."""
    return [
        (name, written)
        for name, written in config.fields.items()
        if tally.kept and not tally.used[written] and not tally.unused[written]
    ]


def check_drops(tally: Tally, config: PackConfig) -> None:
    """Raises :class:`DropRateError` if too many records were dropped."""
    asked = sum(tally.dropped[reason] for reason in ASKED_TO_GO)
    dropped = tally.read - tally.kept - asked
    if tally.kept and dropped <= config.max_drop_rate * tally.read:
        return
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in tally.dropped.most_common())
    example = next((s for s in tally.samples if s.reason in tally.dropped), None)
    where = f" (first: {example.where}: {example.detail})" if example else ""
    allowed = f"at most {config.max_drop_rate:.0%} of the records may be dropped"
    must = allowed if tally.kept else "at least one record must remain"
    found = f"{dropped:,} of {tally.read:,} dropped: {reasons}{where}"
    remedy = "Run `packstore doctor` on the input"
    if tally.dropped["overlong"] == max(tally.dropped.values(), default=0):
        remedy = "Raise pack_size or max_length, or set overlong to truncate_prompt"
    if tally.kept:
        remedy += ", or allow more with max_drop_rate"
    raise DropRateError(sentence("input", must, found, remedy))


def check_parts(kept: Mapping[str, int], config: PackConfig) -> None:
    """Raises :class:`DropRateError` if a part has no records."""
    for part, number in kept.items():
        if not number:
            fraction = config.validation_fraction
            must = f"both parts must get a record with validation_fraction {fraction}"
            found = f"none for {part}, of {sum(kept.values()):,}"
            raise DropRateError(sentence("input", must, found, "Choose another fraction, or seed"))


def run_of(reader: ExampleReader, part: str | None) -> str:
    """Names a run, from facts known before its input is read: a rerun has the same name."""
    sizes = reader.sizes if isinstance(reader, RecordExampleReader) else []
    about = {**reader.provenance([]), "bytes": sizes, "part": part}
    return fingerprint(without_paths(about))[:12]


def with_lineage(provenance: Mapping[str, Any], kind: str, config: PackConfig) -> dict[str, Any]:
    """Adds `lineage`, a hash of all that decides the ids of the examples and their tokens.

    It does not cover which examples are in, nor which tokens are supervised. A repacked dataset
    keeps the lineage of its source.
    """
    if "repacked_from" in provenance:
        return {"lineage": provenance["repacked_from"]["fingerprint"], **provenance}
    tokenizer = provenance["tokenizer"] or {}
    parts = {
        "kind": kind,
        "sources": [[s["sha256"], s["records"]] for s in provenance["sources"]],
        "tokenizer": [tokenizer.get(name) for name in _DECIDING_TOKENIZER],
        "settings": {name: config.recorded()[name] for name in _DECIDING_SETTINGS},
        "on": [config.on[reason] for reason in _DECIDING_ANSWERS],
    }
    if config.overlong.startswith("truncate"):
        parts["truncated"] = [config.overlong, config.sequence_limit]
    return {**provenance, "lineage": fingerprint(parts)}


def without_paths(value: Any) -> Any:
    """Removes paths from `value`: the same input elsewhere is still the same input."""
    if isinstance(value, Mapping):
        return {name: without_paths(v) for name, v in value.items() if name != "path"}
    return [without_paths(v) for v in value] if isinstance(value, list) else value


def shape_of(reader: ExampleReader, config: PackConfig) -> PackShape:
    """Returns the properties that all packs share."""
    return PackShape(
        kind=reader.kind,
        layout=config.layout,
        pack_size=config.pack_size,
        carry=reader.carry,
        vocab_size=reader.vocab_size,
    )


class Counting:
    """Reports the progress over all partitions: records read, packs written."""

    def __init__(self, report: Progress | None = None) -> None:
        self._report = report
        self._total: int | None = None
        self._keys = self._read = self._written = 0

    def keyed(self, examples: int) -> None:
        """Adds examples of the pass that reads only keys."""
        self._keys += examples
        if self._report:
            self._report("compare", self._keys, None, "records")

    def read(self, records: int, last: bool = False) -> None:
        """Adds records; `last`: no more will follow."""
        self._read += records
        if self._report:
            self._report("read", self._read, self._read if last else None, "records")

    def wrote(self, packs: int, left: int | None = None) -> None:
        """Adds packs; `left`: number of packs still to write, if known."""
        self._written += packs
        total = None if left is None else self._written + left
        if self._report and (packs or self._total is None):
            self._report("write", self._written, total, "packs")
        self._total = total


@dataclass(frozen=True, eq=False)
class Contents:
    """The records of a partition.

    Attributes:
        examples: number of examples of each dataset, in the order of :attr:`Selection.parts`.
        tally: counts of all records.
        sources: ordinal of an input -> its path, bytes, hash and records; only of files.
        rejects: the dropped records, compressed; empty without setting `rejects`.
    """

    examples: list[int]
    tally: Tally
    sources: dict[int, dict[str, Any]]
    rejects: bytes


class RecordTotals:
    """Adds up the records of all partitions, and checks them once all are read.

    `jobs` has the job of each part under its name; a single job is part None.
    """

    def __init__(
        self,
        jobs: Mapping[str | None, WriteJob],
        reader: ExampleReader,
        config: PackConfig,
        rejects: RejectsFile,
        counting: Counting,
    ) -> None:
        self._jobs, self._reader, self._config = jobs, reader, config
        self._rejects, self._counting = rejects, counting
        self._names = Selection(config, config.seed).parts
        self._kept = dict.fromkeys(self._names, 0)
        self._tally = Tally()
        self._sources = dict[int, dict[str, Any]]()
        self._missing = config.partitions or 1

    def add(self, contents: Contents) -> None:
        """Adds the next partition, if possible before it is written.

        Raises:
            PackstoreError: after the last partition, if the input contradicts the settings.
            InputError: a file changed while its partitions were read.
        """
        self._rejects.add_compressed(contents.rejects)
        self._tally.add(contents.tally)
        for name, examples in zip(self._names, contents.examples, strict=True):
            self._kept[name] += examples
        for ordinal, source in contents.sources.items():
            if self._sources.setdefault(ordinal, source) != source:
                must = "must stay as it is while it is packed"
                raise InputError(sentence(source["path"], must, "that it changed", "Run it again"))
        self._missing -= 1
        if not self._missing:
            self._check()

    def _check(self) -> None:
        self._counting.read(0, last=True)
        self._rejects.publish()
        log_drops(self._tally)
        check_input(self._tally, self._config, next(iter(self._jobs.values())))
        check_parts(self._kept, self._config)
        for part, job in self._jobs.items():
            job.refuse_again(self.provenance(part))

    def of_part(self, name: str) -> Tally:
        """Returns the tally of the dataset of a part."""
        return of_part(self._tally, name, self._kept)

    def provenance(self, part: str | None) -> dict[str, Any]:
        """Returns the provenance of the dataset of a part, after the last partition."""
        inputs = self._reader.inputs
        sources = [self._sources[i.ordinal] for i in inputs] if inputs else None
        found = with_lineage(self._reader.provenance(sources), self._reader.kind, self._config)
        return {**found, "part": part} if part else found


def commit(
    job: WriteJob,
    shape: PackShape,
    config: PackConfig,
    shards: Sequence[Finished],
    known: tuple[Tally, Mapping[str, Any], Mapping[str, Any]],
) -> None:
    """Puts the pack index and commits the shards; `known` is tally, planning and provenance."""
    counter = PackCounter()
    for part in shards:
        counter.merge(part.counter)
    infos = [part.shard for part in shards]
    manifest = build_manifest(shape, config, infos, counter, *known)
    sizes = itertools.chain(job.earlier(), (part.sizes for part in shards))
    index = put_index(job.location, sizes, job.version)
    job.confirm(infos)
    job.commit(job.whole(replace(manifest, pack_index=index)))
