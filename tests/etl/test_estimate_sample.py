"""An estimate takes its sample from all over the input, and gives the error of its
counts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import packstore
from packstore import estimate
from packstore.cli import main
from packstore.errors import ConfigError

RNG = random.Random(1)
LENGTHS = sorted(int(RNG.lognormvariate(4, 0.8)) + 2 for _ in range(3000))
LONG = 400
"""Tokens of a pack: some pairs are longer."""


def record(length: int) -> dict[str, list[int]]:
    """A pair of 3 x `length` tokens: the prompt is stored twice."""
    return {
        "prompt": [7] * length,
        "chosen": [8] * (length // 2),
        "rejected": [9] * (length // 2),
    }


def write(path: Path, lengths: list[int]) -> Path:
    path.write_text(
        "".join(json.dumps(record(n)) + "\n" for n in lengths), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short records first."""
    return write(tmp_path_factory.mktemp("sample") / "ordered.jsonl", LENGTHS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is small: it has as many places as a large one, if they are
    small too.
    """
    monkeypatch.setattr("packstore.etl.reports.records.SAMPLE_BLOCK_BYTES", 1 << 13)


def sampled(source: Any, records: int = 900, **settings: Any) -> Any:
    return estimate(
        source, pack_sizes=(LONG,), sample=records, layouts=["concat"], **settings
    )


@pytest.fixture(scope="module")
def truth(ordered: Path) -> Any:
    """All records."""
    found = sampled(ordered, len(LENGTHS))
    assert found.sample.is_complete
    return found


@pytest.mark.parametrize(
    "how", [{}, {"max_length": 100}, {"on": {"overlong": "truncate_prompt"}}], ids=str
)
def test_a_small_input_is_read_in_full_and_is_exact(
    how: dict[str, Any], ordered: Path, tmp_path: Path
) -> None:
    (choice,) = sampled(ordered, len(LENGTHS), **how).choices
    packed = packstore.pack(
        ordered,
        tmp_path / "out",
        pack_size=LONG,
        layout="concat",
        max_drop_rate=0.9,
        **how,
    )
    overlong = packed.manifest.records.dropped["overlong"]
    assert (choice.packs, choice.dropped) == (len(packed), overlong)
    assert (choice.packs_error, choice.dropped_error) == (0, 0)


def test_input_in_order_of_length_is_estimated_within_the_stated_error(
    truth: Any, ordered: Path
) -> None:
    (true,) = truth.choices
    packs, dropped = 0, 0
    for seed in range(10):
        found = sampled(ordered, seed=seed)
        (choice,) = found.choices
        assert 300 < found.tally.read <= 900
        assert found.sample.total == len(LENGTHS)
        packs += abs(choice.packs - true.packs) <= choice.packs_error < 0.2 * true.packs
        dropped += abs(choice.dropped - true.dropped) <= choice.dropped_error
    assert packs >= 9
    assert dropped >= 9


def test_lists_and_tables_are_sampled_and_generators_are_not(truth: Any) -> None:
    records = [record(n) for n in LENGTHS]
    (true,) = truth.choices
    found = sampled(records)
    assert found.sample.total == len(records)
    assert abs(found.choices[0].packs - true.packs) <= found.choices[0].packs_error

    def endless() -> Iterator[dict[str, list[int]]]:
        while True:
            yield from records

    found = sampled(endless())
    assert found.sample.total is None
    assert found.scale == 1
    assert found.choices[0].packs_error is None


def test_a_dataset_is_sampled(ordered: Path, tmp_path: Path) -> None:
    packed = packstore.pack(
        ordered, tmp_path / "out", pack_size=4200, row_group_tokens=4200, strategy="none",
    )  # fmt: skip
    true, found = sampled(packed, len(LENGTHS)), sampled(packed)
    assert found.sample.total == len(LENGTHS) > 2 * found.tally.read
    (a,), (b,) = true.choices, found.choices
    assert abs(a.packs - b.packs) <= b.packs_error < 0.2 * a.packs


def test_pack_size_and_layout_are_respected(
    ordered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--pack-size", "1024", "--layout", "concat", "--strategy", "none"]
    assert main(["estimate", str(ordered), *flags, "--json"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["choices"]
    assert (choice["pack_size"], choice["layout"]) == (1024, "concat")
    settings = {"pack_size": 1024, "layout": "concat", "strategy": "none"}
    (same_choice,) = estimate(ordered, None, **settings).choices
    assert same_choice.packs == choice["packs"] == choice["examples"]
    with pytest.raises(ConfigError, match="pack_size"):
        estimate(ordered, pack_sizes=(512,), pack_size=1024)
    with pytest.raises(ConfigError, match="dedup"):
        estimate(ordered, None, dedup="pair")
    with pytest.raises(ConfigError, match="strategy"):
        estimate(ordered, None, strategy="fullest")


def test_a_single_block_that_was_read_whole_has_no_error(tmp_path: Path) -> None:
    found = sampled(write(tmp_path / "few.jsonl", [10] * 5 + [LONG]))
    assert found.sample.is_complete
    for choice in found.choices:
        assert (choice.packs_error, choice.dropped_error) == (0, 0)


def test_records_dropped_for_any_reason_count(tmp_path: Path) -> None:
    source = write(tmp_path / "mixed.jsonl", [10] * 5 + [LONG])
    with source.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**record(10), "rejected": []}) + "\n")
    (choice,) = sampled(source).choices
    assert (choice.examples, choice.dropped) == (5, 2)


@pytest.mark.parametrize("sample", [10_000, 50])
def test_the_progress_of_a_stage_ends_with_its_count(sample: int) -> None:
    """Also of a sample, whose number of records is known only at the end."""
    records = [{"prompt": [5], "chosen": [6, i], "rejected": [7]} for i in range(3000)]
    last: dict[str, tuple[int, int | None]] = {}

    def progress(stage: str, completed: int, total: int | None, unit: str) -> None:
        last[stage] = (completed, total)

    report = estimate(records, None, sample=sample, progress=progress)
    assert last["read"] == (report.tally.read, report.tally.read)
    assert all(completed == total for completed, total in last.values())
