"""Texts that cannot fit are refused before they are encoded, and no others."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from packstore.config import TokenizeConfig
from packstore.errors import RecordError
from packstore.tokenizer import RecordTokenizer
from packstore.tokenizer.records import overlong
from packstore.tokenizer.token_bound import TokenBound

UNBOUNDED = 1 << 40
BYTES = pre_tokenizers.ByteLevel.alphabet()

PIECES = [
    " ",
    "\n",
    "the quick brown fox",
    "----------------",
    "e\u0301",
    "\u1e9b\u0323",
    "\u212b\u2126\u212a",
    "\u1100\u1161\u11a8",
    "각가",
    "汉字",
    "👩‍👩‍👧‍👦",
    "<|im_end|>",
    "▁",
    "\x00\x7f",
    "\u0378",  # not assigned
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30).map("".join)


def count(engine: Any, text: str) -> int:
    return min(len(engine.encode_batch([text], control=c)[0]) for c in (False, True))


@pytest.mark.parametrize("name", ["qwen3", "mistral", "small"])
def test_no_text_has_fewer_tokens(name: str, tokenizer: Any) -> None:
    engine = tokenizer(name, engine="tokenizers").engine
    bound = engine.token_bound
    assert bound is not None

    @settings(max_examples=300, deadline=None)
    @given(TEXTS, st.integers(1, 40))
    def check(text: str, times: int) -> None:
        whole = text * times
        least = bound.least(whole, 0, UNBOUNDED)
        assert least <= count(engine, whole)

    check()
    for n in (127, 128, 129, 1000):  # the longest tokens are of spaces and dashes
        for character in " -=*\t":
            assert bound.least(character * n, 0, UNBOUNDED) <= count(engine, character * n)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "small"])
def test_the_bound_tells_something(name: str, tokenizer: Any, records: Any) -> None:
    engine = tokenizer(name, engine="tokenizers").engine
    text = "\n".join(str(record) for record in records("pairs/chat_en.jsonl")[:50])
    assert count(engine, text) / 20 < engine.token_bound.least(text, 0, UNBOUNDED)
    assert engine.token_bound.least(text, len(text), UNBOUNDED) == 0
    assert engine.token_bound.least(text, 0, 10) >= 10


def test_composing_counts() -> None:
    """Four characters may become one, whose token has fewer bytes than they had."""
    composed = "\u1f82"
    bound = TokenBound(np.full(256, 3), composes=True)
    apart = unicodedata.normalize("NFD", composed) * 1000
    assert bound.least(composed * 1000, 0, UNBOUNDED) == 999  # of 1000, rounded down
    assert 0 < bound.least(apart, 0, UNBOUNDED) <= 1000


def bpe(vocab: dict[str, int] | None = None, **model: Any) -> tokenizers.Tokenizer:
    names = vocab or {c: i for i, c in enumerate(sorted(BYTES))}
    made = tokenizers.Tokenizer(models.BPE(names, [], **model))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def test_where_nothing_is_known() -> None:
    assert TokenBound.of(bpe()) is not None
    some = bpe({"a": 0, "<unk>": 1}, unk_token="<unk>", fuse_unk=True)
    swallowing = bpe()
    swallowing.add_special_tokens([AddedToken("<x>", rstrip=True)])
    removing = bpe()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    words = bpe()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    shrinking = []
    for normalizer in (
        normalizers.Strip(),
        normalizers.NFKC(),
        normalizers.StripAccents(),
        normalizers.Replace("aa", "a"),
        normalizers.Replace(tokenizers.Regex("a+"), "aaaa"),
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
    ):
        made = bpe()
        made.normalizer = normalizer
        shrinking.append(made)
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0))
    piece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    for other in (some, swallowing, removing, words, *shrinking, unigram, piece):
        assert TokenBound.of(other) is None


class Counting:
    """An engine that notes the longest text that it was given."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.longest = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def encode_batch(self, texts: list[str], *, control: bool) -> Any:
        self.longest = max([self.longest, *map(len, texts)])
        return self._engine.encode_batch(texts, control=control)


LONG = "word " * 40_000
RECORDS: list[dict[str, Any]] = [
    {"prompt": "a?", "chosen": "yes", "rejected": "no"},
    {"prompt": "b?", "chosen": LONG, "rejected": "no"},
    {"prompt": LONG, "chosen": "yes", "rejected": "no"},
    {"prompt": "c?", "chosen": "yes", "rejected": LONG + "<|end|>"},
    {"prompt": [{"role": "user", "content": "d?"}], "chosen": LONG, "rejected": "no"},
    {"prompt": "e?", "chosen": "yes", "rejected": "no"},
]


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("policy", ["drop", "truncate_prompt", "truncate_response"])
@pytest.mark.parametrize("specials", ["literal", "control"])
def test_the_same_records_come_through(
    byte_level: Any,
    rows: Any,
    sequences: Any,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    policy: str,
    specials: str,
) -> None:
    """As if everything had been encoded; and what need not be is not."""
    tokenizer = byte_level(template="chatml")
    config = TokenizeConfig(
        pack_size=512,
        layout=layout,  # type: ignore[arg-type]
        overlong=policy,  # type: ignore[arg-type]
        special_tokens=specials,  # type: ignore[arg-type]
    )

    def run() -> tuple[Any, Any, Any, int]:
        engine = Counting(tokenizer.engine)
        stage = RecordTokenizer(tokenizer.with_engine("tokenizers", engine), config, "preference")  # type: ignore[arg-type]
        examples, tally = stage(rows(RECORDS))
        return sequences(examples), examples.example_ids.tolist(), tally.dropped, engine.longest

    *found, longest = run()
    monkeypatch.setattr(overlong, "_JUDGED", UNBOUNDED)
    *expected, all_of_it = run()
    assert found == expected
    assert all_of_it > len(LONG)
    assert (longest < 1000) == (policy == "drop")


def test_an_error_where_that_is_wanted(byte_level: Any, rows: Any) -> None:
    config = TokenizeConfig(pack_size=512, overlong="error")
    stage = RecordTokenizer(byte_level(), config, "preference")
    with pytest.raises(RecordError, match=r"line 2: .*sequence at least \d+ of at most 512"):
        stage(rows(RECORDS[:2]))


def test_many_responses_are_too_much_together(byte_level: Any, rows: Any) -> None:
    texts = [f"{i} " + "x" * 400 for i in range(300)]
    record = {"prompt": "p", "responses": texts, "scores": list(range(300))}
    engine = Counting(byte_level().engine)
    config = TokenizeConfig(pack_size=512)
    stage = RecordTokenizer(byte_level().with_engine("tokenizers", engine), config, "ranked")  # type: ignore[arg-type]
    examples, tally = stage(rows([record]))
    assert (len(examples.example_ids), dict(tally.dropped)) == (0, {"overlong": 1})
    assert engine.longest == 0


def test_what_may_be_cut_to_fit_is_encoded(byte_level: Any, rows: Any, sequences: Any) -> None:
    config = TokenizeConfig(pack_size=512, overlong="truncate_prompt")
    examples, _ = RecordTokenizer(byte_level(), config, "preference")(rows([RECORDS[2]]))
    (first, _), _ = sequences(examples)
    assert 0 < len(first) <= 512
