"""The layout that nobody set follows the kind of the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import packstore
from packstore.etl.reports.records import dry_run

PROMPT = list(range(1, 9))
RECORDS: dict[str, dict[str, Any]] = {
    "preference": {"prompt": PROMPT, "chosen": [20, 21], "rejected": [22]},
    "scored": {"prompt": PROMPT, "responses": [[20], [21], [22]], "scores": [1, 0, 2]},
    "sft": {"prompt": PROMPT, "response": [20, 21]},
}
LAYOUTS = {"preference": "shared_prefix", "scored": "shared_prefix", "sft": "concat"}


def pack(place: Path, record: str, **settings: Any) -> packstore.Dataset:
    records = [
        {**RECORDS[record], "prompt": [*PROMPT, 30 + number]} for number in range(30)
    ]
    return packstore.pack(records, place, pack_size=64, **settings)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("says_kind", [True, False])
def test_the_layout_follows_the_kind(
    tmp_path: Path, kind: str, says_kind: bool
) -> None:
    settings: dict[str, Any] = {"kind": kind} if says_kind else {}
    dataset = pack(tmp_path / "ds", kind, **settings)
    layout = LAYOUTS[kind]
    assert dataset.manifest.layout == layout
    assert dataset.manifest.provenance["settings"]["layout"] == layout
    assert dataset.verify().ok

    named = pack(tmp_path / "named", kind, layout=layout, **settings)
    assert named.manifest.fingerprint == dataset.manifest.fingerprint
    other = "concat" if layout == "shared_prefix" else "shared_prefix"
    dataset = pack(tmp_path / "other", kind, layout=other, **settings)
    assert dataset.manifest.layout == other


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_job_that_names_the_layout_is_the_same_job(tmp_path: Path, kind: str) -> None:
    dataset = pack(tmp_path / "ds", kind)
    again = pack(tmp_path / "ds", kind, layout=LAYOUTS[kind])
    assert again.version == dataset.version == 1


def test_examples_are_measured_as_they_are_stored(tmp_path: Path) -> None:
    """Two sequences of 40 tokens fit a pack of 64, as they share a prompt of 30."""
    record = {"prompt": [*range(30)], "chosen": [31] * 10, "rejected": [32] * 10}
    settings: dict[str, Any] = {"pack_size": 64, "on": {"overlong": "error"}}
    dataset = packstore.pack([record] * 5, tmp_path / "ds", **settings)
    assert dataset.manifest.pairs == 5
    with pytest.raises(packstore.PackstoreError, match="overlong"):
        packstore.pack([record] * 5, tmp_path / "no", layout="concat", **settings)

    report, _ = dry_run([record] * 5, str(tmp_path / "dry"), **settings)
    choice, *_ = report.choices
    assert (choice.layout, choice.dropped) == ("shared_prefix", 0)


@pytest.mark.parametrize("as_url", [False, True])
def test_a_dry_run_packs_a_dataset_anew(tmp_path: Path, as_url: bool) -> None:
    dataset = pack(tmp_path / "ds", "preference")
    source = dataset.url if as_url else dataset
    report, findings = dry_run(source, str(tmp_path / "dry"), pack_size=128)
    assert all(finding.ok for finding in findings)
    assert report.choices[0].examples == dataset.manifest.pairs

    settings: dict[str, Any] = {"pack_size": 8, "on": {"overlong": "error"}}
    report, findings = dry_run(source, str(tmp_path / "dry"), **settings)
    assert report.choices[0].dropped == dataset.manifest.pairs
    assert not all(finding.ok for finding in findings)


@pytest.fixture
def long_prompts() -> list[dict[str, Any]]:
    """Half of the records fit a pack of 64 only if their prompt is stored once."""
    records = []
    for number in range(40):
        prompt = [number, *range(40 if number % 2 else 4)]
        records.append({"prompt": prompt, "chosen": [50] * 9, "rejected": [51] * 12})
    return records


def assert_dry_run_compares(
    source: Any, folder: Path, layout: str, **settings: Any
) -> None:
    """Assert that a dry run shows for each layout what a job with it makes."""
    report, _ = dry_run(source, str(folder / "dry"), layout=layout, **settings)
    assert report.choices[0].layout == layout
    estimated = packstore.estimate(source, **settings).choices
    assert len(report.choices) == len(estimated)
    for choice in report.choices:
        assert choice in estimated
        if choice.share_prefixes == "pack":
            continue
        settings_of_job = {**settings, "layout": choice.layout, "max_drop_rate": 1.0}
        dataset = packstore.pack(source, folder / choice.layout, **settings_of_job)
        assert choice.examples == dataset.manifest.pairs
        assert choice.packs == len(dataset)


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("overlong", ["drop", "truncate_prompt", "truncate_response"])
def test_a_dry_run_compares_layouts_by_the_records_that_each_keeps(
    long_prompts: list[dict[str, Any]], tmp_path: Path, layout: str, overlong: str
) -> None:
    settings: dict[str, Any] = {"pack_size": 64, "on": {"overlong": overlong}}
    assert_dry_run_compares(long_prompts, tmp_path, layout, **settings)


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_a_dry_run_of_a_dataset_compares_layouts_too(
    long_prompts: list[dict[str, Any]], tmp_path: Path, layout: str
) -> None:
    dataset = packstore.pack(long_prompts, tmp_path / "ds", pack_size=128)
    assert_dry_run_compares(dataset, tmp_path, layout, pack_size=64)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_packing_again_keeps_the_layout_or_follows_the_kind(
    tmp_path: Path, kind: str
) -> None:
    other = "concat" if LAYOUTS[kind] == "shared_prefix" else "shared_prefix"
    dataset = pack(tmp_path / "ds", kind, layout=other)
    same = packstore.pack(dataset, tmp_path / "same", pack_size=128)
    assert same.manifest.layout == other
    anew = packstore.pack(dataset, tmp_path / "anew", layout="auto")
    assert anew.manifest.layout == LAYOUTS[kind]
    assert anew.manifest.provenance["settings"]["layout"] == LAYOUTS[kind]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("layout", ["auto", "concat", "shared_prefix"])
def test_appended_packs_have_the_layout_of_the_dataset(
    tmp_path: Path, kind: str, layout: str
) -> None:
    dataset = pack(tmp_path / "ds", kind, layout=layout)
    record = {**RECORDS[kind], "prompt": [*PROMPT, 90]}
    longer = packstore.append(dataset, [record] * 5)
    assert longer.version == 2
    assert longer.manifest.layout == dataset.manifest.layout
    assert longer.verify().ok


def test_an_estimate_compares_both_layouts() -> None:
    for kind, record in RECORDS.items():
        for settings in ({}, {"layout": "auto"}, {"layouts": ["auto"]}):
            report = packstore.estimate([record] * 9, pack_sizes=[64], **settings)
            layouts = [(c.layout, c.share_prefixes) for c in report.choices]
            assert layouts == [
                ("concat", "example"),
                ("shared_prefix", "example"),
                ("shared_prefix", "pack"),
            ], (kind, settings)
