"""Sides are compared as they are stored, and words that a template leaves out are
counted.
"""

from __future__ import annotations

import unicodedata

import pytest
from tokenizers import normalizers

from packstore.errors import RecordError

QUESTION = {"role": "user", "content": "Which city?"}

WHOLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ONLY_ANSWERS = WHOLE.replace("m.content", "m.content.split('</think>')[-1]")
LAST_WORDS = WHOLE.replace("m.content", "m.content[-12:]")
AS_JSON = WHOLE.replace("m.content", "m.content | tojson")
TRIMMED = WHOLE.replace("m.content", "m.content | trim")

KEEP = {"identical_sides": "keep"}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def pair(chosen, rejected):
    return {
        "prompt": [QUESTION],
        "chosen": [said(chosen)],
        "rejected": [said(rejected)],
    }


def composed(text):
    return unicodedata.normalize("NFC", text)


def decomposed(text):
    return unicodedata.normalize("NFD", text)


@pytest.fixture(scope="module")
def normalizing(byte_level):
    """A tokenizer that composes characters, as Qwen's do."""
    source = byte_level(template=WHOLE)
    source.library.normalizer = normalizers.NFC()
    return source


def assert_dropped(pack, tokenizer, record, **settings):
    """The record alone is dropped, stops the job if so wished, and is packed by
    `keep`.
    """
    other = {**record, "chosen": record["rejected"], "rejected": record["prompt"]}
    packed = pack(tokenizer, record, **settings)
    assert (packed.dataset, packed.dropped) == (None, {"identical_sides": 1})
    on = settings.pop("on", {})
    with pytest.raises(RecordError, match="token ids"):
        pack(tokenizer, record, on={**on, "identical_sides": "error"}, **settings)
    kept = pack(tokenizer, record, on={**on, **KEEP}, **settings)
    (first, second) = kept.sequences
    assert first == second
    beside = pack(tokenizer, other, record, other, on=on, **settings)
    assert sorted(beside.examples) == [0, 2]
    assert beside.dataset.manifest.records.dropped == {"identical_sides": 1}


CUT = {"max_length": 12, "on": {"overlong": "truncate_response"}}


def test_ids_that_differ_behind_the_cut(pack):
    record = {"prompt": [1], "chosen": [9] * 20 + [5], "rejected": [9] * 20 + [6]}
    assert_dropped(pack, None, record, **CUT)
    differs_before = {**record, "rejected": [9] * 5 + [6] * 20}
    assert len(pack(None, differs_before, **CUT).examples) == 1


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_texts_that_differ_behind_the_cut(pack, byte_level, layout):
    long = "word " * 9
    record = {"prompt": "p", "chosen": long + "one", "rejected": long + "two"}
    assert_dropped(pack, byte_level(), record, layout=layout, **CUT)
    assert len(pack(byte_level(), record, layout=layout).examples) == 1


def test_texts_that_the_tokenizer_makes_equal(pack, normalizing):
    chosen, rejected = composed("café"), decomposed("café")
    assert chosen != rejected
    assert_dropped(
        pack,
        normalizing,
        {"prompt": "p", "chosen": chosen, "rejected": rejected},
        as_chat=False,
    )
    assert pack(normalizing, pair(chosen, rejected)).dropped == {"identical_sides": 1}
    bare = normalizing.library.normalizer
    normalizing.library.normalizer = None
    assert len(pack(normalizing, pair(chosen, rejected)).examples) == 1
    normalizing.library.normalizer = bare


def test_turns_that_the_template_makes_equal(pack, byte_level):
    tokenizer = byte_level(template=ONLY_ANSWERS)
    thoughts = pair("<think>Far north.</think>Lima", "<think>Far south.</think>Lima")
    words = pair("Lima is the capital", "Rome is the capital")
    assert pack(tokenizer, thoughts).dropped == {"identical_sides": 1}
    assert pack(byte_level(template=LAST_WORDS), words).dropped == {
        "identical_sides": 1
    }
    packed = pack(byte_level(template=WHOLE), thoughts, words)
    assert (len(packed.examples), packed.noted) == (2, {})


def test_scored_answers_are_compared_as_ids(pack, normalizing):
    spellings = [composed("é"), decomposed("é")]
    alike = {"prompt": "p", "responses": spellings, "scores": [2, 1]}
    differs = {"prompt": "p", "responses": [*spellings, "e"], "scores": [3, 2, 1]}
    packed = pack(normalizing, alike, differs, as_chat=False)
    assert packed.dropped == {"identical_sides": 1}
    assert list(packed.examples) == [1]


LEFT_OUT = {
    "thoughts": (
        ONLY_ANSWERS,
        "<think>Far north.</think>Lima",
        {"reasoning_unrendered"},
    ),
    "thoughts that the prompt opened": (
        ONLY_ANSWERS,
        "Far north.</think>Lima",
        {"reasoning_unrendered"},
    ),
    "thoughts in square tags": (
        ONLY_ANSWERS.replace("</think>", "[/THINK]"),
        "[THINK]Far north.[/THINK]Lima",
        {"reasoning_unrendered"},
    ),
    "words between thoughts": (
        ONLY_ANSWERS,
        "<think>Far north.</think>First.<think>Or not.</think>Lima",
        {"reasoning_unrendered", "text_unrendered"},
    ),
    "short words that stand elsewhere too": (
        ONLY_ANSWERS.replace("{% for", "abc{% for", 1),
        "<think>a</think>b<think>c</think>Lima",
        {"reasoning_unrendered", "text_unrendered"},
    ),
    "words far from the end": (LAST_WORDS, "Surely this is Lima", {"text_unrendered"}),
    "words before a mark": (
        WHOLE.replace("m.content", "m.content.split('###')[-1]"),
        "Far north.###Lima",
        {"text_unrendered"},
    ),
    "nothing of a whole text": (WHOLE, "<think>Far north.</think>Lima", set()),
    "only white space": (TRIMMED, "\n<think>\n\nFar north.\n</think>Lima \n", set()),
    "nothing of quoted words": (AS_JSON, '<think>Far\nnorth.</think>"Lima"', set()),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_words_that_a_template_leaves_out_are_counted(name, pack, byte_level):
    template, content, expected = LEFT_OUT[name]
    tokenizer = byte_level(template=template)
    record = {"messages": [QUESTION, said(content), QUESTION, said("Bye, now.")]}
    harmless = {"messages": [QUESTION, said("Lima")]}
    packed = pack(tokenizer, record, harmless, record)
    assert len(packed.examples) == 3
    assert packed.noted == dict.fromkeys(expected, 2)


def test_words_of_a_prompt_that_a_template_leaves_out(pack, byte_level):
    tokenizer = byte_level(template=LAST_WORDS)
    asked = {"role": "user", "content": "Which city is the capital?"}
    record = {"prompt": [asked], "chosen": [said("Lima")], "rejected": [said("Rome")]}
    packed = pack(tokenizer, record)
    assert (len(packed.examples), packed.noted) == (1, {"text_unrendered": 1})


def test_a_warning_names_words_that_are_left_out(pack, byte_level, caplog):
    record = {"messages": [QUESTION, said("Surely this is Lima")]}
    pack(byte_level(template=LAST_WORDS), record)
    assert "text_unrendered" in caplog.text


def test_what_qwen_leaves_out(pack, tokenizer):
    """Its template drops all before the last </think>, and the thoughts of earlier
    turns.
    """
    qwen = tokenizer("few_merges")
    between = "<think>a</think>\nFirst.\n<think>b</think>\nLima"
    earlier = [QUESTION, said("<think>Far north.</think>Lima"), QUESTION, said("Lima")]
    thinking = [
        QUESTION,
        said("Lima", reasoning_content="Far north."),
        QUESTION,
        said("Lima"),
    ]
    for messages, expected in (
        ([QUESTION, said(between)], {"reasoning_unrendered", "text_unrendered"}),
        (earlier, {"reasoning_unrendered"}),
        (thinking, {"reasoning_unrendered"}),
        ([QUESTION, said("<think>\na\n</think>\n\nLima")], set()),
        ([QUESTION, said("<think>a</think>Lima")], set()),
        ([QUESTION, said("Lima", reasoning_content="Far north.")], set()),
    ):
        packed = pack(qwen, {"messages": messages})
        assert len(packed.examples) == 1
        assert {*packed.noted} - {"empty_thinking"} == expected
    differs = pair(between, between.replace("First.", "Second."))
    assert pack(qwen, differs).dropped == {"identical_sides": 1}
    spellings = pair(composed("café"), decomposed("café"))
    assert pack(qwen, spellings).dropped == {"identical_sides": 1}
