"""A billion pairs on a thousand workers: measured on one, then simulated, to see what breaks first.

    python benchmarks/scale.py --shared FOLDER       # pairs of about 4 kB; a few minutes
    python benchmarks/scale.py … --pairs 1e9 --workers 1000 --files 4000 --request-ms 30

Part 1 measures on this machine: CPU of reading (hash, cut) and of packing a MB of text, and of the
note of a partition; and, with large manifests, bytes, seconds and memory of encoding, hashing,
checking and decoding them. Part 2 simulates the job, event by event, as `engine="ray"`
runs it: tasks start in order, two for each worker at most ahead of the oldest unfinished one; a
task reads every file of which it has a share; it is slower by a random factor, and lost with its
machine; its note is read by the driver. Part 3 lists the limits of the format and of the stores,
and the number of pairs at which each is met. Network and stores are assumptions, which are printed
and recorded; everything else is measured in the same run.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers_etl.texts import write_pairs
from rich.console import Console
from rich.table import Table

import packstore
from packstore.config import PARTITION_BYTES, PackConfig
from packstore.etl.engines.ray import MAX_RETRIES
from packstore.etl.partitions.slices import split
from packstore.io.inputs.files import Input, InputReader
from packstore.io.manifest.commit import MAX_MANIFEST_BYTES
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.manifest_hash import with_hash
from packstore.io.shards.shard import RowGroups
from packstore.io.store.location import Location

SHARED = Path(__file__).parents[2] / "shared" / "data"
RESULTS = Path(__file__).parent / "results" / "scale.json"
SAMPLE = 6000
"""Pairs that are packed to measure."""

COLUMNS = (
    "pairs", "files", "partitions", "reads", "hours", "ideal", "reading", "waiting", "commit s",
)  # fmt: skip
LISTED = 1000
"""Keys of one answer of S3 to a listing."""


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
        group_bytes, shard_bytes: of a row group and of a shard in a manifest.
        encode_s, decode_s: of a MB of manifest.
        decoded_mb: memory for each MB of manifest that is opened.
        note_s: CPU seconds of the driver for a note of one shard.
    """

    read_s: float
    pack_s: float
    pair_bytes: float
    pair_tokens: float
    group_bytes: float
    shard_bytes: float
    encode_s: float
    decode_s: float
    decoded_mb: float
    note_s: float


def cpu(work: Callable[[], Any]) -> float:
    """CPU seconds of this process and its finished children."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    work()
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = [
        a.ru_utime + a.ru_stime - b.ru_utime - b.ru_stime
        for a, b in zip(after, before, strict=True)
    ]
    return sum(spent)


def measure(shared: Path, scratch: Path) -> Measured:
    """Packs a sample, and makes manifests of its shard."""
    source, few_pairs = scratch / "sample.jsonl", scratch / "few.jsonl"
    write_pairs(shared / "pairs", source, SAMPLE, "long")
    few_pairs.write_bytes(b"".join(source.read_bytes().splitlines(True)[:100]))
    size = source.stat().st_size / 1e6
    read = min(cpu(lambda: [None for _ in InputReader(str(source))]) for _ in range(3))
    settings: dict[str, Any] = {"num_workers": 1}
    settings["tokenizer"] = str(shared / "tokenizers" / "qwen3")
    packstore.pack(str(few_pairs), str(scratch / "warm"), **settings)
    whole = cpu(lambda: packstore.pack(str(source), str(scratch / "ds"), **settings))
    m = packstore.open(str(scratch / "ds")).manifest
    few, many = (manifest_of(m, 500, groups) for groups in (1, 257))
    sizes = [len(with_hash(one.to_json())) for one in (few, many)]
    group = (sizes[1] - sizes[0]) / (500 * 256)
    large = manifest_of(m, 500, 2000)
    encoded: list[bytes] = []
    encode = cpu(lambda: encoded.append(with_hash(large.to_json())))
    place = scratch / "large.json"
    place.write_bytes(encoded[0])
    opened = json.loads(
        subprocess.run(
            [sys.executable, __file__, "--open", str(place)], check=True, capture_output=True
        ).stdout
    )
    amount = len(encoded[0]) / 1e6
    return Measured(
        read_s=read / size,
        pack_s=(whole - read) / size,
        pair_bytes=1e6 * size / m.records.read,
        pair_tokens=m.totals.tokens / m.records.read,
        group_bytes=group,
        shard_bytes=sizes[0] / 500 - group,
        encode_s=encode / amount,
        decode_s=opened["seconds"] / amount,
        decoded_mb=opened["mb"] / amount,
        note_s=note_seconds(scratch),
    )


def manifest_of(m: Manifest, shards: int, groups: int) -> Manifest:
    """A valid manifest of many shards with random counts."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(shards):
        rows = rng.integers(15, 20, groups)
        columns = RowGroups(
            rows=rows,
            examples=rows + rng.integers(300, 600, groups),
            tokens=rows * (m.pack_size - 5),
            longest=rng.integers(200, m.pack_size - 5, groups),
            crc32=rng.integers(0, 2**32, groups, dtype=np.uint32),
        )
        sums = {name: int(getattr(columns, name).sum()) for name in ("rows", "examples", "tokens")}
        path = f"data/0123456789ab-p{number:05d}-00000-44850ff16d175314.parquet"
        more = {"sequences": 2 * sums["examples"], "supervised_tokens": sums["tokens"] // 2}
        found.append(
            replace(m.shards[0], path=path, bytes=1 << 27, row_groups=columns, **sums, **more)
        )
    names = ("examples", "sequences", "tokens", "supervised_tokens", "bytes")
    totals = {name: sum(getattr(s, name) for s in found) for name in names}
    packs = sum(s.rows for s in found)
    packed = totals["examples"]
    return replace(
        m,
        shards=tuple(found),
        totals=replace(m.totals, packs=packs, logical_tokens=totals["tokens"], **totals),
        records=replace(m.records, read=packed, packed=packed, dropped={}, noted={}),
        pack_index=None,
    )


def opening(path: Path) -> None:
    """Prints seconds and memory of decoding a manifest, in a process of its own."""
    data = path.read_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_mb()
    begin = time.process_time()
    kept = Manifest.from_json(data, str(path))
    seconds = time.process_time() - begin
    print(json.dumps({"seconds": seconds, "mb": peak_mb() - before + len(data) / 1e6}))
    assert kept.shards


def peak_mb() -> float:
    """The highest resident memory of this process, in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))


def note_seconds(scratch: Path) -> float:
    """CPU of one more partition for the same records, of which the note is a part."""
    source = scratch / "notes.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for i in range(4000):
            ids = {"prompt": [i % 50, 7], "chosen": [8, i % 90], "rejected": [9]}
            file.write(json.dumps(ids) + "\n")
    spent = []
    for partitions in (4, 64):
        call = partial(
            packstore.pack, str(source), str(scratch / f"notes-{partitions}"),
            overwrite=True, num_workers=1, partitions=partitions, pack_size=64,
        )  # fmt: skip
        spent.append(min(cpu(call) for _ in range(3)))
    return max(spent[1] - spent[0], 0.0) / 60


@dataclass(frozen=True)
class Job:
    """A job of this size, cut as packstore cuts it."""

    pairs: float
    workers: int
    files: int
    partitions: int
    reads: float
    """Times that each file is read."""


def cut(pairs: float, workers: int, files: int, m: Measured) -> Job:
    """Cuts the input into partitions, as a job would by default."""
    total = pairs * m.pair_bytes
    partitions = max(1, math.ceil(total / PARTITION_BYTES))
    size = math.ceil(total / files)
    place = Location("input.jsonl")
    inputs = [(Input(i, f"{i}.jsonl", place, "jsonl", None), size) for i in range(files)]
    slices = split(inputs, partitions)
    return Job(pairs, workers, files, partitions, sum(map(len, slices)) / files)


def simulate(job: Job, m: Measured, a: Assumed, seed: int = 0) -> dict[str, float]:
    """Runs the tasks of a job; returns hours, and where they go."""
    rng = np.random.default_rng(seed)
    size = job.pairs * m.pair_bytes / job.partitions / 1e6  # MB of a partition
    per_task = job.reads * job.files / job.partitions  # files that a task reads
    read_mb = per_task * job.pairs * m.pair_bytes / job.files / 1e6
    reading = read_mb * max(m.read_s, 1 / a.download_mb) + per_task * a.request_ms / 1e3
    work = size * m.pack_s + reading + 4 * a.request_ms / 1e3
    slowness = rng.lognormal(0, a.spread, job.partitions) * np.where(
        rng.random(job.partitions) < a.slow, 5, 1
    )
    # Tasks are submitted in order, and held until the oldest is done.
    ahead, free = 2 * job.workers, [0.0] * job.workers
    heapq.heapify(free)
    ends = np.zeros(job.partitions)
    done, lost, repeated = 0.0, 0, 0
    oldest = np.zeros(job.partitions)
    for n in range(job.partitions):
        allowed = 0.0 if n < ahead else oldest[n - ahead]
        start = max(heapq.heappop(free), allowed)
        end = start + work * slowness[n]
        for _ in range(MAX_RETRIES):
            death = start + rng.exponential(a.lost_hours * 3600)
            if death > end:
                break
            lost += 1
            repeated += int(death - start)
            start = death + a.restart_s
            end = start + work * slowness[n]
        heapq.heappush(free, end)
        ends[n] = end
        done = max(done, end) + m.note_s  # the driver takes results in order
        oldest[n] = done
    packs = job.pairs * m.pair_tokens / PackConfig().pack_size
    shards = max(job.partitions, job.pairs * m.pair_tokens / PackConfig().shard_tokens)
    manifest = manifest_mb(job.pairs, m, job.partitions)
    listing = shards / LISTED * a.request_ms / 1e3
    commit = manifest * (m.encode_s + 1 / a.download_mb) + listing + packs * 4e-7
    ideal = job.pairs * m.pair_bytes / 1e6 * m.pack_s / job.workers
    return {
        "hours": (done + commit) / 3600,
        "ideal_hours": ideal / 3600,
        "reading_share": reading / work,
        "waiting_share": 1 - float((slowness * work).sum()) / (job.workers * float(ends.max())),
        "half_done_before_hours": float(ends.max() - np.median(ends)) / 3600,
        "lost_tasks": lost,
        "repeated_hours": repeated / 3600,
        "commit_seconds": commit,
        "listing_seconds": listing,
        "driver_share": job.partitions * m.note_s / done,
    }


def manifest_mb(pairs: float, m: Measured, partitions: int) -> float:
    tokens = pairs * m.pair_tokens
    groups = tokens / PackConfig().row_group_tokens
    shards = max(partitions, tokens / PackConfig().shard_tokens)
    return (groups * m.group_bytes + shards * m.shard_bytes) / 1e6


def limits(m: Measured, a: Assumed) -> list[dict[str, Any]]:
    """Pairs at which each limit is met, by bisection."""

    def first(too_much: Callable[[float], bool]) -> float:
        low, high = 1e6, 1e14
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if too_much(middle) else (middle, high)
        return high

    def parts(pairs: float) -> int:
        return math.ceil(pairs * m.pair_bytes / PARTITION_BYTES)

    def mb(pairs: float) -> float:
        return manifest_mb(pairs, m, parts(pairs))

    def listing(pairs: float) -> float:
        shards = pairs * m.pair_tokens / PackConfig().shard_tokens
        return shards / LISTED * a.request_ms / 1e3

    found = [
        ("opening takes a second of CPU", lambda n: mb(n) * m.decode_s > 1),
        ("opening takes 1 GB of memory, in each process", lambda n: mb(n) * m.decoded_mb > 1000),
        ("the manifest is larger than readers accept", lambda n: mb(n) * 1e6 > MAX_MANIFEST_BYTES),
        ("listing the shards takes a minute", lambda n: listing(n) > 60),
        ("the driver takes an hour for the notes", lambda n: parts(n) * m.note_s > 3600),
    ]
    rows = [{"what": what, "pairs": first(test)} for what, test in found]
    for row in rows:
        row["tokens"] = row["pairs"] * m.pair_tokens
    return sorted(rows, key=lambda row: row["pairs"])


def main() -> None:
    """Measures, simulates, and prints what breaks first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=SHARED, help="with pairs and tokenizers")
    parser.add_argument("--pairs", type=float, nargs="+", default=[1e6, 1e8, 1e9, 1e10])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--files", type=int, nargs="+", default=[1000, 4000, 256_000])
    for name, value in asdict(Assumed()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=value)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        opening(args.open)
        return
    assumed = Assumed(**{name: getattr(args, name) for name in asdict(Assumed())})
    with tempfile.TemporaryDirectory() as scratch:
        m = measure(args.shared, Path(scratch))
    console = Console(width=140)
    console.print({k: round(v, 6) for k, v in asdict(m).items()})
    rows = []
    table = Table(*COLUMNS)
    for pairs in args.pairs:
        for files in args.files:
            job = cut(pairs, args.workers, files, m)
            row = asdict(job) | simulate(job, m, assumed)
            rows.append(row)
            table.add_row(
                f"{pairs:.0e}", f"{files:,}", f"{job.partitions:,}", f"{job.reads:.1f}",
                f"{row['hours']:.2f}", f"{row['ideal_hours']:.2f}", f"{row['reading_share']:.0%}",
                f"{row['waiting_share']:.0%}", f"{row['commit_seconds']:.1f}",
            )  # fmt: skip
    console.print(table)
    met = limits(m, assumed)
    for row in met:
        console.print(f"{row['pairs']:.1e} pairs ({row['tokens']:.1e} tokens): {row['what']}")
    load = os.getloadavg()[0]
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "load_average": load}
    result = {
        "environment": about,
        "measured": asdict(m),
        "assumed": asdict(assumed),
        "jobs": rows,
        "limits": met,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
