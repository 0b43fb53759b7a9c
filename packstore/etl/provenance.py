"""Names runs and the lineage of datasets, and finds jobs that have committed.

The *provenance* of a dataset, in its manifest, records how it was made: its inputs,
tokenizer, settings, and the version of packstore. Three hashes summarize it for
different questions. The name of a *run* is equal for a job and its rerun; it is known
before the input is read. The *lineage* is equal for datasets in which an example id
stands for the same tokens and labels, so that a side dataset of one can be joined to
another. The
fingerprint of a manifest covers all of a dataset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from packstore.config import PackConfig, fingerprint
from packstore.errors import DatasetExistsError, quote, sentence
from packstore.etl.sources import ExampleReader, RecordExampleReader
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.store.location import Location

_DECIDING_TOKENIZER_FACTS = (
    "vocab_sha256",
    "probe_sha256",
    "bos_id",
    "eos_id",
    "adds_bos",
    "chat_template_sha256",
    "tool_use_template_sha256",
    "chat_template_date",
)
"""Facts about the tokenizer that change the tokens of an example."""

_DECIDING_SETTINGS = (
    "fields",
    "append_eos",
    "add_bos",
    "template_variables",
    "thinking",
    "supervised_turns",
)
"""Settings that change the tokens of an example, or which of them are supervised."""

_DECIDING_REASONS = ("special_tokens", "invalid_unicode")
"""Reasons of the setting `on` for which some answers change the tokens of an example,
e.g. ``special_tokens=control``.
"""


def run_name(
    reader: ExampleReader, split: str | None, base_fingerprint: str | None
) -> str:
    """Return the name of a run, from facts known before its input is read.

    A rerun has the same name.

    Args:
        reader: the source of examples.
        split: name of the dataset, if the job makes several.
        base_fingerprint: fingerprint of the dataset that is appended to, if records
            that it has are dropped.
    """
    facts = reader.provenance(sources=[])  # their hashes are not known yet
    facts["bytes"] = []
    if isinstance(reader, RecordExampleReader):
        facts["bytes"] = reader.file_sizes
    facts["part"] = split
    if base_fingerprint:
        facts["after"] = base_fingerprint
    return fingerprint(without_paths(facts))[:12]


def provenance_of(
    reader: ExampleReader,
    split: str | None,
    config: PackConfig,
    sources: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Return the provenance of a dataset, with its lineage, for the manifest.

    `lineage` is a hash of all that decides the ids of the examples, their tokens and
    which of these are supervised. It does not cover the choice of examples, e.g.
    `dedup`.
    A repacked dataset keeps the lineage of its source.

    Args:
        reader: the source of examples.
        split: name of the dataset, if the job makes several.
        config: settings.
        sources: path, bytes, sha256 and records of each input; None: of the inputs that
            `reader` has read.
    """
    provenance = reader.provenance(sources)
    split_entry = {"part": split} if split else {}
    if "repacked_from" in provenance:
        # The provenance of the source comes last: its lineage, if any, stays.
        lineage = provenance["repacked_from"]["fingerprint"]
        return {"lineage": lineage, **provenance, **split_entry}

    lineage = fingerprint(_lineage_facts(reader, config, provenance))
    return {**provenance, "lineage": lineage, **split_entry}


def _lineage_facts(
    reader: ExampleReader, config: PackConfig, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all that decides the ids of the examples, their tokens and labels.

    Settings of later releases, from `as_chat` on, are left out where they have their
    defaults, so that the lineage of earlier datasets does not change.
    """
    tokenizer = provenance["tokenizer"] or {}
    recorded = config.recorded()
    facts: dict[str, Any] = {
        "kind": reader.kind,
        "sources": [
            [source["sha256"], source["records"]] for source in provenance["sources"]
        ],
        "tokenizer": [tokenizer.get(name) for name in _DECIDING_TOKENIZER_FACTS],
        "settings": {name: recorded[name] for name in _DECIDING_SETTINGS},
        "on": [config.on[reason] for reason in _DECIDING_REASONS],
    }
    if config.as_chat:
        facts["as_chat"] = True
    for name in ("form", "verdict", "roles", "ignore", "token_values"):
        if getattr(config, name):
            facts[name] = recorded[name]
    if config.adapter:
        facts["adapter"] = provenance["reading"].get("adapter_sha256")
    overlong = config.on["overlong"]
    if overlong.startswith("truncate"):
        facts["truncated"] = [overlong, config.sequence_limit]
    return facts


def without_paths(value: Any) -> Any:
    """Return `value` without paths: a copy elsewhere is still the same input."""
    if isinstance(value, Mapping):
        return {
            name: without_paths(item) for name, item in value.items() if name != "path"
        }
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return value


def find_committed(
    locations: Mapping[str | None, Location],
    open_source: Callable[[], ExampleReader],
    config: PackConfig,
) -> dict[str | None, Dataset]:
    """Return the datasets that this job has committed before: schedulers repeat jobs.

    The input is read only if all else agrees, and then hashed, not tokenized.

    Args:
        locations: split -> location of its dataset.
        open_source: opens the source of examples.
        config: settings.

    Raises:
        DatasetExistsError: a location has another dataset.
    """
    existing: dict[str | None, Dataset] = {}
    for split, location in locations.items():
        dataset = find_dataset(location.url, location.storage_options)
        if dataset is not None:
            existing[split] = dataset
    if not existing:
        return {}

    reader = open_source()
    for split, dataset in existing.items():
        provenance = provenance_of(reader, split, config, sources=[])
        _refuse_another(dataset, provenance, ignore=("sources", "lineage"))
    if isinstance(reader, RecordExampleReader):
        if len(existing) < len(locations) and not reader.inputs:
            # Records in memory can be read only once: to hash them for the split that
            # is there would leave none to pack for the other.
            first = next(iter(existing.values()))
            raise _exists_error(first, " (only one part of two)")
        reader.read_through()
    for split, dataset in existing.items():
        provenance = provenance_of(reader, split, config, sources=None)
        _refuse_another(dataset, provenance)
        dataset.require_files()
    return existing


def _refuse_another(
    dataset: Dataset, provenance: Mapping[str, Any], ignore: Sequence[str] = ()
) -> None:
    """Raise DatasetExistsError if a dataset has another provenance.

    The engine of the tokenizer may differ.
    """
    existing = _comparable(dataset.manifest.provenance, ignore)
    requested = _comparable(provenance, ignore)
    if existing == requested:
        return

    origins = dataset.manifest.provenance.get("combined_from", ())
    if origins and "combined_from" not in requested:
        # Appended records have the path of the dataset that they were appended to.
        if origins[0]["path"] != origins[1]["path"]:
            raise _exists_error(dataset, f" that was joined from {len(origins)}")
        remedy = "Append what is new (packstore append), or name another place"
        remedy += ": overwriting it would drop them"
        raise _exists_error(dataset, ", to which records were appended since", remedy)

    existing = dict(_flatten(existing))
    requested = dict(_flatten(requested))
    names = [
        name
        for name in {**requested, **existing}
        if existing.get(name) != requested.get(name)
    ]
    # The lineage follows from other facts, which are easier to understand.
    names = [name for name in names if name != "lineage"] or names
    differences = []
    for name in names[:2]:
        before = quote(existing.get(name), 24)
        now = quote(requested.get(name), 24)
        differences.append(f"{name} {before} then, {now} now")
    raise _exists_error(dataset, f" ({'; '.join(differences)})")


def _comparable(provenance: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Return, as JSON values, the facts that a repeated job has again."""
    facts = without_paths(json.loads(json.dumps(provenance)))
    tokenizer = facts.get("tokenizer") or {}
    for name in ("engine", "engine_version"):
        tokenizer.pop(name, None)
    for name in ignore:
        facts.pop(name, None)
    return dict(facts)


def _exists_error(
    dataset: Dataset,
    difference: str,
    remedy: str = "Name another place, or overwrite it (overwrite=True, --overwrite)",
) -> DatasetExistsError:
    return DatasetExistsError(
        sentence(
            where=dataset.url,
            rule="must be empty, or hold the dataset of this job",
            found=f"version {dataset.version} of a dataset{difference}",
            remedy=remedy,
        )
    )


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the values of nested mappings under dotted names, as ``settings.seed``."""
    for name, item in value.items():
        if _is_list_of_mappings(item):
            item = {str(number): entry for number, entry in enumerate(item)}
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _is_list_of_mappings(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, Mapping) for entry in value)
