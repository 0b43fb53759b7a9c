"""The setting `max_keys`: no pack has more, and examples that have are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packstore
from packstore.errors import DropRateError, RecordError

SETTINGS: dict[str, Any] = {"pack_size": 1024, "layout": "shared_prefix"}


def groups(num_responses: int) -> list[dict[str, Any]]:
    """Records with a prompt of 200 tokens, and a few short answers to it."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(60):
        answers = rng.integers(1, 900, (num_responses, 3)).tolist()
        scores = rng.normal(size=num_responses).tolist()
        prompt = rng.integers(1, 900, 200).tolist()
        records.append({"prompt": prompt, "responses": answers, "scores": scores})
    return records


def most_keys(dataset: packstore.Dataset) -> int:
    return max(int(packs.keys.max()) for packs in dataset.iter_packs())


def test_a_pack_has_at_most_16_times_its_size_or_as_set(tmp_path: Path) -> None:
    records = groups(45)
    free = packstore.pack(records, tmp_path / "free", **SETTINGS, max_keys=2**31 - 1)
    by_default = packstore.pack(records, tmp_path / "default", **SETTINGS)
    bound = packstore.pack(records, tmp_path / "bound", **SETTINGS, max_keys=10_000)
    assert most_keys(free) > 16 * 1024 >= most_keys(by_default)
    assert most_keys(bound) <= 10_000
    for dataset in (free, by_default, bound):
        assert dataset.verify().ok
        assert dataset.manifest.statistics.most_keys == most_keys(dataset)
        assert dataset.manifest.records.packed == 60
    assert bound.manifest.provenance["settings"]["max_keys"] == 10_000

    repacked = packstore.pack(free, tmp_path / "repacked", **SETTINGS, max_keys=10_000)
    assert most_keys(repacked) <= 10_000
    assert repacked.manifest.records.packed == 60


@pytest.mark.parametrize("pack_size", [1024, 16_384])
@pytest.mark.parametrize("source", ["records", "dataset"])
def test_an_example_of_more_keys_is_overlong(
    source: str, pack_size: int, tmp_path: Path
) -> None:
    """Also one that a pack would hold as whole sequences."""
    records = groups(45) + groups(2)
    given: Any = records
    if source == "dataset":
        given = packstore.pack(records, tmp_path / "whole", **SETTINGS)
    limits = {**SETTINGS, "pack_size": pack_size, "max_keys": 2000}
    limits["max_drop_rate"] = 1.0
    packed = packstore.pack(given, tmp_path / "out", **limits)
    assert packed.manifest.records.dropped == {"overlong": 60}
    assert most_keys(packed) <= 2000
    with pytest.raises(RecordError) as stop:
        packstore.pack(given, tmp_path / "no", **limits, on={"overlong": "error"})
    rule, _ = str(stop.value).split("; found")
    assert "max_keys" in rule
    with pytest.raises(DropRateError, match=r"Raise .*max_keys"):
        packstore.pack(given, tmp_path / "no", **{**limits, "max_drop_rate": 0.1})


@pytest.mark.parametrize("cut", ["truncate_prompt", "truncate_response"])
def test_a_cut_example_has_as_many_keys_as_allowed(cut: str, tmp_path: Path) -> None:
    limits = {**SETTINGS, "max_keys": 9100, "on": {"overlong": cut}}
    packed = packstore.pack(groups(45), tmp_path / "out", **limits)
    assert packed.manifest.records.packed == 60
    sums: set[int] = set()
    for packs in packed.iter_packs():
        starts = np.cumsum([0, *packs.num_responses])[:-1]
        sums |= set(np.add.reduceat(packs.lengths, starts).tolist())
    assert 9100 - 45 < min(sums) <= max(sums) <= 9100
