"""Merges the statistics of several plans (:meth:`Plan.statistics`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packstore.format.arrays import Int64
from packstore.pack.bounds import bound_of_counts

_SAME = ("strategy", "seed", "shuffle", "pack_order", "pack_size", "pad_to_multiple")
_SUMS = ("num_packs", "num_examples", "tokens", "aligned_tokens")


def merged_statistics(plans: Sequence[dict[str, Any]], counts: Int64) -> dict[str, Any]:
    """Returns the statistics over all packs of some plans.

    `randomness` is the mean over the plans, weighted by their examples; `chosen` and `algorithm`
    list all that occur.

    Args:
        plans: statistics of each plan, at least one; all of the same settings.
        counts: int64 `[pack_size + 1]`, examples of each padded length, of all plans.
    """
    total = {name: sum(p[name] for p in plans) for name in _SUMS}
    bound = bound_of_counts(counts, plans[0]["pack_size"])
    room = total["num_packs"] * plans[0]["pack_size"]
    mean = total["num_examples"] / total["num_packs"]
    bridge = [p["megatron_bridge"] for p in plans]
    per_pack = [p["examples_per_pack"] for p in plans]
    return {
        **{name: plans[0][name] for name in _SAME},
        **{name: "+".join(sorted({p[name] for p in plans})) for name in ("chosen", "algorithm")},
        **total,
        "fill_rate": total["tokens"] / room,
        "aligned_fill_rate": total["aligned_tokens"] / room,
        "lower_bound": bound,
        "gap": total["num_packs"] - bound,
        "examples_per_pack": {
            "min": min(p["min"] for p in per_pack),
            "mean": mean,
            "max": max(p["max"] for p in per_pack),
        },
        "randomness": {name: _mean(plans, name) for name in plans[0]["randomness"]},
        "megatron_bridge": {
            "max_samples_per_bin": max(b["max_samples_per_bin"] for b in bridge),
            "dataset_max_seqlen": max(b["dataset_max_seqlen"] for b in bridge),
            "packing_factor": round(mean, 2),
            "packing_efficiency": round(100 * total["aligned_tokens"] / room, 2),
            "pack_size": plans[0]["pack_size"],
            "min_packed_seqlen": min(b["min_packed_seqlen"] for b in bridge),
        },
    }


def _mean(plans: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean of a `randomness` figure over the plans for which it is defined."""
    pairs = [(p["randomness"][name], p["num_examples"]) for p in plans]
    known = [(value, weight) for value, weight in pairs if value is not None]
    weight = sum(w for _, w in known)
    return sum(v * w for v, w in known) / weight if weight else None
