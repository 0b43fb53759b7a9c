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
    {"prompt": f"What is {i} and {i}? ", "chosen": f"It is {2 * i}.", "rejected": "No idea."}
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
def test_a_mapped_field_that_no_record_has_is_an_error(do_pack: Pack, partitions: int) -> None:
    fields = {"chosen_reward": "chosen_scor", "rejected_reward": "rejected_scor"}
    with pytest.raises(ConfigError, match=r"chosen_reward=chosen_scor: a record must have"):
        do_pack(PAIRS, fields=fields, partitions=partitions)
    fields = {"chosen_reward": "score_chosen", "rejected_reward": "score_rejected"}
    assert do_pack(SCORED, fields=fields, partitions=partitions).manifest.pairs == 20


def test_what_is_left_out_by_its_label_does_not_count_as_dropped(do_pack: Pack) -> None:
    records = [{"prompt": "p", "completion": f" {i}", "label": i % 2 == 0} for i in range(8)]
    with pytest.raises(RecordError, match="--on unpaired_feedback=drop"):
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
        ([{"messages": CHAT, "kto_tag": x} for x in (0, 1)], [0, 1], {"chat_template": "plain"}),
        ([LABELED | {"label": x} for x in (-1.0, 1.0)], [-1, 1], {}),
        ([LABELED | {"score": x} for x in (0.25, 3)], [0.25, 3], {"kind": "scored"}),
        ([LABELED | {"stars": x} for x in (5, 1)], [5, 1], {"fields": {"score": "stars"}}),
        ([LABELED | {"reward": x} for x in (-1.0, 0, 0.5)], [-1, 0, 0.5], {}),
        ([LABELED | {"score": x} for x in (False, True)], [0, 1], {}),
        ([{"messages": CHAT, "reward": x} for x in (0.5, 0)], [0.5, 0], {"chat_template": "plain"}),
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
    *((LABELED | {name: 0.5}, "kind scored") for name in ("Reward", "rating", "thumbs")),
    (LABELED | {"rejected_response": " b"}, "kind scored"),
    (LABELED | {"generations": [" b", " c"]}, "kind scored"),
    (LABELED | {"sample_weight": 0.5}, "kind scored"),
    *((PAIRS[0] | {name: 0.5}, f"field score={name}") for name in ("reward", "score", "votes")),
    *((PAIRS[0] | {name: 2}, f"carry {name}:float64") for name in ("weight", "sample_weight")),
    (PAIRS[0] | {"rejected_response": " no"}, "list of all answers"),
    (PAIRS[0] | {"system": "Be kind."}, "--as-chat"),
    (PAIRS[0] | {"tools": [{"name": "f"}]}, "--as-chat"),
    (PAIRS[0] | {"images": ["a.png"]}, "text alone"),
    (SCORED[0] | {"margin": 1.0}, "difference"),
    (SCORED_ANSWERS | {"ranking": [1, 2]}, "carry ranking"),
]


@pytest.mark.parametrize(("record", "remedy"), CHANGES_THE_MEANING)
def test_what_changes_the_meaning_is_read_or_refused(
    do_pack: Pack, record: Record, remedy: str
) -> None:
    """Wherever it stands among others."""
    kind = "scored" if "scores" in record else "preference" if "chosen" in record else "sft"
    others = [{"scored": SCORED_ANSWERS, "preference": PAIRS[1], "sft": LABELED}[kind]] * 5
    for records in ([record, *others], [*others, record]):
        with pytest.raises(RecordError, match=re.escape(remedy)):
            do_pack(records, kind=kind)
    on = {"unpaired_feedback": "keep", "unread_field": "keep"}
    if "margin" not in record:
        assert do_pack(records, kind=kind, on=on).manifest.records.packed == 6


def test_a_margin_is_the_difference_of_the_rewards(do_pack: Pack) -> None:
    records = [PAIRS[0] | {"margin": 0.5}, SCORED[1] | {"margin": 2.5}]
    frame = packstore.scan(do_pack(records)).collect().sort("example_id")
    assert frame["rewards"].to_list() == [[0.5, 0], [4.5, 2]]


VERDICTS: dict[str, list[object]] = {
    "opinion": ["up", "down"],
    "outcome": ["good", "bad", "good"],
    "flagged": [None, True],
    "mark": [1, 2, 3, 4, 5],
    "review": [{"ok": True}, {"ok": False}],
}


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in VERDICTS), ("opinion", 2), ("review", 2)]
)
def test_single_answers_beside_few_values_of_an_unknown_field_are_refused(
    do_pack: Pack, name: str, workers: int
) -> None:
    values = VERDICTS[name]
    number = len({str(value) for value in values})
    records = [LABELED | {name: values[i % len(values)]} for i in range(60)]
    sorted_ = sorted(records, key=lambda record: str(record[name]))  # few in any part of it
    for given in (records, sorted_):
        with pytest.raises(RecordError, match=rf"'{name}' takes {number} values over 60 rec"):
            do_pack(given, num_workers=workers)
    kept: list[dict[str, Any]] = [{"on": {"unpaired_feedback": "keep"}}]
    kept += [{"carry": [name]}] if name in ("opinion", "outcome", "mark") else []
    for settings in kept:
        assert do_pack(records, **settings).manifest.records.packed == 60
    pairs = [pair | {name: values[i % len(values)]} for i, pair in enumerate(PAIRS)]
    assert do_pack(pairs).manifest.kind == "preference"


def test_a_verdict_is_refused_early_and_whatever_the_order(do_pack: Pack) -> None:
    """Not by values that a few neighbours have, where the whole input has many."""
    number, read, filler = 12_000, [0], 700 * "x"

    def opinions(values: int, *, mixed: bool) -> list[Record]:
        return [
            LABELED | {"opinion": f"o{i % values if mixed else i * values // number}", "id": filler}
            for i in range(number)
        ]

    settings: dict[str, Any] = {"num_workers": 0}
    settings["progress"] = lambda stage, done, total, unit: read.append(done)
    with pytest.raises(RecordError, match="'opinion' takes 2 values over"):
        do_pack(opinions(2, mixed=True), **settings)
    assert 0 < max(read) < number
    with pytest.raises(RecordError, match="'opinion' takes 2 values over 12,000 records"):
        do_pack(opinions(2, mixed=False), **settings)
    for mixed in (True, False):
        assert do_pack(opinions(20, mixed=mixed), **settings).manifest.records.packed == number


def test_fields_that_say_nothing_of_an_answer_stay_unread(
    do_pack: Pack, caplog: pytest.LogCaptureFixture
) -> None:
    """Harmless by name, or the same everywhere; others are warned of, of pairs and of answers."""
    told = {"source": "ab", "Model-Name": "xy", "language": "de", "id": "0123456789"}
    for first in (LABELED, PAIRS[0]):
        records = [
            {
                **first,
                "batch": 7,
                "remark": f"no {i}",
                **{n: v[i % len(v)] for n, v in told.items()},
            }
            for i in range(40)
        ]
        caplog.clear()
        with caplog.at_level(logging.INFO, "packstore"):
            do_pack(records)
        said = {r.levelno: r.getMessage() for r in caplog.records if "not used" in r.getMessage()}
        assert said[logging.WARNING] == "fields not used: remark (40 records)"
        assert all(name in said[logging.INFO] for name in (*told, "batch"))


@pytest.mark.parametrize("partitions", [1, 3])
def test_fields_are_in_the_manifest(do_pack: Pack, partitions: int) -> None:
    records = [{**r, "images": ["a.png"], "lang": "en"} for r in SCORED]
    settings = {"partitions": partitions, "on": {"unread_field": "keep"}}
    dataset = do_pack([*records, *PAIRS[:5]], **settings)
    found = dataset.manifest.records
    assert found.fields_used == {
        "chosen": 25, "prompt": 25, "rejected": 25, "score_chosen": 20, "score_rejected": 20,
    }  # fmt: skip
    assert found.fields_not_used == {"images": 20, "lang": 20}
    assert found.noted == {"reward_default": 5}
    assert packstore.open(dataset.url).manifest.records == found


def test_the_log_names_them_once(do_pack: Pack, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "packstore"):
        records = [{**r, "system": "be kind", "lang": "en"} for r in SCORED]
        do_pack(records, on={"unread_field": "keep"})
        do_pack([*PAIRS, {**PAIRS[0], "chosen_reward": 1, "rejected_reward": 2}])
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned[0] == "fields not used: system (20 records)"
    assert "reward_reversed" in str(warned[1:])
    assert "reward_default" in str(warned[1:])
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert "further fields not used: lang" in told
    assert any("score_chosen" in text for text in told)


HARMFUL = {
    "no_eos": PAIRS[:1],
    "reward_reversed": [{**PAIRS[0], "chosen_reward": 1, "rejected_reward": 2}],
    "reward_rounded": [{**PAIRS[0], "chosen_reward": 1e9 + 1, "rejected_reward": 1e9}],
    "reward_default": [SCORED[0], PAIRS[0]],
    "raw_text": PAIRS[:1],
    "foreign_template": [{**PAIRS[0], "prompt": "[INST] Why? [/INST]"}],
    "mixed_forms": [PAIRS[0], {**PAIRS[0], "prompt": [{"role": "user", "content": "Why?"}]}],
}
"""Note -> records that have it, with a chat template and a tokenizer that names no EOS."""


@pytest.mark.parametrize("note", HARMFUL)
def test_a_problem_of_doctor_is_a_warning_of_the_job(
    note: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In Python, with --quiet, and of appended records; with what it means."""
    source, out = write_jsonl(tmp_path / "in.jsonl", HARMFUL[note]), str(tmp_path / "out")
    path = str(write_tokenizer(tmp_path / "tokenizer.json"))
    chat = {"chat_template": "plain"}
    [found] = [f for f in packstore.doctor(source, path, **chat).findings if f.check == note]
    assert found.level == "problem"
    more = write_jsonl(tmp_path / "more.jsonl", [{**r, "chosen": "Ask."} for r in HARMFUL[note]])
    quiet = ["pack", source, f"{out}-2", "--tokenizer", path, "--quiet", "--chat-template", "plain"]
    jobs = (
        lambda: packstore.pack(source, out, path, **chat),
        lambda: packstore.append(out, more),
        lambda: main(quiet),
    )
    for job in jobs:
        caplog.clear()
        job()
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert any(re.fullmatch(rf"noted in 1 records: {note} \(.+\)", text) for text in warned)


def test_a_group_that_no_pack_holds_is_told_to_be_packed_one_by_one(do_pack: Pack) -> None:
    group = {"prompt": "p", "responses": [" a" * 200, " b" * 200], "scores": [1, 0]}
    with pytest.raises(DropRateError, match="pack the answers of a group one by one"):
        do_pack([group])
