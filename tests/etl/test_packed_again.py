"""A dataset that is packed again keeps its settings, and what they mean for appends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_jobs import pairs, write_jsonl

import packstore
from packstore import errors
from packstore.cli import main

SETTINGS: dict[str, Any] = {
    "pack_size": 96,
    "layout": "shared_prefix",
    "share_prefixes": "pack",
    "max_length": 40,
    "max_keys": 900,
    "pad_to_multiple": 2,
    "shuffle": False,
    "strategy": "sequential",
    "seed": 3,
    "format": "arrow",
    "row_group_tokens": 300,
    "shard_tokens": 900,
    "dedup": "pair",
    "on": {"overlong": "truncate_response"},
    "max_drop_rate": 1.0,
}


def recorded(dataset: packstore.Dataset) -> dict[str, Any]:
    settings: dict[str, Any] = dataset.manifest.provenance["settings"]
    return settings


@pytest.mark.parametrize("door", ["python", "command"])
def test_settings_are_kept(door: str, tmp_path: Path) -> None:
    first = packstore.pack(pairs(60), tmp_path / "ds", **SETTINGS)
    place = str(tmp_path / "ds")
    if door == "python":
        again = packstore.pack(place, place, overwrite=True)
    else:
        assert main(["pack", place, place, "--overwrite", "--quiet"]) == 0
        again = packstore.open(place)
    assert again.version == 2
    assert recorded(again) == recorded(first)
    assert again.manifest.pack_size == 96
    assert again.manifest.file_format == "arrow"

    wider = packstore.pack(first, tmp_path / "wider", pack_size=200)
    assert recorded(wider) == {**recorded(first), "pack_size": 200}
    assert wider.verify().ok


def test_settings_of_the_job_win(tmp_path: Path) -> None:
    first = packstore.pack(pairs(60), tmp_path / "ds", **SETTINGS)
    config = packstore.PackConfig(pack_size=128)
    again = packstore.pack(first, tmp_path / "again", config=config)
    assert again.manifest.pack_size == 128
    assert again.manifest.file_format == "parquet"


def test_a_dry_run_plans_the_packs_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = packstore.pack(pairs(60), tmp_path / "ds", **SETTINGS)
    command = ["pack", first.url, str(tmp_path / "new"), "--dry-run", "--json"]
    assert main(command) == 0
    estimate = json.loads(capsys.readouterr().out)["estimate"]
    assert (estimate["pack_size"], estimate["share_prefixes"]) == (96, "pack")


def test_later_appends_still_drop_duplicates(tmp_path: Path) -> None:
    place = tmp_path / "ds"
    packstore.pack(pairs(60), place, **SETTINGS)
    packstore.pack(str(place), place, overwrite=True)
    grown = packstore.append(place, pairs(20, 50), max_drop_rate=1.0)
    assert grown.manifest.pairs == 70


def test_folded_splits_still_grow(tmp_path: Path) -> None:
    records = [{**pair, "prompt": [5, n]} for n, pair in enumerate(pairs(120))]
    settings = {"pack_size": 64, "validation_fraction": 0.3, "seed": 5}
    packstore.pack(records, tmp_path / "whole", **settings)
    packstore.pack(records[:60], tmp_path / "vf", **settings)
    packstore.append(tmp_path / "vf", records[60:90])
    for split in ("train", "validation"):
        place = str(tmp_path / "vf" / split)
        with pytest.raises(errors.ConfigError, match="seed"):
            packstore.pack(place, place, overwrite=True, seed=6)
        folded = packstore.pack(place, place, overwrite=True)
        assert len(folded.manifest.shards) == 1
    last = write_jsonl(tmp_path / "last.jsonl", records[90:])
    packstore.append(tmp_path / "vf", last)
    for split in ("train", "validation"):
        tokens = []
        for folder in ("vf", "whole"):
            dataset = packstore.open(tmp_path / folder / split)
            frame = packstore.scan(dataset, tokens=True).collect()
            tokens.append(sorted(str(sides) for sides in frame["input_ids"]))
        assert tokens[0] == tokens[1]
