"""Records whose fields could mean another thing: refused, used or counted, never guessed."""

from __future__ import annotations

import pytest

from packstore.config import PackConfig, TokenizeConfig
from packstore.errors import RecordError
from packstore.tokenizer import RecordTokenizer, detect_kind
from packstore.tokenizer.records.shapes import parse_record
from packstore.tokenizer.refusals import Refused

CONFIG = TokenizeConfig()
SIDES = {"chosen": "The sea is blue.", "rejected": "The sea is a lie."}
PAIR = {"prompt": "Is it blue? ", **SIDES}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


CHAT = {"chosen": [user("p"), assistant("c")], "rejected": [user("p"), assistant("r")]}


@pytest.fixture
def refusal(rows, byte_level):
    """The text of the error that a record ends a job with."""

    def of(*values, kind="preference", **settings):
        work = RecordTokenizer(byte_level(template="plain"), PackConfig(**settings), kind)
        with pytest.raises(RecordError) as caught:
            work(rows(values))
        return str(caught.value)

    return of


@pytest.fixture
def tally(rows, byte_level):
    """Returns a function that tokenizes records and returns the counts."""

    def of(*values, kind="preference", **settings):
        config = PackConfig(pack_size=4096, **settings)
        return RecordTokenizer(byte_level(template="plain"), config, kind)(rows(values))[1]

    return of


def test_a_prompt_under_another_name_is_refused_and_the_name_proposed(refusal):
    text = refusal({"instruction": "Is it blue?", **SIDES})
    assert "no field 'prompt' among 'instruction', 'chosen', 'rejected'" in text
    assert "--field prompt=instruction" in text


def test_a_mapped_prompt_that_is_not_there_is_refused(refusal):
    record = {"instruction": "Is it blue?", **SIDES}
    text = refusal(record, fields={"prompt": "instrution"})
    assert "no field 'instrution'" in text
    assert "--field prompt=instruction" in text
    assert "no field 'q'" in refusal(CHAT, fields={"prompt": "q"})


def test_dialogues_of_the_hh_form_need_no_prompt():
    for head in ("\n\nHuman: a", "Human: a", "Be nice.\n\nHuman: a"):
        sides = [f"{head}\n\nAssistant: {end}" for end in "bc"]
        found = parse_record(dict(zip(SIDES, sides, strict=True)), "preference", CONFIG)
        assert (found.prompt, found.responses) == (f"{head}\n\nAssistant:", [" b", " c"])


@pytest.mark.parametrize(
    ("record", "proposed"),
    [
        (
            {"instruction": "q", "input": "", "output": "a"},
            ["--field prompt=instruction --field response=output"],
        ),
        ({"question": "q", "better": "a", "worse": "b"}, ["chosen=better", "rejected=worse"]),
        ({"dialogue": [user("q")]}, ["messages=dialogue"]),
        ({"text": "x"}, ["--field"]),
    ],
)
def test_an_unknown_kind_proposes_names(record, proposed):
    with pytest.raises(RecordError) as caught:
        detect_kind(record, CONFIG)
    assert all(names in str(caught.value) for names in proposed)


def test_null_is_told_from_absent(refusal):
    assert "field 'rejected' is null" in refusal({**PAIR, "rejected": None})
    assert "no field 'rejected' among" in refusal({"prompt": "p", "chosen": "c"})


def test_the_side_that_is_wrong_is_named():
    ids = {"prompt": [1, 2], "chosen": [1, 2], "rejected": [3, 4]}
    for name in ids:
        with pytest.raises(Refused, match=rf"found {name} \[1.0, 2.0\]"):
            parse_record({**ids, name: [1.0, 2.0]}, "preference", CONFIG)
        with pytest.raises(Refused, match=rf"{name} must be token ids.*2\.5"):
            parse_record({**ids, name: [1, 2.5]}, "preference", CONFIG)
    with pytest.raises(Refused, match="found prompt ids, chosen text, rejected ids"):
        parse_record({**ids, "chosen": "text"}, "preference", CONFIG)


def test_messages_as_json_text():
    found = parse_record({"messages": '[{"role": "user", "content": "p"}]'}, "sft", CONFIG)
    assert found.responses == [[user("p")]]
    for text in ("x", "[", '{"role": 3}', "3"):
        with pytest.raises(Refused):
            parse_record({"messages": text}, "sft", CONFIG)


GOOD = {"prompt": "p", "completion": " good", "label": True}
FALSE = [False, 0, "false", "False"]


@pytest.mark.parametrize("label", FALSE)
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_a_bad_answer_is_not_packed(refusal, tally, label, name):
    bad = {"prompt": "p", "completion": " bad", name: label}
    good = {**bad, name: "true" if isinstance(label, str) else type(label)(1)}
    text = refusal(good, bad, kind="sft")
    assert "line 2" in text
    assert "pair" in text
    assert "--on unpaired_feedback=drop" in text
    found = tally(good, bad, kind="sft", on={"unpaired_feedback": "drop"})
    assert (found.kept, found.dropped) == (1, {"unpaired_feedback": 1})
    assert tally(good, bad, kind="sft", on={"unpaired_feedback": "keep"}).kept == 2
    assert tally(good, good, kind="sft").kept == 2
    chat = {"messages": [user("p"), assistant("a")], name: label}
    assert "unpaired_feedback" in refusal(chat, kind="sft")


@pytest.mark.parametrize("labels", [["spam", "ham"], [0, 1, 2], [None, None], [[False], [True]]])
def test_a_label_of_another_kind_is_no_feedback(tally, labels):
    records = [{"prompt": "p", "completion": " a", "label": label} for label in labels]
    assert tally(*records, kind="sft").kept == len(labels)


def test_label_of_a_pair_is_no_feedback(tally):
    assert tally({**PAIR, "label": 0}).kept == 1


@pytest.mark.parametrize(
    "names",
    [
        ("chosen_reward", "rejected_reward"),
        ("score_chosen", "score_rejected"),
        ("chosen_score", "rejected_score"),
        ("chosen-rating", "rejected-rating"),
    ],
)
def test_rewards_under_common_names_are_used(rows, byte_level, names):
    record = {**PAIR, **dict(zip(names, (4.5, 2), strict=True))}
    examples, tally = RecordTokenizer(byte_level(), PackConfig(), "preference")(
        rows([record, PAIR])
    )
    assert examples.reward.tolist() == [4.5, 2.0, 1.0, 0.0]
    assert {name: tally.used[name] for name in names} == dict.fromkeys(names, 1)
    assert (tally.scored, tally.unscored) == (1, 1)
    assert not tally.unused


@pytest.mark.parametrize("name", ["chosen_reward", "rejected_reward", "score_chosen"])
def test_a_reward_on_one_side_is_refused(refusal, tally, name):
    record = {**PAIR, name: 4.5}
    assert f"{name!r}" in refusal(record)
    assert "both sides" in refusal(record)
    assert tally(PAIR, record, on={"one_reward": "drop"}).dropped == {"one_reward": 1}


def test_rewards_against_the_order_are_noted(rows, byte_level):
    record = {**PAIR, "chosen_reward": 1, "rejected_reward": 4}
    examples, tally = RecordTokenizer(byte_level(), PackConfig(), "preference")(rows([record]))
    assert examples.reward.tolist() == [1.0, 4.0]
    assert tally.noted == {"reward_reversed": 1}


def test_scores_that_are_no_numbers_are_not_rewards(tally):
    found = tally({**PAIR, "chosen_score": {"help": 3}, "rejected_score": "low"})
    assert (found.kept, found.scored) == (1, 0)
    assert found.unused == {"chosen_score": 1, "rejected_score": 1}


def test_what_nobody_used_is_counted(tally):
    extra = {"system": "be kind", "images": ["a.png"], "weight": 0.0, "none": None, "empty": ""}
    found = tally(PAIR, {**PAIR, **extra}, {**PAIR, "images": [], "lang": "en"}, carry=())
    assert found.used == {"prompt": 3, "chosen": 3, "rejected": 3}
    assert found.unused == {"system": 1, "images": 1, "weight": 1, "lang": 1}
    carried = tally({**PAIR, "lang": "en"}, carry=("lang",))
    assert carried.used["lang"] == 1
    assert not carried.unused


def test_endless_names_are_bounded(tally):
    found = tally(*[{**PAIR, f"k{i}": i, "\ud800": 1, "weight": 1} for i in range(500)])
    assert len(found.unused) <= 100
    assert found.unused["weight"] == 500
    assert all(name.encode() for name in found.unused)


@pytest.mark.parametrize("fields", [{}, {"system": "sys"}])
def test_a_system_text_beside_messages_is_their_first_message(fields):
    config, name = TokenizeConfig(fields=fields), fields.get("system", "system")
    chat = {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "a"}]}
    found = parse_record({**chat, name: "be kind"}, "sft", config)
    assert found.responses == [[system("be kind"), user("p"), assistant("a")]]
    assert name in found.fields
    for record in (CHAT, {"prompt": [user("p")], "chosen": "c", "rejected": "r"}):
        found = parse_record({**record, name: "be kind"}, "preference", config)
        assert found.prompt == [system("be kind"), user("p")]
    assert parse_record({**CHAT, name: ""}, "preference", config).prompt == [user("p")]
    with pytest.raises(Refused, match="must be text"):
        parse_record({**CHAT, name: 3}, "preference", config)


def test_a_dialogue_keeps_the_system_message_that_it_has(tally):
    own = {"messages": [system("own"), user("p"), assistant("a")]}
    assert parse_record({**own, "system": "x"}, "sft", CONFIG).responses[0][0] == system("own")
    assert tally({**own, "system": "own"}, {**own, "system": "x"}, kind="sft").unused == {
        "system": 1
    }
