"""One machine of many cores, and a billion pairs on a thousand: measured here, then
simulated.

    python benchmarks/scale.py --shared FOLDER       # pairs of about 4 kB; two minutes
    python benchmarks/scale.py … --pairs 1e9 --workers 1000 --files 4000

Measured here: CPU of each stage for a MB of text, the whole job on one core and on two
(`taskset`), and the bytes of the manifest for a million tokens. Simulated:

- **one machine**, in three ways: threads of one process, which share the GIL; worker
  processes that tokenize, while one process does all else, each stage in a thread;
  worker processes that make whole partitions, and read files several times. A stage in
  a thread uses one core. Exchange with processes (2 ms for a MB), memory bandwidth and
  disks are left out;
- **a cluster**, event by event, as ``engine="ray"`` runs it: tasks start in order, two
  for each worker at most ahead of the oldest unfinished one; a task reads every file of
  which it has a share, is slower by a random factor, and lost with its machine. Network
  and stores are assumed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, parser, provenance, save, show
from peers_etl.child import in_process
from peers_etl.texts import write_pairs

import packstore
from packstore.config import PARTITION_BYTES
from packstore.etl import spill
from packstore.etl.partitions import work
from packstore.etl.partitions.slices import MAX_SLICES, READERS
from packstore.etl.tokenize import BlockTokenizer
from packstore.io.inputs.files import InputReader
from packstore.io.versions.shard_writer import ShardFile, ShardWriter
from packstore.tokenizer import encode

SHARED = Path(__file__).parents[2] / "shared" / "data"
SAMPLE = 18_000
"""Pairs that are packed to measure."""

CORES, WAYS = (1, 2, 3, 4, 8, 16, 64), ("threads", "processes", "partitions")
STAGES: dict[str, tuple[Any, str]] = {
    "tokenize in Python": (BlockTokenizer, "__call__"),
    "encode texts": (encode, "_encode_mode"),
    "spill": (work.SpilledPartition, "add"),
    "plan": (work, "plan"),
    "gather": (spill.Spill, "_scatter"),
    "fill": (spill, "fill"),
    "check": (ShardWriter, "write"),
    "encode row groups": (ShardFile, "append"),
    "hash shards": (ShardFile, "finish"),
}
"""Name of a stage -> the function that does it."""

HOLDS = {"read": 0.5, "tokenize in Python": 0.9, "encode texts": 0.25, "spill": 0.4}
"""Stages of reading -> their share of time with the GIL, by `py-spy --gil`."""


@dataclass(frozen=True)
class Assumed:
    """Figures that no machine here can measure."""

    request_ms: float = 30.0  # latency of a request to the store
    download_mb: float = 100.0  # MB/s from the store to one worker
    spread: float = 0.15  # standard deviation of the logarithm of a task's slowness
    slow: float = 0.005  # fraction of tasks on a machine that is five times slower
    lost_hours: float = 24.0  # mean hours of a worker until it is lost (spot machines)
    restart_s: float = 120.0  # seconds until a lost worker is replaced


@dataclass(frozen=True)
class Measured:
    """Figures of this run."""

    stages: dict[str, float]  # CPU seconds of each for a MB of text
    pair_bytes: float  # means of the data
    pair_tokens: float
    manifest_bytes: float  # for a million tokens
    cores: dict[
        int, dict[str, float]
    ]  # number of cores -> seconds of the job on them, by stage


def stage_costs(job: Callable[[], Any]) -> Counter[str]:
    """CPU seconds of each stage of a job, in the threads of this process."""
    costs = Counter[str]()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                costs[name] += time.thread_time() - begun

        return call

    for name, (owner, function) in STAGES.items():
        setattr(owner, function, timed(name, getattr(owner, function)))
    job()
    costs["tokenize in Python"] -= costs["encode texts"]  # which is a part of it
    return costs


def measure(shared: Path, scratch: Path) -> Measured:
    """Packs a sample; the job before it loads the compiled loops."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # else the engine works in threads of its own
    source, first = scratch / "sample.jsonl", scratch / "first.jsonl"
    write_pairs(shared / "pairs", source, SAMPLE, "long")
    first.write_bytes(b"".join(source.read_bytes().splitlines(True)[:100]))
    settings: dict[str, Any] = {
        "tokenizer": str(shared / "tokenizers" / "qwen3"),
        "num_workers": 1,
    }
    small = packstore.pack(str(first), str(scratch / "small"), **settings).manifest
    size = source.stat().st_size / 1e6
    packstore.pack(str(source), str(scratch / "before"), **settings)
    out = str(scratch / "ds")
    costs = stage_costs(lambda: packstore.pack(str(source), out, **settings))
    begun = time.thread_time()
    deque(InputReader(str(source)), maxlen=0)
    costs["read"] = time.thread_time() - begun
    manifest = packstore.open(out).manifest
    tokens = manifest.totals.tokens
    more = len(manifest.to_json()) - len(small.to_json())
    return Measured(
        stages={name: seconds / size for name, seconds in costs.items()},
        pair_bytes=1e6 * size / SAMPLE,
        pair_tokens=tokens / SAMPLE,
        manifest_bytes=1e6 * more / (tokens - small.totals.tokens),
        cores={n: on_cores(n, source, settings["tokenizer"], scratch) for n in (1, 2)},
    )


def on_cores(
    number: int, source: Path, tokenizer: str, scratch: Path
) -> dict[str, float]:
    """Seconds of the job by stage, in a process that may use so many cores."""
    cores = ("taskset", "-c", f"0-{number - 1}")
    task = {
        "contender": "packstore",
        "source": str(source),
        "out": str(scratch / f"on-{number}"),
    }
    return dict(in_process({**task, "tokenizer": tokenizer}, *cores)["stages"])


def one_machine(stages: dict[str, float], cores: int, way: str) -> tuple[float, str]:
    """Seconds for a MB of a long job, and the stage that limits it.

    Half of the partitions are read first, the other half while those are written.
    """
    if way == "partitions":
        return (sum(stages.values()) + (READERS - 1) * stages["read"]) / cores, "cores"
    reading = {n: s for n, s in stages.items() if n in HOLDS}
    writing = {n: s for n, s in stages.items() if n not in HOLDS}
    here = (
        HOLDS if way == "threads" else {"read": HOLDS["read"], "spill": HOLDS["spill"]}
    )
    lanes = {"the GIL": sum(here[n] * stages[n] for n in here), "read": stages["read"]}
    read = max(
        (s, n) for n, s in {**lanes, "cores": sum(reading.values()) / cores}.items()
    )
    write = max(
        (s, n) for n, s in {**writing, "cores": sum(writing.values()) / cores}.items()
    )
    both = max(read[0], write[0], sum(stages.values()) / cores)
    return (read[0] + both + write[0]) / 2, max(read, write)[1]


def simulate(
    pairs: float, workers: int, files: int, m: Measured, a: Assumed
) -> dict[str, Any]:
    """Runs the tasks of a job; returns hours, and where they go."""
    rng = np.random.default_rng(0)
    total = pairs * m.pair_bytes / 1e6
    partitions = max(1, math.ceil(total * 1e6 / PARTITION_BYTES))
    each = max(
        1, min(MAX_SLICES, READERS * files // partitions)
    )  # files of which a partition takes
    reads = max(1.0, partitions * each / files)
    per_task = reads * files / partitions
    reading = per_task * total / files * max(m.stages["read"], 1 / a.download_mb)
    reading += per_task * a.request_ms / 1e3
    pack_s = sum(m.stages.values()) - m.stages["read"]
    work = total / partitions * pack_s + reading + 4 * a.request_ms / 1e3
    slow = np.where(rng.random(partitions) < a.slow, 5, 1)
    seconds = work * rng.lognormal(0, a.spread, partitions) * slow
    free = [0.0] * workers
    oldest = np.zeros(partitions)
    done, lost = 0.0, 0
    for n in range(partitions):
        allowed = 0.0 if n < 2 * workers else oldest[n - 2 * workers]
        start = max(heapq.heappop(free), allowed)
        while (death := start + rng.exponential(a.lost_hours * 3600)) < start + seconds[
            n
        ]:
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
        "ideal_hours": total * pack_s / workers / 3600,
        "reading_share": reading / work,
        "lost_tasks": lost,
        "manifest_mb": pairs * m.pair_tokens / 1e6 * m.manifest_bytes / 1e6,
    }


def main() -> None:
    """Measures, simulates and prints."""
    command = parser(__doc__)
    command.add_argument(
        "--shared", type=Path, default=SHARED, help="with pairs and tokenizers"
    )
    command.add_argument(
        "--pairs", type=float, nargs="+", default=[1e6, 1e8, 1e9, 1e10]
    )
    command.add_argument("--workers", type=int, default=1000)
    command.add_argument("--files", type=int, nargs="+", default=[1000, 4000, 256_000])
    command.add_argument("--out", default=RESULTS / "scale.json", help="-: nowhere")
    args = command.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        m = measure(args.shared, Path(scratch))
    assumed, machine = Assumed(), []
    show(("measured", "figures"), asdict(m).items())
    for cores, way in itertools.product(CORES, WAYS):
        seconds, limit = one_machine(m.stages, cores, way)
        rates = {
            "gb_hour": 3.6 / seconds,
            "pairs_hour": 3600e6 / seconds / m.pair_bytes,
        }
        machine.append({"cores": cores, "way": way, "limit": limit, **rates})
    jobs = [
        simulate(n, args.workers, f, m, assumed) for n in args.pairs for f in args.files
    ]
    for rows in (machine, jobs):
        show(rows[0], [row.values() for row in rows])
    facts = {
        "measured": asdict(m),
        "assumed": asdict(assumed),
        "machine": machine,
        "jobs": jobs,
    }
    save(
        args.out, {"environment": provenance("numpy", "pyarrow", "fastokens"), **facts}
    )


if __name__ == "__main__":
    main()
