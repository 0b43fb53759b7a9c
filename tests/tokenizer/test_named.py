"""Named shapes: every example of the table, records that are almost of a shape, paths."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import packstore
from packstore.config.record_shapes import known
from packstore.errors import ConfigError, DatasetExistsError, RecordError
from packstore.tokenizer.records.shapes import table
from tests.tokenizer.test_shapes import TEMPLATE

ENTRIES: dict[str, dict[str, Any]] = known().entries


@pytest.mark.parametrize("name", ENTRIES)
def test_an_example_is_of_exactly_its_shape(name, pack, byte_level):
    """And becomes what the table shows; one that cannot be read is refused by name."""
    entry = ENTRIES[name]
    tokenizer, record = byte_level(template=TEMPLATE), entry["example"]
    if "refuse" in entry:
        with pytest.raises(RecordError, match=re.escape(f"a record of {name} (")) as caught:
            pack(tokenizer, record)
        assert entry["refuse"] in str(caught.value)
        return
    packed = pack(tokenizer, record)
    assert packed.marked == entry["shows"]
    named = packed.dataset.manifest.provenance.get("shape")
    assert named == (None if "becomes" in entry else name)


def test_the_page_says_how_many_there_are():
    page = (Path(__file__).parents[2] / "docs/records.md").read_text(encoding="utf-8")
    assert f"{len(table().named)} named shapes" in page


Q = [{"role": "user", "content": "Q"}]
ABSENT = object()
ALMOST = [
    ("HelpSteer3", {"overall_preference": "2"}, "overall_preference must be a number"),
    ("HelpSteer3", {"overall_preference": ABSENT}, "no 'overall_preference'"),
    ("HelpSteer3", {"response2": ABSENT}, "no 'response2'"),
    (
        "NeMo-RL",
        {"completions": [{"rank": 0, "text": "x"}]},
        "no 'completion' among 'rank', 'text' in completions[0]",
    ),
    ("NeMo-RL", {"completions": [{"completion": "x"}]}, "no 'rank' among 'completion' in comp"),
    ("UltraFeedback", {"completions": [{"response": "x"}]}, "no 'overall_score'"),
    ("UltraFeedback", {"completions": {"response": "x"}}, "completions is no list"),
    ("Nectar", {"answers": [{"answer": "x"}]}, "no 'rank' among 'answer' in answers[0]"),
    ("Nectar", {"answers": ["x", "y"]}, "no 'answer' in answers[0]: 'x'"),
    ("OpenAI preference", {"non_preferred_output": ABSENT}, "no 'non_preferred_output'"),
    ("OpenAI preference", {"input": {"turns": Q}}, "no 'messages' among 'turns' in input"),
    ("distilabel generations", {"ratings": ABSENT}, "no 'ratings'"),
    ("PKU-SafeRLHF", {"better_response_id": ABSENT}, "no 'better_response_id'"),
    ("PKU-SafeRLHF", {"better_response_id": "1"}, "better_response_id must be a number, found '1'"),
    ("SHP", {"labels": ABSENT}, "no 'labels'"),
    ("summarize from feedback", {"summaries": [{"note": "x"}]}, "no 'text' among 'note' in sum"),
    ("WebGPT comparisons", {"score_1": ABSENT}, "no 'score_1'"),
    ("Chatbot Arena", {"winner": ABSENT}, "no 'winner'"),
    ("Stack Exchange paired", {"response_k": ABSENT, "responses_k": "y"}, "no 'response_k'"),
    ("alpaca_farm preference", {"preference": ABSENT}, "no 'preference'"),
    ("Orca pairs", {"rejected": ABSENT, "reject": "y"}, "no 'rejected'"),
    ("alpaca pairs", {"rejected": ABSENT}, "no 'rejected'"),
    ("Gemini preference", {"completions": [{"completion": Q}]}, "no 'score' among 'completion' in"),
    ("Bedrock conversation", {"messages": ABSENT, "message": Q}, "no 'messages'"),
    (
        "chosen_messages and rejected_messages",
        {"rejected_messages": ABSENT, "rejected_message": Q},
        "no 'rejected_messages'",
    ),
    ("arena 55k", {"winner_model_a": "yes"}, "must be a number, or its text, found 'yes'"),
    ("PandaLM annotators", {"response2": True}, "response2 must be text, found True"),
    ("oasst instruct", {"RESPONSE": ABSENT, "ANSWER": "x"}, "no 'RESPONSE'"),
    ("question and response", {"response": ABSENT}, "no 'response'"),
    ("text pairs", {"chosen": ["x"]}, "chosen must be text, found ['x'], a list of one"),
    ("Orca feedback", {"question": None}, "null"),
    ("judged text", {"prompt": ABSENT}, "no 'prompt' among"),
]
"""A shape, what of its example is changed, and what differs then."""


@pytest.mark.parametrize(("shape", "change", "differs"), ALMOST)
def test_what_is_almost_of_a_shape_is_refused_with_what_differs(
    shape, change, differs, pack, byte_level
):
    example = ENTRIES[shape]["example"] | change
    record = {name: value for name, value in example.items() if value is not ABSENT}
    with pytest.raises(RecordError, match="nearest shape: ") as caught:
        pack(byte_level(template=TEMPLATE), record, on={"wrong_type": "error"})
    assert f"nearest shape: {shape} (" in str(caught.value)
    assert differs in str(caught.value)


@pytest.mark.parametrize("shape", [None, "NeMo-RL"])
def test_what_lacks_a_field_stops_and_what_has_it_in_another_form_is_dropped(
    shape, pack, byte_level
):
    record, tokenizer = ENTRIES["NeMo-RL"]["example"], byte_level(template=TEMPLATE)
    other = {**record, "completions": [{"rank": 0, "completion": 3}]}
    assert pack(tokenizer, record, other, shape=shape).dropped == {"wrong_type": 1}
    for lacking in ([{"completion": "x"}], [{"rank": None, "completion": "x"}], None):
        with pytest.raises(RecordError, match="nearest shape: NeMo-RL"):
            pack(tokenizer, record, {**record, "completions": lacking}, shape=shape)


def test_ties_are_dropped_and_counted(pack, byte_level):
    given = {"context": Q, "response1": "x", "response2": "y"}
    rows = [{**given, "overall_preference": n} for n in (None, 0, -2, 0, 1)]
    packed = pack(byte_level(template=TEMPLATE), *rows, max_drop_rate=0)
    assert packed.dropped == {"tie": 3}  # null: nobody judged
    assert [text[-5:-2] for text in packed.marked] == ["x<e", "y<e", "y<e", "x<e"]


def test_two_shapes_that_fit_are_refused_unless_one_is_named(pack, byte_level):
    both = {"instruction": "Q", "output": "x", "input": "R", "target": "y"}
    tokenizer = byte_level(template=TEMPLATE)
    with pytest.raises(RecordError, match=r"alpaca .* and firefly .*--shape NAME"):
        pack(tokenizer, both)
    assert pack(tokenizer, both, shape="firefly").marked == ["[u]R<e>[a]«y<e>»"]
    with pytest.raises(ConfigError, match="Did you mean 'firefly'"):
        pack(tokenizer, both, shape="fireflie")
    with pytest.raises(RecordError, match="nearest shape: Nectar"):
        pack(tokenizer, both, shape="Nectar")
    pair = {"prompt": "Q", "chosen": "x", "rejected": "y"}
    with pytest.raises(RecordError, match=r"text pairs .* but it is of kind preference"):
        pack(tokenizer, pair, shape="text pairs", kind="sft")


def test_of_shapes_that_fit_the_one_that_reads_most_is_taken(pack, byte_level):
    tokenizer = byte_level(template=TEMPLATE)
    empty = {"instruction": "", "input": "Q", "output": "x"}  # also input and output
    assert pack(tokenizer, empty).marked == ["[u]Q<e>[a]«x<e>»"]
    with pytest.raises(RecordError, match=r"a record of one text .*: prompt and answer stand"):
        pack(tokenizer, {"text": "T", "system": "S", "chat": "C"})  # refused either way


def test_reasoning_in_a_field_of_its_own_is_that_of_the_answer(pack, byte_level):
    record = {"Question": "Q", "Complex_CoT": "t", "Response": "x"}
    assert pack(byte_level(template=TEMPLATE), record).marked == ["[u]Q<e>[a]«(t)x<e>»"]
    with pytest.raises(RecordError, match="reasoning beside plain text"):
        pack(byte_level(), record)


@pytest.mark.parametrize("question", ["", " ", "-"])
def test_answers_without_a_question_are_noted(question, pack, byte_level):
    """As Nemotron has them, whose questions stand in other sets."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "x"}]
    asked = [*Q, messages[1], *messages]
    for record, empty in [
        ({"messages": messages}, True),
        ({"messages": asked}, False),
        ({"messages": messages, "label": True}, True),
        (
            {"chosen": messages, "rejected": [messages[0], {"role": "assistant", "content": "y"}]},
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
    with pytest.raises(RecordError, match="system 's'"):
        pack(bare, {**record, "system": "s"})


def test_rewards_beside_a_named_shape_are_kept(pack, byte_level):
    record = {"system": "s", "prompt": "Q", "chosen": "x", "rejected": "y"}
    packed = pack(
        byte_level(template=TEMPLATE), {**record, "score_chosen": 4, "score_rejected": 1.5}
    )
    (group,) = packed.dataset.iter_packs()
    assert sorted(group.reward.tolist()) == [1.5, 4.0]


def test_a_changed_file_of_shapes_is_refused_on_append_and_rerun(tmp_path, byte_level):
    own, out = tmp_path / "own.yaml", str(tmp_path / "out")
    (tmp_path / "t.json").write_text(byte_level().file.to_str(), encoding="utf-8")
    text = "mine:\n  kind: sft\n  fields: {q: text, a: text}\n  reads: {prompt: q, response: a}\n"
    own.write_text(text, encoding="utf-8")
    path, more = tmp_path / "in.jsonl", tmp_path / "more.jsonl"
    path.write_text('{"q": "Q", "a": "x"}\n', encoding="utf-8")
    more.write_text('{"q": "R", "a": "y"}\n', encoding="utf-8")
    settings = {"tokenizer": str(tmp_path / "t.json"), "shape": str(own), "pack_size": 64}
    dataset = packstore.pack(str(path), out, **settings)
    assert dataset.manifest.provenance["shape_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert packstore.pack(str(path), out, **settings).version == dataset.version
    changed = text.replace("prompt: q, response: a", "prompt: a, response: q")
    own.write_text(changed, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own.yaml must be as it was; found sha256"):
        packstore.append(out, str(more))
    with pytest.raises(DatasetExistsError, match="shape_sha256"):
        packstore.pack(str(path), out, **settings)
    own.write_text(text, encoding="utf-8")
    assert packstore.append(out, str(more)).manifest.records.packed == 2


def test_ids_of_a_record_with_a_named_shape(pack, byte_level):
    """Without a tokenizer they are read; with one, text or ids must be chosen."""
    both = {"instruction": "Q", "output": "x", "input_ids": [81, 89], "labels": [-100, 89]}
    assert pack(None, both).sequences == [([81, 89], [False, True])]
    tokenizer = byte_level(template=TEMPLATE)
    with pytest.raises(RecordError, match=r"alpaca .* and ids and labels .*--shape NAME"):
        pack(tokenizer, both, on={"wrong_type": "error"})
    assert pack(tokenizer, both, shape="alpaca").marked == ["[u]Q<e>[a]«x<e>»"]
    assert pack(tokenizer, both, shape="ids and labels").marked == ["r«z»"]


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("Chatbot Arena", {"winner": "left"}, "the verdict must be one of"),
        ("arena 55k", {"prompt": '["Q", "R"]'}, "lists of as many texts"),
        ("arena 55k", {"prompt": "[Q"}, "lists of as many texts"),
        ("summarize from feedback", {"summaries": [{"text": "x"}] * 3}, "there must be two"),
        ("NeMo-RL", {"completions": [{"rank": "low", "completion": "x"}]}, "must be a number"),
    ],
)
def test_a_record_of_a_shape_that_cannot_be_read_names_it(name, changed, said, pack, byte_level):
    record = ENTRIES[name]["example"] | changed
    with pytest.raises(RecordError, match=f"{name}: .*{said}"):
        pack(byte_level(template=TEMPLATE), record, on={"wrong_type": "error"})


def said(*texts: str) -> list[dict[str, Any]]:
    """Turns of the user and of a model, as the sets of the arena write them."""
    roles = ("user", "assistant") * len(texts)
    parts = ([{"type": "text", "text": text, "image": None, "mimeType": None}] for text in texts)
    return [{"role": role, "content": part} for role, part in zip(roles, parts, strict=False)]


def voted(*answers: str) -> dict[str, Any]:
    """The second vote of a session: the question and both answers of each round of it."""
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
        (voted("P", "A", "B", "Q", "y", "x"), "different_contexts"),  # each model has its own
        (voted("P", "A", "A", "Q", "z", "x"), "wrong_type"),
        (voted("P", "A", "A", "Q", "z", "z"), "wrong_type"),  # the judged ones, or others?
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
    sides = {"conversation_a": said("Q", "y", "R", "w"), "conversation_b": said("Q", "x", "R", "z")}
    record = {**sides, "question_id": 81, "judge": "expert_1", "winner": "model_b"}
    assert pack(tokenizer, {**record, "turn": 1}).marked == [f"[u]Q<e>[a]«{x}<e>»" for x in "xy"]
    whole = [f"[u]Q<e>[a]«{x}<e>»[u]R<e>[a]«{z}<e>»" for x, z in ("xz", "yw")]
    assert pack(tokenizer, {**record, "turn": 2}).marked == whole
    for turn in (3, 0, "first"):
        assert pack(tokenizer, {**record, "turn": turn}).dropped == {"wrong_type": 1}


def test_turns_in_the_text_of_a_prompt_stay_text_without_chats(pack, byte_level):
    record = ENTRIES["HelpSteer2"]["example"]
    packed = pack(byte_level(template=TEMPLATE), record, as_chat=False)
    assert packed.marked == [f"{record['prompt']}«x</s>»"]


def test_what_sorts_answers_to_learn_does_not_judge_them(pack, byte_level):
    """Its values differ over records: reasoning on and off, how hard a question is."""
    tokenizer = byte_level(template=TEMPLATE)
    record = ENTRIES["Nemotron"]["example"]
    other = {**record, "reasoning": "off", "metadata": '{"expected_answer": "3"}'}
    assert len(pack(tokenizer, record, other).marked) == 2
    chat = {"conversations": record["messages"], "skip_prompt_formatting": True, "difficulty": 8}
    assert len(pack(tokenizer, chat, {**chat, "skip_prompt_formatting": False}).marked) == 2


def test_votes_that_are_even_are_a_tie(pack, byte_level):
    record = ENTRIES["PandaLM annotators"]["example"] | {"input": float("nan")}
    rows = [{**record, "annotator3": vote} for vote in (2, 0, 1)]
    packed = pack(byte_level(template=TEMPLATE), *rows)
    assert packed.dropped == {"tie": 1}
    (group,) = packed.dataset.iter_packs()
    assert sorted(group.reward.tolist()) == [0.0, 0.0, 1.0, 2.0]
    assert packed.marked[0] == "[u]Q<e>[a]«x<e>»"


def test_totals_of_several_shapes_are_said_once(pack, byte_level, caplog):
    caplog.set_level("INFO", "packstore")
    context = {"context": Q, "response1": "x", "response2": "y"}
    ties = [{**context, "overall_preference": i} for i in (-1, 0, 2)]
    pack(byte_level(template=TEMPLATE), {"prompt": Q, "chosen": "x", "rejected": "y"}, *ties)
    told = [text for text in caplog.messages if text.startswith("records")]
    assert told[0].endswith("): 2 pairs")
    assert told[1].endswith("): 1 pairs")
    assert told[2:] == ["records of all shapes: 3, 3 as chats, 1 ties dropped"]


def test_keys_and_roles_of_ones_own(tmp_path, pack, byte_level):
    """As the tags of LLaMA-Factory's dataset_info.json say them."""
    own, chat = tmp_path / "own.yaml", byte_level(template=TEMPLATE)
    entry = {"kind": "preference", "fields": {"talk": "messages", "best": "any", "worst": "any"}}
    entry |= {"reads": {"prompt": "talk", "chosen": "best", "rejected": "worst"}}
    own.write_text(
        json.dumps({"mine": {**entry, "turns": {"who": "role", "says": "content"},
                             "roles": {"USER": "user", "IT": "assistant"}}}),
        encoding="utf-8",
    )  # fmt: skip
    turns = [{"who": who, "says": said} for who, said in [("USER", "Q"), ("IT", "x"), ("IT", "y")]]
    record = {"talk": turns[:1], "best": turns[1], "worst": turns[2]}
    packed = pack(chat, record, shape=str(own))
    assert packed.marked == ["[u]Q<e>[a]«x<e>»", "[u]Q<e>[a]«y<e>»"]
    unknown = {"messages": [{"role": "USER", "content": "Q"}, {"role": "IT", "content": "x"}]}
    with pytest.raises(RecordError, match=r"unknown role 'IT'.*roles: \{NAME: assistant\}"):
        pack(chat, unknown, on={"bad_role": "error"})


def test_a_shape_of_ones_own(tmp_path, pack, byte_level):
    own = tmp_path / "own.yaml"
    own.write_text(
        "mine:\n  kind: preference\n  fields: {q.text: text, sides: texts, best: number}\n"
        "  reads: {prompt: q.text, options: sides, verdict: best}\n  first: [0]\n  second: [1]\n",
        encoding="utf-8",
    )
    record = {"q": {"text": "Q"}, "sides": ["x", "y"], "best": 1}
    assert pack(byte_level(), record, shape=str(own)).marked == ["Q«y</s>»", "Q«x</s>»"]
    with pytest.raises(ConfigError, match=r"none\.yaml: it must be a .* found No such file"):
        pack(byte_level(), record, shape=str(tmp_path / "none.yaml"))


def test_a_part_that_a_shape_passes_over_as_the_refusal_says(tmp_path, pack, byte_level):
    """Also where the shape reads no parts itself."""
    own, record = tmp_path / "own.yaml", {"q": "Q", "a": "x", "meta": {"grade": 0.5}}
    entry = {"kind": "sft", "fields": {"q": "text", "a": "text"}}
    entry["reads"] = {"prompt": "q", "response": "a"}
    own.write_text(json.dumps({"mine": entry}), encoding="utf-8")
    with pytest.raises(RecordError, match=re.escape('passes: ["meta.grade"]')):
        pack(byte_level(), record, shape=str(own))
    own.write_text(json.dumps({"mine": {**entry, "passes": ["meta.grade"]}}), encoding="utf-8")
    assert pack(byte_level(), record, shape=str(own)).marked == ["Q«x</s>»"]


VERDICT = {
    "kind": "preference",
    "fields": {"q": "text", "sides": "texts", "best": "text"},
    "reads": {"prompt": "q", "options": "sides", "verdict": "best"},
    "first": ["A"],
    "second": ["B"],
}
SCORES = {"kind": "scored", "fields": {"q": "text"}, "reads": {"prompt": "q"}}
MISTAKES = [
    ({"felds": 1}, "its keys .*Did you mean 'fields'"),
    (VERDICT | {"first": "A>B", "second": "B>A"}, r"array.*\$\.first"),
    (VERDICT | {"tie": "C"}, r"array.*\$\.tie"),
    (VERDICT | {"first": ["A", "B"]}, "once in first, second and tie, and 'B' does twice"),
    (VERDICT | {"first": [True], "tie": [1]}, "and 1 does twice"),
    (VERDICT | {"first": []}, "must list the values of the verdict"),
    (VERDICT | {"passes": "meta"}, r"array.*\$\.passes"),
    (SCORES | {"kind": "scores"}, "its kind .*Did you mean 'scored'"),
    (SCORES | {"fields": {"q": "txt"}}, "forms of fields .*Did you mean 'text'"),
    (SCORES | {"reads": {"promt": "q"}}, "what it reads .*Did you mean 'prompt'"),
    (SCORES | {"reads": {"optons": "q"}}, "what it reads .*Did you mean 'options'"),
    (SCORES | {"reads": {"prompt": "q..a"}}, "paths"),
    (SCORES | {"reads": {"first": "q"}}, "both of first and second"),
    (SCORES | {"reads": {}}, "what it reads"),
    (SCORES | {"as_chat": "yes"}, r"bool.*\$\.as_chat"),
    (SCORES | {"splits": "("}, "splits must be a pattern"),
    ("text", "object"),
]


@pytest.mark.parametrize(("entry", "said"), MISTAKES)
def test_a_mistake_in_a_shape_is_named_with_its_file(entry, said, tmp_path, pack, byte_level):
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps({"mine": entry}), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"own\.yaml, shape mine: .*{said}"):
        pack(byte_level(), {"q": "Q", "sides": ["x", "y"], "best": "B"}, shape=str(own))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("task.question", "mine reads prompt of task.question: no 'question' among 'body' in task"),
        ("tsk", "mine reads prompt of tsk: no 'tsk' among 'task', 'answers'"),
        ("answers[].points", r"prompt must be text, found \[1, 0\]"),
    ],
)
def test_a_path_of_a_shape_that_finds_nothing_is_named(path, said, tmp_path, pack, byte_level):
    own, answers = tmp_path / "own.yaml", [{"text": "x", "points": 1}, {"text": "y", "points": 0}]
    fields = {"task.body": "text", "answers[].text": "texts"}
    reads = {"prompt": path, "responses": "answers[].text", "scores": "answers[].points"}
    entry = {"kind": "scored", "fields": fields, "reads": reads}
    own.write_text(json.dumps({"mine": entry}), encoding="utf-8")
    on = {"wrong_type": "error"}
    with pytest.raises(RecordError, match=said):
        pack(byte_level(), {"task": {"body": "Q"}, "answers": answers}, shape=str(own), on=on)


PATHS = [
    (
        {"in": {"q": "Q"}, "out": [{"a": "x", "s": 2}, {"a": "y", "s": 1}]},
        {"prompt": "in.q", "responses": "out[].a", "scores": "out[].s"},
    ),
    (
        {"in": {"q.1": "Q"}, "out": {"a b": ["x", "y"]}, "scores": [2, 1]},
        {"prompt": 'in."q.1"', "responses": "out.a b"},
    ),
    ({"in.q": "Q", "responses": ["x", "y"], "scores": [2, 1]}, {"prompt": "in.q"}),
    ({"in": '{"q": "Q"}', "responses": ["x", "y"], "scores": [2, 1]}, {"prompt": "in.q"}),
]


@pytest.mark.parametrize(("record", "fields"), PATHS)
def test_paths(record, fields, pack, byte_level):
    packed = pack(byte_level(), record, fields=fields)
    assert packed.marked == ["Q«x</s>»", "Q«y</s>»"]
    assert not packed.dataset.manifest.records.fields_not_used


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("out[].b", r"no 'b' among 'a' in out\[1\]"),
        ("in.x", "no 'x' among 'q' in in"),
        ("in[].q", "in is no list"),
        ("nothing.q", "no 'nothing' among 'in', 'out'"),
    ],
)
def test_a_path_that_finds_nothing_says_which_part_is_missing(path, said, pack, byte_level):
    record = {"in": {"q": "Q"}, "out": [{"a": "x", "b": "z"}, {"a": "y"}]}
    with pytest.raises(RecordError, match=said):
        pack(byte_level(), record, fields={"prompt": "in.q", "chosen": path, "rejected": "out"})


@pytest.mark.parametrize("path", ["a..b", "[].a", "a[0]", ".a", 'a."b'])
def test_a_path_that_is_none(path, pack, byte_level):
    with pytest.raises(ConfigError, match="path"):
        pack(byte_level(), {"a": "Q", "c": "x"}, fields={"prompt": path, "response": "c"})


def test_what_a_shape_passes_over_is_counted(pack, byte_level):
    """Also what judges, where the table says that the verdict sums it up."""
    record = {**ENTRIES["HelpSteer3"]["example"], "individual_preference": [{"score": -2}]}
    found = pack(byte_level(template=TEMPLATE), record, record).dataset.manifest.records
    assert found.packed == 2
    assert found.fields_not_used["individual_preference"] == 2


def test_a_mapped_field_goes_before_that_of_its_shape(pack, byte_level):
    tokenizer = byte_level(template=TEMPLATE)
    record = {"question": "Q", "chosen": "x", "rejected": "y", "asked": "R", "a": 3, "b": {"c": 1}}
    fields = {"prompt": "asked", "chosen_reward": "a", "rejected_reward": "b.c"}
    packed = pack(tokenizer, record, shape="Orca pairs", fields=fields)
    assert packed.marked == ["[u]R<e>[a]«x<e>»", "[u]R<e>[a]«y<e>»"]
    (group,) = packed.dataset.iter_packs()
    assert group.reward.tolist() == [3.0, 1.0]
    used = packed.dataset.manifest.records.fields_used
    assert {*used} == {"asked", "chosen", "rejected", "a", "b.c"}
    with pytest.raises(RecordError, match="or none and its fields"):
        pack(tokenizer, {"asked": "Q", "chosen": "x", "rejected": "y"}, shape="Orca pairs",
             fields={"prompt": "asked"})  # fmt: skip


def test_the_shape_is_named_by_the_dataset_and_holds_for_what_is_added(
    pack, byte_level, monkeypatch
):
    record = {"question": "Q", "chosen": "x", "rejected": "y"}
    plain = {"prompt": "Q", "chosen": "x", "rejected": "y"}
    tokenizer = byte_level(template=TEMPLATE)
    assert "shape" not in pack(tokenizer, plain).dataset.manifest.provenance
    dataset = pack(tokenizer, record).dataset
    assert dataset.manifest.provenance["shape"] == "Orca pairs"
    (shape,) = (shape for shape in table().named if shape.name == "Orca pairs")
    assert dataset.manifest.provenance["shape_sha256"] == shape.digest
    more = [{"question": "R", "chosen": "x", "rejected": "y"}]
    monkeypatch.setattr(shape, "entry", {**shape.entry, "note": "another"})
    dataset = packstore.append(dataset, more, tokenizer=tokenizer.library)
    monkeypatch.setattr(shape, "entry", {**shape.entry, "passes": ["score"]})
    with pytest.raises(ConfigError, match=r"Orca pairs must be as it was.*version of packstore"):
        packstore.append(dataset, more, tokenizer=tokenizer.library)
