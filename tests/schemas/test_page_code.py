"""The programs in the pages of the format run, and do what the pages say."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forests import Dialogue, dialogues_of, forest_packs

import packstore
from packstore.format import pack_schema, to_arrow

KIT = Path(__file__).parents[2] / "schemas" / "conformance" / "v1"

LONGEST_READER = 35
"""Lines of the reader: more would not be read to the end."""

Annex = Callable[[str], str]


def program(page: str) -> str:
    """Return the first block of code of a page."""
    return blocks(page)[0]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.+?)```", page, re.S)


@pytest.fixture(scope="session")
def read(prose: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return the sequences that the page's reader prints: reward, ids and labels."""
    path = tmp_path_factory.mktemp("page") / "reader.py"
    path.write_text(program(prose), encoding="utf-8")

    def read_dataset(folder: Path) -> list[Any]:
        command = [sys.executable, str(path), str(folder)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        return [json.loads(line) for line in process.stdout.splitlines()]

    return read_dataset


@pytest.fixture(scope="session")
def writer(annex: Annex, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the functions of the writer in annex B."""
    path = tmp_path_factory.mktemp("annex") / "writer.py"
    path.write_text(program(annex("b-writing")), encoding="utf-8")
    return runpy.run_path(str(path))


def printed(reward: float, dialogue: Dialogue) -> list[Any]:
    """Return what the reader prints for a sequence."""
    pairs = zip(dialogue.ids, dialogue.supervised, strict=True)
    labels = [token if learned else -100 for token, learned in pairs]
    return [reward, dialogue.ids, labels]


def test_the_reader_is_short(prose: str) -> None:
    assert len(program(prose).splitlines()) <= LONGEST_READER


def test_the_reader_reads_the_kit(
    prose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every case that is to be read, but for Arrow files, which it may refuse."""
    path = tmp_path / "reader.py"
    path.write_text(program(prose), encoding="utf-8")
    cases = json.loads((KIT / "kit.json").read_text(encoding="utf-8"))["cases"]
    num_read = 0
    for case in cases:
        if "expected" not in case:
            continue
        dataset = KIT / case["dataset"]
        if list(dataset.glob("**/*.arrow")):
            continue
        text = (KIT / case["expected"]).read_text(encoding="utf-8")
        expected = [line for pack in json.loads(text)["packs"] for line in whole(pack)]
        monkeypatch.setattr(sys, "argv", [str(path), str(dataset)])
        runpy.run_path(str(path), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line) for line in lines] == expected, case["name"]
        num_read += 1
    assert num_read > 50


def test_positions_and_mask_are_those_of_the_kit(
    prose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the mask, a token sees itself and what its sequence has before it."""
    path = tmp_path / "reader.py"
    path.write_text("\n\n".join(blocks(prose)), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(path), str(KIT / "datasets" / "empty")])
    functions = runpy.run_path(str(path))

    num_shared = 0
    for file in sorted((KIT / "expected").glob("*.json")):
        for pack in json.loads(file.read_text(encoding="utf-8"))["packs"]:
            positions, mask = functions["positions_and_mask"](pack)
            assert positions.tolist() == pack["position_ids"], file.name
            for token, segment in enumerate(pack["segment_ids"]):
                start = pack["cu_seqlens_k"][segment]
                end = start + pack["position_ids"][token] + 1
                expected = sorted(pack["kv_index"][start:end])
                assert np.flatnonzero(mask[token]).tolist() == expected, file.name
            num_shared += any(pack["segment_offsets"])
    assert num_shared > 5


def whole(pack: dict[str, Any]) -> list[list[Any]]:
    """Return reward, ids and labels of each sequence of a pack of the kit."""
    ids = [pack["input_ids"][key] for key in pack["kv_index"]]
    edges = itertools.pairwise(pack["cu_seqlens_k"])
    return [
        [reward, ids[start:end], pack["sequence_labels"][start:end]]
        for reward, (start, end) in zip(pack["reward"], edges, strict=True)
    ]


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_the_reader_reads_what_was_packed(
    tmp_path: Path, read: Callable[..., Any], kind: str, layout: str
) -> None:
    """Three records, the second and third with the beginning of the first."""
    records: list[dict[str, Any]] = []
    expected: list[list[Any]] = []
    for prompt in ([11, 12, 13], [11, 12, 13, 14], [11, 12, 13, 14, 15]):
        responses = [[21, len(prompt)], [31], [21, 22]]
        rewards = [0.5, 1.0, 0.25]
        record: dict[str, Any] = {"responses": responses, "scores": rewards}
        if kind == "preference":
            record = {"chosen": responses[0], "rejected": responses[1]}
            rewards = [1.0, 0.0]
        elif kind == "sft":
            record = {"response": responses[0]}
            rewards = [1.0]
        records.append({"prompt": prompt, **record})
        for reward, response in zip(rewards, responses, strict=False):
            supervised = [False] * len(prompt) + [True] * len(response)
            dialogue = Dialogue(prompt + response, supervised)
            expected.append(printed(reward, dialogue))

    folder = tmp_path / "ds"
    packstore.pack(records, folder, layout=layout, pack_size=64, num_workers=0)
    assert sorted(read(folder)) == sorted(expected)


def test_the_writer_writes_pairs(
    tmp_path: Path, writer: dict[str, Any], read: Callable[..., Any]
) -> None:
    examples = []
    expected = []
    for number in range(100):
        prompt = [5, 6, 7, 8, 9][: 1 + number % 5]
        pair = []
        for reward, response in ((1.0, [20, number, 1]), (0.0, [20 + number % 2, 1])):
            supervised = [False] * len(prompt) + [True] * len(response)
            pair.append((prompt + response, supervised))
            expected.append(printed(reward, Dialogue(*pair[-1])))
        examples.append(tuple(pair))

    folder = tmp_path / "ds"
    writer["write"](folder, writer["pack"](examples, pack_size=64), pack_size=64)
    dataset = packstore.open(str(folder))
    assert dataset.verify().problems == ()
    assert dataset.manifest.totals.tokens < dataset.manifest.totals.logical_tokens
    assert read(folder) == expected


@pytest.mark.parametrize("seed", range(5))
def test_trees_of_any_depth_are_written_and_read(
    tmp_path: Path, writer: dict[str, Any], read: Callable[..., Any], seed: int
) -> None:
    examples, packs = forest_packs(seed, "preference")
    rows = to_arrow(packs, pack_schema("preference", "shared_prefix")).to_pylist()
    writer["write"](tmp_path / "ds", rows, pack_size=4096)
    assert packstore.open(str(tmp_path / "ds")).verify().problems == ()
    expected = [
        printed(reward, dialogue)
        for reward, dialogue in zip(
            examples.reward.tolist(), dialogues_of(examples), strict=True
        )
    ]
    assert read(tmp_path / "ds") == expected
