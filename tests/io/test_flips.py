"""Every single-bit flip in what a reader reads is found: none gives a wrong pack in silence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from packstore.errors import FormatError
from packstore.io.dataset import Dataset
from packstore.io.dataset import open as open_dataset
from packstore.io.manifest import Manifest
from packstore.io.seal import unsealed
from packstore.io.side import SideWriter, open_side
from packstore.io.side_manifest import SideManifest
from packstore.records import Packs

PROFILES: dict[str, dict[str, Any]] = {
    "parquet": {},
    "spans": {"labels": "spans"},
    "uncompressed": {"compression": "none"},
    "arrow": {"format": "arrow"},
}


@pytest.fixture(scope="module", params=PROFILES)
def stored(kit: Any, request: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset of one small shard of several row groups."""
    written = kit.Written(str(tmp_path_factory.mktemp("data") / "ds"))
    settings = {**PROFILES[request.param], "shard_tokens": 1 << 20}
    data: Dataset = written.dataset([kit.some_packs(40)], **settings)
    assert len(data.manifest.shards) == 1
    assert len(data.row_groups) > 2
    return data


def regions(data: Dataset, path: Path) -> list[tuple[int, int]]:
    """Every column chunk of every row group, and the footer; of Arrow, thirds of the file."""
    size, footer = path.stat().st_size, data.manifest.shards[0].footer_bytes
    found = [(size - footer, size)]
    if path.suffix == ".arrow":
        cuts = np.linspace(8, size - footer, 4).astype(int).tolist()
        return [*found, *pairwise(cuts)]
    metadata = pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            start = chunk.data_page_offset
            found.append((start, start + chunk.total_compressed_size))
    return found


def same(a: Packs, b: Packs) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name == "reward")
        for name in Packs.__slots__
        if name not in ("columns", "ref_logps", "stand_in")
    )


def read(url: str) -> list[Packs]:
    data = open_dataset(url)
    return [data.decode(g, data.fetch(g)).row(0) for g in range(len(data.row_groups))] + list(
        data.iter_packs()
    )


def refuse_every_bit(
    path: Path, parse: Callable[[bytes], object], read: Callable[[], object]
) -> None:
    """Flips each bit of a manifest: `parse`, and at some of them `read`, must refuse it by name."""
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            parse(unsealed(bytes(spoiled), "manifest"))
        if bit % 101 == 0 or (bit // 8 > len(whole) - 80 and bit % 7 == 0):
            path.write_bytes(spoiled)
            with pytest.raises(FormatError, match=r"-000001\.json"):
                read()
    path.write_bytes(whole)
    read()


def test_every_flip_in_a_manifest_is_refused(kit: Any, tmp_path: Path) -> None:
    data = kit.Written(str(tmp_path / "ds")).dataset([kit.some_packs(3)])
    path = tmp_path / "ds" / "_packstore" / "manifest-000001.json"
    refuse_every_bit(path, Manifest.from_json, lambda: open_dataset(data.url))
    # Versions that were committed without the hash stay readable.
    path.write_bytes(data.manifest.to_json())
    assert open_dataset(data.url).manifest.fingerprint == data.manifest.fingerprint


def test_every_flip_in_a_side_manifest_is_refused(kit: Any, tmp_path: Path) -> None:
    data = kit.Written(str(tmp_path / "ds")).dataset([kit.some_packs(3)])
    url = str(tmp_path / "side")
    with SideWriter(url, data, {"x": "int64"}) as side:
        for packs in data.iter_packs():
            side.write(packs.example_ids, {"x": packs.example_ids})
    path = tmp_path / "side" / "_packstore" / "side-000001.json"
    refuse_every_bit(path, SideManifest.from_json, lambda: open_side(url))
    path.write_bytes(open_side(url).manifest.to_json())
    assert len(open_side(url)) == 3
