"""Measures the local cache and `verify --jobs` behind a store of 20 ms a request.

    python benchmarks/cache.py

The store is that of ``slow_store.py``: local files, 20 ms a request, 100 MB/s a stream; the waits
are real. One epoch without a cache, one that fills it, one that finds everything in it, by a new
loader each; and verify with 1 to 8 shards at a time: seconds, CPU seconds, requests and bytes. The
lowest of several interleaved rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from slow_store import SlowStore

import packstore
from packstore.config import ReadConfig
from packstore.torch import PackedDataLoader, PackedDataset
from packstore.version import VERSION

RESULTS = Path(__file__).parent / "results" / "cache.json"
JOBS = (1, 2, 4, 8)


def records(n: int) -> Iterator[dict[str, Any]]:
    """Pairs of token ids, about 1,000 tokens each."""
    rng = np.random.default_rng(0)
    for _ in range(n):
        lengths = rng.integers(100, 400, 3)
        ids = ((rng.zipf(1.3, k) % 60_000 + 1).tolist() for k in lengths)
        yield dict(zip(("prompt", "chosen", "rejected"), ids, strict=True))


def measured(store: SlowStore, work: Callable[[], object]) -> dict[str, float]:
    """Measures the time of `work`, and its requests to the store."""
    store.reset()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    took = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return {**took, "requests": store.requests, "mb": store.bytes / 1e6}


def epoch(url: str, config: ReadConfig) -> None:
    """All packs once."""
    data = PackedDataset(url, seed=0, reading=config)
    for _ in PackedDataLoader(data, packs_per_batch=4, num_workers=0):
        pass


def least(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The least of each figure."""
    return {name: round(min(r[name] for r in rounds), 3) for name in rounds[0]}


def measure(root: str, pairs: int, rounds: int) -> dict[str, Any]:
    """All figures, of a dataset of so many pairs."""
    settings: dict[str, Any] = {"pack_size": 4096, "shard_tokens": 2 << 20, "num_workers": 0}
    made = packstore.pack(records(pairs), f"{root}/ds", **settings)
    url, store = f"slow://{root}/ds", SlowStore()
    cache = f"{root}/cache"
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        shutil.rmtree(cache, ignore_errors=True)
        cached = ReadConfig(cache_dir=cache)
        acts: dict[str, Callable[[], object]] = {
            "no cache": lambda: epoch(url, ReadConfig()),
            "cache, first epoch": lambda: epoch(url, cached),  # noqa: B023
            "cache, second epoch": lambda: epoch(url, cached),  # noqa: B023
        }
        for jobs in JOBS:
            acts[f"verify --jobs {jobs}"] = lambda jobs=jobs: packstore.open(url).verify(jobs=jobs)
        for name, act in acts.items():
            found.setdefault(name, []).append(measured(store, act))
    figures = {name: least(all_) for name, all_ in found.items()}
    base, one = figures["no cache"]["seconds"], figures["verify --jobs 1"]["seconds"]
    for name, own in figures.items():
        reference = one if name.startswith("verify") else base
        own["times_faster"] = round(reference / own["seconds"], 2)
    size = sum(s.bytes for s in made.manifest.shards) / 1e6
    dataset = {"mb": round(size, 1), "shards": len(made.manifest.shards), "packs": len(made)}
    return {"dataset": dataset, "figures": figures}


def main() -> None:
    """Prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = measure(root, arguments.pairs, arguments.rounds)
    result["machine"] = {"cores": os.cpu_count(), "python": platform.python_version()}
    result["packstore"] = VERSION
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
