"""Sorted input: packs hold examples from all over it, in every way of packing."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packstore

SOURCES = 40


def records(n: int = 6000) -> list[dict[str, Any]]:
    """Pairs of token ids, sorted by source; each source has lengths of its own."""
    rng = np.random.default_rng(0)
    return [
        {
            "prompt": [1 + i % 900] * int(rng.integers(1, 12 + i * 20 // n)),
            "chosen": [2] * int(rng.integers(1, 20)),
            "rejected": [3] * int(rng.integers(1, 20)),
            "source": f"s{i * SOURCES // n}",
        }
        for i in range(n)
    ]


def sources_of(dataset: packstore.Dataset) -> list[np.ndarray]:
    """The carried sources of each pack."""
    return [
        packs.columns["source"][a:b]
        for packs in dataset.iter_packs()
        for a, b in itertools.pairwise(packs.example_offsets)
    ]


def test_packing_shuffles_and_packing_anew_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"pack_size": 512, "carry": ("source",)}
    with caplog.at_level(logging.INFO, "packstore"):
        made = packstore.pack(records(), tmp_path / "made", **settings)
    assert "order of the input" not in caplog.text
    with caplog.at_level(logging.INFO, "packstore"):
        kept = packstore.pack(records(), tmp_path / "kept", shuffle=False, **settings)
    assert "(shuffle=False): packs hold neighbours of the input" in caplog.text
    anew = packstore.pack(kept, tmp_path / "anew", pack_size=512)
    found = {}
    for name, dataset in (("made", made), ("kept", kept), ("anew", anew)):
        packs = sources_of(dataset)
        drawn = sum(SOURCES * (1 - (1 - 1 / SOURCES) ** len(p)) for p in packs)
        found[name] = sum(len(set(p)) for p in packs) / drawn
        assert dataset.manifest.provenance["settings"]["shuffle"] is (name != "kept")
        assert dataset.manifest.statistics.planning["shuffle"] is (name != "kept")
    assert found["kept"] < 0.4
    assert 0.98 < found["made"] < 1.02
    assert 0.98 < found["anew"] < 1.02
    ids = [sorted(i for p in d.iter_packs() for i in p.example_ids.tolist()) for d in (made, kept)]
    assert ids[0] == ids[1]
    assert made.manifest.lineage == kept.manifest.lineage
    assert len(made) <= len(kept) + 1


def test_a_selection_does_not_depend_on_the_shuffle(tmp_path: Path) -> None:
    some = records(600)
    some += some[100:200]
    chosen = []
    for shuffle in (True, False):
        out = tmp_path / str(shuffle)
        packstore.pack(some, out, pack_size=512, shuffle=shuffle, dedup="pair",
                       validation_fraction=0.2)  # fmt: skip
        parts = [packstore.open(out / part) for part in ("train", "validation")]
        chosen.append(
            [sorted(i for p in d.iter_packs() for i in p.example_ids.tolist()) for d in parts]
        )
    assert chosen[0] == chosen[1]
    assert max(max(ids) for ids in chosen[0]) < 600
