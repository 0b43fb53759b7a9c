"""Packs sorted input with and without shuffle: randomness of the packs, time and memory.

    python benchmarks/order.py --shared ../shared/data

50,000 pairs of real prompts and answers in 40 files, one after another; each file has prompts and
lengths of its own, as the topics and models of real data have. Each run is a process of its own.
With and without shuffle take turns, and the least of their CPU seconds (all threads and child
processes) and of their peaks of memory counts. Then the plan alone, of a million lengths, and
reading alone, which a file costs once more for each further partition that takes blocks of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from peers_etl.texts import write_pairs
from rich.console import Console
from rich.table import Table

import packstore
from packstore.io.inputs.files import InputReader
from packstore.version import VERSION

RESULTS = Path(__file__).parent / "results" / "order.json"
FILES = 40
PACK_SIZE = 4096
WAYS: dict[str, dict[str, Any]] = {
    "shuffle": {},
    "input order": {"shuffle": False},
    "shuffle, 4 partitions": {"partitions": 4, "num_workers": 1},
    "input order, 4 partitions": {"shuffle": False, "partitions": 4, "num_workers": 1},
}
CHILD = """
import json, os, resource, sys, time
import packstore, packstore.etl.pipeline
source, out, tokenizer, settings = json.loads(sys.argv[1])
before, start = sum(os.times()[:4]), time.perf_counter()
packstore.pack(source, out, tokenizer, **settings)
seconds, cpu = time.perf_counter() - start, sum(os.times()[:4]) - before
whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
peak = max(resource.getrusage(who).ru_maxrss for who in whose) << 10
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_rss": peak}))
"""

Row = dict[str, Any]


def write(shared: Path, folder: Path, pairs: int) -> list[str]:
    """The files, in order; every second one of short pairs, and no two with the same ones."""
    paths = [folder / f"{i:02d}.jsonl" for i in range(FILES)]
    for i, path in enumerate(paths):
        write_pairs(shared / "pairs", path, pairs // FILES + i, ("long", "short")[i % 2])
    return [str(path) for path in paths]


def run(sources: list[str], tokenizer: Path, settings: dict[str, Any], scratch: Path) -> Row:
    """One job in a process of its own, and how random its packs are."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        out = f"{folder}/out"
        task = [sources, out, str(tokenizer), {"pack_size": PACK_SIZE, **settings}]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(task)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        row: Row = json.loads(done.stdout.splitlines()[-1])
        dataset = packstore.open(out)
        report = dataset.verify()
        if not report.ok or report.places is None:
            raise SystemExit("\n".join(report.problems))
        planning = dataset.manifest.statistics.planning
        return row | {
            "fill_rate": dataset.manifest.fill_rate,
            "packs": len(dataset),
            "places": dataclasses.asdict(report.places),
            "lengths": planning["randomness"],
        }


def reading(source: str, turns: int) -> Row:
    """Milliseconds of CPU to read a MB of text in blocks and to hash it: plain and as gzip."""
    data = Path(source).read_bytes()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for suffix, stored in ((".jsonl", data), (".jsonl.gz", gzip.compress(data, 6))):
            path = Path(folder, "pairs" + suffix)
            path.write_bytes(stored)
            for _ in range(turns + 1):
                start = time.process_time()
                for _ in InputReader(str(path)):
                    pass
                took = 1e9 * (time.process_time() - start) / len(data)
                found[suffix] = min(found.get(suffix, took), took)
    return found


def plans(n: int, turns: int) -> Row:
    """Nanoseconds of CPU for each of `n` lengths, with and without shuffle."""
    lengths = np.random.default_rng(0).lognormal(np.log(600), 0.8, n)
    lengths = np.clip(np.rint(lengths), 1, PACK_SIZE).astype(np.int32)
    found: dict[str, float] = {}
    for _ in range(turns + 1):  # the first one compiles
        for name, shuffle in (("shuffle", True), ("input order", False)):
            start = time.process_time()
            packstore.plan(lengths, pack_size=PACK_SIZE, shuffle=shuffle)
            took = 1e9 * (time.process_time() - start) / n
            found[name] = min(found.get(name, took), took)
    return {"n": n, "ns": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"))
    parser.add_argument("--pairs", type=int, default=50_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    tokenizer = (args.shared / "tokenizers" / "qwen3").resolve()
    best: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="packstore-bench-", dir=args.scratch) as scratch:
        sources = write(args.shared.resolve(), Path(scratch), args.pairs)
        read = reading(sources[0], args.turns)
        size = sum(os.path.getsize(path) for path in sources)
        for _ in range(args.turns):
            for name, settings in WAYS.items():
                row = run(sources, tokenizer, settings, Path(scratch))
                old = best.get(name, row)
                least = {k: min(row[k], old[k]) for k in ("seconds", "cpu_seconds", "peak_rss")}
                best[name] = row | least
    more = {
        f"{figure}, {name} over {other}": best[name][figure] / best[other][figure]
        for name, other in (("shuffle", "input order"), tuple(WAYS)[2:])
        for figure in ("cpu_seconds", "peak_rss")
    }
    results = {
        "environment": {
            "machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
            "versions": {"packstore": VERSION} | {n: version(n) for n in ("numpy", "numba")},
        },
        "pairs": args.pairs, "files": FILES, "input_bytes": size, "pack_size": PACK_SIZE,
        "turns": args.turns, "ways": best, "ratios": more, "plan": plans(1_000_000, args.turns),
        "reading_ms": read,
    }  # fmt: skip
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


def show(results: Row) -> None:
    """The figures as a table, and the ratios."""
    table = Table()
    names = ("fill %", "places", "steps", "sources", "drawn", "lengths", "CPU s", "peak MB")
    for column in ("", *names):
        table.add_column(column, justify="right")
    for name, row in results["ways"].items():
        p = row["places"]
        values = [100 * row["fill_rate"], p["design_effect"], p["step_design_effect"]]
        values += [p["sources_per_example"], p["sources_of_a_draw"]]
        values += [row["lengths"]["design_effect"], row["cpu_seconds"], row["peak_rss"] / 2**20]
        table.add_row(name, *("-" if v is None else f"{v:.3f}" for v in values))
    console = Console(width=130)
    console.print(table, results["ratios"], results["plan"], results["reading_ms"])


if __name__ == "__main__":
    main()
