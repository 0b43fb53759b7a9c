"""Room for the padding of sequences: what is padded while loading still fits
the pack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packstore

RNG = np.random.default_rng(0)
RECORDS = [
    {
        "prompt": RNG.integers(1, 90, 1 + i % 7).tolist(),
        "chosen": RNG.integers(1, 90, RNG.integers(1, 30)).tolist(),
        "rejected": RNG.integers(1, 90, RNG.integers(1, 30)).tolist(),
    }
    for i in range(300)
]
M = 8


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("pack_size", [96, 100])
def test_padded_packs_fit(tmp_path: Path, layout: str, pack_size: int) -> None:
    torch = pytest.importorskip("torch")
    from packstore.torch import PackedDataset, collate, pad_segments

    settings: dict[str, Any] = {"pack_size": pack_size, "layout": layout}
    dataset = packstore.pack(
        RECORDS,
        tmp_path / "out",
        pad_to_multiple=M,
        on={"identical_sides": "keep"},
        **settings,
    )
    padded = [
        pad_segments(collate([sample], "preference"), M)
        for sample in PackedDataset(str(tmp_path / "out"), shuffle=False)
    ]
    tokens = [batch.num_tokens for batch in padded]
    assert max(tokens) <= pack_size
    assert all(not (torch.diff(batch.cu_seqlens) % M).any() for batch in padded)
    planning = dataset.manifest.statistics.planning
    assert planning["pad_to_multiple"] == M
    assert planning["aligned_tokens"] == sum(tokens)
    assert planning["tokens"] == dataset.manifest.totals.tokens < sum(tokens)
    assert planning["fill_rate"] == pytest.approx(dataset.manifest.fill_rate)
    assert planning["aligned_fill_rate"] == pytest.approx(
        sum(tokens) / (pack_size * len(dataset))
    )
    # Packed anew with other settings, and back, by the records' own sizes.
    tight = packstore.pack(dataset, tmp_path / "tight", pad_to_multiple=1, **settings)
    again = packstore.pack(tight, tmp_path / "again", pad_to_multiple=M, **settings)
    assert len(tight) < len(dataset)
    assert again.manifest.statistics.planning["aligned_tokens"] == sum(tokens)


@pytest.mark.parametrize("overlong", ["drop", "truncate_prompt", "truncate_response"])
def test_what_fits_only_without_padding(tmp_path: Path, overlong: str) -> None:
    """Two sequences of 9 tokens: 18 of 24, but 32 once padded to multiples of 8 (or
    16).
    """
    record = {
        "prompt": [1, 2, 3, 4],
        "chosen": [5, 6, 7, 8, 9],
        "rejected": [9, 8, 7, 6, 5],
    }
    short = {"prompt": [1], "chosen": [2], "rejected": [3]}
    records = [record, *[short] * 9]
    made = packstore.pack(
        records,
        tmp_path / "out",
        pack_size=24,
        layout="concat",
        pad_to_multiple=M,
        on={"overlong": overlong},
    )
    assert made.manifest.records.dropped == (
        {"overlong": 1} if overlong == "drop" else {}
    )
    for packs in made.iter_packs():
        padded = -(-packs.segment_lengths // M) * M
        assert np.add.reduceat(padded, packs.sequence_offsets[:-1]).max() <= 24
    whole = packstore.pack(
        records,
        tmp_path / "whole",
        pack_size=24,
        layout="concat",
        on={"overlong": "error"},
    )
    assert whole.manifest.records.packed == 10
