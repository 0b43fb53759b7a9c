"""Measures a packing: validity, fill and memory."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import numpy as np

from packstore.format.arrays import Int32, Int64

Result = tuple[Int64, Int64]


def figures(lengths: Int32, capacity: int, bound: int, result: Result) -> dict[str, Any]:
    """Packs and tightness; ends the run if it is not a packing."""
    order, offsets = result
    packs = len(offsets) - 1
    seen = np.zeros(len(lengths), np.bool_)
    seen[order] = True
    by_pack = lengths[order]
    totals = np.add.reduceat(by_pack, offsets[:-1], dtype=np.int64)
    if len(order) != len(lengths) or not seen.all() or totals.max() > capacity:
        raise SystemExit("not a packing")
    return {
        "packs": packs,
        "gap": packs - bound,
        "fill": round(float(totals.sum() / (packs * capacity)), 7),
    }


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
