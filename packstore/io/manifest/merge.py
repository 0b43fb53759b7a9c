"""Merges the manifests of several datasets into one, without rewriting shards.

Example ids stay distinct and still identify the record: the source numbers of a part
are shifted by the number of sources in the parts before it, and ``provenance.sources``
lists all sources in that order. The lineage of a merged dataset is a hash of the
lineages of its parts and of their numbers of sources: side data of a dataset fit every
dataset of the same lineage.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from packstore.config import fingerprint
from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.format.arrays import SOURCE_SHIFT
from packstore.io.manifest.manifest import Manifest, Records
from packstore.io.manifest.stored_file import StoredFile
from packstore.io.shards.shard import PackCounter, ShardInfo, Totals
from packstore.version import VERSION

MAX_SOURCES = 1 << (63 - SOURCE_SHIFT)
"""Maximum number of sources: example ids have 63 bits, the lower `SOURCE_SHIFT` of them
for the record's number in its source.
"""

_SHARED_FIELDS = ("kind", "layout", "pack_size", "file_format", "features", "carry")
# Fields of the provenance's `tokenizer` that must agree besides its hash.
_SHARED_IDENTITY_FIELDS = (
    "bos_id",
    "eos_id",
    "chat_template_sha256",
    "tool_use_template_sha256",
    "chat_template_date",
)


class Member(NamedTuple):
    """A dataset to merge."""

    url: str  # without secrets
    manifest: Manifest  # with paths relative to the merged dataset


def merge(members: Sequence[Member]) -> Manifest:
    """Return the manifest of the packs of `members` in order; it names no pack index.

    Raises:
        ConfigError: no members, or too many sources.
        CompatibilityError: one manifest cannot describe all members.
        UnsupportedFormatError: only a later release may extend a member.
    """
    check_members(members)
    manifests = [member.manifest for member in members]
    first = manifests[0]

    counter = PackCounter()
    planning_parts: list[Any] = []
    for manifest in manifests:
        counter.merge(PackCounter.of_dataset(manifest.totals, manifest.statistics))
        planning_parts += _planning_parts(manifest)

    shards: list[ShardInfo] = []
    sources: list[Any] = []
    further_files: dict[StoredFile, None] = {}  # a set that keeps the order
    for manifest in manifests:
        shards += _with_shifted_ids(manifest.shards, len(sources) << SOURCE_SHIFT)
        sources += manifest.provenance["sources"]
        further_files.update(dict.fromkeys(manifest.further_files))

    num_bytes = sum(manifest.totals.bytes for manifest in manifests)
    return replace(
        first,
        totals=counter.totals(num_bytes),
        statistics=counter.statistics(first.pack_size, {"parts": planning_parts}),
        records=_sum_records([manifest.records for manifest in manifests]),
        provenance=_merge_provenance(members, sources),
        shards=tuple(shards),
        pack_index=None,
        further_files=tuple(further_files),
    )


def _with_shifted_ids(
    shards: Sequence[ShardInfo], id_shift: int
) -> Sequence[ShardInfo]:
    """Return shards whose example ids are higher by `id_shift`."""
    if id_shift == 0:  # the dataset that is extended, which may have many
        return shards
    return [
        replace(shard, example_id_base=shard.example_id_base + id_shift)
        for shard in shards
    ]


def _planning_parts(manifest: Manifest) -> list[Any]:
    """Return the planner's figures of each part of a dataset."""
    planning = manifest.statistics.planning
    parts = planning.get("parts")
    return parts if isinstance(parts, list) else [dict(planning)]


def _merge_provenance(
    members: Sequence[Member], sources: Sequence[Any]
) -> dict[str, Any]:
    combined_from = [origin for member in members for origin in origins(member)]
    lineages = [[origin["lineage"], origin["sources"]] for origin in combined_from]

    provenance = dict(members[0].manifest.provenance)
    provenance.pop("repacked_from", None)
    splits = [_split_rule(member.manifest) for member in members]
    if any(split != splits[0] for split in splits):
        provenance.pop("part", None)  # it is no longer one split of a job
    return {
        **provenance,
        "lineage": fingerprint({"parts": lineages}),
        "sources": sources,
        "package_version": VERSION,
        "combined_from": combined_from,
    }


def _split_rule(manifest: Manifest) -> tuple[Any, ...]:
    """Return the name of a split, and all that decides which records are in it."""
    settings = manifest.provenance.get("settings", {})
    split = manifest.provenance.get("part")
    return (split, manifest.seed, settings.get("validation_fraction"))


def _sum_records(parts: Sequence[Records]) -> Records:
    return Records(
        read=sum(part.read for part in parts),
        packed=sum(part.packed for part in parts),
        dropped=_sum_counts([part.dropped for part in parts]),
        noted=_sum_counts([part.noted for part in parts]),
        fields_used=_sum_counts([part.fields_used for part in parts]),
        fields_not_used=_sum_counts([part.fields_not_used for part in parts]),
    )


def _sum_counts(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of counts by name, sorted by name."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))


# Which datasets can be merged


def check_members(members: Sequence[Member]) -> None:
    """Refuse datasets that cannot be merged; raise like :func:`merge`."""
    if not members:
        raise ConfigError("there must be at least one dataset to combine; found none.")
    for member in members:
        member.manifest.require_writable(member.url)
        require_mergeable(members[0], member)

    num_sources = sum(len(m.manifest.provenance["sources"]) for m in members)
    if num_sources > MAX_SOURCES:
        raise ConfigError(
            f"there must be at most {MAX_SOURCES} sources; found {num_sources}."
        )


def require_mergeable(first: Member, second: Member) -> None:
    """Raise CompatibilityError for datasets that one manifest cannot describe."""
    differences = _field_differences(first.manifest, second.manifest)
    differences += _tokenizer_differences(first.manifest, second.manifest)
    if differences:
        text = sentence(
            where=f"{first.url} and {second.url}",
            rule="datasets that are combined must have been made alike",
            found="; ".join(differences),
            remedy="Pack one of them anew like the other",
        )
        raise CompatibilityError(text)


def _field_differences(first: Manifest, second: Manifest) -> list[str]:
    differences = []
    for name in _SHARED_FIELDS:
        a = _comparable(getattr(first, name))
        b = _comparable(getattr(second, name))
        if a != b:
            differences.append(f"{name} {quote(a, 40)} and {quote(b, 40)}")

    a = _pad_to_multiple(first)
    b = _pad_to_multiple(second)
    if a != b:
        differences.append(f"pad_to_multiple {quote(a, 40)} and {quote(b, 40)}")
    return differences


def _comparable(value: Any) -> Any:
    """Return the items of a mapping: mappings are equal in any order of columns."""
    return list(value.items()) if isinstance(value, Mapping) else value


def _pad_to_multiple(manifest: Manifest) -> int:
    value: int = manifest.provenance.get("settings", {}).get("pad_to_multiple", 1)
    return value


def _tokenizer_differences(first: Manifest, second: Manifest) -> list[str]:
    a = first.provenance.get("tokenizer")
    b = second.provenance.get("tokenizer")
    if not a and not b:  # datasets from token ids record no tokenizer
        return []
    if not a or not b:
        return ["a tokenizer that is known and one that is not"]

    # Files of one tokenizer may differ in settings that change no ids. Hashes of the
    # vocabulary and of encoded texts decide, if both datasets have them.
    identity: tuple[str, ...] = ("vocab_sha256", "probe_sha256")
    if not all(a.get(name) and b.get(name) for name in identity):
        identity = ("sha256",)
    return [
        f"tokenizer {name} {quote(a.get(name), 20)} and {quote(b.get(name), 20)}"
        for name in identity + _SHARED_IDENTITY_FIELDS
        if a.get(name) != b.get(name)
    ]


# The parts of a merged dataset


class Part(NamedTuple):
    """A dataset that a merged dataset has: the sources of one `pack` or `append`.

    Attributes:
        lineage: of the part alone.
        first_source: number of its first source in the merged dataset.
        end_source: number of the source after its last one.
    """

    lineage: str
    first_source: int
    end_source: int


def all_parts_of(manifest: Manifest) -> list[Part]:
    """Return the parts of a dataset in order; one that was not merged is one part.

    Of a view, these are the parts of the whole dataset.
    """
    origins = manifest.provenance.get("combined_from")
    if not origins:
        return [Part(manifest.lineage, 0, len(manifest.provenance["sources"]))]

    parts = []
    first_source = 0
    for origin in origins:
        end_source = first_source + origin["sources"]
        parts.append(Part(origin["lineage"], first_source, end_source))
        first_source = end_source
    return parts


def parts_of(manifest: Manifest) -> list[Part]:
    """Return the parts of a dataset in order; of a view, the parts in it.

    Parts before the first one with examples are left out.
    """
    parts = all_parts_of(manifest)
    numbers = _part_numbers(manifest, parts)
    return parts[numbers[0] :] if numbers else []


def _part_numbers(manifest: Manifest, parts: Sequence[Part]) -> list[int]:
    """Return the number of the first part that each shard has examples of.

    Shards of a repacked dataset may have examples of further parts.
    """
    first_sources = [part.first_source for part in parts]
    numbers = []
    for shard in manifest.shards:
        source = shard.example_id_base >> SOURCE_SHIFT
        numbers.append(bisect_right(first_sources, source) - 1)
    return numbers


def last_parts(manifest: Manifest, count: int) -> Manifest:
    """Return the manifest of the last parts of a dataset, under the same example ids.

    Parts without shards do not count, and parts that were repacked together are one.

    Sums are those of the shards. A manifest does not record the rest for each shard:
    `logical_tokens` is at least the stored tokens, `records` are the packed ones, the
    histogram of lengths is empty, and all other statistics are the limits of the
    dataset, so that fixed shapes are the same for each window.

    Args:
        manifest: the dataset.
        count: number of parts, at least 1; more than there are: all.
    """
    numbers = _part_numbers(manifest, all_parts_of(manifest))
    last_numbers = sorted(set(numbers))[-count:]
    first_shard = numbers.index(last_numbers[0]) if numbers else 0
    if first_shard == 0:
        return manifest

    shards = manifest.shards[first_shard:]
    totals = _totals_of(shards)
    examples_per_pack = replace(
        manifest.statistics.examples_per_pack, mean=totals.examples / totals.packs
    )
    statistics = replace(
        manifest.statistics,
        fill_rate=totals.tokens / (totals.packs * manifest.pack_size),
        examples_per_pack=examples_per_pack,
        length_histogram={},
        planning={"parts": _planning_parts(manifest)[-count:]},
    )
    records = Records(
        read=totals.examples, packed=totals.examples, dropped={}, noted={}
    )
    return replace(
        manifest,
        totals=totals,
        statistics=statistics,
        records=records,
        shards=shards,
    )


def _totals_of(shards: Sequence[ShardInfo]) -> Totals:
    """Return the sums over shards, which do not record their logical tokens."""
    tokens = sum(shard.tokens for shard in shards)
    return Totals(
        packs=sum(shard.rows for shard in shards),
        examples=sum(shard.examples for shard in shards),
        sequences=sum(shard.sequences for shard in shards),
        tokens=tokens,
        supervised_tokens=sum(shard.supervised_tokens for shard in shards),
        logical_tokens=tokens,
        bytes=sum(shard.bytes for shard in shards),
    )


def origins(member: Member) -> list[dict[str, Any]]:
    """Return the datasets that `member` was combined from, or `member` itself."""
    manifest = member.manifest
    if "combined_from" in manifest.provenance:
        return list(manifest.provenance["combined_from"])
    origin = {
        "path": member.url,
        "fingerprint": manifest.fingerprint,
        "lineage": manifest.lineage,
        "sources": len(manifest.provenance["sources"]),
        "shards": len(manifest.shards),
    }
    return [origin]


def lineages_of_runs(parts: Sequence[Part]) -> Iterator[tuple[int, int, str]]:
    """Yield the lineage of each part, and of each run of consecutive parts.

    For parts A and B: A itself, A merged alone, A with B, B itself, B merged alone.

    Args:
        parts: of a merged dataset.

    Yields:
        The first part of a run, its end (exclusive), and the lineage of a dataset of
        these parts.
    """
    for first, first_part in enumerate(parts):
        yield first, first + 1, first_part.lineage

        # The hash of `fingerprint({"parts": …})`, extended part by part: to compute
        # each one anew would cost time quadratic in the length of the run.
        digest = hashlib.sha256(b'{"parts":[')
        separator = ""
        for end, part in enumerate(parts[first:], first + 1):
            num_sources = part.end_source - part.first_source
            entry = f'{separator}["{part.lineage}",{num_sources}]'
            digest.update(entry.encode())
            separator = ","
            closed = digest.copy()
            closed.update(b"]}")
            yield first, end, closed.hexdigest()
