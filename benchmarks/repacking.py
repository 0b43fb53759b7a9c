"""Measures repacking and mixing while reading, beside reading stored packs.

    python benchmarks/repacking.py            # 40,000 pairs; --quick: 4,000

CPU microseconds per pack of 4096 tokens, all threads of the process, least of several runs,
interleaved: packs as stored, repacked from single pairs, and a mix of two halves. Then what
repacking costs besides: planning an epoch, packs against those of an offline packing, and how much
eight ranks read together, relative to the dataset.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import packstore
from packstore.config import PackConfig
from packstore.format.arrays import Examples, Tally, range_indices, to_offsets
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.manifest.manifest import build_manifest, commit_manifest
from packstore.io.shards.shard import PackShape
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
from packstore.online_packing import ExampleSizes, plan_epoch
from packstore.online_packing import read as reading
from packstore.pack.fill import fill
from packstore.torch.data.mix import MixedPacks, Source
from packstore.torch.data.online_packs import RepackedPacks
from packstore.torch.schedule.stream import PackStream, StoredPacks
from packstore.version import VERSION

RESULTS = Path(__file__).parent / "results" / "repacking.json"
PACK_SIZE, BATCH, RUNS = 4096, 8, 5


def write_pairs(folder: str, n: int, seed: int) -> Dataset:
    """Pairs with lengths like those of preference data, that share their prompts; one in a pack."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.lognormal(5, 0.6, n).astype(np.int64) + 1, 2)
    response = rng.lognormal(5, 0.7, 2 * n).astype(np.int64) + 1
    lengths = np.minimum(prompt + response, PACK_SIZE // 2)
    offsets = to_offsets(lengths)
    place = range_indices(np.zeros_like(lengths), lengths)
    examples = Examples(
        input_ids=(rng.zipf(1.3, offsets[-1]) % 60_000).astype(np.int32),
        supervised=place >= np.repeat(np.minimum(prompt, lengths - 1), lengths),
        sequence_offsets=offsets,
        example_offsets=np.arange(n + 1) * 2,
        reward=np.tile(np.float32([1, 0]), n),
        example_ids=np.arange(n),
    )
    for i in range(n):
        first, second = offsets[2 * i : 2 * i + 2]
        shared = min(prompt[2 * i], lengths[2 * i] - 1, lengths[2 * i + 1] - 1)
        examples.input_ids[second : second + shared] = examples.input_ids[first : first + shared]
    shape = PackShape(
        kind="preference", layout="concat", pack_size=PACK_SIZE, carry={}, vocab_size=60_000
    )
    config = PackConfig(pack_size=PACK_SIZE, strategy="none")
    with ShardWriter(Location(folder), shape, config, "0123456789ab") as writer:
        for start in range(0, n, 100):
            part = examples.take(np.arange(start, min(start + 100, n)))
            writer.write(fill(part, np.arange(part.num_examples + 1), "concat"))
        shards = writer.close()
        tally = Tally(read=n)
        provenance = {"sources": [], "tokenizer": {}, "settings": {}, "package_version": VERSION}
        manifest = build_manifest(shape, config, shards, writer.counter, tally, {}, provenance)
        commit_manifest(Location(folder), manifest)
    return open_dataset(folder)


def cpu_us(stream: PackStream) -> float:
    """Microseconds of the process per pack, over an epoch."""
    indices = np.arange(len(stream))
    start = time.process_time()
    for _ in stream.read(np.split(indices, range(BATCH, len(indices), BATCH))):
        pass
    return 1e6 * (time.process_time() - start) / len(indices)


def amplification(stream: RepackedPacks, ranks: int) -> float:
    """Row groups that all ranks read, relative to those there are."""
    plan, read = stream._plan, 0
    for rank in range(ranks):
        positions = np.arange(rank, len(plan), ranks)
        read += sum(1 for _ in reading._Schedule(positions[:, None], plan).groups())
    return read / len(stream.dataset.row_groups)


def planning(n: int) -> dict[str, float]:
    """Seconds and packs of an epoch of `n` examples, against one plan for all of them."""
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(np.log(600), 0.8, n), 1, PACK_SIZE).astype(np.int32)
    offsets = np.append(np.arange(0, n, 110), n)
    sizes = ExampleSizes(tokens, tokens.astype(np.int64) ** 2, offsets, 0)
    config = PackConfig(pack_size=PACK_SIZE)
    plan_epoch(sizes, config, seed=0, epoch=0, shuffle=True)
    start = time.process_time()
    epoch = plan_epoch(sizes, config, seed=0, epoch=1, shuffle=True)
    seconds = time.process_time() - start
    offline = packstore.plan(tokens, config=config)
    return {"n": n, "seconds": seconds, "packs_over_offline": len(epoch) / offline.num_packs - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    n = 4_000 if quick else 40_000
    with tempfile.TemporaryDirectory() as folder:
        singles = write_pairs(f"{folder}/singles", n, 0)
        whole = packstore.pack(singles, f"{folder}/whole", pack_size=PACK_SIZE)
        halves = [
            packstore.pack(
                write_pairs(f"{folder}/{i}", n // 2, i), f"{folder}/half{i}", pack_size=PACK_SIZE
            )
            for i in (1, 2)
        ]
        repacked = RepackedPacks(singles, PackConfig(pack_size=PACK_SIZE))
        streams: dict[str, PackStream] = {
            "stored": StoredPacks(whole),
            "repacked": repacked,
            "repacked, shared_prefix": RepackedPacks(
                singles, PackConfig(pack_size=PACK_SIZE, layout="shared_prefix")
            ),
            "mixed": MixedPacks([Source(half) for half in halves]),
        }
        runs = [{name: cpu_us(stream) for name, stream in streams.items()} for _ in range(RUNS)]
        result = {
            "cpu_us_per_pack": {name: min(run[name] for run in runs) for name in streams},
            "packs": {name: len(stream) for name, stream in streams.items()},
            "packs_over_offline": len(repacked) / len(whole) - 1,
            "read_by_8_ranks": amplification(repacked, 8),
            "planning": planning(100_000 if quick else 10_000_000),
            "machine": f"{platform.processor()} {platform.platform()}".strip(),
            "load_average": os.getloadavg(),
        }
    table = Table("packs", "CPU us per pack", "of stored")
    for name, us in result["cpu_us_per_pack"].items():
        table.add_row(name, f"{us:.0f}", f"{us / result['cpu_us_per_pack']['stored']:.2f}")
    Console().print(table)
    Console().print({name: value for name, value in result.items() if name != "cpu_us_per_pack"})
    if not quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
