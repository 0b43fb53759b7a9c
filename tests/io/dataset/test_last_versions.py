"""A view of the packs that the newest versions added."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from small_jobs import pack, pairs

import packstore
from packstore import Dataset
from packstore.errors import CompatibilityError, ConfigError
from packstore.torch import PackedDataLoader, PackedDataset, SideWriter

COUNTS = (30, 20, 7, 9)
"""Records of each version."""


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset of four versions."""
    place = tmp_path_factory.mktemp("grown") / "ds"
    dataset = pack(place, pairs(COUNTS[0]))
    for number, count in enumerate(COUNTS[1:], 1):
        more = pairs(count, first=sum(COUNTS[:number]))
        dataset = packstore.append(dataset, more)
    return dataset


def ids_of(dataset: Dataset | PackedDataset) -> list[int]:
    packs = dataset.iter_packs() if isinstance(dataset, Dataset) else dataset
    return sorted(np.concatenate([pack.example_ids for pack in packs]).tolist())


def write_scores(dataset: Dataset, url: Path) -> str:
    """Writes a side dataset whose `score` is the example id; returns its URL."""
    with SideWriter(str(url), dataset, {"score": "int64"}) as writer:
        for packs in dataset.iter_packs():
            writer.write(packs.example_ids, {"score": packs.example_ids})
    return str(url)


def test_a_view_has_the_packs_of_the_last_versions(grown: Dataset) -> None:
    view = grown.last_versions(2)
    expected = [i for i in ids_of(grown) if i >> 40 in (2, 3)]
    assert ids_of(view) == expected
    assert len(expected) == sum(COUNTS[2:]) == view.manifest.totals.examples
    assert view.version == grown.version
    assert view.manifest.lineage == grown.manifest.lineage
    assert view.manifest.fingerprint != grown.manifest.fingerprint

    assert ids_of(view.last_versions(1)) == ids_of(grown.last_versions(1))
    assert ids_of(grown.last_versions(4)) == ids_of(grown.last_versions(9))
    assert packstore.scan(view).collect()["example_id"].sort().to_list() == expected
    with pytest.raises(ConfigError, match="last_versions"):
        grown.last_versions(0)


def test_sizes_and_checks_are_those_of_the_view(grown: Dataset) -> None:
    view = pickle.loads(pickle.dumps(grown.last_versions(2)))
    num_packs = len(view)
    all_sizes = grown.pack_index.take(slice(len(grown) - num_packs, None))
    np.testing.assert_array_equal(view.pack_index.counts, all_sizes.counts)
    assert view.manifest.totals.tokens == all_sizes.tokens.sum()

    report = view.verify()
    assert not report.problems
    assert report.shards == len(view.manifest.shards) < len(grown.manifest.shards)
    assert report.totals.tokens == view.manifest.totals.tokens


def test_a_loader_reads_the_view(grown: Dataset) -> None:
    dataset = PackedDataset(grown.url, last_versions=2, rank=0, world_size=1)
    assert dataset.num_packs == len(grown.last_versions(2))
    assert ids_of(dataset) == ids_of(grown.last_versions(2))
    loader = PackedDataLoader(dataset, examples_per_step=4)
    assert sum(len(batch.example_ids) for batch in loader) == sum(COUNTS[2:])

    # A position in one window says nothing about another.
    other = PackedDataset(grown.url, last_versions=3, rank=0, world_size=1)
    with pytest.raises(CompatibilityError, match="dataset"):
        other.load_state_dict(dataset.state_dict())
    stream = PackedDataset.mix({grown: 1.0}, rank=0, world_size=1).stream
    with pytest.raises(ConfigError, match="last_versions"):
        PackedDataset(stream, last_versions=1)


def test_side_data_need_to_cover_the_view_only(grown: Dataset, tmp_path: Path) -> None:
    view = grown.last_versions(2)
    parts = [
        write_scores(
            pack(tmp_path / f"part{n}", pairs(COUNTS[n], sum(COUNTS[:n]))), url
        )
        for n in (1, 2, 3)
        for url in [tmp_path / f"side{n}"]
    ]
    for sides in (parts[1:], parts):
        for packs in PackedDataset(view, side=sides, rank=0, world_size=1):
            np.testing.assert_array_equal(
                packs.columns["score"], packs.example_ids & ((1 << 40) - 1)
            )
    with pytest.raises(CompatibilityError, match="source 3"):
        PackedDataset(view, side=parts[:2])
    with pytest.raises(ConfigError, match="score"):
        PackedDataset(view, side=[*parts[1:], parts[2]])

    # A run of parts may begin before the view.
    older = packstore.open(grown.url, version=3)
    older_side = write_scores(older, tmp_path / "older")
    ids_from_start = PackedDataset(view, side=[older_side, parts[2]])
    assert ids_of(ids_from_start) == ids_of(view)

    # Side data of the view have the ids of the dataset.
    view_side = write_scores(view, tmp_path / "view")
    for packs in PackedDataset(view, side=view_side, rank=0, world_size=1):
        np.testing.assert_array_equal(packs.columns["score"], packs.example_ids)
    with pytest.raises(CompatibilityError, match="66"):
        PackedDataset(grown, side=view_side)


def test_a_view_is_not_extended(grown: Dataset, tmp_path: Path) -> None:
    view = grown.last_versions(1)
    with pytest.raises(ConfigError, match="view"):
        packstore.append(view, pairs(3, 500))
    with pytest.raises(ConfigError, match="view"):
        packstore.concat([view], str(tmp_path / "out"))
    repacked = pack(tmp_path / "repacked", view)
    assert ids_of(repacked) == ids_of(view)


def test_parts_of_combined_datasets_are_versions(tmp_path: Path) -> None:
    first, second = (pack(tmp_path / n, pairs(9, i)) for i, n in enumerate("ab"))
    joined = packstore.concat([first, second], str(tmp_path / "ab"))
    assert ids_of(joined.last_versions(1)) == [i for i in ids_of(joined) if i >> 40]
    assert first.last_versions(1) is first


def test_versions_that_were_packed_again_are_one(
    grown: Dataset, tmp_path: Path
) -> None:
    folded = pack(tmp_path / "folded", grown)
    two = packstore.append(folded, pairs(5, first=200))
    assert ids_of(two.last_versions(1)) == [i for i in ids_of(two) if i >> 40 == 4]
    assert two.last_versions(2) is two
