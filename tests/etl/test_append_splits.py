"""Datasets of `validation_fraction` grow: each record goes to its split, once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_jobs import pairs, write_jsonl

import packstore
import packstore.torch as pt
from packstore import Dataset, errors
from packstore.cli import main
from packstore.io.manifest.manifest import Records

SPLITS = ("train", "validation")
SETTINGS: dict[str, Any] = {
    "pack_size": 64,
    "validation_fraction": 0.3,
    "seed": 5,
    "max_drop_rate": 1.0,
}


def records_of(first: int, count: int) -> list[dict[str, list[int]]]:
    """Pairs of different prompts, so that they fall into both splits."""
    return [
        {**pair, "prompt": [5, 6, 7 + number]}
        for number, pair in enumerate(pairs(count, first), first)
    ]


def open_splits(folder: Path) -> list[Dataset]:
    return [packstore.open(folder / split) for split in SPLITS]


def versions(folder: Path) -> list[int]:
    return [dataset.version for dataset in open_splits(folder)]


def sequences(dataset: Dataset) -> list[str]:
    """The tokens of every example, in a fixed order."""
    frame = packstore.scan(dataset, tokens=True).collect()
    return sorted(str(sides) for sides in frame["input_ids"])


def contents(folder: Path) -> list[list[str]]:
    datasets = open_splits(folder)
    assert all(dataset.verify().ok for dataset in datasets)
    return [sequences(dataset) for dataset in datasets]


@pytest.mark.parametrize("dedup", ["none", "pair"])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_each_record_goes_where_one_job_would_put_it(
    layout: str, dedup: str, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "layout": layout, "dedup": dedup}
    old, more, last = records_of(0, 60), records_of(60, 50), records_of(110, 9)
    if dedup == "pair":
        more = [*old[::7], *more, *more[:4]]  # of both splits
    packstore.pack(old + more + last, tmp_path / "whole", **settings)
    packstore.pack(old, tmp_path / "vf", **settings)
    grown = packstore.append(tmp_path / "vf", more)
    assert grown.url == str(tmp_path / "vf" / "train")
    packstore.append(tmp_path / "vf", write_jsonl(tmp_path / "last.jsonl", last))
    assert contents(tmp_path / "vf") == contents(tmp_path / "whole")
    assert versions(tmp_path / "vf") == [3, 3]
    for grown_split, whole_split in zip(
        open_splits(tmp_path / "vf"), open_splits(tmp_path / "whole"), strict=True
    ):
        grown_records = grown_split.manifest.records
        assert grown_records.read == whole_split.manifest.records.read
        assert grown_records.packed == whole_split.manifest.records.packed
        assert grown_records.dropped == whole_split.manifest.records.dropped
    assert packstore.clean(str(tmp_path / "vf" / "train")).leftovers == []


def test_a_split_without_new_records_gets_an_equal_version(tmp_path: Path) -> None:
    folder = tmp_path / "vf"
    packstore.pack(records_of(0, 60), folder, **SETTINGS)
    before = contents(folder)
    sizes = []
    for number in range(60, 72):  # one record each time: the other split gets none
        packstore.append(folder, records_of(number, 1))
        sizes.append([len(dataset) for dataset in open_splits(folder)])
    assert versions(folder) == [13, 13]
    gained = [
        len(now) - len(old) for now, old in zip(contents(folder), before, strict=True)
    ]
    assert sum(gained) == 12
    assert min(gained) > 0
    loaded = packstore.open(folder / "validation").manifest
    assert [s["records"] for s in loaded.provenance["sources"]] == [60, *[1] * 12]


def test_values_of_tokens_go_with_their_split(tmp_path: Path) -> None:
    def rollouts(first: int, count: int) -> list[dict[str, Any]]:
        return [
            {"prompt": [5, n], "response": [6, 7, n], "scores": [n + 0.0] * 3}
            for n in range(first, first + count)
        ]

    settings = {**SETTINGS, "token_values": {"score": "scores"}, "kind": "sft"}
    packstore.pack(rollouts(9, 60), tmp_path / "vf", **settings)
    for number in range(69, 75):
        packstore.append(tmp_path / "vf", rollouts(number, 1))
    num_values = 0
    for split, dataset in zip(SPLITS, open_splits(tmp_path / "vf"), strict=True):
        values = str(tmp_path / "vf" / f"{split}-values")
        frame = packstore.scan(dataset, tokens=True, side=[values]).collect()
        num_values += len(frame["score"].explode().explode().drop_nulls())
    assert num_values == 66 * 3


def test_one_split_alone_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "vf"
    train = packstore.pack(records_of(0, 60), folder, **SETTINGS)
    for dataset in (train, train.url, str(folder / "validation")):
        with pytest.raises(errors.ConfigError, match=f"Append to {folder}"):
            packstore.append(dataset, records_of(60, 9))
    elsewhere = packstore.pack(train, tmp_path / "elsewhere", pack_size=64)
    with pytest.raises(errors.ConfigError, match="train and validation in one folder"):
        packstore.append(elsewhere, records_of(60, 9))
    with pytest.raises(errors.ConfigError, match="concat"):
        packstore.append(folder, elsewhere)
    assert versions(folder) == [1, 1]


def test_joined_splits_are_one_dataset(tmp_path: Path) -> None:
    packstore.pack(records_of(0, 60), tmp_path / "vf", **SETTINGS)
    both = [tmp_path / "vf" / split for split in SPLITS]
    whole = packstore.concat([str(path) for path in both], tmp_path / "whole")
    grown = packstore.append(whole, records_of(60, 9))
    assert grown.manifest.pairs == 69


@pytest.mark.parametrize("change", [{"seed": 6}, {"validation_fraction": 0.5}])
def test_splits_of_two_rules_cannot_grow_once_joined(
    change: dict[str, Any], tmp_path: Path
) -> None:
    """Either rule would put records into train whose prompt is in validation."""
    packstore.pack(records_of(0, 60), tmp_path / "a", **SETTINGS)
    packstore.pack(records_of(60, 60), tmp_path / "b", **{**SETTINGS, **change})
    for split in SPLITS:
        both = [str(tmp_path / job / split) for job in ("a", "b")]
        packstore.concat(both, tmp_path / "joined" / split)
    with pytest.raises(errors.ConfigError, match="validation_fraction"):
        packstore.append(tmp_path / "joined", records_of(120, 9))


def test_splits_of_one_rule_grow_once_joined(tmp_path: Path) -> None:
    packstore.pack(records_of(0, 60), tmp_path / "a", **SETTINGS)
    packstore.pack(records_of(60, 60), tmp_path / "b", **SETTINGS)
    for split in SPLITS:
        both = [str(tmp_path / job / split) for job in ("a", "b")]
        packstore.concat(both, tmp_path / "joined" / split)
    packstore.append(tmp_path / "joined", records_of(120, 9))
    packstore.pack(records_of(0, 129), tmp_path / "whole", **SETTINGS)
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


def test_folders_that_are_no_splits_are_refused(tmp_path: Path) -> None:
    for split in SPLITS:
        packstore.pack(records_of(0, 30), tmp_path / "own" / split, pack_size=64)
    with pytest.raises(errors.ConfigError, match="validation_fraction"):
        packstore.append(tmp_path / "own", records_of(60, 9))
    packstore.pack(records_of(0, 60), tmp_path / "half", **SETTINGS)
    (tmp_path / "half" / "validation" / "_packstore" / "manifest-000001.json").unlink()
    with pytest.raises(errors.ConfigError, match="no validation"):
        packstore.append(tmp_path / "half", records_of(60, 9))


@pytest.mark.parametrize("splits", [SPLITS, SPLITS[:1], SPLITS[1:]])
def test_an_error_of_the_folder_of_both_splits_names_those_that_are_there(
    splits: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "vf"
    packstore.pack(records_of(0, 60), folder, **SETTINGS)
    for split in set(SPLITS) - set(splits):
        shutil.rmtree(folder / split)
    messages = []
    for command in ("verify", "inspect", "stats", "show", "clean"):
        assert main([command, str(folder)]) == 1
        messages.append(capsys.readouterr().err)
    for read in (packstore.open, packstore.scan, pt.PackedDataset, packstore.clean):
        with pytest.raises(errors.DatasetNotFoundError) as caught:
            read(str(folder))
        messages.append(str(caught.value))
    for message in messages:
        for split in SPLITS:
            assert (str(folder / split) in message) == (split in splits)


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_the_folder_of_both_splits_is_folded_split_by_split(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "vf"
    packstore.pack(records_of(0, 60), folder, **SETTINGS)
    packstore.append(folder, records_of(60, 9))
    before = contents(folder)
    for out in (folder, tmp_path / "new"):
        assert main(["pack", str(folder), str(out), *flags]) == 1
        error = capsys.readouterr().err
        assert all(str(folder / split) in error for split in SPLITS)
    assert contents(folder) == before

    for split in SPLITS:
        place = str(folder / split)
        assert main(["pack", place, place, "--overwrite"]) == 0
    assert versions(folder) == [3, 3]
    assert contents(folder) == before
    packstore.append(folder, records_of(69, 9))
    assert versions(folder) == [4, 4]


def test_json_names_both_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packstore.pack(records_of(0, 60), tmp_path / "vf", **SETTINGS)
    packstore.pack(
        str(tmp_path / "vf" / "train"), tmp_path / "vf" / "train", overwrite=True
    )
    packed_before = {
        split: dataset.manifest.records.packed
        for split, dataset in zip(SPLITS, open_splits(tmp_path / "vf"), strict=True)
    }
    more = write_jsonl(tmp_path / "more.jsonl", records_of(60, 20))
    for num_appended in (20, 0):
        assert main(["append", str(tmp_path / "vf"), more, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["records_appended"] == num_appended
        splits = result["splits"]
        assert {name: split["version"] for name, split in splits.items()} == {
            "train": 3,
            "validation": 2,
        }
        for name, split in splits.items():
            dataset = packstore.open(tmp_path / "vf" / name)
            assert split["url"] == dataset.url
            assert split["records"]["packed"] == dataset.manifest.records.packed
            assert split["totals"]["examples"] == dataset.manifest.pairs
        appended = {name: split["records_appended"] for name, split in splits.items()}
        expected = {
            name: split["records"]["packed"] - packed_before[name]
            for name, split in splits.items()
        }
        assert appended == (expected if num_appended else {"train": 0, "validation": 0})
        assert sum(appended.values()) == num_appended
        assert (result["url"], result["version"]) == (str(tmp_path / "vf" / "train"), 3)


def test_a_completed_append_counts_the_records_of_both_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packstore.pack(records_of(0, 60), tmp_path / "vf", **SETTINGS)
    more = write_jsonl(tmp_path / "more.jsonl", records_of(60, 20))
    packstore.append(tmp_path / "vf", more)
    # As if it had been killed between the two commits:
    (tmp_path / "vf" / "validation" / "_packstore" / "manifest-000002.json").unlink()
    assert versions(tmp_path / "vf") == [2, 1]
    assert main(["append", str(tmp_path / "vf"), more, "--dry-run"]) == 0
    assert f"interrupted append wrote version 2 of {tmp_path}" in (
        capsys.readouterr().out
    )
    assert main(["append", str(tmp_path / "vf"), more, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records_appended"] == 20
    assert versions(tmp_path / "vf") == [2, 2]


# Killed between two acts

APPEND = """
import json, os, signal, sys, tempfile
import packstore, packstore.etl.append, packstore.cli.pack

def append(source, folder, moment, settings):
    tempfile.tempdir = folder + "/temporary"
    acts = 0
    def count(event, args):
        nonlocal acts
        if event == "open":
            path = args[0] if args[2] & (os.O_WRONLY | os.O_RDWR) else None
        elif event in ("os.rename", "os.link", "os.remove", "os.mkdir"):
            path = args[0]
        else:
            path = None
        if isinstance(path, str) and path.startswith(folder):
            acts += 1
            if acts == moment:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    packstore.append(folder + "/vf", source, num_workers=0, **settings)
    return acts

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        print(append(*json.loads(line)), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(0 if os.WTERMSIG(status) == signal.SIGKILL else -1, flush=True)
"""
"""Appends to both splits, for each line of its input in a process of its own; with a
moment, is killed before its n-th act on the disk.
"""


class Appender:
    """Appends in other processes, which are forks of one that has loaded the code."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", APPEND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )

    def append(
        self, folder: Path, source: str, settings: dict[str, Any], moment: int = 0
    ) -> int:
        """Return the number of acts; 0: it was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps([source, str(folder), moment, settings])
        print(line, file=self._process.stdin, flush=True)
        num_acts = int(self._process.stdout.readline())
        assert (num_acts == 0) == (moment > 0)
        return num_acts

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def appender() -> Iterator[Appender]:
    appender = Appender()
    yield appender
    appender.close()


def results(folder: Path) -> list[tuple[str, Records]]:
    """The packs and the counts of records of both splits."""
    return [
        (dataset.manifest.fingerprint, dataset.manifest.records)
        for dataset in open_splits(folder / "vf")
    ]


@pytest.mark.parametrize(
    ("dedup", "partitions", "step"),
    [
        ("pair", 2, 9),
        pytest.param("pair", 2, 1, marks=pytest.mark.slow),
        pytest.param("pair", 1, 1, marks=pytest.mark.slow),
        pytest.param("none", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_append_is_completed_by_a_rerun(
    dedup: str, partitions: int, step: int, tmp_path: Path, appender: Appender
) -> None:
    more = [*records_of(60, 50), *records_of(0, 10), *records_of(60, 5)]
    source = write_jsonl(tmp_path / "more.jsonl", more)
    other = write_jsonl(tmp_path / "other.jsonl", records_of(200, 20))
    settings = {"partitions": partitions}
    folder, start = tmp_path / "job", tmp_path / "start"
    (start / "temporary").mkdir(parents=True)
    packstore.pack(records_of(0, 60), start / "vf", dedup=dedup, **SETTINGS)

    def reset() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)

    reset()
    num_acts = appender.append(folder, source, settings)
    expected = results(folder)
    states = set()
    for moment in range(num_acts, 0, -step):
        reset()
        appender.append(folder, source, settings, moment)
        state = tuple(versions(folder / "vf"))
        states.add(state)
        if state == (2, 1):
            with pytest.raises(errors.DatasetExistsError, match=r"more\.jsonl"):
                packstore.append(folder / "vf", other)
            for nothing_new in ([], records_of(0, 10)):
                with pytest.raises(errors.DatasetExistsError, match=r"more\.jsonl"):
                    packstore.append(
                        folder / "vf", nothing_new, allow_empty=True, dedup="pair"
                    )
        appender.append(folder, source, settings)
        assert results(folder) == expected
        assert versions(folder / "vf") == [2, 2]
        for split in SPLITS:
            place = str(folder / "vf" / split)
            packstore.clean(place, delete=True, older_than=0, no_writers=True)
            assert not packstore.clean(place, older_than=0, no_writers=True).leftovers
        assert results(folder) == expected
        assert all(dataset.verify().ok for dataset in open_splits(folder / "vf"))
    assert states == {(1, 1), (2, 1), (2, 2)}
