"""Texts are cut only where no id depends on it, and a prompt is encoded once."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

import packstore
from packstore.config import TokenizeConfig
from packstore.format.arrays import Rows
from packstore.tokenizer import RecordTokenizer, fastest
from packstore.tokenizer.cuts import GPT2, Cuts
from packstore.tokenizer.engines.tokenizers import TokenizersEngine

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ONE = r"[^\r\n\p{L}\p{N}]?"
PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
PATTERNS: dict[str, list[str]] = {
    "gpt2": [GPT2],
    "llama3": [rf"{CONTRACTIONS}|{ONE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{END}"],
    "qwen": [rf"{CONTRACTIONS}|{ONE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{END}"],
    "o200k": [
        f"{ONE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{ONE}{UPPER}+{LOWER}*{CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{END}"
    ],
    "tekken": [
        rf"{ONE}{UPPER}*{LOWER}+|{ONE}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{END}"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        rf"{PUNCTUATION}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{END}",
    ],
}
ACROSS_WORDS = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]{2,}[\r\n/]*| +(?!\S)"
"""The pattern of SuperBPE, whose tokens span words."""
BITS = [
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x85"),
    *("a word", "x 1", "word", "a", "The", "XML"),
    *("don't", "I'LL", "s", "1", "1234567", "3.14", "½", "é", "e\u0301"),
    *("\u0301", "汉字", "。", "ひら", "カナ", "😀", "\u200d", "ﬁ", "ſ", "▁", "Ġ", "Ω", "\x00"),
    *(".", "?!", "...", "-", "_", "/", "//", "<", ">", "<s>", "▁▁"),
    *("<|x|>", "</s>", "'", '"', "{}", "\ufffd"),
]  # fmt: skip
TRAINED_ON = [
    "The word is 1234567, don't! " * 3,
    *map("".join, itertools.permutations(BITS[:14], 2)),
]


def byte_level(*patterns: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TRAINED_ON, trainer)
    made.add_special_tokens(["<|x|>", "</s>"])
    return made


def pieces(*, prepend: bool, tokens: Iterable[str] = ()) -> tokenizers.Tokenizer:
    """A BPE as of SentencePiece, without pre-tokenizer."""
    merges = [*itertools.pairwise("▁word"), ("▁", "a"), ("w", "o"), ("wo", "r"), ("wor", "d")]
    merges += [
        ("▁", "word"),
        ("▁", "▁"),
        ("▁", "T"),
        ("1", "2"),
        ("<", "s"),
        (".", "."),
        ("..", "."),
    ]
    names = [chr(c) for c in range(33, 127)] + ["▁", *(f"<0x{b:02X}>" for b in range(256))]
    names += [*(a + b for a, b in merges), *tokens]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] * prepend + [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    made.add_special_tokens(["<s>", "</s>"])
    return made


MADE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **{name: lambda p=patterns: byte_level(*p) for name, patterns in PATTERNS.items()},  # type: ignore[misc]
    "pieces": lambda: pieces(prepend=False),
    "prepended pieces": lambda: pieces(prepend=True),
}


def texts(number: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(BITS, k=draw.randint(1, 14))) for _ in range(number)]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("form", [None, "NFC", "NFKC"])
def test_the_parts_of_a_text_have_its_ids(name: str, form: str | None) -> None:
    made = MADE[name]()
    if form:
        if "pieces" in name:
            return
        made.normalizer = getattr(normalizers, form)()
    cuts = Cuts.of(made)
    assert cuts is not None
    found = 0
    for literal in (False, True):
        made.encode_special_tokens = literal
        known: dict[str, list[int]] = {}

        def ids(text: str, known: dict[str, list[int]] = known) -> list[int]:
            if text not in known:
                known[text] = made.encode(text, add_special_tokens=False).ids
            return known[text]

        for text in texts(400, 7 + literal):
            for at in range(1, len(text) + 1):
                place = cuts.before(text, at)
                assert place <= at
                if not place:
                    continue
                found += 1
                for end in (at, len(text)):
                    parts = ids(cuts.part(text, 0, place))
                    if end > place:
                        parts = parts + ids(cuts.part(text, place, end))
                    assert parts == ids(text[:end]), (text, place, end)
    assert found > 300


def refused(change: Callable[[tokenizers.Tokenizer], object], name: str = "qwen") -> bool:
    made = MADE[name]()
    change(made)
    return Cuts.of(made) is None


def set_of(part: str, value: Any) -> Callable[[tokenizers.Tokenizer], None]:
    return lambda made: setattr(made, part, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.add_tokens(["two words"]),
        lambda made: made.add_tokens([AddedToken("<x>", lstrip=True)]),
        lambda made: made.add_tokens([AddedToken("<x>", rstrip=True)]),
        lambda made: made.add_tokens([AddedToken("<x>", single_word=True)]),
        lambda made: made.add_tokens(["x\n"]),
        lambda made: made.add_tokens(["word"]),
        set_of("normalizer", normalizers.Lowercase()),
        set_of("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        set_of("normalizer", normalizers.Replace("a", "b")),
        set_of("normalizer", normalizers.Prepend("x")),
        set_of("pre_tokenizer", None),
        set_of("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        set_of("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        set_of("pre_tokenizer", pre_tokenizers.Metaspace()),
        set_of("pre_tokenizer", pre_tokenizers.Whitespace()),
        set_of("pre_tokenizer", pre_tokenizers.Split(Regex(GPT2), "removed")),
        set_of("pre_tokenizer", pre_tokenizers.Split(Regex(GPT2), "isolated", invert=True)),
        set_of("pre_tokenizer", pre_tokenizers.Split(Regex(GPT2), "merged_with_previous")),
        set_of("pre_tokenizer", pre_tokenizers.Split(" ", "isolated")),
        set_of("pre_tokenizer", pre_tokenizers.Split(Regex(ACROSS_WORDS), "isolated")),
        set_of("pre_tokenizer", pre_tokenizers.Split(Regex(r"\p{L}+ ?|\s+"), "isolated")),
        set_of("pre_tokenizer", pre_tokenizers.Split(Regex(r"\p{L}+(?= )|\s+"), "isolated")),
        set_of("pre_tokenizer", pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}"), "isolated")),
        set_of("model", models.WordPiece({"a": 0}, unk_token="a")),
        set_of("model", models.BPE({"a": 0}, [], end_of_word_suffix="</w>")),
        set_of("model", models.BPE({"a": 0}, [], continuing_subword_prefix="##")),
    ],
)  # fmt: skip
def test_other_tokenizers_are_encoded_whole(
    change: Callable[[tokenizers.Tokenizer], object],
) -> None:
    assert refused(change)


def test_pieces_with_a_space_inside_are_encoded_whole() -> None:
    assert Cuts.of(pieces(prepend=False, tokens=["▁▁▁▁"])) is not None
    assert Cuts.of(pieces(prepend=False, tokens=["s▁the"])) is None
    assert refused(set_of("pre_tokenizer", pre_tokenizers.Metaspace()), "pieces")


def saved(made: tokenizers.Tokenizer, folder: Path) -> str:
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def dialogue(draw: random.Random) -> dict[str, Any]:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": " ".join(texts(2, draw.getrandbits(30)))}
        for i in range(draw.choice((1, 3, 5)))
    ]
    sides = [[{"role": "assistant", "content": text}] for text in texts(2, draw.getrandbits(30))]
    return {"prompt": turns, "chosen": sides[0], "rejected": sides[1]}


@pytest.mark.parametrize("name", ["qwen", "deepseek", "prepended pieces"])
@pytest.mark.parametrize("control", ["literal", "control"])
def test_examples_do_not_depend_on_cuts(name: str, control: Any, tmp_path: Path) -> None:
    made = MADE[name]()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = packstore.tokenizer.load_tokenizer(saved(made, tmp_path), chat_template="chatml")
    draw = random.Random(3)
    values: list[Any] = [dialogue(draw) for _ in range(60)]
    for _ in range(240):
        prompt, *sides = ["".join(texts(2, draw.getrandbits(30))) for _ in range(3)]
        values.append({"prompt": prompt, "chosen": sides[0], "rejected": sides[1]})
    draw.shuffle(values)
    rows = Rows(source=0, path="x", unit="item", ordinals=range(len(values)), values=values)
    for boundary in ("longest_common_prefix", "drop"):
        config = TokenizeConfig(
            pack_size=4096, special_tokens=control, boundary=boundary, supervised_turns="all"  # type: ignore[arg-type]
        )  # fmt: skip
        (cut, counts), (whole, expected) = (
            RecordTokenizer(tokenizer, config, "preference", whole=w)(rows) for w in (False, True)
        )
        for field in ("input_ids", "supervised", "sequence_offsets", "example_ids", "reward"):
            np.testing.assert_array_equal(getattr(cut, field), getattr(whole, field))
        assert counts == expected
        assert cut.num_examples > 100


def test_a_prompt_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(byte_level(*PATTERNS["qwen"]), tmp_path)
    tokenizer = packstore.tokenizer.load_tokenizer(path, engine="tokenizers")
    prompt = "A long question, asked once more. " * 100 + "Is it?"
    value = {"prompt": prompt, "chosen": " Yes, it is.", "rejected": " No."}
    seen: list[str] = []
    real = TokenizersEngine.encode_batch

    def spied(self: Any, batch: Any, *, control: bool) -> Any:
        seen.extend(batch)
        return real(self, batch, control=control)

    monkeypatch.setattr(TokenizersEngine, "encode_batch", spied)
    rows = Rows(source=0, path="x", unit="item", ordinals=range(1), values=[value])
    RecordTokenizer(tokenizer, TokenizeConfig(), "preference")(rows)
    assert sorted(seen) == sorted([prompt, " Yes, it is.", " No."])


@pytest.fixture
def wrong_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts in the middle of words, which change ids, but not in the first records."""

    def before(self: Cuts, text: str, at: int) -> int:
        return 14 if text.startswith("an odd one") else 0

    monkeypatch.setattr(Cuts, "before", before)
    monkeypatch.setattr(fastest, "_misread", set())


@pytest.mark.usefixtures("wrong_cuts")
@pytest.mark.parametrize("engine", ["auto", "tokenizers"])
def test_a_wrong_proof_is_found_and_not_used(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(byte_level(*PATTERNS["qwen"]), tmp_path)
    records = [{"prompt": f"p {i}", "chosen": " yes", "rejected": " no"} for i in range(150)]
    records[120]["prompt"] = "an odd one: word word"
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    source = tmp_path / "in.jsonl"
    with caplog.at_level(logging.WARNING):
        found = packstore.pack(
            source,
            tmp_path / "ds",
            model,
            tokenizer_engine=engine,
            pack_size=256,
            num_workers=0,
            layout="concat",
        )
    assert "line 121: " in caplog.text
    assert "All records are tokenized again, with the reference." in caplog.text
    reference = tokenizers.Tokenizer.from_file(model)
    expected = reference.encode("an odd one: word word yes").ids
    ids = [pack.input_ids.tolist() for pack in found.iter_packs()]
    assert any(row[at : at + len(expected)] == expected for row in ids for at in range(len(row)))
