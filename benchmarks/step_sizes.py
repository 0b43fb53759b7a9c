"""Counts the pairs of optimizer steps on packs of real data, beside the request.

    python benchmarks/step_sizes.py --data ../shared/data/pairs/hh_harmless.jsonl.gz \\
        --tokenizer ../shared/data/tokenizers/qwen3

A pack is never split. Compared are the steps of the loader, which end at the pack that
is nearest to the request and make up for the error in the steps after it, and steps
that end before they exceed the request. Where the steps are too large, the data is
packed again with the pack size that the loader advises.
"""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, parser, provenance, save, show

import packstore
from packstore.config.reading import large_steps_warning
from packstore.torch import PackedDataset
from packstore.torch.data.steps import longest_example

REQUESTS = 8, 16, 32, 64
PACK_SIZES = 1024, 2048, 4096, 8192
RANKS = 1, 2


def steps_below_request(examples: np.ndarray, requested: int, ranks: int) -> int:
    """Count the steps that take packs until the next one would exceed the request."""
    steps = start = 0
    while start < len(examples):
        stop, total = start, 0
        while stop < len(examples):
            total += int(examples[stop])
            if total > requested and stop >= start + ranks:
                break
            stop += 1
        steps += 1
        start = stop
    return steps


def measure(data: PackedDataset, requested: int, ranks: int) -> dict[str, Any]:
    """Return the sizes of the steps of one epoch."""
    manifest = data.stream.datasets[0].manifest
    examples = data.stream.sizes(np.arange(data.num_packs)).examples
    plan = data.plan(world_size=ranks, examples_per_step=requested)
    fewest, mean, most = plan.examples_per_step
    pairs = manifest.totals.examples
    longest = longest_example(data.stream.datasets[0])
    warning = large_steps_warning(
        requested, mean, most, ranks, manifest.pack_size, longest
    )
    advice = re.search(r"pack_size=(\d+)", warning)
    return {
        "pack_size": manifest.pack_size,
        "pairs": pairs,
        "pairs_per_pack": pairs / data.num_packs,
        "ranks": ranks,
        "requested": requested,
        "unpacked_steps": math.ceil(pairs / requested),
        "steps": plan.steps,
        "mean": mean,
        "fewest": fewest,
        "most": most,
        "mean_below_request": pairs / steps_below_request(examples, requested, ranks),
        "warns": bool(warning),
        "advised_pack_size": int(advice[1]) if advice else None,
    }


def main() -> None:
    """Pack, plan and print."""
    command = parser(__doc__)
    command.add_argument("--data", required=True, help="file of pairs")
    command.add_argument(
        "--tokenizer", required=True, help="folder or file of the tokenizer"
    )
    command.add_argument(
        "--out", default=RESULTS / "step_sizes.json", help="-: nowhere"
    )
    args = command.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:

        def packed(size: int) -> PackedDataset:
            url = Path(folder, str(size))
            if not url.exists():
                packstore.pack(args.data, url, tokenizer=args.tokenizer, pack_size=size)
            return PackedDataset(url)

        for size in PACK_SIZES:
            for ranks in RANKS:
                for requested in REQUESTS:
                    row = measure(packed(size), requested, ranks)
                    advised = row["advised_pack_size"]
                    row["advised_mean"] = None
                    if advised:
                        again = measure(packed(advised), requested, ranks)
                        assert again["pairs"] == row["pairs"]
                        row["advised_mean"] = again["mean"]
                    rows.append(row)
    show(rows[0], [row.values() for row in rows])
    result = {"environment": provenance("numpy", "torch"), "data": Path(args.data).name}
    save(args.out, {**result, "rows": rows})


if __name__ == "__main__":
    main()
