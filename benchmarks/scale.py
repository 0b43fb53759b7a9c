"""A billion pairs on a thousand workers: measured on one machine, then simulated.

    python benchmarks/scale.py --shared FOLDER       # pairs of about 4 kB; a minute
    python benchmarks/scale.py … --pairs 1e9 --workers 1000 --files 4000

Measured here: CPU of reading (hash, cut) and of packing a MB of text, and the bytes of the manifest
for a million tokens. Simulated, event by event, as ``engine="ray"`` runs it: tasks start in order,
two for each worker at most ahead of the oldest unfinished one; a task reads every file of which it
has a share; it is slower by a random factor, and lost with its machine. Network and stores are
assumptions, which are printed and recorded.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers_etl.child import cpu_seconds
from peers_etl.texts import write_pairs
from provenance import provenance
from rich.console import Console
from rich.table import Table

import packstore
from packstore.config import PARTITION_BYTES
from packstore.io.inputs.files import InputReader

SHARED = Path(__file__).parents[2] / "shared" / "data"
RESULTS = Path(__file__).parent / "results" / "scale.json"
SAMPLE = 6000
"""Pairs that are packed to measure."""

COLUMNS = ("pairs", "files", "partitions", "reads", "hours", "ideal", "reading", "manifest MB")


@dataclass(frozen=True)
class Assumed:
    """Figures that no machine here can measure.

    Attributes:
        request_ms: latency of a request to the store.
        download_mb: MB/s from the store to one worker.
        spread: standard deviation of the logarithm of a task's slowness.
        slow: fraction of tasks on a machine that is five times slower.
        lost_hours: mean hours of a worker until it is lost (spot machines).
        restart_s: seconds until a lost worker is replaced.
    """

    request_ms: float = 30.0
    download_mb: float = 100.0
    spread: float = 0.15
    slow: float = 0.005
    lost_hours: float = 24.0
    restart_s: float = 120.0


@dataclass(frozen=True)
class Measured:
    """Figures of this run.

    Attributes:
        read_s, pack_s: CPU seconds for a MB of text, of reading alone and of all else.
        pair_bytes, pair_tokens: means of the data.
        manifest_bytes: of the manifest, for a million tokens.
    """

    read_s: float
    pack_s: float
    pair_bytes: float
    pair_tokens: float
    manifest_bytes: float


def cpu(work: Callable[[], Any]) -> float:
    begun = cpu_seconds()
    work()
    return cpu_seconds() - begun


def measure(shared: Path, scratch: Path) -> Measured:
    """Packs a sample; a small job before it compiles the loops."""
    source, first = scratch / "sample.jsonl", scratch / "first.jsonl"
    write_pairs(shared / "pairs", source, SAMPLE, "long")
    first.write_bytes(b"".join(source.read_bytes().splitlines(True)[:100]))
    settings: dict[str, Any] = {"tokenizer": str(shared / "tokenizers" / "qwen3")}
    small = packstore.pack(str(first), str(scratch / "small"), num_workers=1, **settings).manifest
    size = source.stat().st_size / 1e6
    read = min(cpu(lambda: [None for _ in InputReader(str(source))]) for _ in range(3))
    out = str(scratch / "ds")
    whole = cpu(lambda: packstore.pack(str(source), out, num_workers=1, **settings))
    manifest = packstore.open(out).manifest
    tokens = manifest.totals.tokens
    more = len(manifest.to_json()) - len(small.to_json())
    return Measured(
        read_s=read / size,
        pack_s=(whole - read) / size,
        pair_bytes=1e6 * size / manifest.records.read,
        pair_tokens=tokens / manifest.records.read,
        manifest_bytes=1e6 * more / (tokens - small.totals.tokens),
    )


def simulate(pairs: float, workers: int, files: int, m: Measured, a: Assumed) -> dict[str, Any]:
    """Runs the tasks of a job; returns hours, and where they go."""
    rng = np.random.default_rng(0)
    total = pairs * m.pair_bytes / 1e6
    partitions = max(1, math.ceil(total * 1e6 / PARTITION_BYTES))
    reads = max(1.0, min(8.0, partitions / files))  # a file is read by at most eight partitions
    per_task = reads * files / partitions
    reading = per_task * total / files * max(m.read_s, 1 / a.download_mb)
    reading += per_task * a.request_ms / 1e3
    work = total / partitions * m.pack_s + reading + 4 * a.request_ms / 1e3
    slow = np.where(rng.random(partitions) < a.slow, 5, 1)
    seconds = work * rng.lognormal(0, a.spread, partitions) * slow
    free = [0.0] * workers
    oldest = np.zeros(partitions)
    done, lost = 0.0, 0
    for n in range(partitions):
        allowed = 0.0 if n < 2 * workers else oldest[n - 2 * workers]
        start = max(heapq.heappop(free), allowed)
        while (death := start + rng.exponential(a.lost_hours * 3600)) < start + seconds[n]:
            start, lost = death + a.restart_s, lost + 1
        heapq.heappush(free, start + seconds[n])
        oldest[n] = done = max(done, start + seconds[n])  # results are taken in order
    return {
        "pairs": pairs,
        "workers": workers,
        "files": files,
        "partitions": partitions,
        "reads": reads,
        "hours": done / 3600,
        "ideal_hours": total * m.pack_s / workers / 3600,
        "reading_share": reading / work,
        "lost_tasks": lost,
        "manifest_mb": pairs * m.pair_tokens / 1e6 * m.manifest_bytes / 1e6,
    }


def main() -> None:
    """Measures, simulates and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=SHARED, help="with pairs and tokenizers")
    parser.add_argument("--pairs", type=float, nargs="+", default=[1e6, 1e8, 1e9, 1e10])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--files", type=int, nargs="+", default=[1000, 4000, 256_000])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        m = measure(args.shared, Path(scratch))
    console, assumed = Console(width=140), Assumed()
    console.print({k: round(v, 6) for k, v in asdict(m).items()})
    table, rows = Table(*COLUMNS), []
    for pairs in args.pairs:
        for files in args.files:
            row = simulate(pairs, args.workers, files, m, assumed)
            rows.append(row)
            table.add_row(
                f"{pairs:.0e}", f"{files:,}", f"{row['partitions']:,}", f"{row['reads']:.1f}",
                f"{row['hours']:.2f}", f"{row['ideal_hours']:.2f}", f"{row['reading_share']:.0%}",
                f"{row['manifest_mb']:,.0f}",
            )  # fmt: skip
    console.print(table)
    facts = {"measured": asdict(m), "assumed": asdict(assumed), "jobs": rows}
    result = {"environment": provenance(), **facts}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
