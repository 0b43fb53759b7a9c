"""Runs every strategy and the packers of others on the same lengths.

    pip install lightbinpack binpacking trl datasets
    python benchmarks/packing.py                     # about ten minutes
    python benchmarks/packing.py --n 1000 --out -    # a look

lightbinpack is compiled by pip, which takes two minutes. A peer that is not installed is reported
and left out. Figures: CPU nanoseconds per example, the least of three runs by turns in one process,
compiled code warm; fill; packs above the lower bound, tokens over pack size. Peers get a Python
list, ready made, as their interfaces ask; ours get a numpy array.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers_packing import MOST_EXAMPLES, MOST_TOKENS, PEERS, Trl, peers
from peers_packing.lengths import SETS, draw
from common import provenance
from rich.console import Console
from rich.table import Table

import packstore
from packstore.pack.algorithms import STRATEGIES

RESULTS = Path(__file__).parent / "results" / "packing.json"
ROUNDS = 3
COLUMNS = ("set", "n", "pack", "packer", "ns/example", "fill", "above bound")
QUADRATIC = {"NeMo ffd, re-done": 10_000, "NeMo ffshuffle, re-done": 10_000}
"""Most examples for those whose time grows with the square."""

Row = dict[str, Any]


def contenders(
    lengths: np.ndarray, capacity: int, others: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], int]]]:
    """Name, call and number of packs of each that runs on so many examples."""
    for name in STRATEGIES:
        yield (
            name,
            partial(packstore.plan, lengths, pack_size=capacity, strategy=name),
            lambda plan: plan.num_packs,
        )
    listed = lengths.tolist()
    most = {**MOST_EXAMPLES, **QUADRATIC}
    for name, packer in others.items():
        if len(lengths) > most.get(name, len(lengths)):
            continue
        if isinstance(packer, Trl):
            if int(lengths.sum()) > MOST_TOKENS:
                continue
            yield name, partial(packer, packer.prepare(listed), capacity), len
        else:
            yield name, partial(packer, listed, capacity), len


def measure(name: str, n: int, capacity: int, others: dict[str, Any]) -> Iterator[Row]:
    """The rows of one set of lengths."""
    lengths = draw(name, n, capacity, seed=0)
    tokens = int(lengths.sum())
    ready = list(contenders(lengths, capacity, others))
    least: dict[str, float] = {}
    packs: dict[str, int] = {}
    for _ in range(ROUNDS):
        for packer, call, count in ready:
            begun = time.process_time()
            result = call()
            seconds = time.process_time() - begun
            packs[packer] = count(result)
            least[packer] = min(seconds, least.get(packer, seconds))
    for packer, seconds in least.items():
        yield {
            "set": name,
            "n": n,
            "capacity": capacity,
            "packer": packer,
            "ns_per_example": round(1e9 * seconds / n, 2),
            "packs": packs[packer],
            "fill": round(tokens / (packs[packer] * capacity), 6),
            "above_bound": packs[packer] - -(-tokens // capacity),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--capacity", type=int, nargs="+", default=[4096])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--out", default=str(RESULTS), help="-: nowhere")
    args = parser.parse_args()
    console = Console(width=110)
    others = peers(console)
    list(measure("dpo", 1000, 4096, {}))  # the loops are compiled from here on
    rows: list[Row] = []
    for capacity in args.capacity:
        for n in args.n:
            for name in args.sets:
                table = Table(*COLUMNS)
                for row in measure(name, n, capacity, others):
                    rows.append(row)
                    cells = (name, n, capacity, row["packer"], row["ns_per_example"])
                    table.add_row(*map(str, (*cells, f"{row['fill']:.4f}", row["above_bound"])))
                console.print(table)
    if args.out != "-":
        result = {"environment": provenance("numba", "numpy", *PEERS), "rows": rows}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
