"""Every single-bit flip in what a reader reads is found: none gives a wrong pack in silence."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packstore.errors import PackstoreError
from packstore.io.dataset import Dataset
from packstore.io.dataset import open as open_dataset
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
    settings = {**PROFILES[request.param], "shard_bytes": 1 << 20}
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


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flip_in_a_shard_raises(stored: Dataset, data: st.DataObject) -> None:
    path = Path(stored.shard_urls[0])
    whole = path.read_bytes()
    start, end = data.draw(st.sampled_from(regions(stored, path)))
    place, bit = data.draw(st.integers(start, end - 1)), data.draw(st.integers(0, 7))
    spoiled = bytearray(whole)
    spoiled[place] ^= 1 << bit
    expected = read(stored.url)
    path.write_bytes(spoiled)
    try:
        found = read(stored.url)
    except PackstoreError as error:
        assert path.name in str(error)  # noqa: PT017  (what else is raised fails the test)
        return
    finally:
        path.write_bytes(whole)
    # Bytes between two buffers of an Arrow file mean nothing, and no checksum covers them.
    assert path.suffix == ".arrow"
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_every_bit_of_a_row_group_raises(stored: Dataset) -> None:
    """All of them, not some: the checksum of the bytes of a Parquet row group."""
    path = Path(stored.shard_urls[0])
    if path.suffix == ".arrow":
        pytest.skip("the batch of an Arrow file has gaps; see above")
    reader = stored._readers[0]
    good = reader.fetch(1)
    assert isinstance(good, bytes)
    for bit in range(0, 8 * len(good), 5):
        spoiled = bytearray(good)
        spoiled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PackstoreError, match="row group 1"):
            reader.decode(1, bytes(spoiled))


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flip_in_a_manifest_raises_or_is_seen(stored: Dataset, data: st.DataObject) -> None:
    """The manifest has no checksum of its own; what a reader takes from it is checked."""
    path = Path(stored.url) / "_packstore" / "manifest-000001.json"
    whole = path.read_bytes()
    begin = whole.index(b'"shards"')
    place = data.draw(st.integers(begin, len(whole) - 1))
    spoiled = bytearray(whole)
    spoiled[place] ^= 1 << data.draw(st.integers(0, 7))
    expected, identity = read(stored.url), stored.manifest.fingerprint
    path.write_bytes(spoiled)
    try:
        found = read(stored.url)
        fingerprint = open_dataset(stored.url).manifest.fingerprint
    except PackstoreError:
        return
    finally:
        path.write_bytes(whole)
    assert fingerprint != identity or all(same(a, b) for a, b in zip(found, expected, strict=True))
