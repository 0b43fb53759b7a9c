"""Every single-bit flip in what a reader reads is found: none gives other packs in
silence.

Some bits of each region are flipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flips import flip, regions

from packstore import Dataset
from packstore.torch import SideWriter

PROFILES: dict[str, dict[str, Any]] = {
    "parquet": {},
    "shared_prefix": {"layout": "shared_prefix"},
    "arrow": {"format": "arrow"},
}
FLIPS = 40
"""Of each region, about."""

SURE = {"row group", "footer", "pack index", "manifest", "side data", "side manifest"}


@pytest.fixture(scope="module", params=PROFILES)
def stored(kit: Any, request: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset of one small shard of several row groups, with carried columns."""
    more = [{"source": f"é{i}", "weight": i / 40} for i in range(40)]
    records = [{**a, **b} for a, b in zip(kit.records(40), more, strict=True)]
    how = {"carry": ("source:string", "weight:float64"), "shard_tokens": 1 << 20}
    data = kit.made(
        tmp_path_factory.mktemp("data") / "ds",
        records,
        **how,
        **PROFILES[request.param],
    )
    assert len(data.manifest.shards) == 1
    assert len(data.row_groups) > 2
    return data


@pytest.fixture(scope="module")
def side(stored: Dataset) -> str:
    url = f"{stored.url}-side"
    columns = {"x": "int64", "ref_logps": "list<float32>", "tag": "string"}
    with SideWriter(url, stored, columns) as writer:
        for packs in stored.iter_packs():
            ids, counts = packs.example_ids, packs.num_responses
            logps = np.linspace(-9, -1, int(counts.sum()), dtype=np.float32)
            tags = np.array([f"t{i}" for i in ids], object)
            writer.write(ids, {"x": ids, "ref_logps": logps, "tag": tags}, counts)
    return url


def test_every_region_is_there(stored: Dataset, side: str) -> None:
    found = list(regions(stored, side))
    assert {region.name for region in found} - {"padding"} == SURE
    shard = Path(stored.url) / stored.manifest.shards[0].path
    spans = sorted((r.start, r.stop) for r in found if r.path == shard)
    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
    assert (spans[0][0], spans[-1][1]) == (0, shard.stat().st_size)


def test_flips_are_told(stored: Dataset, side: str) -> None:
    """Arrow files have gaps that mean nothing: what is flipped there gives the same
    packs.
    """
    for region in regions(stored, side):
        bits = 8 * (region.stop - region.start)
        counts, wrong = flip(region, max(bits // FLIPS, 1) | 1)
        assert not wrong
        gaps = region.name == "padding" or (
            region.name == "row group" and region.path.suffix == ".arrow"
        )
        assert gaps or set(counts) == {"raised"}, (region.name, counts)
