"""Plain records back out: packed again they are the same examples."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import packstore
from packstore.cli import main
from packstore.errors import CompatibilityError, ConfigError, RecordError, TokenizerError
from packstore.exchange import export
from packstore.format.arrays import Examples
from packstore.io.dataset.dataset import Dataset
from packstore.testing import random_examples


def records(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
    return [json.loads(line) for line in data.splitlines()]


def content(dataset: Dataset, kit: SimpleNamespace) -> list[tuple[Any, ...]]:
    """The examples in order of their ids, without these."""
    examples: Examples = kit.examples(dataset)
    examples = examples.take(np.argsort(examples.example_ids))
    out = []
    for i in range(examples.num_examples):
        one = examples.take(np.array([i]))
        carried = [one.columns[name][0] for name in sorted(one.columns)]
        out.append((one.input_ids.tolist(), one.supervised.tolist(), one.reward.tolist(), carried))
    return out


def plain_examples(kind: str, seed: int) -> Examples:
    """Examples whose sequences share their prompt, and are supervised behind it throughout."""
    return random_examples(40, seed=seed, kind=kind, edges=kind == "sft")


@pytest.mark.parametrize("kind", ["preference", "sft", "ranked"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_packed_again_it_is_the_same(
    kind: str, suffix: str, layout: str, tmp_path: Path, kit: SimpleNamespace
) -> None:
    examples = plain_examples(kind, 3)
    columns = {
        "score": np.linspace(-1, 1, 40),
        "name": np.array([f"n°{i}" for i in range(40)], object),
        "good": np.arange(40) % 3 == 0,
        "count": np.arange(40) << 40,
    }
    examples = Examples(
        **{n: getattr(examples, n) for n in Examples.__slots__ if n != "columns"}, columns=columns
    )
    carry = {"score": "float64", "name": "string", "good": "bool", "count": "int64"}
    dataset = kit.write(str(tmp_path / "a"), examples, kind=kind, layout=layout, carry=carry)
    path = tmp_path / f"x.jsonl{suffix}"
    exported = export("jsonl", dataset, path)
    assert "supervised in part of a response" not in exported.facts
    found = records(path)
    assert [r["example_id"] for r in found] == kit.examples(dataset).example_ids.tolist()
    again = packstore.pack(
        str(path), str(tmp_path / "b"), pack_size=300, num_workers=0, identical_sides="keep",
        carry=tuple(f"{name}:{type_}" for name, type_ in carry.items()),
    )  # fmt: skip
    expected = content(dataset, kit)
    if kind == "sft":  # a reward of a single response says nothing: it is 1
        expected = [(ids, on, [1.0], carried) for ids, on, _, carried in expected]
    assert content(again, kit) == expected


@pytest.mark.parametrize("kind", ["preference", "ranked"])
def test_what_prompt_and_response_cannot_say_stands_in_labels(
    kind: str, tmp_path: Path, kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = kit.dataset(60, 1, kind=kind)
    exported = export("jsonl", dataset, tmp_path / "x.jsonl")
    examples: Examples = kit.examples(dataset)
    partly = s = 0
    for record in records(tmp_path / "x.jsonl"):
        responses = record.get("responses") or [record["chosen"], record["rejected"]]
        labels = record.get("response_labels")
        if labels is None and "chosen_labels" in record:
            labels = [record["chosen_labels"], record["rejected_labels"]]
        partly += labels is not None
        for response, own in zip(responses, labels or responses, strict=True):
            part = slice(*examples.sequence_offsets[s : s + 2])
            ids, on = examples.input_ids[part], examples.supervised[part]
            assert record["prompt"] + response == ids.tolist()
            assert [-100] * len(record["prompt"]) + own == np.where(on, ids, -100).tolist()
            s += 1
    assert s == examples.num_sequences
    assert exported.facts["supervised in part of a response"] == partly > 5
    assert "supervise all of it" in caplog.text
    same = {"pack_size": 400, "num_workers": 0, "identical_sides": "keep", "empty_side": "keep"}
    again = packstore.pack(str(tmp_path / "x.jsonl"), str(tmp_path / "again"), **same)
    assert content(again, kit) == content(dataset, kit)


def test_labels_that_are_not_those_of_the_ids(tmp_path: Path) -> None:
    pair = {"prompt": [1], "chosen": [2, 3], "rejected": [4]}
    ranked = {"prompt": [1], "responses": [[2], [3]], "scores": [1, 0]}
    for record in (
        {**pair, "chosen_labels": [2, 4]},
        {**pair, "rejected_labels": [4, 4]},
        {**pair, "chosen_labels": "x"},
        {**ranked, "response_labels": [[2]]},
    ):
        settings = {"pack_size": 64, "num_workers": 0, "wrong_type": "error"}
        with pytest.raises(RecordError, match="item 1: every field must be of its type; found"):
            packstore.pack([record], str(tmp_path / "out"), **settings)


CHATS = [
    {"prompt": f"What is {i} and {i}?", "chosen": f" It is {2 * i}: ½ ☃.", "rejected": " No idea."}
    for i in range(30)
]


@pytest.mark.parametrize(
    "name",
    ["small_bpe/tokenizer.json", "mistral_v1", pytest.param("qwen3", marks=pytest.mark.slow)],
)
def test_text(
    name: str, shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text packed, exported as text and packed again: the same ids."""
    tokenizer = str(shared_data / "tokenizers" / name)
    first = packstore.pack(CHATS, str(tmp_path / "a"), tokenizer, pack_size=256, num_workers=0)
    assert main(["export", "jsonl", first.url, str(tmp_path / "x.jsonl"), "--text"]) == 0
    capsys.readouterr()
    found = {r["example_id"]: r for r in records(tmp_path / "x.jsonl")}
    for i, chat in enumerate(CHATS):
        assert {k: found[i][k] for k in chat} == chat
    again = packstore.pack(
        str(tmp_path / "x.jsonl"), str(tmp_path / "b"), tokenizer, pack_size=256, num_workers=0
    )
    assert again.manifest.totals.tokens == first.manifest.totals.tokens
    other = str(shared_data / "nemo/tokenizer.json")
    with pytest.raises(CompatibilityError, match="must be the tokenizer that"):
        export("jsonl", first, tmp_path / "y.jsonl", text=True, tokenizer=other)


def test_sft_and_ranked_text(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = str(shared_data / "tokenizers/small_bpe/tokenizer.json")
    sft = [{"prompt": "p:", "response": " r one"}, {"prompt": "q:", "response": " r two"}]
    ranked = [{"prompt": "p:", "responses": [" a", " b", " c"], "scores": [1.0, 0.5, 0.0]}]
    for kind, given in (("sft", sft), ("ranked", ranked)):
        dataset = packstore.pack(
            given, str(tmp_path / kind), tokenizer, pack_size=64, num_workers=0
        )
        export("jsonl", dataset, tmp_path / f"{kind}.jsonl", text=True)
        found = sorted(records(tmp_path / f"{kind}.jsonl"), key=lambda r: r["example_id"])
        assert [{k: r[k] for k in g} for r, g in zip(found, given, strict=True)] == given


def test_refusals(tmp_path: Path, kit: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = kit.dataset()
    with pytest.raises(ConfigError, match=r"x.json: must end in .jsonl, or in .jsonl.gz or"):
        export("jsonl", dataset, tmp_path / "x.json")
    with pytest.raises(ConfigError, match="a tokenizer is needed for text only"):
        export("jsonl", dataset, tmp_path / "x.jsonl", tokenizer="t.json")
    with pytest.raises(TokenizerError, match="its tokenizer must be known to write text"):
        export("jsonl", dataset, tmp_path / "x.jsonl", text=True)
    named = kit.dataset(carry={})
    examples = kit.examples(named)
    examples.columns["prompt"] = np.arange(20)  # type: ignore[index]
    taken = kit.write(str(tmp_path / "taken"), examples, carry={"prompt": "int64"})
    with pytest.raises(CompatibilityError, match="found 'prompt'"):
        export("jsonl", taken, tmp_path / "x.jsonl")
    assert kit.left(tmp_path / "x.jsonl") == []
    with pytest.raises(SystemExit) as stop:
        main(["export", "csv", dataset.url, str(tmp_path / "x.csv")])
    assert stop.value.code == 2
    assert "nemo" in capsys.readouterr().err


def test_twice_the_same_bytes(tmp_path: Path, kit: SimpleNamespace) -> None:
    dataset = kit.dataset()
    for name in ("a", "b"):
        for suffix in ("", ".gz", ".zst"):
            export("jsonl", dataset, tmp_path / f"{name}.jsonl{suffix}")
    for suffix in ("", ".gz", ".zst"):
        a, b = ((tmp_path / f"{n}.jsonl{suffix}").read_bytes() for n in "ab")
        assert a == b
    export("jsonl", dataset, "memory://exchange/x.jsonl.zst", overwrite=True)
