"""The goals of the loader, each with its figure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

REMOTE = ("packstore", "packstore-compact")
"""Profiles for object stores; Arrow files are for local disks."""

Rows = dict[str, dict[str, Any]]
Passes = list[dict[str, float]]


@dataclass(frozen=True)
class Goal:
    """A bound and what was measured; `met` is None if something it needs was not measured."""

    what: str
    bound: str
    figure: str
    met: bool | None


def goals(rows: Rows, passes: Passes) -> list[Goal]:
    """All goals.

    Args:
        rows: figures of each reader.
        passes: packs a second of LitData and of ours, read one right after the other.
    """
    parts = (_speed(rows), _paired(rows, passes), _sizes(rows), _ours(rows), _slow(rows))
    return [*itertools.chain(*parts), *_damage(rows)]


def _value(rows: Rows, reader: str, figure: str) -> Any:
    return rows.get(reader, {}).get(figure)


def _goal(
    what: str, value: float | None, met: Callable[[float], bool], bound: str, text: str
) -> Goal:
    if value is None:
        return Goal(what, bound, "-", None)
    return Goal(what, bound, text.format(value), met(value))


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _speed(rows: Rows) -> Iterator[Goal]:
    bounds = {
        "hf-streaming": 10,
        "mds": 5,
        "webdataset": 8,
        "hf-map": 1.3,
    }
    for peer, least in bounds.items():
        for ours in ("packstore", "packstore padded"):
            figures = (_value(rows, name, "samples_per_second") for name in (ours, peer))
            yield _at_least(f"{ours}: packs/s over {peer}", _ratio(*figures), least)


def _paired(rows: Rows, passes: Passes) -> Iterator[Goal]:
    bounds = {"packstore": 0.9, "packstore-compact": 0.9, "packstore-arrow": 1.2}
    for ours, least in bounds.items():
        for name in (ours, f"{ours} padded"):
            ratios = [p[name] / p["litdata"] for p in passes if name in p and "litdata" in p]
            what = f"{name}: packs/s over litdata, median of {len(ratios)} pairs"
            yield _at_least(what, statistics.median(ratios) if ratios else None, least)


def _sizes(rows: Rows) -> Iterator[Goal]:
    for ours, parts in {"packstore": 3, "packstore-compact": 6}.items():
        sizes = (_value(rows, name, "bytes") for name in ("litdata", ours))
        yield _at_least(f"{ours}: smaller than litdata by", _ratio(*sizes), parts)


def _at_least(what: str, value: float | None, least: float) -> Goal:
    return _goal(what, value, lambda x: x >= least, f">= {least}", "{:.2f} x")


def _at_most(what: str, value: float | None, most: float, text: str) -> Goal:
    return _goal(what, value, lambda x: x <= most, f"<= {most}", text)


def _ours(rows: Rows) -> Iterator[Goal]:
    for name in ("packstore", "packstore-compact", "packstore-arrow"):
        for variant in (name, f"{name} padded"):
            yield _at_most(
                f"{variant}: CPU us a pack", _value(rows, variant, "cpu_us"), 33, "{:.1f} us"
            )
        first, memory = (_value(rows, name, key) for key in ("first_seconds", "memory"))
        first_ms = None if first is None else 1000 * first
        yield _at_most(f"{name}: first batch, ms", first_ms, 40, "{:.0f} ms")
        above = None if memory is None else memory / 1e6
        yield _at_most(f"{name}: MB above torch's own", above, 110, "{:.0f} MB")
        seconds = _value(rows, name, "resume_seconds") or []
        for place, value in zip(("50 %", "95 %"), seconds, strict=False):
            yield _at_most(f"{name}: resume at {place}, ms", 1000 * value, 40, "{:.0f} ms")
        flat = _ratio(*reversed(seconds)) if len(seconds) == 2 else None
        yield _at_most(f"{name}: resume at 95 % over 50 %", flat, 1.25, "{:.2f} x")


def _slow(rows: Rows) -> Iterator[Goal]:
    """Behind a store of 20 ms a request and 100 MB/s a stream."""
    for name in REMOTE:
        found = _value(rows, name, "slow") or {}
        there = found.get("slow", {})
        first = there and 1000 * there["first_batch_s"]
        opening = f" (opened in {1000 * there['open_s']:.0f})" if there else ""
        what = f"{name}, slow store: first batch, ms{opening}"
        yield _at_most(what, first or None, 100, "{:.0f} ms")
        what = f"{name}, slow store: MB read before it"
        yield _at_most(what, there.get("first_megabytes"), 4, "{:.1f} MB")
        what = f"{name}, slow store: share of the local rate"
        yield _at_least(what, found.get("share_of_local_rate"), 0.9)


def _damage(rows: Rows) -> Iterator[Goal]:
    for name in ("packstore", "packstore-compact", "packstore-arrow"):
        found = _value(rows, name, "damage")
        share = found and found["outcomes"].get("raised", 0) / found["trials"]
        yield _goal(
            f"{name}: flipped bits that raise, of {found['trials'] if found else 0}",
            None if share is None else 100 * share,
            lambda x: x == 100,
            "100 %",
            "{:.1f} %",
        )
