"""Large datasets: opening a manifest of many row groups takes little more than the
result.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import packstore
from packstore import Dataset

GROUPS, SHARDS = 500, 100


def test_opening_takes_little_more_than_the_result(ds: Dataset) -> None:
    path = Path(ds.url) / "_packstore" / "manifest-000001.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    for name in ("sha256", "pack_index"):
        del value[name]
    of_group = {"rows": 32, "examples": 64, "tokens": 640, "longest": 10}
    groups = {name: [n] * GROUPS for name, n in of_group.items()}
    shard = value["shards"][0] | {
        "row_groups": {**groups, "crc32": "00000007" * GROUPS}
    }
    shard |= {"rows": 32 * GROUPS, "examples": 64 * GROUPS, "sequences": 128 * GROUPS}
    shard["tokens"] = 640 * GROUPS
    value["shards"] = [shard | {"path": f"data/{i}.parquet"} for i in range(SHARDS)]
    sums = {name: SHARDS * shard.get(name, 0) for name in value["totals"]}
    value["totals"] |= sums | {"packs": SHARDS * shard["rows"]}
    value["records"] |= {
        "read": sums["examples"],
        "packed": sums["examples"],
        "dropped": {},
    }
    size = path.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
    packstore.open(ds.url)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    large = packstore.open(ds.url)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(large.manifest.shards) == SHARDS
    assert after - before < SHARDS * GROUPS * 5 * 8 * 1.2
    assert (
        peak - after < 1.5 * size
    )  # objects for all of the text take far more than its bytes
