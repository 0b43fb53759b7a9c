"""Values of tokens: shown, verified and counted as they are stored."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_jobs import trained_tokenizer, write_jsonl

import packstore
from packstore import Dataset
from packstore.cli import main
from packstore.format.arrays import TopK
from packstore.io.side import SideWriter

COLUMNS = {
    "old_logps": "token<float32>",
    "teacher": "token<top3,float16>",
    "advantage": "list<float32>",
    "note": "string",
}


def write_values(
    url: Path, dataset: Dataset, change_counts: Callable[[Any], Any] | None = None
) -> str:
    """Write log-probs of -0.5, -1, -1.5, … in each example.

    Every third token is not among the three of the teacher, others are the second.
    """
    with SideWriter(str(url), dataset, COLUMNS) as writer:
        for packs in dataset.iter_packs():
            targets = packs.signed_ids[packs.supervised]
            counts = packs.num_targets
            if change_counts is not None:
                counts = change_counts(counts)
            place = np.concatenate([np.arange(n) for n in counts])
            second = np.where(place % 3 == 2, targets + 1, targets)
            ids = np.stack([second + 10, second, second + 20], axis=1)
            values = {
                "old_logps": -(place + 1) / 2,
                "teacher": TopK(ids, np.tile([-1.0, -2.0, -3.0], (len(ids), 1))),
                "advantage": np.tile([0.25, -0.25], len(packs.example_ids)),
                "note": np.array([f"note {i}" for i in packs.example_ids], np.object_),
            }
            writer.write(packs.example_ids, values, num_targets=counts)
    return str(url)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("values")
    tokenizer = folder / "tokenizer.json"
    trained_tokenizer(["a word and another word"] * 9).save(str(tokenizer))
    pairs = [
        {"prompt": f"Which {i}?", "chosen": f"This {i % 3 * 'a'}.", "rejected": "语!"}
        for i in range(30)
    ]
    source = write_jsonl(folder / "pairs.jsonl", pairs)
    return packstore.pack(source, folder / "packed", str(tokenizer), pack_size=128)


@pytest.fixture(scope="module")
def values(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_values(tmp_path_factory.mktemp("side") / "values", dataset)


def run(capsys: pytest.CaptureFixture[str], *command: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in command]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_numbers_follow_tokens_where_there_are_no_colours(
    dataset: Dataset, values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, "show", dataset.url, "--side", values)
    assert "old_logps in ⟨ ⟩ after each supervised token" in text
    assert "· advantage -0.25" in text
    assert "⟦T⟨-0.5⟩h⟨-1⟩i⟨-1.5⟩" in text
    ids = run(capsys, "show", dataset.url, "--side", values, "--ids")
    first = dataset.read_packs(0).signed_ids
    assert f"{first[first >= 0][0]}⟨-0.5⟩ " in ids
    teacher = run(capsys, "show", dataset.url, "--side", values, "--column", "teacher")
    assert "⟦T⟨-2⟩h⟨-2⟩i⟨–⟩" in teacher
    assert "–: not among the top k" in teacher


def test_the_first_examples_of_each_pack(
    dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(capsys, "show", dataset.url, "--count", 2)
    num_examples = len(dataset.read_packs(0).row(0).num_responses)
    assert num_examples > 2
    text = run(capsys, "show", dataset.url, "--count", 2, "--examples", 2)
    assert text.count("chosen") == text.count("rejected") == 4
    first_pack = whole.partition("pack 1: ")[0]
    assert first_pack.startswith(text.partition("sequence 4")[0].partition("…")[0])
    assert f"{num_examples - 2} more examples" in text
    assert run(capsys, "show", dataset.url, "--count", 2, "--examples", 999) == whole


def test_tokens_have_colours_on_a_terminal(
    dataset: Dataset,
    values: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    coloured = run(capsys, "show", dataset.url, "--side", values)
    assert "48;5;230m" in coloured
    assert "⟨" not in coloured
    numbered = run(capsys, "show", dataset.url, "--side", values, "--numbers")
    assert "48;5;230m" not in numbered
    assert "⟨-0.5⟩" in numbered
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run(capsys, "show", dataset.url, "--side", values)
    assert "48;5;" not in plain
    assert "⟦T⟨-0.5⟩" in re.sub(r"\x1b\[\d+m", "", plain)


def test_values_as_json_stand_beside_the_ids(
    dataset: Dataset, values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads(run(capsys, "show", dataset.url, "--side", values, "--json"))
    (pack,) = shown["packs"]
    assert pack["columns"][0]["note"].startswith("note ")
    numbers = []
    for sequence in pack["sequences"]:
        of_sequence = sequence["values"]
        assert of_sequence["advantage"] in (0.25, -0.25)
        for label, number, top in zip(
            sequence["labels"],
            of_sequence["old_logps"],
            of_sequence["teacher"],
            strict=True,
        ):
            assert (number is None) == (top is None) == (label == -100)
            if number is not None:
                numbers.append(number)
                assert len(top["ids"]) == len(top["logps"]) == 3
    assert numbers[:3] == [-0.5, -1, -1.5]
    assert len(numbers) == dataset.read_packs(0).row(0).num_targets.sum()


def test_a_page_holds_the_values_of_a_pack(
    dataset: Dataset, values: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    command = ["--side", values, "--column", "teacher", "--html", page]
    run(capsys, "show", dataset.url, *command)
    text = page.read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text.partition('id="data">')[2].partition("<")[0])
    assert data["columns"] == ["teacher", "old_logps"]
    (pack,) = data["embedded"]
    assert pack["values"]["old_logps"]["numbers"][:2] == [-0.5, -1]
    teacher = pack["values"]["teacher"]
    assert teacher["numbers"][:3] == [-2, -2, None]
    targets = [token for token in pack["ids"] if token >= 0]
    assert teacher["ids"][0] == [targets[0] + 10, targets[0], targets[0] + 20]
    assert teacher["texts"][str(targets[0])] == "T"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--column", "old_logps"], "found none. Name a side dataset"),
        (["--numbers"], "found no --side"),
        (["--examples", "0"], "--examples must be at least 1; found 0"),
        (["--examples", "1", "--json"], "leave it out"),
        (["--side", "VALUES", "--column", "advantage"], "old_logps, teacher"),
        (["--side", "nowhere"], "nowhere: must be a side dataset"),
    ],
)
def test_wrong_arguments_of_show(
    dataset: Dataset,
    values: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    words = [values if word == "VALUES" else word for word in arguments]
    assert main(["show", dataset.url, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_verify_checks_a_side_dataset_alone_and_against_its_dataset(
    dataset: Dataset, values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = run(capsys, "verify", values)
    assert alone == f"ok: {values}, 1 shards, values of 30 examples\n"
    both = run(capsys, "verify", dataset.url, "--side", values)
    assert both.endswith(alone)
    result = json.loads(run(capsys, "verify", dataset.url, "--side", values, "--json"))
    assert result["ok"]
    assert result["side"]["examples"] == 30
    identity = [{"url": values, "version": 1}]
    assert result["side"]["sides"] == identity
    for command in ("verify", "stats"):
        assert json.loads(run(capsys, command, values, "--json"))["sides"] == identity


def problems_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Return what a command prints that finds problems."""
    capsys.readouterr()
    assert main(["verify", *command]) == 1
    return capsys.readouterr().out


def test_verify_names_the_problems_of_values(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = write_values(tmp_path / "moved", dataset, lambda counts: np.roll(counts, 1))
    run(capsys, "verify", moved)
    found = problems_of(capsys, dataset.url, "--side", moved)
    assert re.search(r"moved, example \d+: \w+ must hold values of \d+ superv", found)
    assert "1 problem: " in found

    records = [{"prompt": [1, 2, i], "chosen": [3], "rejected": [4]} for i in range(30)]
    other = packstore.pack(records, tmp_path / "other", pack_size=128)
    assert "lineage" in problems_of(capsys, other.url, "--side", moved)

    shard = next((tmp_path / "moved" / "data").iterdir())
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert shard.name in problems_of(capsys, moved)
    assert '"ok": false' in problems_of(capsys, moved, "--json")


def test_inspect_names_the_columns_of_a_side_dataset(
    values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, "inspect", values)
    for name, type_name in COLUMNS.items():
        assert re.search(rf"{name} +│ {re.escape(type_name)} ", text)
    assert json.loads(run(capsys, "inspect", values, "--json"))["columns"] == COLUMNS
    assert main(["inspect", values, "--as-config"]) == 1


@pytest.mark.parametrize("command", ["verify", "stats"])
def test_a_side_dataset_has_no_side_data(
    values: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, values, "--side", values]) == 1
    assert f"packstore {command} DATASET --side VALUES" in capsys.readouterr().err


def test_stats_of_a_side_dataset(
    dataset: Dataset, values: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "stats.html"
    result = json.loads(run(capsys, "stats", values, "--json", "--html", page))
    assert "<figcaption>old_logps</figcaption>" in page.read_text(encoding="utf-8")
    num_targets = dataset.manifest.totals.supervised_tokens
    assert result["examples"] == 30
    columns = result["columns"]
    assert [columns[name]["type"] for name in COLUMNS] == list(COLUMNS.values())
    assert columns["teacher"]["values"] == num_targets
    assert columns["advantage"]["values"] == 60
    assert columns["note"]["values"] == 30
    size = sum(column["bytes"] for column in columns.values())
    shard = next((Path(values) / "data").iterdir())
    assert 0.2 * shard.stat().st_size < size < shard.stat().st_size

    figures = result["values"]
    probabilities = np.exp([-1.0, -2.0, -3.0])
    outcomes = np.append(probabilities, 1 - probabilities.sum())
    entropy = -(outcomes * np.log(outcomes)).sum()
    assert figures["teacher: mass"]["median"] == pytest.approx(probabilities.sum())
    assert figures["teacher: entropy"]["mean"] == pytest.approx(entropy)
    assert figures["old_logps"]["max"] == -0.5
    assert figures["advantage"]["mean"] == 0


def test_stats_of_a_dataset_with_side_data(
    dataset: Dataset, values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = json.loads(run(capsys, "stats", values, "--json"))["values"]
    result = json.loads(run(capsys, "stats", dataset.url, "--side", values, "--json"))
    figures = result["values"]
    assert {name: figures[name] for name in alone} == alone
    places = [
        place
        for packs in dataset.iter_packs()
        for count in packs.num_targets
        for place in range(count)
    ]
    share = np.mean([place % 3 != 2 for place in places])
    assert figures["teacher: share of tokens in it"]["mean"] == pytest.approx(share)
    assert figures["teacher: log-prob of the token"]["min"] == -2
    assert figures["reward"]["count"] == 60


def test_commands_take_the_folder_of_the_parts_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"prompt": [1, 2], "response": [3] * n, "logprobs": [-n / 4] * n}
        for n in range(1, 9)
    ]
    dataset = packstore.pack(
        records[:5],
        tmp_path / "rollouts",
        kind="sft",
        pack_size=16,
        append_eos=False,
        token_values={"old_logps": "logprobs"},
    )
    dataset = packstore.append(dataset, records[5:])
    folder = f"{dataset.url}-values"
    alone = run(capsys, "verify", folder)
    assert alone == "ok: 2 side datasets, 2 shards, values of 8 examples\n"
    assert run(capsys, "verify", dataset.url, "--side", folder).endswith(alone)

    figures = json.loads(run(capsys, "stats", folder, "--json"))
    assert figures["examples"] == 8
    assert figures["columns"]["old_logps"]["values"] == sum(range(1, 9))
    assert figures["values"]["old_logps"]["min"] == -2
    command = ["show", dataset.url, "--side", folder, "--ids"]
    assert "⟦3⟨-0.5⟩ 3⟨-0.5⟩⟧" in run(capsys, *command)
    frame = packstore.scan(dataset, side=folder).select("old_logps").collect()
    values = frame["old_logps"].explode().explode().drop_nulls()
    assert sorted(values.unique()) == [-n / 4 for n in range(8, 0, -1)]

    assert main(["verify", folder, "--version", "2"]) == 1
    assert "must have version 2" in capsys.readouterr().err

    # A part without values is noticed.
    newest = max((Path(folder)).iterdir(), key=lambda part: part.stat().st_mtime_ns)
    newest.rename(tmp_path / "elsewhere")
    assert main(["verify", dataset.url, "--side", folder]) == 1
    printed = capsys.readouterr()
    assert "old_logps" in printed.out + printed.err
