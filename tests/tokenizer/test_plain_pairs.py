"""Pairs of plain texts take a short way: the examples and counts of the long one."""

import itertools

import numpy as np
import pytest

from packstore.config import PackConfig
from packstore.errors import TokenizerError
from packstore.tokenizer import RecordTokenizer
from packstore.tokenizer.record_tokenizer import STRICT

TEXTS = ["", " \n", "a", "hé<", "|im_end|> b", "x<|im_end|>", "汉字 " * 9, "\ud800", 3, None]


@pytest.mark.parametrize("special_tokens", ["keep", "control", "drop"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"empty_side": "keep", "identical_sides": "keep"}, {"invalid_unicode": "keep"}],
)
def test_the_short_way_leads_where_the_long_one_does(tokenizer, rows, special_tokens, settings):
    values = [
        dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
        for texts in itertools.product(TEXTS, repeat=3)
    ]
    values += [{**values[-1], "chosen_reward": 2.5}, {"chosen": "a"}, [], "text"]
    on = {"special_tokens": special_tokens, "missing_field": "drop", **settings}
    config = PackConfig(on={**on, "one_reward": "drop"})
    short, long = (RecordTokenizer(tokenizer("qwen3"), config, "preference") for _ in range(2))
    assert short._hint
    long._hint = ""
    for some in (values, values[::-1], values[:7]):
        (found, tally), (expected, other) = (work(rows(some)) for work in (short, long))
        assert tally == other
        for name in ("input_ids", "supervised", "sequence_offsets", "reward", "example_ids"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("engine", STRICT)
def test_engines_that_are_trusted_refuse_what_is_no_unicode(tokenizer, engine):
    for text in ("\ud800", "a\udfffb" * 100):
        with pytest.raises(TokenizerError):
            tokenizer("qwen3", engine=engine).engine.encode_batch(["a", text], control=False)
