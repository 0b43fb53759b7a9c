"""From records whose fields have a meaning to the manifest, the log and doctor."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_jobs import trained_tokenizer, write_jsonl, write_tokenizer
from tokenizers import Tokenizer

import packstore
from packstore.cli import main
from packstore.errors import ConfigError, DropRateError, RecordError

Record = dict[str, Any]
Pack = Callable[..., packstore.Dataset]

PAIRS: list[Record] = [
    {
        "prompt": f"What is {i} and {i}? ",
        "chosen": f"It is {2 * i}.",
        "rejected": "No idea.",
    }
    for i in range(20)
]
SCORED = [{**pair, "score_chosen": 4.5, "score_rejected": 2} for pair in PAIRS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer(["What is it?"])


@pytest.fixture
def do_pack(tokenizer: Tokenizer, tmp_path: Path) -> Pack:
    """packstore.pack of records in a file, into a fresh folder."""
    count = iter(range(1000))

    def run(records: list[Record], **settings: Any) -> packstore.Dataset:
        out = tmp_path / f"out-{next(count)}"
        source = write_jsonl(out.with_suffix(".jsonl"), records)
        return packstore.pack(source, out, tokenizer, pack_size=256, **settings)

    return run


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_mapped_field_that_no_record_has_is_an_error(
    do_pack: Pack, partitions: int
) -> None:
    fields = {"chosen_reward": "chosen_scor", "rejected_reward": "rejected_scor"}
    with pytest.raises(ConfigError, match="chosen_scor"):
        do_pack(PAIRS, fields=fields, partitions=partitions)
    fields = {"chosen_reward": "score_chosen", "rejected_reward": "score_rejected"}
    assert do_pack(SCORED, fields=fields, partitions=partitions).manifest.pairs == 20


def test_what_is_left_out_by_its_label_does_not_count_as_dropped(do_pack: Pack) -> None:
    records = [
        {"prompt": "p", "completion": f" {i}", "label": i % 2 == 0} for i in range(8)
    ]
    with pytest.raises(RecordError, match="label"):
        do_pack(records, kind="sft")
    found = do_pack(records, kind="sft", on={"unpaired_feedback": "drop"}).manifest
    assert (found.kind, found.records.packed) == ("sft", 4)
    assert found.records.dropped == {"unpaired_feedback": 4}


LABELED = {"prompt": "p", "completion": " a"}
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("records", "rewards", "settings"),
    [
        ([LABELED | {"label": x} for x in (True, False)], [1, 0], {}),
        ([LABELED | {"desirable": x} for x in ("true", "False", "0")], [1, 0, 0], {}),
        (
            [{"messages": CHAT, "kto_tag": x} for x in (0, 1)],
            [0, 1],
            {"chat_template": "plain"},
        ),
        ([LABELED | {"label": x} for x in (-1.0, 1.0)], [-1, 1], {}),
        ([LABELED | {"score": x} for x in (0.25, 3)], [0.25, 3], {"kind": "scored"}),
        (
            [LABELED | {"stars": x} for x in (5, 1)],
            [5, 1],
            {"fields": {"score": "stars"}},
        ),
        ([LABELED | {"reward": x} for x in (-1.0, 0, 0.5)], [-1, 0, 0.5], {}),
        ([LABELED | {"score": x} for x in (False, True)], [0, 1], {}),
        (
            [{"messages": CHAT, "reward": x} for x in (0.5, 0)],
            [0.5, 0],
            {"chat_template": "plain"},
        ),
        (
            [LABELED | {"thumbs": x} for x in ("up", "down")],
            [1, 0],
            {"fields": {"score": "thumbs"}},
        ),
        ([{"prompt": "p", "responses": [" a"], "scores": [0.5]}], [0.5], {}),
        ([{"prompt": [1], "response": [2], "reward": 0.5}], [0.5], {"kind": "scored"}),
    ],
)
def test_single_answers_with_a_label_or_score_are_packed_with_their_reward(
    do_pack: Pack, records: list[Any], rewards: list[float], settings: dict[str, Any]
) -> None:
    dataset = do_pack(records, **settings)
    assert dataset.verify().ok
    assert dataset.manifest.kind == "scored"
    frame = packstore.scan(dataset).collect().sort("example_id")
    assert frame["rewards"].to_list() == [[reward] for reward in rewards]


SCORED_ANSWERS = {"prompt": "p", "responses": [" a", " b"], "scores": [1, 0]}
CHANGES_THE_MEANING: list[tuple[Record, str]] = [
    *((LABELED | {name: 0.5}, name) for name in ("Reward", "rating", "thumbs")),
    (LABELED | {"metadata": '{"score": 0.5}'}, "metadata.score"),
    (LABELED | {"sample_weight": 0.5}, "sample_weight"),
    *((PAIRS[0] | {name: 2}, name) for name in ("weight", "sample_weight")),
    (PAIRS[0] | {"system": "Be kind."}, "system"),
    (PAIRS[0] | {"tools": [{"name": "f"}]}, "tools"),
    (PAIRS[0] | {"images": ["a.png"]}, "images"),
    (PAIRS[0] | {"talk": [{"role": "user", "content": "Before."}]}, "talk"),
    (SCORED[0] | {"margin": 1.0}, "margin"),
    (SCORED_ANSWERS | {"weight": 2}, "weight"),
]
"""A record, and the column that it must not have unread."""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("record", "column"), CHANGES_THE_MEANING)
def test_a_column_that_changes_the_meaning_is_read_or_refused(
    do_pack: Pack, record: Record, column: str, num_workers: int
) -> None:
    """Wherever it stands among others; its place is named, and it can be ignored."""
    kind = (
        "scored"
        if "scores" in record
        else "preference"
        if "chosen" in record
        else "sft"
    )
    others = [
        {"scored": SCORED_ANSWERS, "preference": PAIRS[1], "sft": LABELED}[kind]
    ] * 5
    for records, line in (([record, *others], 1), ([*others, record], 6)):
        with pytest.raises(RecordError, match=rf"line {line}: .*{re.escape(column)}"):
            do_pack(records, kind=kind, num_workers=num_workers)
    if num_workers == 0:
        assert do_pack(records, kind=kind, ignore=[column]).manifest.records.packed == 6


ORDINARY = {
    "channel": "web",
    "type": "qa",
    "worker_id": "w3",
    "style": "brief",
    "level": 3,
}


@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_ordinary_columns_stop_nothing(do_pack: Pack, kind: str) -> None:
    """However many values they have, over however many records."""
    record = {"preference": PAIRS[0], "sft": LABELED, "scored": SCORED_ANSWERS}[kind]
    records = [
        {**record, **ORDINARY, "unique_id": f"u{i}", "opinion": i % 2}
        for i in range(10)
    ]
    for number in (1, 2, 10):
        manifest = do_pack(records[:number]).manifest
        assert manifest.records.packed == number
        unread = {*ORDINARY, "unique_id", "opinion"}
        assert unread - {"opinion"} <= manifest.records.fields_not_used.keys() <= unread


def test_a_margin_is_the_difference_of_the_rewards(do_pack: Pack) -> None:
    records = [PAIRS[0] | {"margin": 0.5}, SCORED[1] | {"margin": 2.5}]
    frame = packstore.scan(do_pack(records)).collect().sort("example_id")
    assert frame["rewards"].to_list() == [[0.5, 0], [4.5, 2]]


@pytest.mark.parametrize("partitions", [1, 3])
def test_fields_are_in_the_manifest(do_pack: Pack, partitions: int) -> None:
    records = [{**r, "note": "n", "lang": "en"} for r in SCORED]
    dataset = do_pack([*records, *PAIRS[:5]], partitions=partitions)
    found = dataset.manifest.records
    assert found.fields_used == {
        "chosen": 25, "prompt": 25, "rejected": 25, "score_chosen": 20, "score_rejected": 20,
    }  # fmt: skip
    assert found.fields_not_used == {"note": 20, "lang": 20}
    assert found.noted == {"reward_default": 5}
    assert packstore.open(dataset.url).manifest.records == found


def test_the_log_names_them_once(
    do_pack: Pack, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "packstore"):
        do_pack([{**r, "note": "be kind", "lang": "en"} for r in SCORED])
    assert sum("note = be kind" in text for text in caplog.messages) == 1
    assert sum("lang" in text for text in caplog.messages) == 1
    with caplog.at_level(logging.INFO, "packstore"):
        do_pack([*PAIRS, {**PAIRS[0], "chosen_reward": 1, "rejected_reward": 2}])
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "reward_reversed" in str(warned)
    assert "reward_default" in str(warned)


HARMFUL = {
    "no_eos": PAIRS[:1],
    "reward_reversed": [{**PAIRS[0], "chosen_reward": 1, "rejected_reward": 2}],
    "reward_rounded": [{**PAIRS[0], "chosen_reward": 1e9 + 1, "rejected_reward": 1e9}],
    "reward_default": [SCORED[0], PAIRS[0]],
    "raw_text": PAIRS[:1],
    "foreign_template": [{**PAIRS[0], "prompt": "[INST] Why? [/INST]"}],
    "mixed_forms": [
        PAIRS[0],
        {**PAIRS[0], "prompt": [{"role": "user", "content": "Why?"}]},
    ],
}
"""Note -> records that have it, with a chat template and a tokenizer that names no EOS.
"""


@pytest.mark.parametrize("note", HARMFUL)
def test_a_problem_of_doctor_is_a_warning_of_the_job(
    note: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In Python, with --quiet, and of appended records; with what it means."""
    source, out = (
        write_jsonl(tmp_path / "in.jsonl", HARMFUL[note]),
        str(tmp_path / "out"),
    )
    path = str(write_tokenizer(tmp_path / "tokenizer.json"))
    chat = {"chat_template": "plain"}
    [found] = [
        f for f in packstore.doctor(source, path, **chat).findings if f.check == note
    ]
    assert found.level == "problem"
    more = write_jsonl(
        tmp_path / "more.jsonl", [{**r, "chosen": "Ask."} for r in HARMFUL[note]]
    )
    quiet = [
        "pack",
        source,
        f"{out}-2",
        "--tokenizer",
        path,
        "--quiet",
        "--chat-template",
        "plain",
    ]
    jobs = (
        lambda: packstore.pack(source, out, path, **chat),
        lambda: packstore.append(out, more),
        lambda: main(quiet),
    )
    for job in jobs:
        caplog.clear()
        job()
        warned = [
            r.getMessage() for r in caplog.records if r.levelno == logging.WARNING
        ]
        assert any(
            re.fullmatch(rf"noted in 1 records: {note} \(.+\)", text) for text in warned
        )


def test_a_group_that_no_pack_holds_is_told_to_be_packed_one_by_one(
    do_pack: Pack,
) -> None:
    group = {"prompt": "p", "responses": [" a" * 200, " b" * 200], "scores": [1, 0]}
    with pytest.raises(DropRateError, match="group"):
        do_pack([group])
