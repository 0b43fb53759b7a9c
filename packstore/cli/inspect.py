"""``packstore inspect``: shows the manifest, without opening a shard."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from packstore.cli import Command, common
from packstore.config.job import job_of, to_yaml
from packstore.io.manifest.commit import with_hash


def _configure(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the manifest itself")
    shown.add_argument(
        "--as-config", action="store_true", help="print the job that made it, for pack --config"
    )


def _run(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    m = dataset.manifest
    if args.json:
        common.print_json(with_hash(m.to_json()).decode())
        return 0
    if args.as_config:
        sys.stdout.write(to_yaml(job_of(m.provenance, dataset.url)))
        return 0
    console = common.stdout_console()
    stats, totals = m.statistics, m.totals
    per_pack = stats.examples_per_pack
    rows: dict[str, object] = {
        "version": dataset.version,
        "kind": f"{m.kind} (K = {m.num_responses or 'stored per example'})",
        "layout": m.layout,
        "packs": f"{totals.packs:,} of {m.pack_size:,} tokens",
        "fill rate": f"{m.fill_rate:.2%}",
        "strategy": f"{m.strategy}, packs {m.pack_order}, seed {m.seed}",
        "examples": totals.examples,
        "examples per pack": f"{per_pack.min} to {per_pack.max}, mean {per_pack.mean:.2f}",
        "sequences": totals.sequences,
        "tokens": totals.tokens,
        "tokens unpacked": totals.logical_tokens,
        "supervised tokens": f"{totals.supervised_tokens:,} "
        f"({totals.supervised_tokens / max(totals.tokens, 1):.1%})",
        "longest sequence": stats.longest_sequence,
        "shortest pack": stats.shortest_pack,
        "most segments": stats.most_segments,
        "files": f"{len(m.shards)} {m.file_format}, {totals.bytes:,} bytes, "
        f"{8 * totals.bytes / max(totals.tokens, 1):.1f} bits per token",
        "features": ", ".join(m.features) or "none",
        "fingerprint": m.fingerprint,
    }
    console.print(common.two_columns(f"dataset {dataset.url}", rows))
    counts = {"read": m.records.read, "packed": m.records.packed}
    counts |= {f"dropped: {reason}": count for reason, count in m.records.dropped.items()}
    counts |= {f"noted: {event}": count for event, count in m.records.noted.items()}
    every = max(m.records.read, 1)
    shares = [
        (what, common.number(count), f"{count / every:.1%}") for what, count in counts.items()
    ]
    console.print(common.figures_table("records", ("what", "records", "share"), shares))
    console.print(common.two_columns("planning", _flat(stats.planning)))
    console.print(common.two_columns("provenance", _flat(_short(m.provenance))))
    return 0


def _short(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Shortens the provenance: replaces the text of the chat template by its length."""
    tokenizer = dict(provenance.get("tokenizer") or {})
    if tokenizer.get("chat_template"):
        tokenizer["chat_template"] = f"{len(tokenizer['chat_template'])} characters"
    return {**provenance, "tokenizer": tokenizer}


def _flat(value: Any, prefix: str = "") -> dict[str, object]:
    """Flattens nested mappings and lists to dotted names."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(i): entry for i, entry in enumerate(value)}
    if not isinstance(value, dict) or not value:
        return {prefix: ", ".join(map(str, value)) if isinstance(value, list) else value}
    flat: dict[str, object] = {}
    for name, entry in value.items():
        flat |= _flat(entry, f"{prefix}.{name}" if prefix else str(name))
    return flat


INSPECT = Command(
    "  packstore inspect s3://bucket/prefs-8k --json > manifest.json\n"
    "  packstore inspect prefs-8k --as-config > job.yaml\n",
    _configure,
    _run,
)
