"""``packstore inspect``: the manifest and the statistics of a dataset, or the manifest
of side data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from packstore.cli import Command
from packstore.cli._arguments import add_dataset, open_dataset_or_sides
from packstore.cli._output import (
    fact_table,
    figure_table,
    format_value,
    print_result,
    record_counts,
    stdout_console,
)
from packstore.config.job import job_of, to_yaml
from packstore.errors import ConfigError

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.side.side import Side


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dataset(
        parser,
        versions=True,
        help="folder or URL of a packed dataset, or of a side dataset",
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument(
        "--json", action="store_true", help="print the manifest as JSON"
    )
    formats.add_argument(
        "--as-config",
        action="store_true",
        help="print the job that made it, for pack --config",
    )


def _run(args: argparse.Namespace) -> int:
    source = open_dataset_or_sides(args)
    if isinstance(source, list):
        return _run_sides(args, source)
    dataset = source
    if args.json:
        _print_json(dataset)
    elif args.as_config:
        job = job_of(dataset.manifest.provenance, dataset.url)
        sys.stdout.write(to_yaml(job))
    else:
        _print_manifest(dataset)
    return 0


def _run_sides(args: argparse.Namespace, sides: Sequence[Side]) -> int:
    """Print side datasets; those of a dataset's parts one after another."""
    if args.as_config:
        raise ConfigError(
            f"--as-config prints the job of a packed dataset; found side data, "
            f"{args.dataset}."
        )
    for side in sides:
        if args.json:
            _print_json(side)
        else:
            _print_side(side)
    return 0


def _print_json(source: Dataset | Side) -> None:
    """Print URL, version and all fields of a manifest."""
    manifest = json.loads(source.manifest.to_json())
    print_result({"url": source.url, "version": source.version, **manifest})


def _print_side(side: Side) -> None:
    m = side.manifest
    facts = {
        "version": side.version,
        "kind": m.kind,
        "examples": m.examples,
        "files": f"{len(m.shards)}, {sum(m.files.values()):,} bytes",
        "lineage of the dataset": m.lineage,
        "fingerprint of the dataset": m.fingerprint,
    }
    console = stdout_console()
    console.print(fact_table(f"side dataset {side.url}", facts))
    console.print(fact_table("columns", m.columns))
    if m.provenance:
        console.print(fact_table("provenance", m.provenance))


def _print_manifest(dataset: Dataset) -> None:
    m = dataset.manifest
    console = stdout_console()
    console.print(fact_table(f"dataset {dataset.url}", _facts(dataset)))

    num_records = max(m.records.read, 1)
    rows = [
        (name, format_value(count), f"{count / num_records:.1%}")
        for name, count in record_counts(m.records).items()
    ]
    console.print(figure_table("records", ("", "records", "share"), rows))
    console.print(fact_table("planning", _flatten(m.statistics.planning)))

    tokenizer = dict(m.provenance.get("tokenizer") or {})
    template = tokenizer.get("chat_template")
    if template:
        tokenizer["chat_template"] = f"{len(template)} characters"
    provenance = {**m.provenance, "tokenizer": tokenizer}
    console.print(fact_table("provenance", _flatten(provenance)))


def _facts(dataset: Dataset) -> dict[str, object]:
    m = dataset.manifest
    totals = m.totals
    statistics = m.statistics
    per_pack = statistics.examples_per_pack
    supervised_share = totals.supervised_tokens / max(totals.tokens, 1)
    bits_per_token = 8 * totals.bytes / max(totals.tokens, 1)
    return {
        "version": dataset.version,
        "kind": f"{m.kind} (K = {m.num_responses or 'stored per example'})",
        "layout": m.layout,
        "packs": f"{totals.packs:,} of {m.pack_size:,} tokens",
        "fill rate": f"{m.fill_rate:.2%}",
        "strategy": f"{m.strategy}, packs {m.pack_order}, seed {m.seed}",
        "examples": totals.examples,
        "examples per pack": f"{per_pack.min} to {per_pack.max}, mean "
        f"{per_pack.mean:.2f}",
        "sequences": totals.sequences,
        "tokens": totals.tokens,
        "tokens unpacked": totals.logical_tokens,
        "supervised tokens": f"{totals.supervised_tokens:,} ({supervised_share:.1%})",
        "longest sequence": statistics.longest_sequence,
        "shortest pack": statistics.shortest_pack,
        "most segments": statistics.most_segments,
        "most keys": statistics.most_keys,
        "most targets": statistics.most_targets,
        "files": f"{len(m.shards)} {m.file_format}, {totals.bytes:,} bytes, "
        f"{bits_per_token:.1f} bits per token",
        "features": ", ".join(m.features) or "none",
        "fingerprint": m.fingerprint,
    }


def _flatten(value: Any, prefix: str = "") -> dict[str, object]:
    """Flatten nested mappings and lists of mappings: ``{"a": {"b": 1}}`` becomes
    ``{"a.b": 1}``; any other list becomes text.
    """
    if isinstance(value, list):
        if not value or not isinstance(value[0], dict):
            return {prefix: ", ".join(str(entry) for entry in value)}
        value = {str(i): entry for i, entry in enumerate(value)}
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, object] = {}
    for name, entry in value.items():
        flat |= _flatten(entry, prefix=f"{prefix}.{name}" if prefix else str(name))
    return flat


INSPECT = Command(
    configure=_configure,
    run=_run,
    examples="  packstore inspect s3://bucket/prefs-8k --json > manifest.json\n"
    "  packstore inspect prefs-8k --as-config > job.yaml\n",
)
