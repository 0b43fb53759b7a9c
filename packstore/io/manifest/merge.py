"""Merges the manifests of several datasets into one, without rewriting shards.

Example ids stay distinct and still identify the record: the source numbers of a part
are shifted by the sources of the parts before it, and ``provenance.sources`` lists all
sources in that order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from packstore.config import fingerprint
from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.format.arrays import SOURCE_SHIFT
from packstore.io.manifest.manifest import Manifest, Records
from packstore.io.shards.shard import PackCounter, ShardInfo
from packstore.version import VERSION

MAX_SOURCES = 1 << (63 - SOURCE_SHIFT)
"""Maximum number of sources: ids have 63 bits, the lower ones number the records of a
source.
"""

_SHAPE = (
    "kind",
    "layout",
    "pack_size",
    "file_format",
    "features",
    "carry",
    "pad_to_multiple",
)
_TEMPLATES = ("chat_template_sha256", "tool_use_template_sha256", "chat_template_date")


class Member(NamedTuple):
    """A dataset to merge: its URL without secrets; its manifest, with paths from the
    new one.
    """

    url: str
    manifest: Manifest


def merge(members: Sequence[Member]) -> Manifest:
    """Returns the manifest of the packs of `members` in order; it names no pack
    index.
    """
    check_members(members)
    manifests = [member.manifest for member in members]
    counter, plans, shards, sources = (
        PackCounter(),
        list[Any](),
        list[ShardInfo](),
        list[Any](),
    )
    for m in manifests:
        counter.merge(PackCounter.of_dataset(m.totals, m.statistics))
        plan = m.statistics.planning.get("parts")
        plans += plan if isinstance(plan, list) else [dict(m.statistics.planning)]
        base = len(sources) << SOURCE_SHIFT  # so that ids stay distinct
        shards += [
            replace(s, example_id_base=s.example_id_base + base) for s in m.shards
        ]
        sources += m.provenance["sources"]
    first, came_from = manifests[0], [origin for m in members for origin in origins(m)]
    lineage = [[origin["lineage"], origin["sources"]] for origin in came_from]
    return replace(
        first,
        totals=counter.totals(sum(m.totals.bytes for m in manifests)),
        statistics=counter.statistics(first.pack_size, {"parts": plans}),
        records=_records([m.records for m in manifests]),
        provenance={
            **{k: v for k, v in first.provenance.items() if k != "repacked_from"},
            "lineage": fingerprint({"parts": lineage}),
            "sources": sources,
            "package_version": VERSION,
            "combined_from": came_from,
        },
        shards=tuple(shards),
        pack_index=None,
        further_files=tuple(
            dict.fromkeys(file for m in manifests for file in m.further_files)
        ),
    )


def check_members(members: Sequence[Member]) -> None:
    """Refuses datasets that cannot be merged; raises like :func:`merge`."""
    if not members:
        raise ConfigError("there must be at least one dataset to combine; found none.")
    for member in members:
        member.manifest.require_writable(member.url)
        check_alike(members[0], member)
    sources = sum(len(member.manifest.provenance["sources"]) for member in members)
    if sources > MAX_SOURCES:
        raise ConfigError(
            f"there must be at most {MAX_SOURCES} sources; found {sources}."
        )


def check_alike(first: Member, other: Member) -> None:
    """Raises CompatibilityError for datasets that one manifest cannot describe."""
    differences = [
        f"{name} {quote(a, 40)} and {quote(b, 40)}"
        for name in _SHAPE
        if (a := _value(first.manifest, name)) != (b := _value(other.manifest, name))
    ]
    a, b = (m.manifest.provenance.get("tokenizer") or {} for m in (first, other))
    if a and b:  # datasets from token ids record no tokenizer
        names: tuple[str, ...] = ("vocab_sha256", "probe_sha256")
        if not all(tokenizer.get(name) for tokenizer in (a, b) for name in names):
            names = ("sha256",)
        differences += [
            f"tokenizer {name} {quote(a.get(name), 20)} and {quote(b.get(name), 20)}"
            for name in (*names, "bos_id", "eos_id", *_TEMPLATES)
            if a.get(name) != b.get(name)
        ]
    elif a or b:
        differences.append("a tokenizer that is known and one that is not")
    if differences:
        where = f"{first.url} and {other.url}"
        rule = "datasets that are combined must have been made alike"
        remedy = "Pack one of them anew like the other"
        raise CompatibilityError(sentence(where, rule, "; ".join(differences), remedy))


def _value(manifest: Manifest, name: str) -> Any:
    if name == "pad_to_multiple":
        return manifest.provenance.get("settings", {}).get(name, 1)
    value = getattr(manifest, name)
    return list(value.items()) if isinstance(value, Mapping) else value


def origins(member: Member) -> list[dict[str, Any]]:
    """Returns the datasets that `member` was combined from, or `member` itself."""
    about, m = member.manifest.provenance, member.manifest
    if "combined_from" in about:
        return list(about["combined_from"])
    ids = {"path": member.url, "fingerprint": m.fingerprint, "lineage": m.lineage}
    return [{**ids, "sources": len(about["sources"]), "shards": len(m.shards)}]


def runs(parts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, str]]:
    """Yields first, end (exclusive) and lineage of each part, and of each run of parts
    as one.
    """
    for first, part in enumerate(parts):
        yield first, first + 1, part["lineage"]
        text = hashlib.sha256(
            b'{"parts":['
        )  # as in `merge`, without its quadratic cost
        for end, other in enumerate(parts[first:], first + 1):
            comma = "," if end > first + 1 else ""
            text.update(f'{comma}["{other["lineage"]}",{other["sources"]}]'.encode())
            whole = text.copy()
            whole.update(b"]}")
            yield first, end, whole.hexdigest()


def _records(parts: Sequence[Records]) -> Records:
    sums: dict[str, Any] = {
        n: sum(getattr(p, n) for p in parts) for n in ("read", "packed")
    }
    for name in (field.name for field in fields(Records) if field.name not in sums):
        total: Counter[str] = Counter()
        for part in parts:
            total.update(getattr(part, name))
        sums[name] = dict(sorted(total.items()))
    return Records(**sums)
