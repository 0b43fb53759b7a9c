"""Side data of a part of a dataset that was extended or combined: it joins what the
part is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import edit_manifest, manifest_path
from small_jobs import pack, pairs

import packstore
from packstore import Dataset
from packstore.errors import CompatibilityError, ConfigError
from packstore.format import Packs, to_offsets
from packstore.torch import PackedDataset, SideWriter

COLUMNS = {"ref_logps": "list<float32>", "score": "int64", "name": "string"}


def values_of(packs: Packs) -> dict[str, Any]:
    """A value of every column that follows from the tokens, so that an id of another
    part shows.
    """
    ids, lengths = packs.input_ids.astype(np.int64), packs.segment_lengths
    starts = to_offsets(lengths)[:-1]
    sums = np.add.reduceat(
        ids * (1 + np.arange(len(ids)) - np.repeat(starts, lengths)), starts
    )
    score = np.add.reduceat(sums, to_offsets(packs.num_responses)[:-1])
    return {
        "ref_logps": (-sums / 8).astype(np.float32),
        "score": score,
        "name": np.array([f"é{x}" for x in score], object),
    }


def side_of(dataset: Dataset, *names: str) -> str:
    """A side dataset with these columns, by default all."""
    columns = {name: COLUMNS[name] for name in names or COLUMNS}
    url = f"{dataset.url}-{dataset.version}-{'-'.join(columns)}"
    with SideWriter(url, dataset, columns) as writer:
        for packs in dataset.iter_packs():
            every = values_of(packs)
            values = {name: every[name] for name in columns}
            writer.write(packs.example_ids, values, packs.num_responses)
    return url


def assert_joined(
    dataset: Dataset | str,
    sides: Sequence[str],
    columns: Sequence[str] = tuple(COLUMNS),
) -> None:
    seen = 0
    for packs in PackedDataset(dataset, side=sides, seed=3, rank=0, world_size=1):
        for name in columns:
            found = packs.ref_logps if name == "ref_logps" else packs.columns[name]
            expected = values_of(packs)[name]
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        seen += len(packs.example_ids)
    opened = packstore.open(dataset) if isinstance(dataset, str) else dataset
    assert seen == opened.manifest.totals.examples


def test_after_append(tmp_path: Path) -> None:
    """That of the old version, with that of what was appended, packed alone; in any
    order.
    """
    one = pack(tmp_path / "ds", pairs(60))
    old, more = side_of(one), side_of(pack(tmp_path / "more", pairs(25, 60)))
    two = packstore.append(one, pairs(25, 60))
    assert_joined(two, [old, more])
    assert_joined(two, [more, old])
    assert_joined(one, [old])
    third = side_of(pack(tmp_path / "third", pairs(9, 85)))
    both = side_of(two)
    three = packstore.append(two, pairs(9, 85))
    assert_joined(three, [third, old, more])
    assert_joined(three, [both, third])  # both versions at once
    again = packstore.pack(
        three, tmp_path / "again", pack_size=100, layout="shared_prefix"
    )
    assert again.manifest.lineage == three.manifest.lineage
    for packs in PackedDataset(again, side=[both, third], rank=0, world_size=1):
        assert len(packs.ref_logps) == len(packs.lengths)


def test_after_concat(tmp_path: Path) -> None:
    """Of datasets that were combined before, and of one that comes twice."""
    a, b, c = (pack(tmp_path / name, pairs(20, 20 * i)) for i, name in enumerate("abc"))
    sides = a_side, b_side, c_side = [side_of(d) for d in (a, b, c)]
    whole = packstore.concat([a, b, c], str(tmp_path / "abc"))
    assert_joined(whole, sides[::-1])
    inner = packstore.concat([b, c], str(tmp_path / "bc"))
    outer = packstore.concat([a, inner, inner, b], str(tmp_path / "all"))
    assert_joined(outer, [a_side, b_side, c_side])
    bc_side = side_of(inner)
    with pytest.raises(CompatibilityError, match="source 0"):
        PackedDataset(outer, side=[bc_side])
    with pytest.raises(CompatibilityError, match="source 5"):
        PackedDataset(outer, side=[a_side, bc_side])
    repeated = packstore.concat(
        [inner, inner, inner, inner], str(tmp_path / "repeated")
    )
    assert_joined(
        repeated, [side_of(packstore.concat([inner] * 2, str(tmp_path / "two")))]
    )
    alone = packstore.concat([a, inner, inner], str(tmp_path / "five"))
    assert_joined(alone, [bc_side, a_side])
    assert_joined(packstore.concat([a], str(tmp_path / "one")), [a_side])


def test_answers_of_any_number(kit: Any, tmp_path: Path) -> None:
    """Log-probs of the sequences of each example, in packs that mix examples of both
    parts.
    """
    parts = [
        pack(tmp_path / n, kit.records(30, "scored", seed))
        for seed, n in enumerate("ab")
    ]
    sides = [side_of(part) for part in parts]
    whole = packstore.concat(parts, str(tmp_path / "ab"))
    mixed = packstore.pack(whole, tmp_path / "mixed", pack_size=200)
    assert any(
        len({i >> 40 for i in p.example_ids.tolist()}) == 2 for p in mixed.iter_packs()
    )
    assert_joined(mixed, sides)


def test_what_is_covered_twice_or_not_at_all(tmp_path: Path) -> None:
    a, b = pack(tmp_path / "a", pairs(30)), pack(tmp_path / "b", pairs(20, 30))
    a_side, b_side = side_of(a, "score"), side_of(b, "score")
    logps = side_of(b, "ref_logps")
    whole = packstore.concat([a, b], str(tmp_path / "ab"))
    whole_side, names = side_of(whole, "score"), side_of(whole, "name")
    assert_joined(whole, [a_side, b_side, names], ["score", "name"])
    other = side_of(pack(tmp_path / "other", pairs(30, 5)), "score")
    for sides, error, found in (
        ([a_side], CompatibilityError, "'score'.*source 1"),
        ([b_side], CompatibilityError, "source 0"),
        ([a_side, b_side, logps], CompatibilityError, "'ref_logps'"),
        ([a_side, b_side, other], CompatibilityError, "lineage"),
        ([a_side, b_side, b_side], ConfigError, "'score'"),
        ([whole_side, b_side], ConfigError, "'score'"),
        ([a_side, whole_side], ConfigError, "'score'"),
    ):
        with pytest.raises(error, match=found):
            PackedDataset(whole, side=sides)
    with pytest.raises(CompatibilityError, match="lineage"):
        PackedDataset(a, side=[whole_side])


def test_an_example_of_no_part_is_refused(tmp_path: Path) -> None:
    """Whose id was moved beyond the sources of its part."""
    a, b = pack(tmp_path / "a", pairs(30)), pack(tmp_path / "b", pairs(20, 30))
    sides = [side_of(a), side_of(b)]
    whole = packstore.concat([a, b], str(tmp_path / "ab"))
    edit_manifest(whole.url, lambda m: m["shards"][-1].update(example_id_base=7 << 40))
    with pytest.raises(CompatibilityError, match="7696581394"):
        list(PackedDataset(whole.url, side=sides))
    edit_manifest(
        open_side_url := sides[1],
        lambda m: m.update(kind="sft"),
        manifest_path(1, "side"),
    )
    with pytest.raises(CompatibilityError, match=f"{open_side_url}.*kind"):
        PackedDataset(whole.url, side=sides)
