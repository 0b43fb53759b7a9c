"""Every strategy and the peers that pip can install, on the same lengths, in one run.

    pip install lightbinpack binpacking trl datasets
    python benchmarks/packing.py                     # n up to 1e6; --n 10000000 for more

CPU nanoseconds per example (the least of several runs, one process, compiled code warm), fill,
packs over the best lower bound, and how like the lengths are that meet in a pack. Peers get a
Python list, ready made, as their interfaces ask; ours get a numpy array. A packer that took more
than a tenth of --limit is left out at larger n; a peer that is not installed is reported as such.
Memory is the peak of what numpy and Python allocate, in a run of its own (strategies only). The
first call is one in a fresh process whose compiled code is cached, imports apart.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from peers_packing import PEERS, QUADRATIC, Packer, peers
from rich.console import Console
from rich.table import Table

from packstore.pack import statistics
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.bounds import lower_bound
from packstore.pack.order import STEP, stratified
from packstore.records import Int32, Int64, ragged_indices, to_offsets

RESULTS = Path(__file__).parent / "results" / "packing.json"
FLOOR = "counting argsort"
Result = tuple[Int64, Int64]


def length_sets(n: int, capacity: int, seed: int) -> dict[str, Int32]:
    """Nine sets of lengths: two like preference pairs, and seven that are hard in some way."""
    rng = np.random.default_rng(seed)
    c = capacity

    def whole(values: np.ndarray) -> Int32:
        return np.clip(np.rint(values), 1, c).astype(np.int32)

    short = rng.random(n) < 0.7
    return {
        "dpo": whole(rng.lognormal(np.log(600), 0.8, n)),
        "dpolong": whole(rng.lognormal(np.log(1300), 0.4, n)),
        "bimodal": whole(
            np.where(short, rng.normal(250, 80, n), rng.normal(0.635 * c, 0.12 * c, n))
        ),
        "uniform": whole(rng.integers(1, c + 1, n)),
        "nearuni": whole(rng.normal(0.3 * c, 0.02 * c, n)),
        "narrow": whole(rng.uniform(0.26 * c, 0.48 * c, n)),
        "manyeq": whole(rng.choice([0.11, 0.23, 0.31, 0.47, 0.64], n) * c),
        "half": whole(rng.integers(c // 2 + 1, c + 1, n)),
        "third": np.full(n, c // 3 + 1, np.int32),
    }


@numba.njit
def counting_argsort(lengths: Int32, capacity: int) -> Int32:
    """The floor: what it costs to sort the examples by length, and nothing else."""
    starts = np.zeros(capacity + 2, np.int64)
    for length in lengths:
        starts[length + 1] += 1
    starts = np.cumsum(starts)
    order = np.empty(len(lengths), np.int32)
    for i in range(len(lengths)):
        order[starts[lengths[i]]] = i
        starts[lengths[i]] += 1
    return order


def fastest(limit: float, work: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """The least CPU seconds of up to seven runs (fewer if they take long), and the result."""
    best, spent = float("inf"), 0.0
    for _ in range(7):
        start = time.process_time()
        result = work(*given)
        took = time.process_time() - start
        best, spent = min(best, took), spent + took
        if spent > limit / 2:
            break
    return best, result


def figures(lengths: Int32, capacity: int, result: Result) -> dict[str, Any]:
    """Tightness and randomness; fails if `result` is not a packing."""
    order, offsets = result
    by_pack = lengths[order]
    packs = len(offsets) - 1
    totals = np.add.reduceat(by_pack, offsets[:-1], dtype=np.int64)
    if totals.max() > capacity or not np.array_equal(np.sort(order), np.arange(len(lengths))):
        raise SystemExit("not a packing")
    logs = np.log(by_pack)
    squares = np.add.reduceat(by_pack.astype(np.int64) ** 2, offsets[:-1])
    sizes = np.diff(offsets)
    delivery = stratified(sizes, squares, 0)
    bound = lower_bound(lengths, capacity)
    return {
        "packs": packs,
        "bound": bound,
        "gap": packs - bound,
        "fill": float(totals.sum() / (packs * capacity)),
        "icc": statistics.intraclass_correlation(logs, offsets),
        "same_decile": statistics.same_decile(by_pack, offsets),
        "design_effect_plain": statistics.design_effect(logs, offsets, STEP),
        "design_effect_stratified": statistics.design_effect(
            logs[ragged_indices(offsets, delivery)], to_offsets(sizes[delivery]), STEP
        ),
    }


def from_lists(packs: list[list[int]]) -> Result:
    order = np.fromiter((i for pack in packs for i in pack), np.int64)
    return order, to_offsets(np.array([len(pack) for pack in packs]))


def run(
    packer: str, other: Packer | None, lengths: Int32, as_list: list[int], case: tuple[int, float]
) -> tuple[float, dict[str, Any]]:
    """CPU seconds and figures of one packer; `case` is the capacity and the limit in seconds."""
    capacity, limit = case
    if packer == FLOOR:
        counting_argsort(lengths[:9], capacity)
        return fastest(limit, counting_argsort, lengths, capacity)[0], {}
    if other is not None:
        seconds, packs = fastest(limit, other, as_list, capacity)
        return seconds, figures(lengths, capacity, from_lists(packs))
    strategy = STRATEGIES.load(packer)
    strategy(lengths[:9].copy(), capacity, 0)  # compiled code warm
    seconds, result = fastest(limit, strategy, lengths, capacity, 0)
    found = figures(lengths, capacity, result)
    del result
    tracemalloc.start()
    strategy(lengths, capacity, 0)
    found["peak_bytes_per_example"] = round(tracemalloc.get_traced_memory()[1] / len(lengths), 1)
    tracemalloc.stop()
    return seconds, found


FIRST_CALL = """
import sys, time
import numba, numpy as np, packstore.pack.plan
lengths = np.random.default_rng(0).integers(1, 4097, 1000).astype(np.int32)
start = time.process_time()
packstore.pack.plan.plan(lengths, pack_size=4096, strategy=sys.argv[1])
print(time.process_time() - start)
"""


def first_calls(runs: int = 3) -> dict[str, float]:
    """CPU seconds of the first plan of a process, the least of some, once its code is cached."""
    found = {}
    for strategy in ("pool", "best_fit_decreasing", "exact_fill"):
        command = [sys.executable, "-c", FIRST_CALL, strategy]
        texts = [subprocess.check_output(command, text=True) for _ in range(runs + 1)]
        found[strategy] = round(min(float(text) for text in texts[1:]), 3)
    return found


def measure(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    others = peers(console)
    rows: list[dict[str, Any]] = []
    slow: set[tuple[str, str, int]] = set()
    for capacity, n in itertools.product(args.capacity, sorted(args.n)):
        for name, lengths in length_sets(n, capacity, args.seed).items():
            if args.sets and name not in args.sets:
                continue
            as_list = lengths.tolist()
            for packer in (FLOOR, *STRATEGIES, *others):
                if (packer, name, capacity) in slow or n > QUADRATIC.get(packer, n):
                    continue
                if args.packers and packer not in args.packers:
                    continue
                case = (capacity, args.limit)
                seconds, row = run(packer, others.get(packer), lengths, as_list, case)
                if seconds > args.limit / 10:  # ten times the examples would take too long
                    slow.add((packer, name, capacity))
                key = {"capacity": capacity, "n": n, "set": name, "packer": packer}
                rows.append({**key, "ns_per_example": 1e9 * seconds / n, **row})
        console.print(f"capacity {capacity}, n = {n:,}: done")
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """A table per capacity and set, for the largest n: a row per packer."""

    def text(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    for capacity, name in dict.fromkeys((r["capacity"], r["set"]) for r in rows):
        group = [r for r in rows if (r["capacity"], r["set"]) == (capacity, name)]
        counts = sorted({r["n"] for r in group})
        table = Table(title=f"{name}, packs of {capacity}: ns per example, then at its largest n")
        for column in ("packer", *(f"n={n:.0e}" for n in counts)):
            table.add_column(column, justify="left" if column == "packer" else "right")
        for column in ("fill %", "gap", "icc", "same decile", "deff plain", "deff stratified"):
            table.add_column(column, justify="right")
        for packer in dict.fromkeys(r["packer"] for r in group):
            mine = {r["n"]: r for r in group if r["packer"] == packer}
            last = mine[max(mine)]
            fill = last.get("fill")
            table.add_row(
                packer,
                *(text(mine[n]["ns_per_example"] if n in mine else None, 1) for n in counts),
                text(fill and 100 * fill, 3),
                text(last.get("gap"), 0),
                text(last.get("icc"), 2),
                text(last.get("same_decile"), 2),
                text(last.get("design_effect_plain"), 1),
                text(last.get("design_effect_stratified"), 2),
            )
        console.print(table)


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a measurement from another."""
    return tuple(row[name] for name in ("capacity", "n", "set", "packer"))


def environment() -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in ("packstore", "numpy", "numba", *PEERS)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole = {"type": lambda text: int(float(text)), "nargs": "+"}
    parser.add_argument("--n", default=[1000, 10_000, 100_000, 1_000_000], **whole)
    parser.add_argument("--capacity", default=[4096, 8192, 32_768], **whole)
    parser.add_argument("--sets", nargs="+", help="names of length sets; default: all nine")
    parser.add_argument("--packers", nargs="+", help="names of packers; default: all")
    parser.add_argument("--first-calls", action="store_true", help="measure first calls, too")
    parser.add_argument(
        "--more", action="store_true", help="add to the results that are there, as another run"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=10, help="seconds for a packer at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    console = Console(width=150)
    before = environment()
    rows = measure(args, console)
    show(rows, console)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "more")}
    run_now = {"environment": before, "settings": settings}
    fresh: dict[str, Any] = {"runs": [], "first_call_s": {}, "rows": []}
    known = json.loads(args.out.read_text()) if args.more and args.out.exists() else fresh
    calls = first_calls() if args.first_calls else known["first_call_s"]
    for row in rows:
        row["run"] = len(known["runs"])
    same = {row_key(row) for row in rows}
    kept = [row for row in known["rows"] if row_key(row) not in same]
    result = {"runs": [*known["runs"], run_now], "first_call_s": calls, "rows": kept + rows}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written: {args.out}")


if __name__ == "__main__":
    main()
