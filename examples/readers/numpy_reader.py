"""Packs of a packstore dataset as numpy arrays, without packstore: for JAX and others.

    for pack in read_packs("prefs-8k"):
        row = fixed_shape(pack, size=8192)  # equal shapes: one compilation of `jax.jit`

It reads a local folder of any kind, in both layouts, trees of prefixes too.
`schemas/format.md` is the reference; sections are named below. It trusts the files, so
use it for data of your own.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


def read_packs(folder):
    """Yield packs in file order: the stored columns, and those that section 5 derives."""
    manifests = (Path(folder) / "_packstore").glob("manifest-*.json")
    newest = max(manifests, key=lambda path: int(path.stem.split("-")[1]))
    manifest = json.loads(newest.read_bytes())  # section 6
    if manifest["format_version"] != 1 or manifest["features"]:
        raise ValueError(f"{folder} needs a newer reader")
    for shard in manifest["shards"]:
        for batch in pq.ParquetFile(Path(folder) / shard["path"]).iter_batches(16):
            for row in batch.to_pylist():
                pack = {name: np.array(values) for name, values in row.items()}
                pack["example_ids"] += shard["example_id_base"]
                yield pack | derive(pack)


def derive(pack):
    """Return the arrays of section 5 by name, and `keys`, a list for each segment."""
    edges = pack["seq_boundaries"]
    offsets = pack["lengths"] - np.diff(edges)  # tokens that each segment leaves out
    keys = []
    for i, offset in enumerate(offsets):
        segment = np.arange(edges[i], edges[i + 1])
        if offset > 0:
            parent = i - pack["parent_distances"][i]
            segment = np.concatenate([keys[parent][:offset], segment])
        keys.append(segment)
    segment_ids = np.repeat(np.arange(len(offsets)), np.diff(edges))
    starts = (edges[:-1] - offsets)[segment_ids]
    return {
        "segment_offsets": offsets,
        "segment_ids": segment_ids,
        "position_ids": np.arange(len(segment_ids)) - starts,
        "cu_seqlens": edges,
        "cu_seqlens_k": np.concatenate([[0], np.cumsum(pack["lengths"])]),
        "kv_index": np.concatenate(keys),
        "keys": keys,
    }


def attention_mask(pack):
    """Return bool `[T, T]`: whether the token of a row sees that of a column."""
    mask = np.zeros((len(pack["input_ids"]),) * 2, bool)
    for i, keys in enumerate(pack["keys"]):
        queries = np.arange(pack["cu_seqlens"][i], pack["cu_seqlens"][i + 1])
        visible = np.tri(len(queries), len(keys), pack["segment_offsets"][i], bool)
        mask[np.ix_(queries, keys)] = visible
    return mask


def fixed_shape(pack, size):
    """Return a pack, padded to `size` tokens, with its mask and targets.

    Padding is in a segment numbered -1, has target -100, and sees itself alone.
    `targets[t]` is the token that `t` predicts: labels, moved by one.
    """
    room = size - len(pack["input_ids"])
    mask = np.eye(size, dtype=bool)
    mask[: size - room, : size - room] = attention_mask(pack)
    return {
        "input_ids": np.pad(pack["input_ids"], (0, room)),
        "position_ids": np.pad(pack["position_ids"], (0, room)),
        "segment_ids": np.pad(pack["segment_ids"], (0, room), constant_values=-1),
        "targets": np.pad(pack["labels"][1:], (0, room + 1), constant_values=-100),
        "mask": mask,
    }
