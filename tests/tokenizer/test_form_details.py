"""Forms in detail: ties, votes, rounds before a vote, records that are almost of a
form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import packstore
from packstore.errors import RecordError, TokenizerError
from tests.tokenizer.conftest import TEMPLATE

Q = [{"role": "user", "content": "Q"}]
HELPSTEER3 = {"context": Q, "response1": "x", "response2": "y"}
ABSENT = object()


def example_of(form: str) -> dict[str, Any]:
    """Return the first example of a form."""
    for family in sorted((Path(__file__).parent / "forms").glob("*.jsonl")):
        for line in family.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["form"] == form:
                return entry["example"]
    raise KeyError(form)


ALMOST = [
    ("helpsteer3", {"overall_preference": "much better"}),
    ("helpsteer3", {"response2": ABSENT}),
    ("scored_answers", {"completions": [{"response": "x"}]}),
    ("scored_answers", {"completions": {"response": "x"}}),
    ("ranked_answers", {"completions": [{"completion": "x"}]}),
    ("ranked_answers", {"completions": ["x", "y"]}),
    ("pku_saferlhf", {"better_response_id": ABSENT}),
    ("shp", {"labels": ABSENT}),
    ("summarize_from_feedback", {"summaries": [{"note": "x"}]}),
    ("chatbot_arena", {"winner": ABSENT}),
    ("alpaca_pairs", {"rejected": ABSENT}),
    ("pandalm", {"response2": True}),
]
"""A form, and a change of its example."""


@pytest.mark.parametrize(("form", "change"), ALMOST)
def test_a_record_that_is_almost_of_a_form_is_never_packed_by_it(
    form, change, pack, byte_level
):
    """A form that is named says what differs."""
    example = example_of(form) | change
    record = {name: value for name, value in example.items() if value is not ABSENT}
    stop = {"wrong_type": "error"}
    with pytest.raises(RecordError) as caught:
        pack(byte_level(template=TEMPLATE), record, form=form, on=stop)
    assert form in str(caught.value)
    (name,) = change
    assert name in str(caught.value)


def test_a_field_that_is_absent_stops_and_one_of_another_type_is_dropped(
    pack, byte_level
):
    record, tokenizer = example_of("scored_answers"), byte_level(template=TEMPLATE)
    other = {**record, "completions": [{"overall_score": 1, "response": 3}]}
    assert pack(tokenizer, record, other, form="scored_answers").dropped == {
        "wrong_type": 1
    }
    for completions in ([{"response": "x"}], None):
        lacking = {**record, "completions": completions}
        with pytest.raises(RecordError, match="item 2"):
            pack(tokenizer, record, lacking, form="scored_answers")


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("chatbot_arena", {"winner": "left"}),
        ("arena_55k", {"prompt": '["Q", "R"]'}),
        ("summarize_from_feedback", {"summaries": [{"text": "x"}] * 3}),
    ],
)
def test_a_value_that_a_form_cannot_read_is_of_a_wrong_type(
    form, change, pack, byte_level
):
    record = example_of(form) | change
    with pytest.raises(RecordError, match=form):
        pack(byte_level(template=TEMPLATE), record, on={"wrong_type": "error"})


def test_ties_are_dropped_and_counted(pack, byte_level):
    rows = [{**HELPSTEER3, "overall_preference": n} for n in (1, 0, -2, 0)]
    packed = pack(byte_level(template=TEMPLATE), *rows, max_drop_rate=0)
    assert packed.dropped == {"tie": 2}
    assert [text[-5:-2] for text in packed.marked] == ["y<e", "x<e", "x<e", "y<e"]


def test_votes_that_are_even_are_a_tie(pack, byte_level):
    record = example_of("pandalm") | {"input": float("nan")}
    rows = [{**record, "annotator3": vote} for vote in (2, 0, 1)]
    packed = pack(byte_level(template=TEMPLATE), *rows)
    assert packed.dropped == {"tie": 1}
    (group,) = packed.dataset.iter_packs()
    assert sorted(group.reward.tolist()) == [0.0, 0.0, 1.0, 2.0]
    assert packed.marked[0] == "[u]Q<e>[a]«x<e>»"


def said(*texts: str) -> list[dict[str, Any]]:
    """Turns of the user and of a model, as the sets of the arena write them."""
    roles = ("user", "assistant") * len(texts)
    parts = (
        [{"type": "text", "text": text, "image": None, "mimeType": None}]
        for text in texts
    )
    return [
        {"role": role, "content": part}
        for role, part in zip(roles, parts, strict=False)
    ]


def voted(*answers: str) -> dict[str, Any]:
    """The second vote of a session: the question and both answers of each round
    of it.
    """
    rounds = [said(*answers[i : i + 3]) for i in range(0, len(answers), 3)]
    full = [
        {"user": q, "model_side_a": a, "model_side_b": {**b, "role": "assistant"}}
        for q, a, b in rounds
    ]
    return {"winner": "model_b", "evaluation_order": 2, "full_conversation": full}


VOTE = {"conversation_a": said("Q", "y"), "conversation_b": said("Q", "x")}
AFTER = ["[u]P<e>[a]A<e>[u]Q<e>[a]«x<e>»", "[u]P<e>[a]A<e>[u]Q<e>[a]«y<e>»"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (voted("P", "A", "A", "Q", "y", "x"), AFTER),  # with the rounds that are judged
        (voted("P", "A", "A"), AFTER),  # without
        (voted("Q", "A", "A", "Q", "y", "x"), [t.replace("P", "Q") for t in AFTER]),
        (voted("Q", "y", "x") | {"evaluation_order": 1}, [t[14:] for t in AFTER]),
        (
            voted("P", "A", "B", "Q", "y", "x"),
            "different_contexts",
        ),  # each model has its own
        (voted("P", "A", "A", "Q", "z", "x"), "wrong_type"),
        (
            voted("P", "A", "A", "Q", "z", "z"),
            "wrong_type",
        ),  # the judged ones, or others?
        (voted("Q", "y", "x"), "missing_field"),
        (voted() | {"evaluation_order": "2"}, "missing_field"),
        (voted() | {"full_conversation": [{"user": "P"}]}, "wrong_type"),
    ],
)
def test_a_vote_is_learned_after_the_rounds_before_it(more, expected, pack, byte_level):
    on = {"missing_field": "drop"}
    packed = pack(byte_level(template=TEMPLATE), VOTE | more, on=on)
    if isinstance(expected, str):
        assert packed.dropped == {expected: 1}
    else:
        assert packed.marked == expected


def test_a_verdict_of_the_first_round_leaves_out_the_second(pack, byte_level):
    tokenizer = byte_level(template=TEMPLATE)
    sides = {
        "conversation_a": said("Q", "y", "R", "w"),
        "conversation_b": said("Q", "x", "R", "z"),
    }
    record = {**sides, "question_id": 81, "judge": "expert_1", "winner": "model_b"}
    assert pack(tokenizer, {**record, "turn": 1}).marked == [
        f"[u]Q<e>[a]«{x}<e>»" for x in "xy"
    ]
    whole = [f"[u]Q<e>[a]«{x}<e>»[u]R<e>[a]«{z}<e>»" for x, z in ("xz", "yw")]
    assert pack(tokenizer, {**record, "turn": 2}).marked == whole
    for turn in (3, 0, "first"):
        assert pack(tokenizer, {**record, "turn": turn}).dropped == {"wrong_type": 1}


def test_reasoning_in_a_field_of_its_own_is_that_of_the_answer(pack, byte_level):
    record = {"Question": "Q", "Complex_CoT": "t", "Response": "x"}
    assert pack(byte_level(template=TEMPLATE), record).marked == ["[u]Q<e>[a]«(t)x<e>»"]
    with pytest.raises(
        TokenizerError, match="chat_template"
    ):  # plain text has no place for it
        pack(byte_level(), record)


@pytest.mark.parametrize("question", ["", " ", "-"])
def test_answers_without_a_question_are_noted(question, pack, byte_level):
    """As Nemotron has them, whose questions stand in other sets."""
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "x"},
    ]
    asked = [*Q, messages[1], *messages]
    for record, empty in [
        ({"messages": messages}, True),
        ({"messages": asked}, False),
        ({"messages": messages, "label": True}, True),
        (
            {
                "chosen": messages,
                "rejected": [messages[0], {"role": "assistant", "content": "y"}],
            },
            True,
        ),
        ({"prompt": question, "completion": "x"}, True),
    ]:
        packed = pack(byte_level(template=TEMPLATE), record)
        assert ("empty_prompt" in packed.noted) is empty


def test_texts_of_an_instruct_set_are_chats_if_there_is_a_template(pack, byte_level):
    record = {"system": "", "question": "Q", "chosen": "x", "rejected": "y"}
    templated, bare = byte_level(template=TEMPLATE), byte_level()
    assert pack(templated, record).marked[0] == "[u]Q<e>[a]«x<e>»"
    assert not pack(templated, record).noted
    for tokenizer, settings in ((templated, {"as_chat": False}), (bare, {})):
        assert pack(tokenizer, record, **settings).marked == ["Q«x</s>»", "Q«y</s>»"]
    with pytest.raises(RecordError, match="system"):
        pack(bare, {**record, "system": "s"})


def test_rounds_in_the_text_of_a_prompt_are_turns(pack, byte_level):
    record = example_of("helpsteer2")
    packed = pack(byte_level(template=TEMPLATE), record)
    assert packed.marked == ["[u]P<e>[a]A<e>[u]Q<e>[a]«x<e>»"]
    fields = {"score": "helpfulness"}
    as_text = pack(byte_level(), record, fields=fields, form="none")
    assert as_text.marked == [f"{record['prompt']}«{record['response']}</s>»"]


def test_rewards_beside_a_form_are_kept(pack, byte_level):
    record = {"question": "Q", "chosen": "x", "rejected": "y"}
    packed = pack(
        byte_level(template=TEMPLATE),
        {**record, "score_chosen": 4, "score_rejected": 1.5},
    )
    (group,) = packed.dataset.iter_packs()
    assert sorted(group.reward.tolist()) == [1.5, 4.0]


def test_ids_of_a_record_with_a_form(pack, byte_level):
    """With a tokenizer text is read; without one, ids."""
    both = {
        "prompt": "Q",
        "completion": "x",
        "prompt_ids": [81],
        "completion_ids": [89],
    }
    assert pack(byte_level(template=TEMPLATE), both, as_chat=False).marked == [
        "Q«x</s>»"
    ]
    assert pack(None, both).sequences == [([81, 89], [False, True])]


def test_a_field_that_a_form_rightly_leaves_is_counted(pack, byte_level):
    """Also one that judges, where the verdict sums it up."""
    record = {
        **HELPSTEER3,
        "overall_preference": 1,
        "individual_preference": [{"score": -2}],
    }
    counts = pack(
        byte_level(template=TEMPLATE), record, record
    ).dataset.manifest.records
    assert counts.packed == 2
    assert counts.fields_not_used["individual_preference"] == 2


def test_a_mapped_field_takes_the_place_of_the_one_that_a_form_reads(pack, byte_level):
    record = {
        "prompt": "Q",
        "response": "x",
        "helpfulness": 3,
        "correctness": 1,
        "coherence": 4,
    }
    fields = {"score": "correctness"}
    packed = pack(byte_level(), record, form="helpsteer2", fields=fields)
    assert packstore.scan(packed.dataset).collect()["rewards"].to_list() == [[1]]


def test_mapped_fields_beside_a_form(pack, byte_level):
    tokenizer = byte_level(template=TEMPLATE)
    record = {
        "question": "Q",
        "chosen": "x",
        "rejected": "y",
        "asked": "R",
        "a": 3,
        "b": {"c": 1},
    }
    fields = {"prompt": "asked", "chosen_reward": "a", "rejected_reward": "b.c"}
    packed = pack(tokenizer, record, form="question_pairs", fields=fields)
    assert packed.marked == ["[u]R<e>[a]«x<e>»", "[u]R<e>[a]«y<e>»"]
    (group,) = packed.dataset.iter_packs()
    assert group.reward.tolist() == [3.0, 1.0]
    assert {"asked", "a", "b.c"} <= packed.dataset.manifest.records.fields_used.keys()


def test_a_path_into_a_form_s_list_replaces_its_scores(pack, byte_level):
    answers = [
        {"response": x, "overall_score": y, "x": -y} for x, y in [("a", 1), ("b", 2)]
    ]
    record = {"instruction": "Q", "completions": answers}
    fields = {"scores": "completions[].x"}
    packed = pack(byte_level(), record, fields=fields, form="scored_answers")
    assert packstore.scan(packed.dataset).collect()["rewards"].to_list() == [[-1, -2]]
    assert not packed.dataset.manifest.records.fields_not_used


def test_a_role_that_a_form_s_reading_lacks_cannot_be_mapped(pack, byte_level):
    record = {**HELPSTEER3, "overall_preference": 1, "a": "z"}
    with pytest.raises(RecordError, match="score"):
        pack(byte_level(), record, form="helpsteer3", fields={"score": "a"})
