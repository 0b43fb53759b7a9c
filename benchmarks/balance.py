"""Simulates how long ranks wait for the slowest one, by how packs are planned and dealt
to them.

    python benchmarks/balance.py                     # a minute

A step ends when its slowest rank does. The cost of a pack is that of a dense model of
8B: its tokens, and the squares of its sequences for attention. Figures: the time of all
steps over that of ranks that are never idle. Under DDP ranks wait once a step, under
FSDP2 for each batch, as they gather weights together. Lengths are random; layout
`concat`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from common import RESULTS, parser, provenance, save, show
from numba import njit

import packstore
from packstore.torch.data.steps import spread

SETS = {
    "hh, 8k": (94, 32, 8192),
    "uf, 8k": (121, 288, 8192),
    "long prompts, 32k": (4096, 256, 32768),
    "long prompts, 128k": (4096, 256, 131072),
}
"""Medians of prompt and response (log-normal), and the pack size."""

SPREADS = 1.0, 0.7
"""Standard deviations of the logarithms, of prompts and responses."""

SQUARE = 32 * 4096 / 8.03e9 * 700 / 300
"""Cost of causal attention over the square of a length, in tokens: layers x width over
weights, and the rates of matrix products and of attention on an H100 in TFLOP/s.
"""

SLACKS = 1.02, 1.1, 1.25
"""A pack planned by cost costs at most so many times the mean, unless one example does.
"""

WINDOW = 8192
RANKS = (8, 64, 512)
WAYS = ((1, "in order"), (4, "in order"), (4, "balanced"))
"""Packs of a rank, and how they are dealt."""

STEPS = 20


def draw(name: str, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and squares of pairs that fill so many packs."""
    prompt, response, size = SETS[name]
    rng = np.random.default_rng(0)
    mean = 2 * (
        prompt * np.exp(SPREADS[0] ** 2 / 2) + response * np.exp(SPREADS[1] ** 2 / 2)
    )
    n = int(packs * size / mean)
    prompts = rng.lognormal(np.log(prompt), SPREADS[0], n)
    sides = prompts[:, None] + rng.lognormal(np.log(response), SPREADS[1], (n, 2))
    sides = np.ceil(sides[sides.sum(1) <= size - 2])
    return sides.sum(1).astype(np.int32), (sides**2).sum(1)


@njit(cache=False)  # type: ignore[untyped-decorator]
def plan_by_cost(tokens: Any, costs: Any, size: int, most: float, window: int) -> Any:
    """The pack of each example: the oldest that fit both capacities, of a window in
    order.
    """
    n = len(tokens)
    pack_of = np.full(n, -1)
    first, pack = 0, 0
    while first < n:
        if pack_of[first] >= 0:
            first += 1
            continue
        room, left, seen, i = size, max(most, costs[first]), 0, first
        while i < n and seen < window and room > 0:
            if pack_of[i] < 0:
                seen += 1
                if tokens[i] <= room and costs[i] <= left:
                    pack_of[i] = pack
                    room -= tokens[i]
                    left -= costs[i]
            i += 1
        pack += 1
    return pack_of


def idle(
    costs: np.ndarray, squares: np.ndarray, ranks: int, batches: int, way: str
) -> Any:
    """Mean over the steps of the slowest rank's cost, with one wait a step and one a
    batch.
    """
    steps = len(costs) // (ranks * batches)
    by_step = by_batch = 0.0
    for n in range(steps):
        step = slice(n * ranks * batches, (n + 1) * ranks * batches)
        if way == "balanced":
            dealt = np.stack([costs[step][i] for i in spread(squares[step], ranks)], 1)
        else:
            dealt = costs[step].reshape(batches, ranks)
        by_step += dealt.sum(0).max()
        by_batch += dealt.max(1).sum()
    return by_step / steps / batches, by_batch / steps / batches


def measure(name: str, ranks: list[int]) -> list[dict[str, Any]]:
    """The rows of one set of lengths."""
    size, rows = SETS[name][2], []
    tokens, squares = draw(name, STEPS * max(ranks) * 4)
    costs = tokens + SQUARE * squares
    plan = packstore.plan(tokens, pack_size=size, seed=0)
    each = np.repeat(np.arange(plan.num_packs), np.diff(plan.offsets))
    ways = {"tokens": np.empty(len(tokens), np.int64)}
    ways["tokens"][plan.order] = each
    mean = costs.sum() / plan.num_packs
    for slack in SLACKS:
        pack_of = plan_by_cost(tokens, costs, size, slack * mean, WINDOW)
        shuffled = np.random.default_rng(1).permutation(pack_of.max() + 1)
        ways[f"cost, {slack}"] = shuffled[pack_of]
    for planned, pack_of in ways.items():
        of_packs = (
            np.bincount(pack_of, costs),
            np.bincount(pack_of, squares).astype(np.int64),
        )
        packs = len(of_packs[0])
        ideal = costs.sum() / packs
        for number, (batches, way) in itertools.product(ranks, WAYS):
            ddp, fsdp = (x / ideal for x in idle(*of_packs, number, batches, way))
            row = {"set": name, "planned by": planned, "ranks": number}
            row |= {"packs of a rank": batches, "dealt": way}
            row |= {"ddp": round(ddp, 3), "fsdp2": round(fsdp, 3)}
            rows.append(row | {"packs": packs, "costliest": of_packs[0].max() / mean})
    return rows


def main() -> None:
    """Simulates and prints."""
    command = parser(__doc__)
    command.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    command.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    command.add_argument("--out", default=RESULTS / "balance.json", help="-: nowhere")
    args = command.parse_args()
    rows = [row for name in args.sets for row in measure(name, args.ranks)]
    show(rows[0], [row.values() for row in rows])
    save(args.out, {"environment": provenance("numpy", "numba", "torch"), "rows": rows})


if __name__ == "__main__":
    main()
