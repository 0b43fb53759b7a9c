"""Names a run and the lineage of a dataset, and finds a job that has committed
already.
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


def run_name(reader: ExampleReader, part: str | None, after: str | None) -> str:
    """Names a run, from facts known before its input is read: a rerun has the same
    name.

    `after` is the fingerprint of the dataset whose duplicates it drops.
    """
    sizes = reader.sizes if isinstance(reader, RecordExampleReader) else []
    facts = {**reader.provenance([]), "bytes": sizes, "part": part}
    facts |= {"after": after} if after else {}
    return fingerprint(without_paths(facts))[:12]


def provenance_of(
    reader: ExampleReader,
    part: str | None,
    config: PackConfig,
    sources: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Returns the provenance of the dataset of a part, with its lineage, for the
    manifest.

    `lineage` is a hash of all that decides the ids of the examples and their tokens. It
    does not cover which examples are in, nor which tokens are supervised. A repacked
    dataset keeps the lineage of its source. Without `sources`, the entries of the
    inputs are those that were read.
    """
    about, named = reader.provenance(sources), {"part": part} if part else {}
    if "repacked_from" in about:
        return {"lineage": about["repacked_from"]["fingerprint"], **about, **named}
    tokenizer = about["tokenizer"] or {}
    deciding: dict[str, Any] = {
        "kind": reader.kind,
        "sources": [[s["sha256"], s["records"]] for s in about["sources"]],
        "tokenizer": [tokenizer.get(name) for name in _DECIDING_TOKENIZER],
        "settings": {name: config.recorded()[name] for name in _DECIDING_SETTINGS},
        "on": [config.on[reason] for reason in _DECIDING_ANSWERS],
    }
    if config.as_chat:
        deciding["as_chat"] = True
    for name in ("form", "verdict", "roles", "ignore"):
        if getattr(config, name):
            deciding[name] = config.recorded()[name]
    if config.adapter:
        deciding["adapter"] = about["reading"].get("adapter_sha256")
    if (overlong := config.on["overlong"]).startswith("truncate"):
        deciding["truncated"] = [overlong, config.sequence_limit]
    return {**about, "lineage": fingerprint(deciding), **named}


def without_paths(value: Any) -> Any:
    """Removes paths from `value`: the same input elsewhere is still the same input."""
    if isinstance(value, Mapping):
        return {name: without_paths(v) for name, v in value.items() if name != "path"}
    return [without_paths(v) for v in value] if isinstance(value, list) else value


def find_committed(
    places: Mapping[str | None, Location],
    open_examples: Callable[[], ExampleReader],
    config: PackConfig,
) -> dict[str | None, Dataset]:
    """Returns the datasets that this job has committed before, by part: schedulers
    repeat jobs.

    The input is read only if all else agrees, and then hashed, not tokenized.
    """
    newest = {
        p: find_dataset(place.url, place.storage_options) for p, place in places.items()
    }
    existing = {
        part: dataset for part, dataset in newest.items() if dataset is not None
    }
    if not existing:
        return {}
    reader = open_examples()
    for part, dataset in existing.items():
        about = provenance_of(reader, part, config, [])
        _refuse_other(dataset, about, ("sources", "lineage"))
    if isinstance(reader, RecordExampleReader):
        if (
            len(existing) < len(places) and not reader.inputs
        ):  # such an input can be read only once
            raise _exists(next(iter(existing.values())), " (only one part of two)")
        reader.read_through()
    for part, dataset in existing.items():
        _refuse_other(dataset, provenance_of(reader, part, config, None))
        dataset.require_files()
    return existing


def _refuse_other(
    dataset: Dataset, about: Mapping[str, Any], without: Sequence[str] = ()
) -> None:
    """Refuses a dataset of another provenance than `about`; the tokenizer engine may
    differ.
    """

    def compared(provenance: Mapping[str, Any]) -> dict[str, Any]:
        facts = without_paths(json.loads(json.dumps(provenance)))
        for name in ("engine", "engine_version"):
            (facts.get("tokenizer") or {}).pop(name, None)
        return {name: value for name, value in facts.items() if name not in without}

    before, now = compared(dataset.manifest.provenance), compared(about)
    if before == now:
        return
    parts = dataset.manifest.provenance.get("combined_from", ())
    if parts and "combined_from" not in now:
        if parts[0]["path"] != parts[1]["path"]:
            raise _exists(dataset, f" that was joined from {len(parts)}")
        remedy = "Append what is new (packstore append), or name another place"
        remedy += ": overwriting it would drop them"
        raise _exists(dataset, ", to which records were appended since", remedy)
    before, now = dict(_flat(before)), dict(_flat(now))
    names = [n for n in {**now, **before} if before.get(n) != now.get(n)]
    differences = [
        f"{name} {quote(before.get(name), 24)} then, {quote(now.get(name), 24)} now"
        for name in [n for n in names if n != "lineage"]
        or names  # the lineage follows from others
    ]
    raise _exists(dataset, f" ({'; '.join(differences[:2])})")


def _exists(
    dataset: Dataset,
    difference: str,
    remedy: str = "Name another place, or overwrite it (overwrite=True, --overwrite)",
) -> DatasetExistsError:
    found = f"version {dataset.version} of one{difference}"
    return DatasetExistsError(
        sentence(dataset.url, "must not hold another dataset yet", found, remedy)
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yields the values of nested mappings under their dotted names."""
    for name, inner in value.items():
        if (
            isinstance(inner, list)
            and inner
            and all(isinstance(i, Mapping) for i in inner)
        ):
            inner = {str(i): part for i, part in enumerate(inner)}
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner
