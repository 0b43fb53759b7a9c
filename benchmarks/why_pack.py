"""Compares packs with the usual ways to batch, and weighs pairs under a mean per pack.

    python benchmarks/why_pack.py --data ../shared/data/pairs/hh_harmless.jsonl.gz \\
        --tokenizer ../shared/data/tokenizers/qwen3 --chat-template chatml

For each file, tokens that a model processes in one epoch:

    padded_random_16   batches of 16 pairs in random order, both sides padded to the longest of all
    padded_random_4    the same with 4 pairs
    padded_random_1    the same with 1 pair: the shorter side is padded to the longer
    length_grouped_16  batches of 16 pairs from transformers' `group_by_length`: a random order is
                       cut into groups of 50 batches, and each group is sorted by the longer side
    padding_free       no padding at all: the tokens themselves
    packs              whole packs of layout concat, empty space included
    shared_packs       the same in layout shared_prefix

Random orders are drawn ten times, and the mean is given. Beside them the price of the ways without
packs: how much the batches of length grouping differ from random ones (variance of their mean
length, over that of random batches), and how uneven the steps of padding-free batches of 16 pairs
are (tokens of the largest, over the mean). Then the weight that each pair has if the loss is a mean
per pack and then a mean over packs (1 is fair). Without --data, on the project's own sample.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from rich.console import Console
from rich.table import Table
from transformers.trainer_pt_utils import get_length_grouped_indices

import packstore
from packstore.format.arrays import Examples, Int32, Int64
from packstore.format.seeds import permutation
from packstore.pack.layout import sizes

ROOT = Path(__file__).parents[1]
ORDERS = 10
"""Random orders that are drawn; figures are their mean."""
BATCH = 16
GROUP_BATCHES = 50
"""Batches that length grouping sorts together: the most that transformers takes. On sets this small
it would take fewer, which groups less well."""
STRATEGIES = ("first_fit_shuffle", "first_fit_decreasing", "pool")


def load(path: str, tokenizer: str, template: str | None, pack_size: int) -> Examples:
    """All examples of a file that fit a pack, tokenized, in input order."""
    from packstore.pack.fill import unpack

    with tempfile.TemporaryDirectory() as folder:
        dataset = packstore.pack(
            path, f"{folder}/out", tokenizer, pack_size=pack_size, strategy="none",
            chat_template=template, max_drop_rate=0.9,
        )  # fmt: skip
        examples = Examples.concat([unpack(packs) for packs in dataset.iter_packs()])
        return examples.take(np.argsort(examples.example_ids))


def batches(order: Int64, size: int) -> list[Int64]:
    """The order cut into batches; the last may be smaller."""
    return [order[i : i + size] for i in range(0, len(order), size)]


def padded_tokens(lengths: Int32, cut: list[Int64]) -> int:
    """Tokens of some batches of pairs, each padded to its longest sequence; lengths `[E, 2]`."""
    return sum(lengths[own].size * int(lengths[own].max()) for own in cut)


def grouped(lengths: Int32, seed: int) -> Int64:
    """An order in which transformers' sampler would give the pairs; lengths `[E, 2]`."""
    longest = lengths.max(axis=1).tolist()
    draw = torch.Generator().manual_seed(seed)
    order = get_length_grouped_indices(longest, BATCH, GROUP_BATCHES, generator=draw)
    return np.array(order, np.int64)


def processed_tokens(lengths: Int32) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens of an epoch by each way without packs, and the price of two of them."""
    tokens = lengths.sum(axis=1)
    found: dict[str, list[float]] = {}
    spread: dict[str, list[float]] = {"random": [], "grouped": []}
    largest = []
    for seed in range(ORDERS):
        shuffled = permutation(len(lengths), seed)
        for size in (BATCH, 4, 1):
            own = padded_tokens(lengths, batches(shuffled, size))
            found.setdefault(f"padded_random_{size}", []).append(own)
        by_length = batches(grouped(lengths, seed), BATCH)
        name = f"length_grouped_{BATCH}"
        found.setdefault(name, []).append(padded_tokens(lengths, by_length))
        steps = batches(shuffled, BATCH)
        for way, cut in (("random", steps), ("grouped", by_length)):
            spread[way].append(np.var([tokens[own].mean() for own in cut if len(own) == BATCH]))
        sums = [tokens[own].sum() for own in steps if len(own) == BATCH]
        largest.append(max(sums) / np.mean(sums))
    mean = {name: float(np.mean(values)) for name, values in found.items()}
    price = {
        "length_grouped_variance_over_random": float(
            np.mean(spread["grouped"]) / np.mean(spread["random"])
        ),
        "padding_free_largest_step_over_mean": float(np.mean(largest)),
    }
    return {**mean, "padding_free": int(tokens.sum())}, price


def weights(plan: packstore.Plan) -> np.ndarray:
    """Weight of each pair under a mean per pack: pairs / (packs * pairs of its pack)."""
    counts = np.diff(plan.offsets)
    return np.repeat(plan.num_examples / (plan.num_packs * counts), counts)


def measure(path: str, tokenizer: str, template: str | None, pack_size: int) -> dict[str, Any]:
    """The figures of one file."""
    examples = load(path, tokenizer, template, pack_size)
    concat, shared = sizes(examples, "concat"), sizes(examples, "shared_prefix")
    plans = {s: packstore.plan(concat, pack_size=pack_size, strategy=s) for s in STRATEGIES}
    tokens, price = processed_tokens(examples.lengths.reshape(-1, 2))
    packs = plans["pool"].num_packs * pack_size
    shared_packs = packstore.plan(shared, pack_size=pack_size).num_packs * pack_size
    return {
        "file": Path(path).name,
        "pairs": examples.num_examples,
        "tokens": {**tokens, "packs": packs, "shared_packs": shared_packs},
        "over_packs": {way: n / packs for way, n in tokens.items()},
        "over_shared_packs": {way: n / shared_packs for way, n in tokens.items()},
        "price": price,
        "fill": {s: p.fill_rate for s, p in plans.items()},
        "pack_mean_weight": {
            s: [float(x) for x in np.percentile(weights(p), (0, 1, 99, 100))]
            for s, p in plans.items()
        },
    }


def show(results: list[dict[str, Any]], pack_size: int) -> None:
    """Prints the figures as tables, a column per file."""
    for title, key in (
        (f"tokens over those of packs of {pack_size}", "over_packs"),
        (f"tokens over those of packs of {pack_size} with shared prefixes", "over_shared_packs"),
        ("price of the ways without packs", "price"),
    ):
        table = Table("", *(f"{r['file']}\n{r['pairs']} pairs" for r in results), title=title)
        for way in results[0][key]:
            table.add_row(way, *(f"{r[key][way]:.2f}" for r in results))
        Console(width=150).print(table)
    table = Table("fill, weight min…max", *(r["file"] for r in results), title="mean per pack")
    for s in STRATEGIES:
        ends = [(r["fill"][s], *r["pack_mean_weight"][s]) for r in results]
        table.add_row(s, *(f"{fill:.2%}  {low:.2f}…{high:.2f}" for fill, low, *_, high in ends))
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
        about = {
            **provenance("transformers"),
            "tokenizer": Path(args.tokenizer).name,
            "chat_template": args.chat_template,
            "pack_size": args.pack_size,
            "orders": ORDERS,
            "group_batches": GROUP_BATCHES,
        }
        Path(args.json).write_text(
            json.dumps({**about, "results": results}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
