"""What judges, weighs or adds an answer is read or refused, beside records of every kind."""

from __future__ import annotations

import functools
import itertools
import json
import re

import pytest

import packstore
from packstore.config import PackConfig
from packstore.config.record_shapes import HARMLESS, known
from packstore.errors import RecordError
from packstore.format.arrays import Rows
from packstore.tokenizer import RecordTokenizer, load_tokenizer
from packstore.tokenizer.records.fields import unexplained
from packstore.tokenizer.records.shapes import table
from tests.tokenizer.test_shapes import TEMPLATE

Q, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "x"}
BASES = {
    "text pairs": ("preference", {"prompt": "Q", "chosen": "x", "rejected": "y"}),
    "chat pairs": ("preference", {"prompt": [Q], "chosen": [A], "rejected": "y"}),
    "id pairs": ("preference", {"prompt_ids": [81], "chosen_ids": [87], "rejected_ids": [88]}),
    "Orca pairs": ("preference", {"question": "Q", "chosen": "x", "rejected": "y"}),
    "scored texts": ("scored", {"prompt": "Q", "responses": ["x", "y"], "scores": [2, 1]}),
    "judged text": ("scored", {"prompt": "Q", "completion": "x", "label": True}),
    "prompt and response": ("sft", {"prompt": "Q", "completion": "x"}),
    "dialogue": ("sft", {"messages": [Q, A]}),
    "alpaca": ("sft", {"instruction": "Q", "output": "x"}),
}  # fmt: skip
NESTED = {shape.name: shape for shape in table().named if shape.opens}
NUMBERS = (0.5, 0, 3, -1.5, True, False, "0.5", "bad", {"mean": 0.5}, {"by": {"a": 1}}, [0.5, 1])
TEXTS = ("z", ["z"], [{"role": "assistant", "content": "z"}], {"text": "z"})
JUDGES = """
    quality helpful confidence pass_rate judge verdict correctness human_score answer_rating
    is_correct preferred winner_model scoreB passRate Judge-Score toxicity is_safe critique
    vote_count best_index is_tie answer_accuracy wins elo feedback_a response_score pass@1
    evaluation
""".split()  # noqa: SIM905
ADDS = """
    negative response_b answer_b output_2 responseB answer2 completion_1 chosen_2 rejected_alt
    bad_answer better_response alternatives all_responses rejected_text hard_negatives
    model_output full_rejected messages_2 negatives second_answer edited_response answers
""".split()  # noqa: SIM905
WEIGHTS = ["weight", "loss_weight", "sample_weights", "weight_b", "importance", "coefficient"]
MASKS = ["loss_mask", "mask", "completion_mask", "response_mask", "lossMask", "loss", "train_on"]
VARIABLES = ["enable_thinking", "chatTemplate"]
TURNS = ["system_instruction", "sysPrompt", "system_text", "developer_prompt", "preamble"]
MEDIA = ["images", "image", "videos", "audios", "image_path", "video_urls", "imageList"]
CASES = [
    *itertools.product(JUDGES, NUMBERS),
    *itertools.product(ADDS, TEXTS),
    *itertools.product(WEIGHTS, (0.5, 0, 3)),
    *itertools.product(MASKS, ([0, 1], [1, 1, 0])),
    *itertools.product(VARIABLES, (True, False, "{{ x }}")),
    *itertools.product(TURNS, ("S", ["S"], {"parts": ["S"]})),
    *itertools.product(MEDIA, ("a.png", ["a.png"], {"path": "a.png"}, [{"bytes": "b"}])),
    *itertools.product(
        ["metadata", "extra_info", "info", "Meta", "annotations", "anything"],
        (
            {"score": 0.5},
            {"by": {"quality": 1}},
            {"all": [{"pass_rate": 0.5}]},
            [{"rating": 5}],
            [{"rating": 5}, {"rating": 4}, {"response_b": "z"}],
            '{"judge": {"verdict": "bad"}}',
            {"by": '{"judge": "{\\"verdict\\": \\"bad\\"}"}'},
            ['{"rating": 5}'],
            {"response_b": "z"},
        ),
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def said(byte_level):
    """What becomes of records: reasons of those refused, fields that are warned of."""
    file = byte_level(template=TEMPLATE).library
    tokenizer = load_tokenizer(file, chat_template=TEMPLATE)

    @functools.cache
    def stage(kind, is_text, shape):
        on = dict.fromkeys(("unread_field", "unknown_key", "unpaired_feedback"), "drop")
        config = PackConfig(on=on, shape=shape)
        return RecordTokenizer(tokenizer if is_text else None, config, kind)

    def go(kind, *records, shape=None):
        is_text = "prompt_ids" not in records[0]
        _, tally, _ = stage(kind, is_text, shape)(Rows(0, "", "item", range(len(records)), records))
        return dict(tally.dropped), unexplained(tally)

    return go


@pytest.mark.parametrize("insists", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_what_judges_weighs_or_adds_is_read_or_refused(base, insists, said):
    """Also if a shape is named, which says of single answers which one is learned."""
    kind, record = BASES[base]
    shape = base if insists else None
    assert said(kind, record, shape=shape) == ({}, [])
    silent = []
    for name, value in CASES:
        is_text = "z" in (value, *(value.values() if isinstance(value, dict) else ()))
        if base == "id pairs" and (
            is_text or (known().group(name) == "adds" and type(value) is str)
        ):
            continue  # text that its ids may stand for
        if insists and kind == "sft" and (is_text or known().group(name) == "adds"):
            continue
        given = [{**record, name: value}] * 3  # the same in all of them
        dropped, _ = said(kind, *given, shape=shape)
        refused = (
            "unread_field",
            "unpaired_feedback",
            *(["wrong_type"] if name == "image" else ()),
        )
        if dropped not in [{reason: 3} for reason in refused]:
            silent.append((name, value))
    assert silent == []


@pytest.mark.parametrize("name", [name for name, shape in NESTED.items() if not shape.refuse])
def test_also_in_an_object_of_which_parts_are_read(name, said):
    """As in an item of the answers: each named shape says what it leaves there."""
    shape = NESTED[name]
    record = shape.entry["example"]
    assert said(shape.kind, record) == ({}, [])
    for root in shape.opens & record.keys():
        for field in ("weight", "rejected", "judge_score", "loss_mask", "images"):
            given = json.loads(json.dumps(record))
            is_text = isinstance(given[root], str)
            value = json.loads(given[root]) if is_text else given[root]
            (value[0] if isinstance(value, list) else value)[field] = [0.5, "z"]
            given[root] = json.dumps(value) if is_text else value
            dropped, _ = said(shape.kind, given)
            assert sum(dropped.values()) == 1, (root, field)


@pytest.mark.parametrize("base", BASES)
def test_what_is_harmless_is_passed_over(base, said):
    kind, record = BASES[base]
    harmless = {
        "id": 3, "conversationId": "c", "Prompt-ID": "p", "source": "s", "model": "m", "lang": "en",
        "metadata": {"source": "s", "url": "u", "by": {"model": "m"}, "turns": 3},
        "info": '{"language": "en"}', "extra_info": {"index": 3, "split": "train"}, "score": None,
        "meta": "text", "loss_mask": [1, 1, 1], "mask": "User", "response_b": "",
    }  # fmt: skip
    unknown = {
        "reward_model": "m", "chosen_model": "m", "judge_prompt": "j", "chosen_tokens": 3,
        "response_length": 4, "attention_mask": [1, 1], "passage": "p", "ratio": 0.5,
        "context": "c", "ground_truth": "g", "answer": "a", "options": ["a", "b"],
    }  # fmt: skip
    for name, value in {**harmless, **unknown}.items():
        if not (name == "weight" and kind == "sft"):
            assert said(kind, {**record, name: value}) == ({}, []), name
    for name, value in harmless.items():
        other = {"source": "t", "url": "v"} if isinstance(value, dict) else value
        if name != "mask" and not isinstance(value, list):
            assert said(kind, {**record, name: value}, {**record, name: other})[1] == [], name
    varied = [{**record, "metadata": {"x": i, "source": i}} for i in range(3)]
    assert said(kind, *varied) == ({}, ["metadata.x"])
    deep = [functools.reduce(lambda inner, _: {"a": inner}, range(20), i) for i in range(3)]
    _, unknown = said(kind, *({**record, "metadata": value} for value in deep))
    assert unknown == ["metadata" + 10 * ".a"]


@pytest.mark.parametrize(
    ("name", "flat", "value"),
    [
        ("attention_mask", [1, 1, 1], [0, 1, 1]),
        ("chosen_attention_mask", [1, 1, 1], [1, 1, 0]),
        ("position_ids", [0, 1, 2], [0, 1, 0]),
        ("seq_lens", [3], [2, 1]),
    ],
)
def test_padding_and_other_sequences_among_ids_are_not_learned(name, flat, value, said):
    pair = {"prompt_ids": [81], "chosen_ids": [87, 88], "rejected_ids": [88]}
    assert said("preference", {**pair, name: flat}) == ({}, [])
    assert said("preference", {**pair, name: value})[0] == {"unread_field": 1}
    assert said("preference", {**BASES["text pairs"][1], name: value}) == ({}, [])


@pytest.mark.parametrize("mask", [[0, 0.5, 1], [0, 2, 1], ["0", "1", "1"], [0, None, 1]])
def test_a_mask_is_of_zeros_and_ones(mask, said):
    assert said("sft", {"input_ids": [81, 87, 88], "mask": [0, 1.0, True]}) == ({}, [])
    assert said("sft", {"input_ids": [81, 87, 88], "mask": mask})[0] == {"wrong_type": 1}


def test_an_object_is_looked_into_whatever_stands_beside_its_record(said):
    """The name of its field may be one that the named shape of another record reads."""
    alpaca = {"instruction": "Q", "input": "R", "output": "x"}
    judged = {"prompt": "Q", "completion": "x", "input": {"quality": 0.5}}
    assert said("sft", judged)[0] == {"unpaired_feedback": 1}
    assert said("sft", alpaca, judged)[0] == {"unpaired_feedback": 1}


def test_names_are_compared_by_their_words():
    groups = {"ratings": "judges", "a.b[].passRate": "judges", "generation": "adds", "ID": HARMLESS}
    assert {name: known().group(name) for name in groups} == groups


def test_the_remedy_reads_it(pack, byte_level):
    record = {"prompt": "Q", "completion": "x", "metadata": {"quality": 0.5}}
    with pytest.raises(RecordError, match=r"--field score=metadata\.quality") as caught:
        pack(byte_level(), record)
    assert "--carry" not in str(caught.value)
    packed = pack(byte_level(), record, fields={"score": "metadata.quality"})
    assert packed.dataset.manifest.kind == "scored"
    assert "metadata.quality" in packed.dataset.manifest.records.fields_used


@pytest.mark.parametrize("column", ["images", "videos", "audios"])
@pytest.mark.parametrize("form", ["swift", "factory"])
def test_a_placeholder_beside_its_images_is_not_learned_as_text(column, form, said):
    """The forms of ms-swift and LLaMA-Factory; also if its images have gone."""
    text = f"<{column[:-1]}>What is it?"
    chat = [{"role": "user", "content": text}, A]
    records = {
        "swift": [
            ("sft", {"messages": chat}),
            ("sft", {"query": text, "response": "x"}),
            ("preference", {"messages": chat, "rejected_response": "y"}),
            ("preference", {"query": text, "response": "x", "rejected_response": "y"}),
        ],
        "factory": [
            ("sft", {"instruction": text, "input": "", "output": "x"}),
            ("sft", {"conversations": [{"from": "human", "value": text},
                                       {"from": "gpt", "value": "x"}]}),
            ("scored", {"messages": chat, "label": True}),
            ("preference", {"conversations": [{"from": "human", "value": text}],
                            "chosen": {"from": "gpt", "value": "x"},
                            "rejected": {"from": "gpt", "value": "y"}}),
        ],
    }  # fmt: skip
    for kind, record in records[form]:
        for given in (record, {**record, column: ["a.bin"]}, {**record, column: []}):
            assert said(kind, given)[0] == {"unread_field": 1}


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("<image>\nWhat is it?", True),  # LLaVA
        ("What is it?\n<image>", True),
        ("<image><image>这是什么？", True),  # ms-swift
        ("<image>", True),
        ("<image> is no tag of HTML, is it?", False),
        ("What is the tag <image>?", False),
        ("What does this do:\n<video>", False),
        ("<video>\n<source src='a.mp4'>\n</video>", False),
        ("<image><url>a.png</url></image>", False),
        ("<image href='a.png'/>", False),
        ("<img>", False),
    ],
)
def test_a_placeholder_is_one_where_trainers_write_it(text, is_refused, said):
    expected = {"unread_field": 1} if is_refused else {}
    turns = [{"role": "user", "content": text}, A]
    for kind, record in [
        ("sft", {"messages": turns}),
        ("sft", {"messages": [Q, A, *turns]}),
        ("preference", {"prompt": text, "chosen": "x", "rejected": "y"}),
        ("preference", {"prompt": "Q", "chosen": text, "rejected": "y"}),
    ]:
        of_answer = record.get("chosen") == text
        assert said(kind, record)[0] == ({} if of_answer else expected)


ANSWER = {"prompt": "Q", "completion": "x", "a": "0/60 points", "meta": {"src": 3}}
PAIR = {"prompt": "Q", "chosen": "x", "rejected": "y", "chosen_score": 2, "rejected_score": 1}
IGNORED = [
    (ANSWER, {"chosen_reward": "meta.src"}, "prompt and response"),
    (ANSWER | {"score": 1}, {"chosen_reward": "meta.src"}, "judged text"),
    (ANSWER | {"a": "S"}, {"system": "a"}, "prompt and response"),
    ({"messages": [{"role": "system", "content": "T"}, Q, A], "a": "S"}, {"system": "a"},
     "dialogue"),
    (PAIR | {"a": 3}, {"score": "a"}, "text pairs"),
    (PAIR | {"a": [1, 0]}, {"scores": "a"}, "text pairs"),
    ({"context": "Q", "response1": "x", "response2": "y", "overall_preference": 1, "a": 3},
     {"chosen_reward": "a"}, "HelpSteer3"),
    ({"context": "Q", "response1": "x", "response2": "y", "overall_preference": 1, "a": "z"},
     {"chosen": "a"}, "HelpSteer3"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "fields", "shape"), IGNORED)
def test_a_mapped_field_is_read_or_its_record_refused(record, fields, shape, pack, byte_level):
    tokenizer = byte_level(template=TEMPLATE) if "messages" in record else byte_level()
    ((name, at),) = fields.items()
    named = shape if shape == "HelpSteer3" else None
    with pytest.raises(RecordError, match=rf"{shape} .* does not read --field {name}={at}"):
        pack(tokenizer, record, fields=fields, shape=named)
    keep = {"unread_field": "keep", "unpaired_feedback": "keep"}
    assert pack(tokenizer, record, fields=fields, shape=named, on=keep).marked


@pytest.mark.parametrize(
    ("record", "fields", "kind"),
    [
        ({"prompt": "Q", "label": "good"}, {"response": "label"}, "sft"),
        ({"prompt": "Q", "score": "5", "label": True}, {"response": "score"}, "scored"),
        ({"q": "Q", "chosen": "x", "rejected": "y", "reward": "z"}, {"prompt": "q"}, "preference"),
        ({"score": "Q", "completion": "x"}, {"prompt": "score"}, "sft"),
    ],
)
def test_a_mapped_field_is_not_read_under_its_own_name_too(record, fields, kind, pack, byte_level):
    keep = {"unread_field": "keep"}
    dataset = pack(byte_level(), record, fields=fields, on=keep).dataset
    assert dataset.manifest.kind == kind
    rewards = packstore.scan(dataset).collect()["rewards"].to_list()
    assert rewards == [[1, 0] if kind == "preference" else [1]]


def test_a_mapped_score_that_is_none_is_no_answer_to_learn(pack, byte_level):
    records = [ANSWER, ANSWER | {"a": "60/60 points"}]
    refused = pack(byte_level(), *records, fields={"score": "a"})
    assert refused.dropped == {"wrong_type": 2}
    scored = pack(byte_level(), ANSWER | {"a": 1}, *records, fields={"score": "a"})
    assert (scored.dataset.manifest.kind, scored.dropped) == ("scored", {"wrong_type": 2})


def test_a_mapped_field_may_be_absent_or_empty(pack, byte_level):
    tokenizer, fields = byte_level(template=TEMPLATE), {"system": "a"}
    text, chat = {"prompt": "Q", "completion": "x"}, {"messages": [Q, A], "a": "S"}
    empty = [text | {"a": value} for value in (None, "", [], float("nan"))]
    packed = pack(tokenizer, chat, text, *empty, fields=fields, as_chat=False)
    assert packed.dataset.manifest.records.packed == 6
    with pytest.raises(RecordError, match="does not read --field system=a"):
        pack(tokenizer, chat, text | {"a": ""}, text | {"a": "S"}, fields=fields, as_chat=False)


@pytest.mark.parametrize("name", ["mine", "UltraFeedback"])
def test_a_path_into_what_a_named_shape_reads_goes_before_it(name, tmp_path, pack, byte_level):
    own = tmp_path / "own.yaml"
    reads = {"prompt": "q", "responses": "completions[].response", "scores": "completions[].y"}
    entry = {"kind": "scored", "fields": {"q": "text", "completions[].y": "numbers"}}
    own.write_text(json.dumps({"mine": {**entry, "reads": reads}}), encoding="utf-8")
    answers = [
        {"response": x, "y": y, "overall_score": y, "x": -y} for x, y in [("a", 1), ("b", 2)]
    ]
    record = {"q" if name == "mine" else "instruction": "Q", "completions": answers}
    how = {"fields": {"scores": "completions[].x"}, "shape": str(own) if name == "mine" else name}
    frame = packstore.scan(pack(byte_level(), record, **how).dataset).collect()
    assert frame["rewards"].to_list() == [[-1, -2]]


def test_a_mapped_field_takes_the_place_of_the_one_that_a_named_shape_reads(pack, byte_level):
    """Also one that the shape passes over; the other is only named."""
    record = {"prompt": "Q", "response": "x", "helpfulness": 3, "correctness": 1, "coherence": 4}
    packed = pack(byte_level(), record, shape="HelpSteer2", fields={"score": "correctness"})
    assert packstore.scan(packed.dataset).collect()["rewards"].to_list() == [[1]]
    records = packed.dataset.manifest.records
    assert {"correctness", "prompt", "response"} == records.fields_used.keys()
    assert {"helpfulness", "coherence"} == records.fields_not_used.keys()


def test_what_stands_beside_a_mapped_path_is_no_less_read(tmp_path, pack, byte_level):
    fields = {"prompt": "q.t", "responses": "a[].text", "scores": 'a[]."the score"'}
    own, reads = tmp_path / "own.yaml", {**fields, "scores": "a[].the score"}
    entry = {"kind": "scored", "fields": {"q.t": "text", "a[].text": "texts"}, "reads": reads}
    answers = [{"text": "x", "the score": 2, "id": 1}, {"text": "y", "the score": 1, "id": 2}]
    graded = [{**answer, "eval": {"grade": "AB"[i]}} for i, answer in enumerate(answers)]
    record, judged = ({"q": {"t": "Q"}, "a": given} for given in (answers, graded))
    own.write_text(json.dumps({"mine": entry}), encoding="utf-8")
    mapped, shaped = {"fields": fields, "kind": "scored"}, {"shape": str(own)}
    for settings in (mapped, shaped):
        packed = pack(byte_level(), record, **settings)
        assert packed.marked == ["Q«x</s>»", "Q«y</s>»"]
        assert not packed.dataset.manifest.records.fields_not_used
    # Who maps a score has chosen it among others, which are named.
    found = pack(byte_level(), judged, **mapped).dataset.manifest.records
    assert [*found.fields_not_used] == ["a[].eval.grade"]
    unmapped = {name: path for name, path in fields.items() if name != "scores"}
    with pytest.raises(RecordError, match=r"scores|grade"):
        pack(byte_level(), judged, fields=unmapped)
    remedy = re.escape('passes: ["a[].eval.grade"]')
    with pytest.raises(RecordError, match=rf"found a\[\]\.eval\.grade .*{remedy}"):
        pack(byte_level(), judged, **shaped)
    own.write_text(json.dumps({"mine": {**entry, "passes": ["a[].eval.grade"]}}), encoding="utf-8")
    assert pack(byte_level(), judged, **shaped).marked
