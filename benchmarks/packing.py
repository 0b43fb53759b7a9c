"""Runs every strategy and the packers of others on the same lengths.

    pip install trl datasets
    python benchmarks/packing.py                     # about ten minutes
    python benchmarks/packing.py --n 1000 --out -    # a look

A peer that is not installed is reported and left out. Figures: CPU nanoseconds per
example, the least of three runs by turns in one process, compiled code warm; fill;
packs above the lower bound, tokens over pack size. Peers get a Python list, ready made,
as their interfaces ask; ours get a numpy array.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from common import RESULTS, parser, provenance, save, show
from peers_packing import MOST_EXAMPLES, MOST_TOKENS, RE_DONE, trl

import packstore
from packstore.format.arrays import Int32
from packstore.pack.algorithms import STRATEGIES

ROUNDS = 3
AT_ONCE = 1 << 20

Draw = Callable[[np.random.Generator, int, int], np.ndarray]
Row = dict[str, Any]


def _pairs(
    median: float, sigma: float, rng: np.random.Generator, n: int, c: int
) -> np.ndarray:
    return rng.lognormal(np.log(median), sigma, n)


SETS: dict[str, tuple[int, Draw]] = {
    "dpo": (0, partial(_pairs, 600, 0.8)),
    "dpolong": (1, partial(_pairs, 1300, 0.4)),
    "uniform": (3, lambda rng, n, c: rng.integers(1, c + 1, n)),
    "narrow": (5, lambda rng, n, c: rng.uniform(0.26 * c, 0.48 * c, n)),
}
"""Sets of lengths, two like preference pairs and two that are hard: a part of the seed,
and a function of a generator, the number of lengths and the pack size.
"""


def draw(name: str, n: int, capacity: int) -> Int32:
    """int32 `[n]`, each 1..capacity; a part at a time, so that 1e8 need no more than
    their own.
    """
    number, lengths_of = SETS[name]
    rng, lengths = np.random.default_rng([0, number]), np.empty(n, np.int32)
    for start in range(0, n, AT_ONCE):
        part = lengths[start : start + AT_ONCE]
        part[:] = np.clip(np.rint(lengths_of(rng, len(part), capacity)), 1, capacity)
    return lengths


def contenders(
    lengths: Int32, capacity: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of each that runs on so many examples."""
    for name in STRATEGIES:
        yield name, partial(packstore.plan, lengths, pack_size=capacity, strategy=name)
    n, listed = len(lengths), lengths.tolist()
    for name, packer in RE_DONE.items():
        if n <= MOST_EXAMPLES.get(name, n):
            yield name, partial(packer, listed, capacity)
    for name, batch_size in (("TRL bfd, one batch", n), ("TRL bfd", 1000)):
        if n <= MOST_EXAMPLES[name] and int(lengths.sum()) <= MOST_TOKENS:
            try:
                yield name, trl(lengths, capacity, batch_size)
            except ImportError as error:
                print(f"{name} is left out: {error}")


def measure(name: str, n: int, capacity: int) -> Iterator[Row]:
    """The rows of one set of lengths."""
    lengths = draw(name, n, capacity)
    tokens = int(lengths.sum())
    ready = list(contenders(lengths, capacity))
    least: dict[str, float] = {}
    packs: dict[str, int] = {}
    for _ in range(ROUNDS):
        for packer, call in ready:
            begun = time.process_time()
            result = call()
            seconds = time.process_time() - begun
            packs[packer] = result.num_packs if packer in STRATEGIES else len(result)
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
    command = parser(__doc__)
    command.add_argument("--n", type=int, nargs="+", default=[10_000, 1_000_000])
    command.add_argument("--capacity", type=int, nargs="+", default=[4096])
    command.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    command.add_argument("--out", default=RESULTS / "packing.json", help="-: nowhere")
    args = command.parse_args()
    warm = draw("dpo", 1000, 4096)
    for strategy in STRATEGIES:  # the loops are compiled from here on
        packstore.plan(warm, pack_size=4096, strategy=strategy)
    rows: list[Row] = []
    for capacity, n, name in itertools.product(args.capacity, args.n, args.sets):
        found = list(measure(name, n, capacity))
        show(found[0], [row.values() for row in found])
        rows += found
    save(args.out, {"environment": provenance("numba", "numpy", "trl"), "rows": rows})


if __name__ == "__main__":
    main()
