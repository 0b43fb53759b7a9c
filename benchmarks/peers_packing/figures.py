"""Measures a packing: validity, fill, randomness and memory."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import numpy as np

from packstore.format.arrays import Int32, Int64, ragged_indices, to_offsets
from packstore.pack import statistics
from packstore.pack.order import ORDERS, STEP

Result = tuple[Int64, Int64]


def figures(
    lengths: Int32, capacity: int, bound: int, result: Result, randomness: bool
) -> dict[str, Any]:
    """Packs, tightness and, if asked for, randomness; ends the run if it is not a packing."""
    order, offsets = result
    packs = len(offsets) - 1
    seen = np.zeros(len(lengths), np.bool_)
    seen[order] = True
    by_pack = lengths[order]
    totals = np.add.reduceat(by_pack, offsets[:-1], dtype=np.int64)
    if len(order) != len(lengths) or not seen.all() or totals.max() > capacity:
        raise SystemExit("not a packing")
    found = {
        "packs": packs,
        "gap": packs - bound,
        "fill": round(float(totals.sum() / (packs * capacity)), 7),
    }
    return {**found, **_randomness(by_pack, offsets)} if randomness else found


def _randomness(by_pack: Int32, offsets: Int64) -> dict[str, float | None]:
    """Within packs, and of steps of 64 packs in each order of delivery."""
    logs = np.log(by_pack)
    squares = np.add.reduceat(by_pack.astype(np.int64) ** 2, offsets[:-1])
    sizes = np.diff(offsets)
    found = {
        "icc": statistics.intraclass_correlation(logs, offsets),
        "same_decile": statistics.same_decile(by_pack, offsets),
    }
    for name, order in ORDERS.items():
        delivery = order(sizes, squares, 0)
        found[f"design_effect_{name}"] = statistics.design_effect(
            logs[ragged_indices(offsets, delivery)], to_offsets(sizes[delivery]), STEP
        )
    return {name: None if value is None else round(value, 4) for name, value in found.items()}


class Memory:
    """The most memory that this process takes beyond what it has now (Linux; else None)."""

    def __init__(self) -> None:
        gc.collect()
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already is not to be used
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
            self._start: int | None = _status("VmRSS")
        except OSError:
            self._start = None

    def peak(self) -> int | None:
        """Bytes."""
        return None if self._start is None else max(0, _status("VmHWM") - self._start)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return 1024 * int(found[1]) if found else 0
