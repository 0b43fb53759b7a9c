"""Merges the manifests of several datasets into one, without rewriting shards.

Example ids stay distinct and still identify the record: the source numbers of a part are shifted by
the sources of the parts before it, and ``provenance.sources`` lists all sources in that order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from packstore.config import fingerprint
from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.format.arrays import SOURCE_SHIFT
from packstore.io.manifest.manifest import Manifest, Records, check_manifest
from packstore.io.shards.shard import ShardInfo
from packstore.io.shards.statistics import PackCounter, Statistics
from packstore.version import VERSION

MAX_SOURCES = 1 << (63 - SOURCE_SHIFT)
"""Maximum number of sources: ids have 63 bits, the lower ones number the records of a source."""

_SHAPE = ("kind", "layout", "pack_size", "file_format", "features", "carry", "pad_to_multiple")
_TOKENIZER: tuple[str, ...] = ("bos_id", "eos_id")
_TOKENIZER += ("chat_template_sha256", "tool_use_template_sha256", "chat_template_date")


@dataclass(frozen=True)
class Part:
    """One of the datasets: its URL without secrets, and its manifest.

    The paths of its shards are relative to the new dataset.
    """

    url: str
    manifest: Manifest


def merge(parts: Sequence[Part]) -> Manifest:
    """Returns the manifest of the packs of `parts` in order; it names no pack index.

    Raises:
        CompatibilityError: the parts are not compatible.
        ConfigError: no parts, or more sources than ids can number.
    """
    check_parts(parts)
    first = parts[0].manifest
    manifests = [part.manifest for part in parts]
    sources = [source for m in manifests for source in m.provenance["sources"]]
    found = [origin for part in parts for origin in origins(part)]
    provenance = {k: v for k, v in first.provenance.items() if k != "repacked_from"}
    counter = PackCounter()
    for m in manifests:
        counter.merge(PackCounter.of_dataset(m.totals, m.statistics))
    planning = {"parts": [plan for m in manifests for plan in _plannings(m.statistics)]}
    merged = replace(
        first,
        totals=counter.totals(sum(m.totals.bytes for m in manifests)),
        statistics=counter.statistics(first.pack_size, planning),
        records=_records([m.records for m in manifests]),
        provenance={
            **provenance,
            "lineage": fingerprint({"parts": [[o["lineage"], o["sources"]] for o in found]}),
            "sources": sources,
            "package_version": VERSION,
            "combined_from": found,
        },
        shards=_shifted(manifests),
        pack_index=None,
    )
    check_manifest(merged, "manifest")
    return merged


def check_parts(parts: Sequence[Part]) -> None:
    """Refuses datasets that cannot be combined; raises like :func:`merge`."""
    if not parts:
        raise ConfigError("there must be at least one dataset to combine; found none.")
    for part in parts[1:]:
        check_alike(parts[0], part)
    sources = sum(len(part.manifest.provenance["sources"]) for part in parts)
    if sources > MAX_SOURCES:
        raise ConfigError(f"there must be at most {MAX_SOURCES} sources; found {sources}.")


def check_alike(first: Part, other: Part) -> None:
    """Refuses datasets that one manifest cannot describe; names the differences.

    Raises:
        CompatibilityError: they must not be trained on together.
    """
    differences = [
        f"{name} {quote(a, 40)} and {quote(b, 40)}"
        for name in _SHAPE
        if (a := _value(first.manifest, name)) != (b := _value(other.manifest, name))
    ]
    tokenizers = [p.manifest.provenance.get("tokenizer") or {} for p in (first, other)]
    differences += _tokenizer_differences(*tokenizers)
    if differences:
        where = f"{first.url} and {other.url}"
        must = "datasets that are combined must have been made alike"
        do = "Pack one of them anew like the other"
        raise CompatibilityError(sentence(where, must, "; ".join(differences), do))


def _value(manifest: Manifest, name: str) -> Any:
    if name == "pad_to_multiple":
        return manifest.provenance.get("settings", {}).get(name, 1)
    value = getattr(manifest, name)
    return list(value.items()) if isinstance(value, Mapping) else value


def _tokenizer_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Compares fields that both have: datasets from token ids record no tokenizer."""
    if not a or not b:
        return [] if a == b else ["a tokenizer that is known and one that is not"]
    names: tuple[str, ...] = ("vocab_sha256", "probe_sha256")
    if not all(t.get(name) for t in (a, b) for name in names):
        names = ("sha256",)
    return [
        f"tokenizer {name} {quote(a.get(name), 20)} and {quote(b.get(name), 20)}"
        for name in (*names, *_TOKENIZER)
        if a.get(name) != b.get(name)
    ]


def _shifted(manifests: Sequence[Manifest]) -> tuple[ShardInfo, ...]:
    """Returns all shards, their ids shifted by the sources of the manifests before."""
    shards, base = list[ShardInfo](), 0
    for manifest in manifests:
        shards += [replace(s, example_id_base=s.example_id_base + base) for s in manifest.shards]
        base += len(manifest.provenance["sources"]) << SOURCE_SHIFT
    return tuple(shards)


def origins(part: Part) -> list[dict[str, Any]]:
    """Returns the datasets that `part` was combined from, or `part` itself."""
    manifest = part.manifest
    if "combined_from" in manifest.provenance:
        return list(manifest.provenance["combined_from"])
    return [
        {
            "path": part.url,
            "fingerprint": manifest.fingerprint,
            "lineage": manifest.lineage,
            "sources": len(manifest.provenance["sources"]),
            "shards": len(manifest.shards),
        }
    ]


def _plannings(statistics: Statistics) -> list[Any]:
    parts = statistics.planning.get("parts")
    return list(parts) if isinstance(parts, list) else [dict(statistics.planning)]


def _records(parts: Sequence[Records]) -> Records:
    def added(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if name in ("read", "packed"):
            return sum(values)
        total: Counter[str] = Counter()
        for value in values:
            total.update(value)
        return dict(sorted(total.items()))

    return Records(**{f.name: added(f.name) for f in fields(Records)})
