"""What packing saves, and what a mean per pack would do to the weight of a pair.

    python benchmarks/why_pack.py --data ../shared/data/pairs/hh_harmless.jsonl.gz \\
        --tokenizer ../shared/data/tokenizers/qwen3

For each file: tokens that a model processes in padded batches of 16 pairs in random order, in
packs, and in packs with shared prefixes; and the weight that each pair has if the loss is a mean
per pack and then a mean over packs (1 is fair). Without --data, on the project's own sample.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import packstore
from packstore.pack.layout import sizes
from packstore.records import Examples
from packstore.seeds import permutation

ROOT = Path(__file__).parents[1]
BATCH = 16
STRATEGIES = ("first_fit_shuffle", "first_fit_decreasing", "pool")


def load(path: str, tokenizer: str, template: str | None, pack_size: int) -> Examples:
    """All examples of a file that fit a pack, tokenized."""
    from packstore.pack.fill import unpack

    with tempfile.TemporaryDirectory() as folder:
        dataset = packstore.pack(
            path, f"{folder}/out", tokenizer, pack_size=pack_size, strategy="none",
            pack_order="plain", chat_template=template, max_drop_rate=0.9,
        )  # fmt: skip
        return Examples.concat([unpack(packs) for packs in dataset.iter_packs()])


def padded_tokens(examples: Examples) -> int:
    """Tokens of batches of `BATCH` pairs in random order, each padded to its longest sequence."""
    order = permutation(examples.num_examples, 0)
    lengths = examples.lengths.reshape(-1, 2)[order]
    starts = range(0, len(lengths), BATCH)
    return sum(lengths[i : i + BATCH].size * int(lengths[i : i + BATCH].max()) for i in starts)


def weights(plan: packstore.Plan) -> np.ndarray:
    """Weight of each pair under a mean per pack: pairs / (packs * pairs of its pack)."""
    counts = np.diff(plan.offsets)
    return np.repeat(plan.num_examples / (plan.num_packs * counts), counts)


def measure(path: str, tokenizer: str, template: str | None, pack_size: int) -> dict[str, Any]:
    """The figures of one file."""
    examples = load(path, tokenizer, template, pack_size)
    concat, shared = sizes(examples, "concat"), sizes(examples, "shared_prefix")
    padded = padded_tokens(examples)
    plans = {s: packstore.plan(concat, pack_size=pack_size, strategy=s) for s in STRATEGIES}
    shared_plan = packstore.plan(shared, pack_size=pack_size)
    return {
        "file": Path(path).name,
        "pairs": examples.num_examples,
        "padded_tokens": padded,
        "packed_tokens": int(concat.sum()),
        "shared_tokens": int(shared.sum()),
        "padded_over_packed": padded / (plans["pool"].num_packs * pack_size),
        "padded_over_shared": padded / (shared_plan.num_packs * pack_size),
        "fill": {s: p.fill_rate for s, p in plans.items()},
        "pack_mean_weight": {
            s: [float(x) for x in np.percentile(weights(p), (0, 1, 99, 100))]
            for s, p in plans.items()
        },
    }


def show(results: list[dict[str, Any]], pack_size: int) -> None:
    """Prints the figures as a table."""
    table = Table(title=f"pack_size {pack_size}; padded batches of {BATCH} pairs, random order")
    for column in ("file", "pairs", "padded / packed", "padded / shared"):
        table.add_column(column, justify="right")
    for strategy in STRATEGIES:
        table.add_column(f"{strategy}\nfill, weight min…max", justify="right")
    for r in results:
        per_strategy = []
        for s in STRATEGIES:
            low, *_, high = r["pack_mean_weight"][s]
            per_strategy.append(f"{r['fill'][s]:.2%}  {low:.2f}…{high:.2f}")
        ratios = (f"{r['padded_over_packed']:.2f}", f"{r['padded_over_shared']:.2f}")
        table.add_row(r["file"], str(r["pairs"]), *ratios, *per_strategy)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", nargs="+", default=[str(ROOT / "examples/sample/pairs.jsonl")])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--chat-template", default=None)
    parser.add_argument("--pack-size", type=int, default=4096)
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args()
    results = [
        measure(path, args.tokenizer, args.chat_template, args.pack_size) for path in args.data
    ]
    show(results, args.pack_size)
    if args.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        about = {"python": platform.python_version(), "commit": commit, "pack_size": args.pack_size}
        Path(args.json).write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
