"""Room for the padding of sequences: what is padded while loading still fits the pack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_jobs import write_jsonl

import packstore
from packstore.config import PlanConfig
from packstore.errors import ConfigError, InputError

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
    from packstore.torch import PackedDataset, collate
    from packstore.torch.parallel import pad_segments

    settings: dict[str, Any] = {"pack_size": pack_size, "layout": layout}
    dataset = packstore.pack(
        RECORDS, tmp_path / "out", pad_to_multiple=M, on={"identical_sides": "keep"}, **settings
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
    assert planning["aligned_fill_rate"] == pytest.approx(sum(tokens) / (pack_size * len(dataset)))
    # Packed anew with other settings, and back, by the records' own sizes.
    tight = packstore.pack(dataset, tmp_path / "tight", **settings)
    again = packstore.pack(tight, tmp_path / "again", pad_to_multiple=M, **settings)
    assert len(tight) < len(dataset)
    assert again.manifest.statistics.planning["aligned_tokens"] == sum(tokens)


@pytest.mark.parametrize("overlong", ["drop", "truncate_prompt", "truncate_response"])
def test_what_fits_only_without_padding(tmp_path: Path, overlong: str) -> None:
    """Two sequences of 9 tokens: 18 of 24, but 32 once padded to multiples of 8 (or 16)."""
    record = {"prompt": [1, 2, 3, 4], "chosen": [5, 6, 7, 8, 9], "rejected": [9, 8, 7, 6, 5]}
    short = {"prompt": [1], "chosen": [2], "rejected": [3]}
    records = [record, *[short] * 9]
    made = packstore.pack(
        records, tmp_path / "out", pack_size=24, pad_to_multiple=M, overlong=overlong
    )
    assert made.manifest.records.dropped == ({"overlong": 1} if overlong == "drop" else {})
    for packs in made.iter_packs():
        padded = -(-packs.segment_lengths // M) * M
        assert np.add.reduceat(padded, packs.sequence_offsets[:-1]).max() <= 24
    whole = packstore.pack(records, tmp_path / "whole", pack_size=24, overlong="error")
    assert whole.manifest.records.packed == 10


def test_a_plan_rounds_lengths_up() -> None:
    made = packstore.plan([3, 8, 9, 4], config=PlanConfig(pack_size=24, pad_to_multiple=M))
    assert made.lengths.tolist() == [8, 8, 16, 8]
    assert (made.tokens, made.aligned_tokens, made.num_packs) == (24, 40, 2)
    assert (made.fill_rate, made.aligned_fill_rate) == (24 / 48, 40 / 48)
    with pytest.raises(InputError, match=r"1 to 20 tokens .*found 24"):
        packstore.plan([17], config=PlanConfig(pack_size=20, pad_to_multiple=M))
    with pytest.raises(ConfigError, match="pad_to_multiple must be at least 1; found 0"):
        PlanConfig(pad_to_multiple=0)


def test_commands_tell_both_fills(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_jsonl(source, RECORDS)

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "packstore", *command],
            capture_output=True, encoding="utf-8", check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    more = ["--pad-to-multiple", str(M), "--on", "identical_sides=keep"]
    choices = json.loads(run("estimate", str(source), "--pack-sizes", "96", *more, "--json"))[
        "choices"
    ]
    packed = packstore.pack(
        source, tmp_path / "out", pack_size=96, pad_to_multiple=M, on={"identical_sides": "keep"}
    )
    planning = packed.manifest.statistics.planning
    (choice,) = (c for c in choices if (c["layout"], c["strategy"]) == ("concat", "pool"))
    for name in ("fill_rate", "aligned_fill_rate"):
        assert choice[name] == pytest.approx(planning[name])
    text = f"fill: {planning['fill_rate']:.2%}, {planning['aligned_fill_rate']:.2%} once"
    assert text in run("stats", str(tmp_path / "out"))
