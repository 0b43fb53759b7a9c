"""What every way of packing has in common: what a run is known by, its lineage, its commit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Protocol

from packstore.config import MEANINGFUL, PackConfig, fingerprint
from packstore.errors import ConfigError, DropRateError, sentence
from packstore.intake import Intake
from packstore.io.job import WriteJob
from packstore.io.manifest import build_manifest, commit_manifest
from packstore.io.presence import require_committed
from packstore.io.shard import PackShape
from packstore.io.writer import ShardWriter
from packstore.records import Tally
from packstore.selection import DUPLICATES
from packstore.version import VERSION

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
    "tool_arguments",
    "special_tokens",
    "invalid_unicode",
)
"""What changes the tokens of an example, beside truncation."""


ASKED_TO_GO = (*DUPLICATES.values(), "unpaired_feedback")
"""Reasons that a setting must ask for; they do not count against `max_drop_rate`."""

log = logging.getLogger("packstore")


class Progress(Protocol):
    """Told how far a stage is; called often, so it decides itself when to draw."""

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """`done` of `total` (None: unknown) `unit` of `stage` are finished."""


def check_input(tally: Tally, config: PackConfig, job: WriteJob) -> None:
    """Refuses an input that is not what the settings say, and logs the fields that were not used.

    The settings of a dataset that is extended were right for its first records, and stay.

    Raises:
        ConfigError: no record has a field that is mapped.
        DropRateError: nothing, or too little, is left.
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
    """Logs how many records were dropped for each reason, and the first of them."""
    for reason, count in sorted(tally.dropped.items()):
        first = next((s for s in tally.samples if s.reason == reason), None)
        text = "" if first is None else f"; the first: {first.where}: {first.detail}"
        log.warning("dropped %s records: %s%s", f"{count:,}", reason, text)


def absent_fields(tally: Tally, config: PackConfig) -> list[tuple[str, str]]:
    """The mapped fields, and their names in the input, that no record has."""
    return [
        (name, written)
        for name, written in config.fields.items()
        if tally.kept and not tally.used[written] and not tally.unused[written]
    ]


def check_drops(tally: Tally, config: PackConfig) -> None:
    """Raises :class:`DropRateError` if nothing, or too little, is left."""
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
    """Raises :class:`DropRateError` if one of several parts got nothing."""
    for part, number in kept.items():
        if not number:
            fraction = config.validation_fraction
            must = f"both parts must get a record with validation_fraction {fraction}"
            found = f"none for {part}, of {sum(kept.values()):,}"
            raise DropRateError(sentence("input", must, found, "Choose another fraction, or seed"))


def begun_with(config: PackConfig, job: WriteJob) -> dict[str, Any]:
    """What an interrupted run must have been begun with, as far as it is known beforehand."""
    libraries = {"packstore": VERSION, "pyarrow": version("pyarrow"), "numpy": version("numpy")}
    call = "pack" if job.extends is None else "append"
    return {"call": call, "settings": config.recorded(), "libraries": libraries}


def with_lineage(provenance: Mapping[str, Any], kind: str, config: PackConfig) -> dict[str, Any]:
    """`provenance` with `lineage`: what decides the ids of the examples, and their tokens.

    Not which examples are in, and not which tokens are supervised. Of a dataset that is packed anew
    it is that of the dataset.
    """
    if "repacked_from" in provenance:
        return {"lineage": provenance["repacked_from"]["fingerprint"], **provenance}
    tokenizer = provenance["tokenizer"] or {}
    parts = {
        "kind": kind,
        "sources": [[s["sha256"], s["records"]] for s in provenance["sources"]],
        "tokenizer": [tokenizer.get(name) for name in _DECIDING_TOKENIZER],
        "settings": {name: config.recorded()[name] for name in _DECIDING_SETTINGS},
    }
    if config.overlong.startswith("truncate"):
        parts["truncated"] = [config.overlong, config.sequence_limit]
    return {**provenance, "lineage": fingerprint(parts)}


def without_paths(value: Any) -> Any:
    """`value` without what names a place: the same input elsewhere is still the same input."""
    if isinstance(value, Mapping):
        return {name: without_paths(v) for name, v in value.items() if name != "path"}
    return [without_paths(v) for v in value] if isinstance(value, list) else value


def shape_of(intake: Intake, config: PackConfig) -> PackShape:
    """What all packs will have in common."""
    return PackShape(
        kind=intake.kind,
        layout=config.layout,
        pack_size=config.pack_size,
        carry=intake.carry,
        vocab_size=intake.vocab_size,
    )


def commit(
    job: WriteJob,
    shape: PackShape,
    config: PackConfig,
    writer: ShardWriter,
    known: tuple[Tally, Mapping[str, Any], Mapping[str, Any]],
) -> None:
    """Finishes the writer and commits its shards; `known` is tally, planning and provenance."""
    shards = writer.close()
    manifest = build_manifest(shape, config, shards, writer.counter, *known)
    manifest = replace(manifest, pack_index=writer.pack_index)
    job.confirm(shards)
    whole = job.whole(manifest)
    commit_manifest(job.location, whole, version=job.version)
    job.done()
    require_committed(job.location, whole, job.version)
