"""Measures token columns in Parquet: size and speed by encoding, codec and row group.

    python benchmarks/parquet.py --data ../shared/data/pairs/hh_harmless_raw.jsonl.gz \\
        --tokenizer ../shared/data/tokenizers/qwen3

Real ids, packed; each column alone, then whole files as the settings write them. Bits per token;
million tokens per CPU second written and read (one thread, the best of several runs, from memory,
page checksums verified as the reader does). Columns: `input_ids`; `labels`, which the plain profile
stores; `label_spans`, which the compact profile stores instead. Without --data, on the project's
own sample, which only shows that the script runs.

`pairs`: both token columns stored in several ways, in whole row groups, the cases in turns. Written
as packs become Arrow and then Parquet, read as Parquet becomes packs again, with all checks of ids
and labels; CPU ns a token. ``--only pairs`` measures these alone, and keeps the rest of the result.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import packstore
from packstore.format.arrays import Packs
from packstore.format.schema import from_arrow, pack_schema, to_arrow

RESULTS = Path(__file__).parent / "results" / "parquet.json"
ROOT = Path(__file__).parents[1]
PACK_SIZE = 4096
ENCODINGS: dict[str, dict[str, Any]] = {
    "PLAIN": {"use_dictionary": False},
    "DICTIONARY": {"use_dictionary": True},
    "DELTA_BINARY_PACKED": {"column_encoding": "DELTA_BINARY_PACKED", "use_dictionary": False},
    "BYTE_STREAM_SPLIT": {"column_encoding": "BYTE_STREAM_SPLIT", "use_dictionary": False},
}
CODECS: dict[str, dict[str, Any]] = {
    "none": {"compression": "none"},
    "lz4": {"compression": "lz4"},
    "snappy": {"compression": "snappy"},
    **{f"zstd {n}": {"compression": "zstd", "compression_level": n} for n in (1, 3, 9)},
}
SETTINGS: dict[str, Any] = {
    "write_statistics": False, "write_page_checksum": True, "data_page_size": 1 << 20
}  # fmt: skip
GROUP_TOKENS = (4096, 32_768, 131_072, 524_288, 2_097_152)
"""Tokens of a row group; 131,072 is the default."""
PROFILES: dict[str, dict[str, Any]] = {
    "default: zstd 3": {},
    "zstd 1": {"compression_level": 1},
    "zstd 9": {"compression_level": 9},
    "lz4": {"compression": "lz4"},
    "none": {"compression": "none"},
    "spans, zstd 3": {"labels": "spans"},
    "spans, zstd 1": {"labels": "spans", "compression_level": 1},
    "spans, lz4": {"labels": "spans", "compression": "lz4"},
    "arrow": {"format": "arrow"},
    "arrow, spans": {"format": "arrow", "labels": "spans"},
}
SPLIT = "BYTE_STREAM_SPLIT"
PAIRS: dict[str, tuple[tuple[str, int], tuple[str, int]] | None] = {
    "ids and labels plain, zstd 3 (the default)": (("PLAIN", 3), ("PLAIN", 3)),
    "labels zstd 1": (("PLAIN", 3), ("PLAIN", 1)),
    "labels byte stream split, zstd 1": (("PLAIN", 3), (SPLIT, 1)),
    "both zstd 1": (("PLAIN", 1), ("PLAIN", 1)),
    "both byte stream split, zstd 1": ((SPLIT, 1), (SPLIT, 1)),
    "label spans, zstd 3": None,
}
"""Encoding and level of zstd of ids and labels; None: spans."""


def best(runs: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """The least CPU seconds, and the result."""
    least = float("inf")
    for _ in range(runs):
        start = time.process_time()
        result = work()
        least = min(least, time.process_time() - start)
    return max(least, 1e-9), result


def written(table: pa.Table, group_rows: int, options: dict[str, Any]) -> pa.Buffer:
    """A Parquet file in memory."""
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, table.schema, **SETTINGS, **options) as writer:
        writer.write_table(table, group_rows)
    return out.getvalue()


def read(buffer: pa.Buffer) -> int:
    """Reads a file row group by row group; returns the rows."""
    file = pq.ParquetFile(pa.BufferReader(buffer), page_checksum_verification=True)
    groups = range(file.num_row_groups)
    return sum(file.read_row_group(g, use_threads=False).num_rows for g in groups)


def column(table: pa.Table, tokens: int, runs: int) -> Iterator[dict[str, Any]]:
    """Every encoding and codec at the default row group, then row groups for two encodings."""
    per_row = tokens / len(table)
    cases = [(e, c, 131_072) for e in ENCODINGS for c in CODECS]
    cases += [(e, "zstd 3", g) for e in ("PLAIN", "DICTIONARY") for g in GROUP_TOKENS]
    for encoding, codec, group in dict.fromkeys(cases):
        rows = max(1, round(group / per_row))
        options = {**ENCODINGS[encoding], **CODECS[codec]}
        if "column_encoding" in options:
            # A path of the schema: the numbers in the lists.
            path = f"{table.schema.names[0]}.list.element"
            options["column_encoding"] = {path: options["column_encoding"]}
        write_seconds, buffer = best(runs, lambda r=rows, o=options: written(table, r, o))
        read_seconds, found = best(runs, lambda b=buffer: read(b))
        assert found == len(table)
        yield {
            "column": table.schema.names[0],
            "encoding": encoding,
            "codec": codec,
            "row_group_tokens": group,
            "bits_per_token": round(8 * len(buffer) / tokens, 3),
            "write_mtok_s": round(tokens / write_seconds / 1e6, 1),
            "read_mtok_s": round(tokens / read_seconds / 1e6, 1),
        }


def pairs(packs: list[Packs], kind: str, runs: int) -> list[dict[str, Any]]:
    """Ids and labels, stored as :data:`PAIRS` say; one row group for each of `packs`."""
    tokens = sum(len(p.signed_ids) for p in packs)
    least: dict[tuple[str, str], float] = {}
    stored: dict[str, int] = {}
    for _ in range(runs):
        for name, case in PAIRS.items():
            schema = pack_schema(kind, "concat", label_spans=case is None)
            levels = dict.fromkeys((f"{column}.list.element" for column in schema.names), 3)
            options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}
            if case is not None:
                paths = "input_ids.list.element", "labels.list.element"
                levels |= {path: level for path, (_, level) in zip(paths, case, strict=True)}
                split = {
                    path: SPLIT for path, (e, _) in zip(paths, case, strict=True) if e == SPLIT
                }
                options["column_encoding"] = split or None
            options["compression_level"] = levels

            def write(schema: pa.Schema = schema, options: Any = options) -> pa.Buffer:
                out = pa.BufferOutputStream()
                with pq.ParquetWriter(out, schema, **SETTINGS, **options) as writer:
                    for one in packs:
                        writer.write_batch(to_arrow(one, schema), len(one))
                return out.getvalue()

            def decode(buffer: pa.Buffer) -> int:
                file = pq.ParquetFile(pa.BufferReader(buffer))
                return sum(
                    len(from_arrow(table.combine_chunks().to_batches()[0], kind))
                    for g in range(file.num_row_groups)
                    for table in (file.read_row_group(g, use_threads=False),)
                )

            write_seconds, buffer = best(1, write)
            read_seconds, _ = best(1, lambda b=buffer: decode(b))
            stored[name] = len(buffer)
            for what, seconds in (("write", write_seconds), ("read", read_seconds)):
                least[name, what] = min(seconds, least.get((name, what), seconds))
    return [
        {
            "stored": name,
            "bits_per_token": round(8 * stored[name] / tokens, 2),
            "write_ns": round(least[name, "write"] / tokens * 1e9, 1),
            "read_ns": round(least[name, "read"] / tokens * 1e9, 1),
        }
        for name in PAIRS
    ]


def profile(
    name: str, settings: dict[str, Any], source: packstore.Dataset, folder: Path, runs: int
) -> dict[str, Any]:
    """A whole dataset as `settings` write it, read through packstore."""
    write_seconds, dataset = best(
        1, lambda: packstore.pack(source, str(folder), pack_size=PACK_SIZE, **settings)
    )
    tokens = dataset.manifest.totals.tokens
    read_seconds, _ = best(runs, lambda: sum(len(p) for p in dataset.iter_packs()))
    return {
        "profile": name,
        "settings": settings,
        "bits_per_token": round(8 * dataset.manifest.totals.bytes / tokens, 3),
        "pack_mtok_s": round(tokens / write_seconds / 1e6, 1),
        "read_mtok_s": round(tokens / read_seconds / 1e6, 1),
    }


def show(rows: list[dict[str, Any]], title: str, console: Console) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def environment() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {p: importlib.metadata.version(p) for p in ("pyarrow", "numpy")},
        "commit": commit.stdout.strip(),
    }


def stored_pairs(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """:func:`pairs` of each input by itself."""
    before, rows = environment(), []
    for path in args.data:
        with tempfile.TemporaryDirectory() as folder:
            source = packstore.pack(
                path, f"{folder}/source", args.tokenizer, pack_size=PACK_SIZE, format="arrow",
                max_drop_rate=0.9,
            )  # fmt: skip
            found = pairs(list(source.iter_packs()), source.manifest.kind, args.runs)
        show(found, f"{Path(path).name}, {source.manifest.totals.tokens:,} tokens", console)
        rows += [{"data": Path(path).name, **row} for row in found]
    return {"environment": before, "runs": args.runs, "rows": rows}


def columns_and_profiles(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All inputs together: each column alone, and whole datasets by setting."""
    before = environment()
    with tempfile.TemporaryDirectory() as folder:
        source = packstore.pack(
            args.data, f"{folder}/source", args.tokenizer, pack_size=PACK_SIZE, format="arrow",
            max_drop_rate=0.9,
        )  # fmt: skip
        kind, batches, tokens = source.manifest.kind, [], 0
        wide = pack_schema(kind, "concat", label_spans=False, carry={})
        narrow = pack_schema(kind, "concat", label_spans=True, carry={})
        for packs in source.iter_packs():
            batches.append((to_arrow(packs, wide), to_arrow(packs, narrow)))
            tokens += len(packs.input_ids)
            if tokens >= args.tokens:
                break
        plain = pa.Table.from_batches([a for a, _ in batches])
        compact = pa.Table.from_batches([b for _, b in batches])
        ids = np.unique(plain["input_ids"].combine_chunks().flatten().to_numpy())
        columns: list[dict[str, Any]] = []
        for table, name in ((plain, "input_ids"), (plain, "labels"), (compact, "label_spans")):
            columns += column(table.select([name]), tokens, args.runs)
            console.print(f"{name}: done")
        profile("", {}, source, Path(folder, "warm"), 1)
        profiles = [
            profile(name, settings, source, Path(folder, f"profile-{i}"), args.runs)
            for i, (name, settings) in enumerate(PROFILES.items())
        ]
    show(columns, f"columns, {tokens:,} tokens, {len(ids):,} different ids", console)
    show(profiles, "whole datasets", console)
    settings = {"tokens": args.tokens, "runs": args.runs, "pack_size": PACK_SIZE}
    settings["data"] = [Path(path).name for path in args.data]
    settings["tokenizer"] = Path(args.tokenizer).name
    result = {"environment": before, "settings": settings, "tokens": tokens, "ids": len(ids)}
    return {**result, "columns": columns, "profiles": profiles}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=[str(ROOT / "examples/sample/pairs.jsonl")])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="tokens at most")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["pairs"], help="measure these; keep the other results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    console = Console(width=150)
    if args.only:
        result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    else:
        result = columns_and_profiles(args, console)
    result["pairs"] = stored_pairs(args, console)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {args.out}")


if __name__ == "__main__":
    main()
