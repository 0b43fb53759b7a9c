"""Two mapped answers and the column that says which one is better."""

from __future__ import annotations

import json

import pytest

import packstore
from packstore.cli import main
from packstore.errors import ConfigError, RecordError, UnknownNameError
from tests.tokenizer.conftest import TEMPLATE

TWO = {"prompt": "Q", "response_a": "x", "response_b": "y"}
FIELDS = {"first": "response_a", "second": "response_b", "verdict": "winner"}
FIRST = ["Q«x</s>»", "Q«y</s>»"]
SECOND = ["Q«y</s>»", "Q«x</s>»"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(
            (value, FIRST)
            for value in ("A", "a", " A ", "model_a", "response_a", "Response_A")
        ),
        *((value, SECOND) for value in ("B", "b", "model_b", "Model B", "response_b")),
    ],
)
def test_a_value_that_names_a_side_needs_no_list(value, expected, pack, byte_level):
    packed = pack(byte_level(), {**TWO, "winner": value}, fields=FIELDS)
    assert packed.marked == expected
    assert packed.dataset.manifest.kind == "preference"


@pytest.mark.parametrize(
    ("columns", "values"),
    [
        (("answer_left", "answer_right"), ("left", "right")),
        (("first_output", "second_output"), ("first", "second")),
        (("out1", "out2"), ("out1", "out2")),
        (("x.text", "y.text"), ("x", "y")),
        (("claude", "gpt"), ("claude", "gpt")),
    ],
)
def test_sides_of_any_names(columns, values, pack, byte_level):
    texts = ("x", "y")
    record: dict = {"prompt": "Q"}
    for column, text in zip(columns, texts, strict=True):
        name, dot, member = column.partition(".")
        record[name] = {member: text} if dot else text
    fields = {"first": columns[0], "second": columns[1], "verdict": "best"}
    for value, expected in zip(values, (FIRST, SECOND), strict=True):
        assert (
            pack(byte_level(), {**record, "best": value}, fields=fields).marked
            == expected
        )


@pytest.mark.parametrize("value", [1, 2, 0, 1.0, -1, True, "1", "2", "0.5", "1st?"])
def test_a_number_is_never_interpreted_without_a_list(value, pack, byte_level):
    """It may count from 0 or from 1, or say how much better the second is."""
    with pytest.raises(RecordError, match="verdict"):
        pack(byte_level(), {**TWO, "winner": value}, fields=FIELDS)
    numbered = {"prompt": "Q", "response_1": "x", "response_2": "y", "winner": value}
    fields = {"first": "response_1", "second": "response_2", "verdict": "winner"}
    with pytest.raises(RecordError, match="verdict"):
        pack(byte_level(), numbered, fields=fields)


@pytest.mark.parametrize(
    ("verdict", "first", "second", "tie"),
    [
        ({"first": 1, "second": 2, "tie": 0}, (1, "1", 1.0), (2, "2"), (0, "0")),
        ({"first": 0, "second": 1}, (0, "0"), (1,), ()),
        ({"first": True, "second": False}, (True, "true"), (False, "False"), ()),
        (
            {"first": "yes", "second": "no", "tie": "same"},
            ("yes", " YES "),
            ("no",),
            ("same",),
        ),
        ({"first": [1, 2], "second": [-1, -2], "tie": 0}, (1, 2), (-2,), (0,)),
    ],
)
def test_a_list_of_values(verdict, first, second, tie, pack, byte_level):
    def go(value):
        return pack(
            byte_level(), {**TWO, "winner": value}, fields=FIELDS, verdict=verdict
        )

    assert all(go(value).marked == FIRST for value in first)
    assert all(go(value).marked == SECOND for value in second)
    assert all(go(value).dropped == {"tie": 1} for value in tie)


def test_ties_are_left_out_and_other_values_are_of_a_wrong_type(pack, byte_level):
    values = ["A", "tie", "B", "both bad", None, 3, ["A"]]
    records = [{**TWO, "winner": value} for value in values]
    settings = {
        "fields": FIELDS,
        "verdict": {"tie": "both bad"},
        "on": {"missing_field": "drop"},
    }
    packed = pack(byte_level(), *records, **settings)
    assert packed.dropped == {"tie": 2, "missing_field": 1, "wrong_type": 2}
    assert packed.marked == [*FIRST, *SECOND]


def test_a_list_goes_before_names_of_sides(pack, byte_level):
    """As where a says that the first was worse."""
    verdict = {"first": "B", "second": "A"}
    packed = pack(byte_level(), {**TWO, "winner": "A"}, fields=FIELDS, verdict=verdict)
    assert packed.marked == SECOND


def test_a_verdict_inside_an_object(pack, byte_level):
    record = {**TWO, "judge": '{"result": {"best": "model_b"}}'}
    fields = {**FIELDS, "verdict": "judge.result.best"}
    assert pack(byte_level(), record, fields=fields).marked == SECOND


def test_answers_may_be_messages(pack, byte_level):
    turn = {"role": "user", "content": "Q"}
    sides = {name: [turn, {"role": "assistant", "content": text}]
             for name, text in (("response_a", "x"), ("response_b", "y"))}  # fmt: skip
    packed = pack(
        byte_level(template=TEMPLATE), {**sides, "winner": "B"}, fields=FIELDS
    )
    assert packed.marked == ["[u]Q<e>[a]«y<e>»", "[u]Q<e>[a]«x<e>»"]


@pytest.mark.parametrize("lacking", ["first", "second", "verdict"])
def test_the_three_belong_together(lacking, pack, byte_level):
    fields = {role: name for role, name in FIELDS.items() if role != lacking}
    with pytest.raises(RecordError, match=lacking):
        pack(byte_level(), {**TWO, "winner": "A"}, fields=fields, kind="preference")


def test_mistakes_in_the_list_are_named(pack, byte_level):
    record = {**TWO, "winner": 1}
    with pytest.raises(UnknownNameError, match="third"):
        pack(byte_level(), record, fields=FIELDS, verdict={"third": 1})
    with pytest.raises(ConfigError, match="verdict"):
        pack(byte_level(), record, fields=FIELDS, verdict={"first": 1, "second": "1"})


def test_on_the_command_line(byte_level, tmp_path):
    """Several values of a side, and append without the list."""
    byte_level().library.save(str(tmp_path / "t.json"))
    source, more = tmp_path / "in.jsonl", tmp_path / "more.jsonl"
    records = [{**TWO, "prompt": f"Q{v}", "winner": v} for v in (1, 2, 0, 3)]
    source.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    out = str(tmp_path / "out")
    flags = [part for item in FIELDS.items() for part in ("--field", "=".join(item))]
    flags += ["--tokenizer", str(tmp_path / "t.json"), "--pack-size", "64"]
    flags += ["--verdict", "first=1,second=2,second=3,tie=0", "--max-drop-rate", "0"]
    assert main(["pack", str(source), out, *flags]) == 0
    counts = packstore.open(out).manifest.records
    assert (counts.packed, counts.dropped) == (3, {"tie": 1})
    more.write_text(json.dumps({**TWO, "winner": 2}) + "\n", encoding="utf-8")
    assert main(["append", out, str(more)]) == 0
    frame = packstore.scan(out, tokens=True).collect()
    assert packstore.open(out).manifest.records.packed == 4
    newest = frame.sort("example_id")["input_ids"].to_list()[-1]
    reference = packstore.pack(
        [{"prompt": "Q", "chosen": "y", "rejected": "x"}],
        "memory://verdicts",
        str(tmp_path / "t.json"),
    )
    (expected,) = (
        packstore.scan(reference, tokens=True).collect()["input_ids"].to_list()
    )
    assert newest == expected


def test_both_answers_alike_in_name_are_not_mapped_as_better_and_worse(
    pack, byte_level
):
    """Half of the pairs would be reversed."""
    record = {**TWO, "overall": 2}
    with pytest.raises(RecordError) as caught:
        pack(byte_level(), record)
    assert "first" in str(caught.value)
    assert "chosen" not in str(caught.value).partition("found")[2]
    with pytest.raises(RecordError, match="overall"):
        pack(
            byte_level(),
            record,
            fields={"chosen": "response_a", "rejected": "response_b"},
        )
