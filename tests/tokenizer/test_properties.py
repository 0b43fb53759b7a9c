"""Properties of every record, tokenizer and setting."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packstore.config import REASONS, PackConfig, TokenizeConfig
from packstore.format import Rows
from packstore.testing import assert_examples_equal
from packstore.tokenizer import RecordTokenizer

texts = st.text(max_size=12) | st.sampled_from(
    ["", " ", "a b", "x<|im_end|>", "</s>", "\n", "\n\nAssistant:", "é", "é", "\ud800", "😀"]
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", "nobody"]),
            "content": texts,
        }
    ),
    max_size=4,
)
anything = texts | messages | st.none() | st.booleans() | st.integers() | st.lists(st.integers())
words = texts.map(lambda text: text.strip() or "word")
talk = st.lists(words, min_size=1, max_size=4).map(
    lambda said: [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
    ]
)
answers = words | words.map(lambda text: [{"role": "assistant", "content": text}])
good_records = st.fixed_dictionaries(
    {"prompt": words | talk, "chosen": answers, "rejected": answers}
) | st.fixed_dictionaries({"chosen": talk, "rejected": talk})
bad_records = st.fixed_dictionaries(
    {"prompt": anything, "chosen": anything, "rejected": anything}
) | st.dictionaries(st.sampled_from(["prompt", "chosen", "rejected"]), anything)
some_records = st.integers(0, 5).flatmap(lambda i: good_records if i else bad_records)
choices = st.fixed_dictionaries(
    {
        "overlong": st.sampled_from(["drop", "truncate_prompt", "truncate_response"]),
        "on": st.fixed_dictionaries(
            {
                "missing_field": st.just("drop"),
                "one_reward": st.just("drop"),
                "special_tokens": st.sampled_from(["keep", "control", "drop"]),
                "invalid_unicode": st.sampled_from(["drop", "keep"]),
                "empty_side": st.sampled_from(["drop", "keep"]),
                "identical_sides": st.sampled_from(["drop", "keep"]),
            }
        ),
        "supervised_turns": st.sampled_from(["all", "last"]),
        "thinking": st.sampled_from(["template", "strip"]),
        "layout": st.sampled_from(["concat", "shared_prefix"]),
        "pack_size": st.sampled_from([24, 4096]),
    }
)


def as_rows(values):
    return Rows(source=3, path="x", unit="item", ordinals=range(7, 7 + len(values)), values=values)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "mistral_model", "t5"])
def test_nothing_breaks_and_nothing_is_lost(tokenizer, name):
    ours = tokenizer(name)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(some_records, max_size=8), choices)
    def check(values, choice):
        config = TokenizeConfig(**choice)
        work = RecordTokenizer(ours, config, "preference")
        examples, tally = work(as_rows(values))
        assert tally.read == len(values)
        assert tally.kept == examples.num_examples
        assert set(tally.dropped) <= set(REASONS)
        assert set((examples.example_ids - (3 << 40)).tolist()) <= set(range(7, 7 + len(values)))
        starts = examples.sequence_offsets[:-1]
        assert not examples.supervised[starts].any()
        if len(starts):
            assert (np.add.reduceat(examples.supervised.astype(int), starts) > 0).all()
            assert examples.input_ids.max() < ours.vocab_size
        assert (examples.lengths <= config.sequence_limit).all()
        assert (examples.num_responses == 2).all()
        swapped = [
            {**v, **dict(zip(("chosen", "rejected"), sides(v), strict=True))} for v in values
        ]
        other, again = work(as_rows([drop_nulls(v) for v in swapped]))
        assert again.dropped.total() == tally.dropped.total()
        order = np.arange(2 * examples.num_examples).reshape(-1, 2)[:, ::-1].ravel()
        for a, b in zip(range(2 * examples.num_examples), order, strict=True):
            x = slice(examples.sequence_offsets[a], examples.sequence_offsets[a + 1])
            y = slice(other.sequence_offsets[b], other.sequence_offsets[b + 1])
            np.testing.assert_array_equal(examples.input_ids[x], other.input_ids[y])
            np.testing.assert_array_equal(examples.supervised[x], other.supervised[y])

    check()


def sides(record):
    return record.get("rejected"), record.get("chosen")


def drop_nulls(record):
    return {name: value for name, value in record.items() if value is not None}


TEXTS = ["", " \n", "a", "hé<", "|im_end|> b", "x<|im_end|>", "汉字 " * 9, "\ud800", 3, None]


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"special_tokens": "control", "empty_side": "keep", "identical_sides": "keep"},
        {"special_tokens": "drop", "invalid_unicode": "keep"},
    ],
)
def test_pairs_of_plain_text_take_a_short_way_to_the_same(tokenizer, answers):
    """Hashes for `dedup` are made on the long way only."""
    values = [
        dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
        for texts in itertools.product(TEXTS, repeat=3)
    ]
    values += [{**values[-1], "chosen_reward": 2.5}, {"chosen": "a"}, [], "text"]
    answers = {"missing_field": "drop", "one_reward": "drop", **answers}
    short, long = (
        RecordTokenizer(tokenizer("qwen3"), PackConfig(on=answers, dedup=dedup), "preference")
        for dedup in ("none", "pair")
    )
    for some in (values, values[:7]):
        (found, tally), (expected, other) = (work(as_rows(some)) for work in (short, long))
        assert tally == other
        assert_examples_equal(found, replace(expected, keys=None))
