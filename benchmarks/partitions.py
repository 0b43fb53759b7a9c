"""Packs the same pairs as one partition, as several, and on Ray: CPU seconds on the same cores.

    python benchmarks/partitions.py --shared ../shared/data

Each run is a process of its own; ways take turns, and the least of their CPU seconds counts: of the
process, and for Ray of all processes of its cluster, which stands before the job begins. A job of
few pairs gives what a way costs at its start, mostly the tokenizer of each process. The rest grows
with the data; its ratio to that of one partition is `over`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers_etl.texts import write_pairs
from rich.console import Console
from rich.table import Table

from packstore.version import VERSION

RESULTS = Path(__file__).parent / "results" / "partitions.json"
FILES, FEW = 16, 64
WAYS: dict[str, dict[str, Any]] = {
    "1 partition": {"partitions": 1},
    "4 partitions": {"partitions": 4},
    "16 partitions": {"partitions": 16},
    "Ray, 4 partitions": {"partitions": 4, "engine": "ray"},
}
CHILD = """
import json, os, sys, time
from pathlib import Path
import packstore, packstore.etl.pipeline
source, out, tokenizer, settings = json.loads(sys.argv[1])

def cpu():
    # Of this process and all below it, also those that have ended.
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(words[1]), sum(map(int, words[11:15]))
    below = {os.getpid()}
    while more := {p for p, above in parents.items() if above in below} - below:
        below |= more
    return sum(ticks[p] for p in below) / os.sysconf("SC_CLK_TCK")

if settings.get("engine") == "ray":
    import ray
    import packstore.etl.engines.ray
    ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    time.sleep(5)
before = cpu()
packstore.pack(source, out, tokenizer, pack_size=8192, **settings)
print(json.dumps(cpu() - before))
"""

Row = dict[str, Any]


def run(source: str, tokenizer: Path, settings: Row, scratch: Path) -> float:
    """CPU seconds of one job in a process of its own."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        task = json.dumps([source, f"{folder}/out", str(tokenizer), settings])
        done = subprocess.run(
            [sys.executable, "-c", CHILD, task], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return float(done.stdout.splitlines()[-1])


def write(shared: Path, folder: Path, pairs: int) -> dict[str, str]:
    """The same pairs in one file and in several, and a few of them."""
    one, many, few = folder / "one.jsonl", folder / "many", folder / "few.jsonl"
    write_pairs(shared / "pairs", one, pairs, "long")
    lines = one.read_bytes().splitlines(keepends=True)
    few.write_bytes(b"".join(lines[:FEW]))
    many.mkdir()
    for i in range(FILES):
        part = lines[i * len(lines) // FILES : (i + 1) * len(lines) // FILES]
        (many / f"{i:02d}.jsonl").write_bytes(b"".join(part))
    return {"1 file": str(one), f"{FILES} files": str(many), f"{FEW} pairs": str(few)}


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
    least: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="packstore-bench-", dir=args.scratch) as folder:
        sources = write(args.shared.resolve(), Path(folder), args.pairs)
        size = os.path.getsize(sources["1 file"])
        for _ in range(args.turns):
            for name, source in sources.items():
                for way, settings in WAYS.items():
                    took = run(source, tokenizer, settings, Path(folder))
                    rows = least.setdefault(name, {})
                    rows[way] = min(rows.get(way, took), took)
    start = least.pop(f"{FEW} pairs")
    base = next(iter(WAYS))
    over = {
        name: {w: (rows[w] - start[w]) / (rows[base] - start[base]) for w in WAYS}
        for name, rows in least.items()
    }
    results = {
        "environment": {
            "machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
            "versions": {"packstore": VERSION} | {n: version(n) for n in ("ray", "fastokens")},
        },
        "pairs": args.pairs, "input_bytes": size, "turns": args.turns,
        "start_cpu_seconds": start, "cpu_seconds": least, "over": over,
    }  # fmt: skip
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    table = Table("CPU seconds", "start", *(f"{name} (over)" for name in least))
    for way in WAYS:
        cells = [f"{least[name][way]:.1f} ({over[name][way]:.2f})" for name in least]
        table.add_row(way, f"{start[way]:.1f}", *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
