"""Equality of packs, sizes, batches and lists of them, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from packstore.format import Packs, PackSizes


def same(a: Any, b: Any) -> bool:
    """Are both the same, down to the types and bits of their arrays?"""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, np.ndarray):
        bits = (
            a.tolist() == b.tolist()
            if a.dtype == object
            else a.tobytes() == b.tobytes()
        )
        return bool(bits and a.dtype == b.dtype)
    if isinstance(a, Packs | PackSizes):
        return all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in fields(type(a))
        )
    return bool(a.equals(b) if isinstance(a, pa.RecordBatch) else a == b)
