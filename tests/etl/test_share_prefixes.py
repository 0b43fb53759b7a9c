"""The setting `share_prefixes`: packs whose examples share what they begin with."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from places import Files
from small_jobs import write_jsonl

import packstore
from packstore.cli import main
from packstore.errors import ConfigError
from packstore.etl.reports.records import dry_run

SETTINGS: dict[str, Any] = {
    "pack_size": 1024,
    "layout": "shared_prefix",
    "share_prefixes": "pack",
    "row_group_tokens": 4096,
}


def turns(rollouts: int, seed: int = 0) -> list[dict[str, Any]]:
    """A pair for each turn of some rollouts, in random order."""
    draw = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [draw.randrange(1, 900) for _ in range(n)]

    records = []
    for _ in range(rollouts):
        prompt = ids(draw.randint(20, 60))
        for _ in range(draw.randint(2, 10)):
            records.append({"prompt": prompt, "chosen": ids(9), "rejected": ids(7)})
            if draw.random() < 0.8:  # else the turn is tried again
                prompt = [*prompt, *records[-1]["chosen"], *ids(9)]
    draw.shuffle(records)
    return records


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("in")
    return [write_jsonl(folder / f"{n}.jsonl", turns(40, n)) for n in range(3)]


def examples(dataset: packstore.Dataset) -> dict[int, Any]:
    """Everything of each example, under its id."""
    frame = packstore.scan(dataset, tokens=True).collect().drop("pack", "shard")
    assert frame["example_id"].is_unique().all()
    return {row.pop("example_id"): row for row in frame.to_dicts()}


@pytest.mark.parametrize("segment_bytes", [32 << 20, 20_000])
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_is_there_once_and_takes_less(
    files: list[str],
    segment_bytes: int,
    partitions: int,
    shuffle: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the temporary files of what was read are many, else of 32 MB each."""
    monkeypatch.setattr("packstore.etl.spill.SEGMENT_BYTES", segment_bytes)
    settings = {**SETTINGS, "partitions": partitions, "shuffle": shuffle}
    packed = packstore.pack(files, tmp_path / "pack", **settings)
    alone = packstore.pack(
        files, tmp_path / "example", **{**settings, "share_prefixes": "example"}
    )
    assert packed.verify().ok
    assert examples(packed) == examples(alone)
    assert packed.manifest.totals.tokens < 0.65 * alone.manifest.totals.tokens
    assert packed.manifest.fill_rate > 0.85
    assert packed.manifest.statistics.most_keys <= 16 * 1024
    planning = packed.manifest.statistics.planning
    assert planning["tokens"] == planning["aligned_tokens"]
    assert planning["tokens"] == packed.manifest.totals.tokens


def test_the_same_bytes_for_any_number_of_workers(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packstore.etl.spill.SEGMENT_BYTES", 20_000)
    datasets = [
        packstore.pack(
            files, tmp_path / str(n), num_workers=n, partitions=2, **SETTINGS
        )
        for n in (0, 1, 4)
    ]
    contents = [Files(dataset.url).all() for dataset in datasets]
    assert contents[0] == contents[1] == contents[2]


def test_a_dataset_is_packed_anew_and_appended_to(
    files: list[str], tmp_path: Path
) -> None:
    packed = packstore.pack(files[0], tmp_path / "pack", **SETTINGS)
    whole = packstore.pack(packed, tmp_path / "whole", pack_size=1024, layout="concat")
    again = packstore.pack(whole, tmp_path / "again", **SETTINGS)
    assert again.verify().ok
    assert examples(again) == examples(whole) == examples(packed)
    assert again.manifest.totals.tokens < 0.5 * whole.manifest.totals.tokens

    grown = packstore.append(str(tmp_path / "pack"), files[1])
    assert grown.verify().ok
    new = packstore.pack(files[1], tmp_path / "new", **SETTINGS)
    assert (
        grown.manifest.totals.tokens
        == packed.manifest.totals.tokens + new.manifest.totals.tokens
    )


def test_an_estimate_and_a_dry_run_say_what_it_saves(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"pack_size": 1024}
    report = packstore.estimate(files, **sizes)
    example, pack = report.choices[1:]
    assert (example.share_prefixes, pack.share_prefixes) == ("example", "pack")
    assert pack.stored_rate < 0.65 * example.stored_rate
    assert pack.packs < 0.7 * example.packs
    packed = packstore.pack(files, tmp_path / "out", **SETTINGS)
    assert pack.packs == len(packed)

    (only,) = packstore.estimate(
        files, **sizes, layouts=["shared_prefix"], share_prefixes="pack"
    ).choices
    assert only == pack
    dry, _ = dry_run(files, str(tmp_path / "new"), **SETTINGS)
    assert dry.choices[0] == pack
    assert example in dry.choices

    capsys.readouterr()
    job = ["pack", *files, str(tmp_path / "new"), "--pack-size", "1024"]
    assert main([*job, "--dry-run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["estimate"] == asdict(example)
    assert asdict(pack) in result["alternatives"]


@pytest.mark.parametrize("segment_bytes", [32 << 20, 20_000])
def test_limits_hold_of_records_that_are_sorted_on_disk(
    files: list[str],
    segment_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some are overlong, and others are packed by their own keys."""
    monkeypatch.setattr("packstore.etl.spill.SEGMENT_BYTES", segment_bytes)
    settings = {**SETTINGS, "pack_size": 160, "max_keys": 500, "max_drop_rate": 1.0}
    packed = packstore.pack(files, tmp_path / "out", **settings)
    assert packed.verify().ok
    assert packed.manifest.statistics.most_keys <= 500
    assert packed.manifest.records.dropped["overlong"] > 20
    (choice,) = packstore.estimate(
        files, pack_size=160, layout="shared_prefix", share_prefixes="pack",
        max_keys=500,
    ).choices  # fmt: skip
    assert choice.dropped == packed.manifest.records.dropped["overlong"]
    assert abs(choice.packs - len(packed)) <= 0.04 * len(packed)


@pytest.mark.parametrize("max_keys", [1500, 3000])
def test_an_estimate_is_the_most_that_is_stored_where_packs_are_split(
    files: list[str], max_keys: int, tmp_path: Path
) -> None:
    """Rollouts are not split, as each part would store its beginning."""
    settings = {**SETTINGS, "max_keys": max_keys}
    packed = packstore.pack(files, tmp_path / "out", **settings)
    assert packed.manifest.fill_rate < 0.8
    settings.pop("row_group_tokens")
    (choice,) = packstore.estimate(files, **settings).choices
    totals = packed.manifest.totals
    assert totals.tokens / totals.logical_tokens <= choice.stored_rate
    assert packed.manifest.fill_rate <= choice.fill_rate
    assert len(packed) == choice.packs


def test_a_sample_shows_the_least(files: list[str]) -> None:
    """Records that begin alike are seldom drawn together."""
    whole = packstore.estimate(files, pack_size=1024).choices[-1]
    part = packstore.estimate(files, pack_size=1024, sample=100).choices[-1]
    assert part.stored_rate > whole.stored_rate


def test_sft_shares_only_if_its_packs_do(tmp_path: Path) -> None:
    records = [
        {"prompt": turn["prompt"], "completion": turn["chosen"]} for turn in turns(30)
    ]
    sizes = {"pack_size": 1024}
    whole = packstore.pack(records, tmp_path / "whole", **sizes)
    shared = packstore.pack(
        records, tmp_path / "shared", **sizes, share_prefixes="pack"
    )
    assert (whole.manifest.layout, shared.manifest.layout) == (
        "concat",
        "shared_prefix",
    )
    assert shared.verify().ok
    assert examples(shared) == examples(whole)
    assert shared.manifest.totals.tokens < 0.6 * whole.manifest.totals.tokens


def test_it_is_refused_where_nothing_is_shared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share_prefixes"):
        packstore.pack(turns(2), tmp_path, layout="concat", share_prefixes="pack")
