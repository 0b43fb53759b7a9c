"""Sorted input: packs hold examples from all over it, in every way of packing."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_jobs import write_jsonl

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
    files = [tmp_path / f"{i:02d}.jsonl" for i in range(48)]
    for file, part in zip(files, np.array_split(records(), 48), strict=True):
        write_jsonl(file, part.tolist())
    cut = packstore.pack(files, tmp_path / "cut", partitions=4, num_workers=0, **settings)
    found = {}
    for name, dataset in (("made", made), ("kept", kept), ("anew", anew), ("cut", cut)):
        packs = sources_of(dataset)
        drawn = sum(SOURCES * (1 - (1 - 1 / SOURCES) ** len(p)) for p in packs)
        found[name] = sum(len(set(p)) for p in packs) / drawn
        assert dataset.manifest.provenance["settings"]["shuffle"] is (name != "kept")
        assert dataset.manifest.statistics.planning["shuffle"] is (name != "kept")
    assert found["kept"] < 0.4
    assert 0.98 < found["made"] < 1.02
    assert 0.98 < found["anew"] < 1.02
    assert 0.97 < found["cut"] < 1.03
    ids = [sorted(i for p in d.iter_packs() for i in p.example_ids.tolist()) for d in (made, kept)]
    assert ids[0] == ids[1]
    assert made.manifest.lineage == kept.manifest.lineage
    assert len(made) <= len(kept) + 1
