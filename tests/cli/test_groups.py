"""``packstore stats --by`` against sums over the records themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_jobs import write_jsonl, write_tokenizer

import packstore
from packstore.cli import main
from packstore.cli._groups import grouped

LANGS = ("en", "de", "zh")


def records(seed: int, count: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "prompt": f"Question {i} " + "word " * draw.randrange(20),
            "chosen": " good" * draw.randrange(1, 30),
            "rejected": f" bad {i}",
            "chosen_reward": draw.random(),
            "rejected_reward": draw.random() - 1,
            "lang": draw.choice(LANGS),
            "score": draw.random(),
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    sources = [write_jsonl(folder / f"{n}.jsonl", records(n, 50 + 20 * n)) for n in (0, 1)]
    tokenizer = folder / "t.json"
    write_tokenizer(tokenizer)
    packstore.pack(
        sources,
        folder / "made",
        str(tokenizer),
        pack_size=512,
        layout="shared_prefix",
        carry=("lang", "score:float64"),
        row_group_tokens=2048,
    )
    return folder / "made"


@pytest.mark.parametrize("by", ["lang", "file"])
def test_groups_equal_a_loop_over_the_packs(
    made: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens: dict[str, list[int]] = {}
    gaps: dict[str, list[float]] = {}
    for packs in packstore.open(str(made)).iter_packs():
        for i, example_id in enumerate(packs.example_ids.tolist()):
            group = packs.columns["lang"][i] if by == "lang" else f"{example_id >> 40}.jsonl"
            tokens.setdefault(group, []).append(int(packs.lengths[2 * i : 2 * i + 2].sum()))
            gaps.setdefault(group, []).append(float(packs.reward[2 * i] - packs.reward[2 * i + 1]))
    assert main(["stats", str(made), "--by", by, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["by"]
    assert list(found) == sorted(tokens, key=lambda g: (-len(tokens[g]), g))
    whole = sum(map(sum, tokens.values()))
    for group, own in tokens.items():
        expected = {
            "examples": len(own),
            "examples_share": len(own) / 120,
            "tokens": sum(own),
            "tokens_share": sum(own) / whole,
            "mean": np.mean(own),
            "p50": np.percentile(own, 50),
            "p99": np.percentile(own, 99),
            "max": max(own),
            "reward_gap": np.mean(gaps[group]),
        }
        assert found[group] == pytest.approx(expected, rel=1e-6)


def test_files_of_one_name_are_one_group(tmp_path: Path) -> None:
    rows = [
        {"prompt": [1], "chosen": [2] * (i + 1), "rejected": [3], "ok": i % 2 == 0}
        for i in range(6)
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    made = packstore.pack(source, tmp_path / "made", pack_size=32, carry=("ok:bool",))
    assert grouped(made, "ok")["True"]["tokens"] == 3 * 3 + 1 + 3 + 5
    assert grouped(made, "ok")["False"]["tokens"] == 3 * 3 + 2 + 4 + 6
    twice = packstore.concat([made, made], tmp_path / "twice")
    (own,) = grouped(twice, "file").values()
    assert (own["examples"], own["tokens"], own["max"]) == (12, 2 * 39, 9)


def test_what_cannot_group_is_refused(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for by, expected in (("score", "texts, integers or booleans"), ("nope", "file, lang, score")):
        assert main(["stats", str(made), "--by", by]) == 1
        assert expected in capsys.readouterr().err
