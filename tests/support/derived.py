"""What readers derive from a pack, computed in the words of format.md."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def derive(row: Row, k: int | None) -> Row:
    """Returns the values that format.md derives from a pack, computed in its own words."""
    b, lengths = row["seq_boundaries"], row["lengths"]
    s = range(len(lengths))
    counts = row["num_responses"] if k is None else [k] * len(row["example_ids"])
    f = [sum(counts[:e]) for e, count in enumerate(counts) for _ in range(count)]
    offset = [lengths[i] - (b[i + 1] - b[i]) for i in s]
    segment = [i for i in s for _ in range(b[i], b[i + 1])]
    keys = [(*range(b[f[i]], b[f[i]] + offset[i]), *range(b[i], b[i + 1])) for i in s]
    return {
        "segment_offsets": offset,
        "segment_ids": segment,
        "position_ids": [offset[i] + t - b[i] for t, i in enumerate(segment)],
        "cu_seqlens": b,
        "cu_seqlens_k": [sum(lengths[:i]) for i in range(len(lengths) + 1)],
        "kv_index": [t for run in keys for t in run],
        "max_seqlen": max(b[i + 1] - b[i] for i in s),
        "max_seqlen_k": max(lengths),
    }
