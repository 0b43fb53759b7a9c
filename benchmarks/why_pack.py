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
    packs              whole packs, empty space included; a prompt is stored once (shared_prefix)
    concat_packs       the same in layout concat

All ways have the same pairs, those that fit a pack in both layouts. Beside them the pairs and the
tokens that packs keep in layout shared_prefix, over those in layout concat, where longer ones are
dropped.

Random orders are drawn ten times, and the mean is given. Beside them the price of the ways without
packs: how much the batches of length grouping differ from random ones (variance of their mean
length, over that of random batches), and how uneven the steps of padding-free batches of 16 pairs
are (tokens of the largest, over the mean). Then the weight that each pair has if the loss is a mean
per pack and then a mean over packs (1 is fair). Without --data, on the project's own sample.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HERE, parser, provenance, save, show
from transformers.trainer_pt_utils import get_length_grouped_indices

import packstore
from packstore.format.arrays import Examples, Int32, Int64
from packstore.format.seeds import permutation
from packstore.pack.fill import unpack
from packstore.pack.layout import sizes

SAMPLE = HERE.parent / "examples" / "sample" / "pairs.jsonl"
ORDERS = 10
"""Random orders that are drawn; figures are their mean."""
BATCH = 16
GROUP_BATCHES = 50
"""Batches that length grouping sorts together: the most that transformers takes. On
sets this small it would take fewer, which groups less well.
"""
STRATEGIES = ("first_fit_shuffle", "first_fit_decreasing", "pool")


def load(path: str, tokenizer: str, template: str | None, pack_size: int) -> Examples:
    """All examples of a file that fit a pack, tokenized, in input order."""
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
    """Tokens of some batches of pairs, each padded to its longest sequence; lengths
    `[E, 2]`.
    """
    return sum(lengths[own].size * int(lengths[own].max()) for own in cut)


def grouped(lengths: Int32, seed: int) -> list[Int64]:
    """Batches as transformers' sampler would give the pairs; lengths `[E, 2]`."""
    longest = lengths.max(axis=1).tolist()
    draw = torch.Generator().manual_seed(seed)
    order = get_length_grouped_indices(longest, BATCH, GROUP_BATCHES, generator=draw)
    return batches(np.array(order, np.int64), BATCH)


def processed_tokens(lengths: Int32) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens of an epoch by each way without packs, and the price of two of them."""
    tokens = lengths.sum(axis=1)
    found, means = defaultdict(list), defaultdict(list)
    for seed in range(ORDERS):
        shuffled = permutation(len(lengths), seed)
        cuts = {
            f"padded_random_{size}": batches(shuffled, size) for size in (BATCH, 4, 1)
        }
        cuts[f"length_grouped_{BATCH}"] = grouped(lengths, seed)
        for way, cut in cuts.items():
            found[way].append(padded_tokens(lengths, cut))
            means[way].append([tokens[own].mean() for own in cut if len(own) == BATCH])
    ways = (f"padded_random_{BATCH}", f"length_grouped_{BATCH}")
    random, by_length = (np.array(means[way]) for way in ways)  # [ORDERS, full batches]
    variances = by_length.var(axis=1).mean(), random.var(axis=1).mean()
    price = {
        "length_grouped_variance_over_random": float(variances[0] / variances[1]),
        "padding_free_largest_step_over_mean": float(
            (random.max(1) / random.mean(1)).mean()
        ),
    }
    mean = {way: float(np.mean(values)) for way, values in found.items()}
    return {**mean, "padding_free": int(tokens.sum())}, price


def weights(plan: packstore.Plan) -> np.ndarray:
    """Weight of each pair under a mean per pack: pairs / (packs * pairs of its
    pack).
    """
    counts = np.diff(plan.offsets)
    return np.repeat(plan.num_examples / (plan.num_packs * counts), counts)


def measure(
    path: str, tokenizer: str, template: str | None, pack_size: int
) -> dict[str, Any]:
    """The figures of one file."""
    kept = load(path, tokenizer, template, pack_size)
    fits_whole = sizes(kept, "concat") <= pack_size
    examples = kept.take(np.flatnonzero(fits_whole))
    concat, shared = sizes(examples, "concat"), sizes(examples, "shared_prefix")
    plans = {
        s: packstore.plan(concat, pack_size=pack_size, strategy=s) for s in STRATEGIES
    }
    tokens, price = processed_tokens(examples.lengths.reshape(-1, 2))
    concat_packs = plans["pool"].num_packs * pack_size
    packs = packstore.plan(shared, pack_size=pack_size).num_packs * pack_size
    return {
        "file": Path(path).name,
        "pairs": examples.num_examples,
        "tokens": {**tokens, "packs": packs, "concat_packs": concat_packs},
        "over_packs": {way: n / packs for way, n in tokens.items()},
        "over_concat_packs": {way: n / concat_packs for way, n in tokens.items()},
        "kept_over_concat": {
            "pairs": kept.num_examples / examples.num_examples,
            "tokens": kept.num_tokens / examples.num_tokens,
        },
        "price": price,
        "fill": {s: p.fill_rate for s, p in plans.items()},
        "pack_mean_weight": {
            s: [float(x) for x in np.percentile(weights(p), (0, 1, 99, 100))]
            for s, p in plans.items()
        },
    }


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--data", nargs="+", default=[str(SAMPLE)])
    command.add_argument("--tokenizer", required=True)
    command.add_argument("--chat-template", default=None)
    command.add_argument("--pack-size", type=int, default=4096)
    command.add_argument("--json", help="also write the figures here")
    args = command.parse_args()
    how = (args.tokenizer, args.chat_template, args.pack_size)
    results = [measure(path, *how) for path in args.data]
    files = [f"{r['file']}\n{r['pairs']} pairs" for r in results]
    for key, title in (
        ("over_packs", f"tokens over those of packs of {args.pack_size}"),
        ("over_concat_packs", "the same, over packs of layout concat"),
        ("kept_over_concat", "what packs keep, over what they keep in layout concat"),
        ("price", "price of the ways without packs"),
        ("fill", "share of packs that is filled"),
        (
            "pack_mean_weight",
            "weight of a pair under a mean per pack: least, 1 %, 99 %, most",
        ),
    ):
        show(
            ("", *files),
            [(way, *(r[key][way] for r in results)) for way in results[0][key]],
            title,
        )
    about: dict[str, Any] = {"tokenizer": Path(args.tokenizer).name, "orders": ORDERS}
    about |= {"chat_template": args.chat_template, "pack_size": args.pack_size}
    about |= {"group_batches": GROUP_BATCHES, "results": results}
    save(args.json, provenance("transformers") | about)


if __name__ == "__main__":
    main()
