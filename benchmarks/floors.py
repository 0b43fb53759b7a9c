"""Measures each stage of packing, beside the least that its work could cost.

    python benchmarks/floors.py --shared FOLDER [--pairs 50000]

CPU seconds for a million tokens, of all threads and children, on real pairs of about 4 kB. `whole`
is `packstore.pack` as users call it; the stages run one after the other, each over all input.
The floor of a stage is the same work by one call of the library that does it, on the same data: a
copy of the bytes and their sha256 (read), orjson alone (parse), the tokenizer engine alone on each
prompt with its chosen text, and on each rejected text (tokenize), a copy of the tokens (spill,
fill), zstd alone on both columns (write), sha256 of the files (hash). Each is the least of
`--turns`, in turns; compare ratios, as the machine may be busy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from peers_etl.texts import write_pairs
from rich.console import Console
from rich.table import Table

import packstore
from packstore.build.engines import ENGINES
from packstore.build.sources import RecordExampleReader
from packstore.build.spill import Spill, filled
from packstore.config import PackConfig
from packstore.io.inputs.files import InputReader
from packstore.io.shards.shard import PackShape
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
from packstore.pack.layout import sizes
from packstore.pack.plan import plan
from packstore.tokenizer import RecordTokenizer

RESULTS = Path(__file__).parent / "results" / "floors.json"
PACK_SIZE = 8192
LEVEL = 3
TEXTS_AT_ONCE = 1024

Spent = dict[str, float]


def cpu_seconds() -> float:
    """CPU seconds of this process and its finished children."""
    times = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(t.ru_utime + t.ru_stime for t in times)


class Clock:
    """CPU seconds by name; the least of several turns."""

    def __init__(self) -> None:
        self.spent: Spent = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs `work`, and returns its result."""
        begun = cpu_seconds()
        found = work()
        spent = cpu_seconds() - begun
        self.spent[name] = min(self.spent.get(name, spent), spent)
        return found


class InThreads:
    """Work that the local engine does in threads."""

    suits_threads = True

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __call__(self, item: Any) -> Any:
        return self._work(item)


def stages(source: str, out: str, tokenizer: str, clock: Clock) -> dict[str, Any]:
    """Runs the stages; returns what the floors work on."""
    config = PackConfig(pack_size=PACK_SIZE)
    reader = clock("load tokenizer", lambda: RecordExampleReader(source, tokenizer, config, {}))
    blocks = clock("read", lambda: list(InputReader(source, None, config)))
    rows = clock("parse", lambda: [block.parse() for block in blocks])
    work = InThreads(RecordTokenizer(reader.tokenizer, config, reader.kind))
    found = clock("tokenize", lambda: list(ENGINES.load("local")(work, rows, None)))
    with Spill(None) as spill:

        def keep() -> None:
            for examples, _ in found:
                spill.append(examples, sizes(examples, config.layout))

        clock("spill", keep)
        packing = clock("plan", lambda: plan(spill.lengths(), config=config))
        packs = clock("fill", lambda: list(filled(spill, packing, config)))
        shape = PackShape(
            kind=reader.kind, layout=config.layout, pack_size=PACK_SIZE, carry={},
            vocab_size=reader.vocab_size,
        )  # fmt: skip

        def write() -> None:
            with ShardWriter(Location(out, {}), shape, config, "0" * 12) as writer:
                for one in packs:
                    writer.write(one)

        clock("write", write)
    ids = np.concatenate([one.input_ids for one in packs])
    labels = np.where(np.concatenate([one.supervised for one in packs]), ids, -100)
    return {"engine": reader.tokenizer.engine, "ids": ids, "labels": labels.astype(np.int32)}


def floors(source: str, out: str, made: dict[str, Any], clock: Clock) -> None:
    """Runs the least work of each stage."""
    data = Path(source).read_bytes()
    clock("read", lambda: (bytearray(data), hashlib.sha256(data).digest()))
    records = clock("parse", lambda: [orjson.loads(line) for line in data.splitlines()])
    texts = [
        text
        for record in records
        for text in (record["prompt"], record["prompt"] + record["chosen"], record["rejected"])
    ]
    texts = [text for i, text in enumerate(texts) if i % 3]  # prompt and chosen as one text
    engine = made["engine"]

    def encode_some(some: list[str]) -> Any:
        return engine.encode_batch(some, control=False)

    def encode() -> None:
        batches = [texts[i : i + TEXTS_AT_ONCE] for i in range(0, len(texts), TEXTS_AT_ONCE)]
        for _ in ENGINES.load("local")(InThreads(encode_some), batches, None):
            pass

    clock("tokenize", encode)
    ids, labels = made["ids"], made["labels"]
    clock("spill", lambda: (ids.copy(), labels.copy()))
    order = np.argsort(np.arange(len(ids) // PACK_SIZE) % 97)
    rows = ids[: len(order) * PACK_SIZE].reshape(-1, PACK_SIZE)
    clock("fill", lambda: (rows[order], rows[order]))
    codec = pa.Codec("zstd", compression_level=LEVEL)

    def compress() -> None:
        for column in (ids, labels):
            for i in range(0, len(column), 1 << 18):
                codec.compress(pa.py_buffer(np.ascontiguousarray(column[i : i + (1 << 18)])))

    clock("write", compress)
    files = [path.read_bytes() for path in Path(out).rglob("*.parquet")]
    clock("hash", lambda: [hashlib.sha256(file).digest() for file in files])


def main() -> None:
    """Runs both in turns, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=50_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    ours, least, whole = Clock(), Clock(), Clock()
    tokenizer = str(args.shared / "tokenizers" / "qwen3")
    with tempfile.TemporaryDirectory(prefix="packstore-bench-") as scratch:
        source = str(Path(scratch) / "long.jsonl")
        write_pairs(args.shared / "pairs", Path(source), args.pairs, "long")
        tokens = 0
        for turn in range(args.turns):
            place = str(Path(scratch) / f"whole-{turn}")
            job = whole(
                "whole",
                lambda place=place: packstore.pack(source, place, tokenizer, pack_size=PACK_SIZE),
            )
            tokens = job.manifest.totals.tokens
            out = str(Path(scratch) / f"stages-{turn}")
            made = stages(source, out, tokenizer, ours)
            floors(source, out, made, least)
    least.spent["whole"] = sum(least.spent.values())
    own = ours.spent | whole.spent
    table = Table("stage", "CPU s / million tokens", "floor", "times")
    rows = []
    for name in dict.fromkeys([*ours.spent, "hash", "whole"]):
        pair = own.get(name), least.spent.get(name)
        rows.append({"stage": name, "cpu_s": pair[0], "floor_s": pair[1]})
        texts = ["" if value is None else f"{value / tokens * 1e6:.4f}" for value in pair]
        both = None not in pair and pair[1]
        table.add_row(name, *texts, f"{pair[0] / pair[1]:.1f}" if both else "")
    Console(width=100).print(table)
    about = {
        "machine": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg(),
        "python": platform.python_version(), "pairs": args.pairs, "tokens": tokens,
        "turns": args.turns, "goal": "whole at most 1.5 times the floors",
    }  # fmt: skip
    args.out.write_text(
        json.dumps({"environment": about, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
