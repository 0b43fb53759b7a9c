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


def records(n: int = 3000) -> list[dict[str, Any]]:
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


def mixture(dataset: packstore.Dataset) -> float:
    """Distinct sources of a pack, over those of as many examples drawn by chance."""
    seen = drawn = 0.0
    for packs in dataset.iter_packs():
        for first, last in itertools.pairwise(packs.example_offsets):
            seen += len(set(packs.columns["source"][first:last]))
            drawn += SOURCES * (1 - (1 - 1 / SOURCES) ** (last - first))
    return seen / drawn


def test_packing_shuffles_and_packing_anew_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"pack_size": 512, "carry": ("source",)}
    with caplog.at_level(logging.INFO, "packstore"):
        made = packstore.pack(records(), tmp_path / "made", **settings)
        assert "order of the input" not in caplog.text
        assert f"fill rate {100 * made.manifest.fill_rate:.2f} %" in caplog.text
        kept = packstore.pack(records(), tmp_path / "kept", shuffle=False, **settings)
        assert "(shuffle=False): packs hold neighbours of the input" in caplog.text
    again = packstore.pack(kept, tmp_path / "again")
    anew = packstore.pack(kept, tmp_path / "anew", shuffle=True)
    parts = enumerate(np.array_split(records(), 48))
    files = [
        write_jsonl(tmp_path / f"{i:02d}.jsonl", part.tolist()) for i, part in parts
    ]
    cut = packstore.pack(
        files, tmp_path / "cut", partitions=4, num_workers=0, **settings
    )
    assert mixture(kept) < 0.4
    for dataset in (made, anew, cut):
        assert 0.97 < mixture(dataset) < 1.03
    for dataset in (made, kept, again, anew, cut):
        planning = dataset.manifest.statistics.planning
        # Packing again keeps the settings, unless others are given.
        assert planning["shuffle"] is (dataset not in (kept, again))
        assert dataset.manifest.provenance["settings"]["shuffle"] is planning["shuffle"]
    assert made.manifest.lineage == kept.manifest.lineage
    assert len(made) <= len(kept) + 1
