"""Properties of every record, tokenizer and setting."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packstore.config import REASONS

texts = st.text(max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "a b",
        "x<|im_end|>",
        "</s>",
        "\n",
        "\n\nAssistant:",
        "é",
        "é",
        "\ud800",
        "😀",
    ]
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
anything = (
    texts
    | messages
    | st.none()
    | st.booleans()
    | st.integers()
    | st.lists(st.integers())
)
words = texts.map(lambda text: text.strip() or "word")
talk = st.lists(words, min_size=1, max_size=4).map(
    lambda said: [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(said)
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
        "on": st.fixed_dictionaries(
            {
                "missing_field": st.just("drop"),
                "one_reward": st.just("drop"),
                "special_tokens": st.sampled_from(["keep", "control", "drop"]),
                "invalid_unicode": st.sampled_from(["drop", "keep"]),
                "empty_side": st.sampled_from(["drop", "keep"]),
                "identical_sides": st.sampled_from(["drop", "keep"]),
                "overlong": st.sampled_from(
                    ["drop", "truncate_prompt", "truncate_response"]
                ),
            }
        ),
        "supervised_turns": st.sampled_from(["all", "last"]),
        "thinking": st.sampled_from(["template", "strip"]),
        "layout": st.sampled_from(["concat", "shared_prefix"]),
        "pack_size": st.sampled_from([24, 4096]),
    }
)


SLOW = [
    pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "mistral_model", "t5")
]


@pytest.mark.parametrize("name", ["mistral", *SLOW])
def test_nothing_breaks_and_nothing_is_lost(pack, tokenizer, name):
    quiet = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ]

    @settings(max_examples=3, suppress_health_check=quiet)
    @given(st.lists(some_records, min_size=20, max_size=40), choices)
    def check(values, choice):
        def packed(records):
            return pack(tokenizer(name), *records, kind="preference", **choice)

        found, swapped = packed(values), packed([exchanged(value) for value in values])
        assert len(found.examples) + len(found.rejects) == len(values)
        assert set(found.dropped) <= set(REASONS)
        assert swapped.dropped.total() == found.dropped.total()
        assert swapped.examples == {
            n: sides[::-1] for n, sides in found.examples.items()
        }
        if choice["on"]["identical_sides"] == "drop":
            assert all(one[0] != other[0] for one, other in found.examples.values())
        for ids, on in found.sequences:
            assert any(on)
            assert not on[0]
            assert len(ids) <= choice["pack_size"]

    check()


def exchanged(record):
    """The record with its sides exchanged; a side that lacks stays absent."""
    sides = {"chosen": record.get("rejected"), "rejected": record.get("chosen")}
    return {
        name: value for name, value in {**record, **sides}.items() if value is not None
    }
