"""The goals of packing, judged by the rows of one run of ``packing.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from peers_packing.lengths import PAIRS

Row = dict[str, Any]
FLOOR = "counting argsort"


class Rows:
    """Finds rows and values of them."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def where(self, packer: str, **keys: Any) -> list[Row]:
        """Rows of a packer; a key is a value or a tuple of allowed ones."""
        allowed = {k: v if isinstance(v, tuple) else (v,) for k, v in keys.items()}
        rows = [row for row in self._rows if row["packer"] == packer]
        return [row for row in rows if all(row[k] in v for k, v in allowed.items())]

    def beside(self, packer: str, other: str, **keys: Any) -> Iterator[tuple[Row, Row]]:
        """Rows of `packer` and of another one on the same lengths."""
        case = ("capacity", "n", "set")
        known = {tuple(row[k] for k in case): row for row in self.where(other, **keys)}
        for row in self.where(packer, **keys):
            if tuple(row[k] for k in case) in known:
                yield row, known[tuple(row[k] for k in case)]

    def values(self, packer: str, name: str, **keys: Any) -> list[float]:
        """A figure of the rows that have it."""
        found = (row.get(name) for row in self.where(packer, **keys))
        return [value for value in found if value is not None]

    def ratios(self, packer: str, other: str, name: str, **keys: Any) -> list[float]:
        """A figure of `packer` over that of another one on the same lengths."""
        return [mine[name] / its[name] for mine, its in self.beside(packer, other, **keys)]


def judged(rows: list[Row], first_calls: dict[str, float]) -> list[Row]:
    """A row per goal: what, the worst value found, the limit, and whether it is met.

    `met` is None where the run has no row for it.
    """
    table, goals = Rows(rows), []

    def goal(text: str, values: list[float], limit: float, worst: Callable[..., float]) -> None:
        value = round(worst(values), 5) if values else None
        met = None if value is None else value <= limit if worst is max else value >= limit
        goals.append({"goal": text, "value": value, "limit": limit, "met": met})

    time = "ns_per_example"
    large = (1_000_000, 10_000_000, 100_000_000)
    goal("pool, all sets: ns per example", table.values("pool", time, n=large), 30, max)
    for n in (1_000_000, 10_000_000):
        keys = {"n": n, "capacity": 4096, "set": PAIRS}
        text = f"pool on pairs, n={n:.0e}, packs of 4096"
        goal(f"{text}: ns per example", table.values("pool", time, **keys), 30, max)
        goal(
            f"{text}: times a counting argsort", table.ratios("pool", FLOOR, time, **keys), 20, max
        )
        goal(f"{text}: fill", table.values("pool", "fill", **keys), 0.9995, min)
    more = table.beside("pool", "first_fit_decreasing", set=PAIRS)
    worse = [mine["packs"] / its["packs"] - 1 for mine, its in more]
    goal("pool on pairs: packs more than first-fit-decreasing, share", worse, 0.003, max)
    for packer, seconds in first_calls.items():
        goal(f"first call of {packer}, warm cache: CPU seconds", [seconds], 0.4, max)
    return goals
