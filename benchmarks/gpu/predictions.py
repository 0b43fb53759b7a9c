"""Figures that were predicted before any run on a GPU, by counting bytes and operations.

For one H200: copies of 4.3 TB/s, bfloat16 products at 700 TFLOP/s; forward and backward without
optimizer and reference, eager layers, no gradient checkpointing.
"""

from __future__ import annotations

from typing import Any

TOLERANCE = 0.25
"""A figure that is off by more is to be explained before anything is tuned."""

PREDICTED: dict[str, dict[str, float]] = {
    "ceilings": {"copy_tb_per_second": 4.3, "product_tflops": 790},
    "llama-1.2b/hh/8192/padding_free": {"pairs_per_second": 146, "peak_gib": 25.9},
    "llama-1.2b/hh/8192/concat": {"pairs_per_second": 173, "peak_gib": 14.7},
    "llama-1.2b/hh/8192/shared_prefix": {"pairs_per_second": 262, "peak_gib": 14.7},
    "llama-1.2b/hh/32768/concat": {"pairs_per_second": 187},
    "llama-1.2b/hh/32768/shared_prefix": {"pairs_per_second": 279, "peak_gib": 56},
    "qwen3-0.6b/hh/8192/padding_free": {"pairs_per_second": 172},
    "qwen3-0.6b/hh/8192/concat": {"pairs_per_second": 204},
    "qwen3-0.6b/hh/8192/shared_prefix": {"pairs_per_second": 306},
    "qwen3-0.6b/hh/32768/concat": {"pairs_per_second": 220},
    "qwen3-0.6b/hh/32768/shared_prefix": {"pairs_per_second": 322, "peak_gib": 64},
    "head/128256x2048/packstore": {"ms": 20.0},
    "head/128256x2048/packstore triton": {"ms": 14.2},
    "head/128256x2048/trl": {"ms": 13.2},
    "head/151936x1024/packstore": {"ms": 16.3},
    "head/151936x1024/packstore triton": {"ms": 10.0},
    "head/151936x1024/trl": {"ms": 8.8},
    "train/full": {"data_wait": 0.0},
}
"""Case -> figure -> value; floors of the head are 11.5 and 6.8 ms."""


def misses(case: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Returns the predictions for a case and, under ``misses``, those that are off too far."""
    told = {n: v for n, v in PREDICTED.get(case, {}).items() if figures.get(n) is not None}
    if not told:
        return {}
    off = {n: figures[n] / v - 1 if v else float(figures[n] > 0.01) for n, v in told.items()}
    texts = [
        f"{n}: predicted {told[n]:.4g}, measured {figures[n]:.4g} ({part:+.0%})"
        for n, part in off.items()
        if abs(part) > TOLERANCE
    ]
    return {"predicted": told, "misses": texts}
