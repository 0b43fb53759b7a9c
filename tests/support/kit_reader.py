"""packstore as a reader of the conformance kit: ``python tests/support/kit_reader.py
DATASET…``.

It verifies, as ``packstore verify`` does; what it prints comes from the loader and its
batches.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import numpy as np

import packstore
import packstore.torch as pt
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    DatasetNotFoundError,
    FormatError,
    StorageError,
    UnsupportedFormatError,
)
from packstore.io.side import TOKEN_RULES
from packstore.io.side.parts import open_sides
from packstore.pack.fill import unpack

NAMES = {
    r"\[([a-z-]+)\]": None,  # a rule of packs
    r"\.index\b": "pack-index",
    "example ids must be distinct|must have example ids of": "example-ids",
    "must hold nulls|not hold nulls|its schema must|its lists must": "schema",
    "not be compressed|compression among|no dictionary|side by side|UTF8": "encoding",
    r"at most \d+ (bytes|values)": "encoding",
    "crc32|sha256|must have bytes|no such file|footer must have": "bytes",
    "must have": "counts",
}
"""What a problem says -> the name of annex G; the first that is found."""


def named(problem: str) -> str:
    found = ((re.search(pattern, problem), name) for pattern, name in NAMES.items())
    return next((name or m[1] for m, name in found if m), problem)


def rule_of_values(problem: str) -> str:
    """The rule of values of tokens that a problem names."""
    name = re.search(r"\[([a-z-]+)\]", problem)
    return name[1] if name and name[1] in TOKEN_RULES else "side"


def answer(dataset: str, *sides: str) -> dict[str, Any]:
    """What the kit asks for."""
    try:
        data = packstore.open(dataset)
    except UnsupportedFormatError:
        return {"refused": "unsupported"}
    except (DatasetNotFoundError, FormatError):
        return {"refused": "manifest"}
    if problems := data.verify().problems:
        return {"refused": named(problems[0])}
    try:
        for side in open_sides(sides, data.manifest):
            if problems := side.verify(data).problems:
                return {"refused": rule_of_values(problems[0])}
        packs = pt.PackedDataset(data, shuffle=False, rank=0, world_size=1, side=sides)
        return {"packs": [plain(p, data.manifest) for p in packs] if len(data) else []}
    except UnsupportedFormatError:
        return {"refused": "unsupported"}
    except (CompatibilityError, ConfigError, FormatError, StorageError):
        return {"refused": "side"}


def plain(packs: Any, manifest: Any) -> dict[str, Any]:
    """A pack as JSON values."""
    batch = pt.collate(packs, manifest.kind)
    names = [
        "input_ids",
        "labels",
        "lengths",
        "example_ids",
        "num_responses",
        "segment_ids",
    ]
    names += ["position_ids", "cu_seqlens", "cu_seqlens_k", "kv_index"]
    out = {name: batch[name] for name in names if batch[name] is not None}
    out.setdefault("kv_index", np.arange(batch.num_tokens))  # no prefix is left out
    out |= {
        "seq_boundaries": packs.seq_boundaries,
        "segment_offsets": packs.segment_offsets,
    }
    whole = unpack(packs)
    out["sequence_labels"] = np.where(whole.supervised, whole.input_ids, -100)
    if manifest.layout == "shared_prefix":
        out["parent_distances"] = packs.parent_distances
    out |= {"reward": batch.rewards, **batch.columns}
    out = {name: values.tolist() for name, values in out.items()}
    out |= {"max_seqlen": batch.max_seqlen, "max_seqlen_k": batch.max_seqlen_k}
    if manifest.kind != "scored":
        del out["num_responses"]
    joined = dict(batch.sequence_columns)
    joined |= {} if batch.ref_logps is None else {"ref_logps": batch.ref_logps}
    side = {name: values.tolist() for name, values in joined.items()}
    for name, values in batch.token_columns.items():
        side[name] = lists_of_tokens(values)
    side |= {
        name: out.pop(name)
        for name in list(batch.columns)
        if name not in manifest.carry
    }
    out |= {"side": side} if side else {}
    return {name: text(value) for name, value in out.items()}


def lists_of_tokens(values: Any) -> Any:
    """Values of tokens: a list, or two of the top k, whose tokens are end to end."""
    if not isinstance(values, pt.TopK):
        return values.tolist()
    return {
        "ids": values.ids.reshape(-1).tolist(),
        "logps": values.logps.reshape(-1).tolist(),
    }


def text(value: Any) -> Any:
    """The same, but for numbers that are not finite as texts."""
    if isinstance(value, dict):
        return {name: text(v) for name, v in value.items()}
    if isinstance(value, list):
        return [text(v) for v in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"


if __name__ == "__main__":
    print(json.dumps(answer(*sys.argv[1:])))
