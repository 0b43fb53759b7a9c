"""Runs every strategy and the packers of others on the same lengths, in about 20 minutes.

    pip install lightbinpack binpacking trl datasets
    python benchmarks/packing.py --fresh   # 4 GB of memory; best with nothing else on the machine

lightbinpack is compiled by pip, which takes two minutes. A peer that is not installed is reported
and left out. After each set of lengths the rows are written, and the goals are judged by them. A
run that was cut off goes on when the same command is given without --fresh.

CPU nanoseconds per example: the least of several runs, one process, compiled code warm, strategies
by turns with one another and with a counting argsort. Peers get a Python list, ready made, as their
interfaces ask; ours get a numpy array. Memory is what the process takes beyond its input while the
packer runs and holds its result (Linux; from 1e5 examples on). Fill, and packs over the tokens
divided by the pack size. The first call is one in a fresh process whose compiled code is cached,
imports apart.

1e3 to 1e7 examples, and 1e8 for what plans so many. Thorough cases are the two sets like preference
pairs in packs of 4096: there peers run where they are expected to take less than --limit, elsewhere
less than half a second; and there alone 1e8 examples are run.
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
from pathlib import Path
from typing import Any

from peers_packing import MOST_EXAMPLES, MOST_TOKENS, PEERS, peers
from peers_packing.case import LARGEST, Case, thorough
from peers_packing.goals import FLOOR, judged
from peers_packing.lengths import PAIRS, SETS
from rich.console import Console
from rich.table import Table

from packstore.pack.algorithms import STRATEGIES

RESULTS = Path(__file__).parent / "results" / "packing.json"
PLANS_LARGEST = (FLOOR, "pool")
SLOW = ("first_fit_decreasing", "first_fit_shuffle")
"""Of 1e7 examples, these plan the thorough cases only."""

SECONDS_ELSEWHERE = 0.5
"""--limit for cases that are not thorough."""

UNKNOWN_GROWTH = 3.0
"""From a number of examples to ten times as many, the time of each grows so much if unknown."""


class Run:
    """All cases, those that the file has left out."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self._args, self._console = args, console
        self._others = peers(console)
        self.result = self._begun()

    def _begun(self) -> dict[str, Any]:
        """The result so far: that of a run with the same settings which was cut off, or a new one.

        Results do not change with what the machine is busy with, but times do: its load is kept
        from the start and the end.
        """
        names = ("n", "capacity", "sets", "packers", "seed", "limit")
        new = {
            "complete": False,
            "environment": environment(),
            "settings": {name: getattr(self._args, name) for name in names},
            "goals": [],
            "first_call_s": {},
            "rows": [],
        }
        if self._args.out.exists() and not self._args.fresh:
            old = json.loads(self._args.out.read_text(encoding="utf-8"))
            same = (old.get("settings"), old.get("environment", {}).get("versions")) == (
                new["settings"],
                new["environment"]["versions"],
            )
            if same and not old["complete"]:
                self._console.print(f"goes on after {len(old['rows'])} rows")
                return dict(old)
        return new

    def write(self) -> None:
        """One row a line; with the goals as far as they can be judged."""
        self.result["goals"] = judged(self.result["rows"], self.result["first_call_s"])
        self.result["environment"]["load_average_at_end"] = os.getloadavg()
        head = {name: value for name, value in self.result.items() if name != "rows"}
        rows = ",\n".join(json.dumps(row) for row in self.result["rows"])
        text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n]}}\n'
        partial = self._args.out.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self._args.out)

    def measure(self) -> None:
        """Each case that is not in the file."""
        done = {(row["capacity"], row["n"], row["set"]) for row in self.result["rows"]}
        args = self._args
        for n, capacity, name in itertools.product(sorted(args.n), args.capacity, args.sets):
            if (capacity, n, name) in done or (n == LARGEST and not thorough(name, capacity)):
                continue
            start = time.perf_counter()
            case = Case(name, n, capacity, args.seed)
            for packer in (FLOOR, *STRATEGIES, *self._others):
                if self._wanted(packer, case):
                    case.first(packer, self._others.get(packer))
            case.repeat()
            key = {"capacity": capacity, "n": n, "set": name}
            for packer, row in case.rows.items():
                row["ns_per_example"] = round(row["ns_per_example"], 3)
                self.result["rows"].append({**key, "packer": packer, "bound": case.bound, **row})
            self.write()
            seconds = time.perf_counter() - start
            self._console.print(f"{name}, packs of {capacity}, n={n:.0e}: {seconds:.1f} s")

    def _wanted(self, packer: str, case: Case) -> bool:
        if self._args.packers and packer not in self._args.packers:
            return False
        n = case.n
        if packer not in self._others:
            if n == LARGEST:
                return packer in PLANS_LARGEST
            return n <= 1_000_000 or case.thorough or packer not in SLOW
        if n > MOST_EXAMPLES.get(packer, n) or n == LARGEST:
            return False
        if packer.startswith("TRL") and case.tokens > MOST_TOKENS:
            return False
        limit = self._args.limit if case.thorough else SECONDS_ELSEWHERE
        return self._expected(packer, case) < limit

    def _expected(self, packer: str, case: Case) -> float:
        """Seconds, by the two next smaller runs; infinite if the last was left out."""
        known = [
            (row["n"], row["ns_per_example"])
            for row in self.result["rows"]
            if (row["packer"], row["set"], row["capacity"]) == (packer, case.name, case.capacity)
        ]
        if not known:
            return 0.0 if case.n == min(self._args.n) else float("inf")
        n, ns = known[-1]
        growth = max(1.0, ns / known[-2][1]) if len(known) > 1 else UNKNOWN_GROWTH
        return 1e-9 * ns * growth * case.n if case.n <= 10 * n else float("inf")


FIRST_CALL = """
import sys, time
import numba, numpy as np, packstore.pack.plan
lengths = np.random.default_rng(0).integers(1, 4097, 1000).astype(np.int32)
start = time.process_time()
packstore.pack.plan.plan(lengths, pack_size=4096, strategy=sys.argv[1])
print(time.process_time() - start)
"""


def first_calls(runs: int = 5) -> dict[str, float]:
    """CPU seconds of the first plan of a process, the least of some, once its code is cached."""
    found = {}
    for strategy in ("pool", "first_fit_decreasing"):
        command = [sys.executable, "-c", FIRST_CALL, strategy]
        texts = [subprocess.check_output(command, text=True) for _ in range(runs + 1)]
        found[strategy] = round(min(float(text) for text in texts[1:]), 3)
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """The packs of 4096 of the sets like pairs at 1e6, and the goals."""
    for name in PAIRS:
        table = Table("packer", "ns", "bytes", "fill %", "gap")
        table.title = f"{name}, packs of 4096, a million examples"
        for row in result["rows"]:
            if (row["capacity"], row["n"], row["set"]) == (4096, 1_000_000, name):
                memory, gap = (str(row.get(k, "-")) for k in ("peak_bytes_per_example", "gap"))
                fill = f"{100 * row['fill']:.3f}" if "fill" in row else "-"
                table.add_row(row["packer"], f"{row['ns_per_example']:,.1f}", memory, fill, gap)
        console.print(table)
    table = Table("goal", "worst value", "limit", "met")
    for goal in result["goals"]:
        met = {True: "yes", False: "[red]no", None: "not run"}[goal["met"]]
        table.add_row(goal["goal"], str(goal["value"]), str(goal["limit"]), met)
    console.print(table)


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
        "versions": {p: version(p) for p in ("packstore", "numpy", "numba", "awkward", *PEERS)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole = {"type": lambda text: int(float(text)), "nargs": "+"}
    sizes = [1000, 10_000, 100_000, 1_000_000, 10_000_000, LARGEST]
    parser.add_argument("--n", default=sizes, **whole)
    parser.add_argument("--capacity", default=[4096, 8192, 32_768], **whole)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, metavar="SET")
    parser.add_argument("--packers", nargs="+", help="names of packers; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=20, help="seconds for a run of a peer")
    parser.add_argument("--fresh", action="store_true", help="begin anew what was cut off")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.out.parent.mkdir(exist_ok=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    console = Console(width=130)
    run = Run(args, console)
    run.result["first_call_s"] = run.result["first_call_s"] or first_calls()
    run.measure()
    run.result["complete"] = True
    run.write()
    show(run.result, console)
    console.print(f"written: {args.out}")


if __name__ == "__main__":
    main()
