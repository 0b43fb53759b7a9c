"""Measures start, resume, memory and order of the loader, and very large datasets.

    python benchmarks/loading_scale.py DATASET [--quick] [--out results/loading_scale.json]

DATASET is the local folder of a dataset of a few thousand packs or more. Each part runs in a
process of its own; times are the best of several runs, after the imports, and on a busy machine
those of the CPU (`cpu`) say more than those of the clock. Memory is what the
process uses above torch alone; the imports of packstore are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

PACKS_PER_BATCH = 8
DERIVED = ("input_ids", "labels", "segment_ids", "position_ids", "target_index", "kv_index")


def memory() -> dict[str, float]:
    """MB of this process: all of it, and what is no file."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if " kB" in line}
    return {"rss": found["VmRSS"], "anonymous": found["RssAnon"] + found["RssShmem"]}


def loader(dataset: str, **settings: Any) -> Any:
    """The loader at default settings, with batches of 8 packs."""
    from packstore.torch import PackedDataLoader, PackedDataset

    return PackedDataLoader(PackedDataset(dataset, **settings), packs_per_batch=PACKS_PER_BATCH)


def start(dataset: str, quick: bool) -> dict[str, float]:
    """Milliseconds to the first batch: from the URL, in a fresh process, imports done."""
    import packstore.torch  # noqa: F401

    begin, clock = time.perf_counter(), time.process_time()
    next(iter(loader(dataset)))
    cpu = 1e3 * (time.process_time() - clock)
    return {"first_batch_ms": 1e3 * (time.perf_counter() - begin), "first_batch_cpu_ms": cpu}


def resume(dataset: str, quick: bool, share: float) -> dict[str, float]:
    """Milliseconds to the first batch after a state that was taken at `share` of the epoch."""
    probe = loader(dataset)
    state = probe.state_dict()
    state["next"] = int(len(probe.data.stream) * share) // PACKS_PER_BATCH * PACKS_PER_BATCH
    begin, clock = time.perf_counter(), time.process_time()
    fresh = loader(dataset)
    fresh.load_state_dict(state)
    next(iter(fresh))
    cpu = 1e3 * (time.process_time() - clock)
    name = f"resume_{share:.0%}"
    return {f"{name}_ms": 1e3 * (time.perf_counter() - begin), f"{name}_cpu_ms": cpu}


def epochs(dataset: str, quick: bool) -> dict[str, Any]:
    """Memory over five epochs, and CPU time a pack in the last ones."""
    import torch

    torch.set_num_threads(1)
    alone = memory()
    import packstore.torch  # noqa: F401

    imported = memory()
    batches, after, cpu, wall = loader(dataset), [], [], []
    for epoch in range(2 if quick else 5):
        batches.set_epoch(epoch)
        begin, clock, packs, peak = time.process_time(), time.perf_counter(), 0, 0.0
        for number, batch in enumerate(batches):
            packs += batch.num_packs
            if number % 50 == 0:
                peak = max(peak, memory()["rss"])
        cpu.append(1e6 * (time.process_time() - begin) / packs)
        wall.append(packs / (time.perf_counter() - clock))
        after.append({"peak_rss": peak, **memory()})
    peaks = [found["peak_rss"] for found in after]
    return {
        "cpu_us_per_pack": min(cpu),
        "packs_per_s": max(wall),
        "imports_mb": imported["rss"] - alone["rss"],
        "over_torch_mb": max(peaks) - alone["rss"],
        "over_imports_mb": max(peaks) - imported["rss"],
        "last_epoch_to_first": peaks[-1] / peaks[0],
        "epochs": after,
    }


def parts_of_cpu(dataset: str, quick: bool) -> dict[str, float]:
    """Microseconds of CPU a pack of each thing that is done for it, one after another."""
    import torch

    from packstore.io.dataset.dataset import open as open_dataset
    from packstore.torch.batch.collate import collate

    torch.set_num_threads(1)
    data = open_dataset(dataset)
    numbers = range(min(len(data.row_groups), 100))
    packs_in = int(data.row_groups.rows[: len(numbers)].sum())
    raw = [data.fetch(g) for g in numbers]
    groups = [data.decode(g, r) for g, r in zip(numbers, raw, strict=True)]
    count = len(groups) // PACKS_PER_BATCH * PACKS_PER_BATCH
    rows = [group.row(0) for group in groups[:count]]

    def cpu(work: Callable[[], object], packs: int) -> float:
        times = []
        for _ in range(2 if quick else 5):
            begin = time.process_time()
            work()
            times.append(time.process_time() - begin)
        return 1e6 * min(times) / packs

    cuts = range(0, count, PACKS_PER_BATCH)
    kind = data.manifest.kind

    def derive() -> None:
        for i in cuts:
            batch = collate(rows[i : i + PACKS_PER_BATCH], kind)
            for name in DERIVED:
                getattr(batch, name)

    return {
        "fetch": cpu(lambda: [data.fetch(g) for g in numbers], packs_in),
        "decode": cpu(lambda: [data.decode(g, raw[g]) for g in numbers], packs_in),
        "row": cpu(lambda: [group.row(0) for group in groups], len(groups)),
        "collate": cpu(
            lambda: [collate(rows[i : i + PACKS_PER_BATCH], kind) for i in cuts],
            count,
        ),
        "collate_and_derive_all": cpu(derive, count),
    }


def order(dataset: str, quick: bool) -> dict[str, float]:
    """Order of 1e8 packs: set up, seek, what 8 ranks read, how well it mixes, what strata bring."""
    from packstore.format.arrays import to_offsets
    from packstore.io.dataset.order import PackOrder

    packs = 10**6 if quick else 10**8
    rows = np.full(packs // 32, 32)
    times, seeks = [], []
    for epoch in range(4):
        begin = time.perf_counter()
        found = PackOrder(rows, epoch=epoch)
        found.locate(np.arange(packs // 2, packs // 2 + 8))  # computes the fields that are needed
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        found.locate(np.arange(packs // 2, packs // 2 + 512))
        seeks.append(time.perf_counter() - begin)
    small = np.full(6250, 32)  # 200,000 packs, sorted by 20 topics
    topic = np.arange(200_000) * 20 // 200_000
    mixed = PackOrder(small)
    indices = np.arange(199_936)
    group, row = mixed.locate(indices)

    def distance(taken: Any) -> float:
        counts = (topic[taken].reshape(-1, 64)[..., None] == np.arange(20)).sum(1)
        return float(np.abs(counts / 64 - 1 / 20).sum(1).mean())

    rng = np.random.default_rng(0)
    perfect = np.mean([distance(rng.permutation(200_000)[:199_936]) for _ in range(5)])
    pairs = rng.poisson(12, 200_000)
    first = to_offsets(small)

    def noise(one: PackOrder) -> float:
        group, row = one.locate(indices)
        return float(pairs[first[group] + row].reshape(-1, 64).sum(1).std())

    read = sum(len(np.unique(mixed.locate(np.arange(r, 200_000, 8))[0])) for r in range(8))
    return {
        "packs": packs,
        "set_up_s": min(times),
        "seek_512_packs_ms": 1e3 * min(seeks),
        "shuffle_to_perfect": distance(group * 32 + row) / float(perfect),
        "eight_ranks_read": read / len(small),
        "pair_noise_down_by_strata": noise(mixed) / noise(PackOrder(small, strata=pairs)),
    }


def manifest(dataset: str, quick: bool, packs: int) -> dict[str, float]:
    """Opening and resuming in a dataset of so many packs, whose shards are only in its manifest."""
    from packstore.io.dataset.dataset import open as open_dataset
    from packstore.io.dataset.order import PackOrder

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, __file__, dataset, "--make", folder, str(packs)], check=True
        )
        begin, clock = time.perf_counter(), time.process_time()
        data = open_dataset(folder)
        opened, opened_cpu = time.perf_counter() - begin, time.process_time() - clock
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        begin, clock = time.perf_counter(), time.process_time()
        order = PackOrder(data.group_rows, epoch=3)
        order.locate(np.arange(packs // 2, packs // 2 + 512))
        seek, seek_cpu = time.perf_counter() - begin, time.process_time() - clock
        size = sum(p.stat().st_size for p in Path(folder, "_packstore").iterdir())
    top = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    name = f"{packs:.0e}".replace("+0", "")
    figures = {"megabytes": size / 1e6, "open_s": opened, "open_peak_mb": peak}
    figures |= {"resume_s": seek, "peak_mb": top}
    figures |= {"open_cpu_s": opened_cpu, "resume_cpu_s": seek_cpu}
    return {f"manifest_{name}_{key}": value for key, value in figures.items()}


def make_manifest(dataset: str, folder: str, packs: int) -> None:
    """A manifest of shards of 1000 row groups of 32 packs."""
    from packstore.io.dataset.dataset import open as open_dataset
    from packstore.io.shards.shard import RowGroups

    base, rng, ones = open_dataset(dataset).manifest, np.random.default_rng(0), np.ones(1000, int)
    k, size = base.num_responses or 2, base.pack_size
    shards = []
    for number in range(packs // 32_000):
        groups = RowGroups(
            rows=32 * ones,
            examples=rng.integers(350, 450, 1000),
            tokens=rng.integers(31 * size, 32 * size, 1000),
            longest=rng.integers(2, size, 1000),
            crc32=rng.integers(0, 1 << 32, 1000),
        )
        examples, tokens = int(groups.examples.sum()), int(groups.tokens.sum())
        sums = {"examples": examples, "sequences": k * examples, "tokens": tokens}
        name = f"data/0123456789ab-{number:05d}-0123456789abcdef.parquet"
        shard = replace(base.shards[0], path=name, rows=32_000, row_groups=groups, **sums)
        shards.append(shard)
    names = ("examples", "sequences", "tokens", "supervised_tokens", "bytes")
    totals = {name: sum(getattr(s, name) for s in shards) for name in names}
    counts = {"read": totals["examples"], "packed": totals["examples"], "dropped": {}}
    made = replace(
        base,
        shards=tuple(shards),
        pack_index=None,
        totals=replace(base.totals, packs=32_000 * len(shards), **totals),
        records=replace(base.records, **counts),
    )
    target = Path(folder, "_packstore")
    target.mkdir()
    (target / "manifest-000001.json").write_bytes(made.to_json())


def slow(dataset: str, quick: bool) -> dict[str, Any]:
    """Behind a store of 20 ms a request and 100 MB/s a stream."""
    from slow_store import compare

    return compare(dataset, 100 if quick else 600, 1 if quick else 3)


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...], int]] = {
    "start": (start, (), 5),
    **{f"resume_{share}": (resume, (share,), 5) for share in (0.05, 0.5, 0.95)},
    "epochs": (epochs, (), 1),
    "parts_of_cpu": (parts_of_cpu, (), 1),
    "order": (order, (), 1),
    "manifest_1e7": (manifest, (10**7,), 2),
    "manifest_1e8": (manifest, (10**8,), 2),
    "slow_store": (slow, (), 1),
}
"""Name -> what measures it, its arguments, and processes to run (the smallest figure counts)."""


def main() -> None:
    """Runs all parts, each in processes of its own, and prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="local folder of a dataset")
    parser.add_argument("--quick", action="store_true", help="one run each, no 1e8 packs")
    parser.add_argument("--out", help="also write the figures to this file")
    parser.add_argument("--part", choices=list(PARTS), help="only this one, in this process")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make_manifest(args.dataset, args.make[0], int(args.make[1]))
        return
    if args.part:
        measure, arguments, _ = PARTS[args.part]
        print(json.dumps(measure(args.dataset, args.quick, *arguments)))
        return
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    results: dict[str, Any] = {
        "machine": platform.platform(),
        "python": sys.version.split()[0],
        "load_average": os.getloadavg(),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
    }
    for name, (_, _, runs) in PARTS.items():
        if args.quick and name == "manifest_1e8":
            continue
        command = [sys.executable, __file__, args.dataset, "--part", name]
        command += ["--quick"] if args.quick else []
        found: list[dict[str, Any]] = []
        for _ in range(1 if args.quick else runs):
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(run.stdout.splitlines()[-1]))
        best = found[0] if len(found) == 1 else {k: min(f[k] for f in found) for k in found[0]}
        results[name] = best
        print(name, json.dumps(best), file=sys.stderr, flush=True)
    text = json.dumps(results, indent=1) + "\n"
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
