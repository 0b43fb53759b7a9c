from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from packstore.errors import MissingExtraError, TokenizerError
from packstore.tokenizer import load_tokenizer


class AutoLike:
    """An object that is no tokenizer of the library `tokenizers`, as transformers has them."""


def word_level(**specials: int) -> tokenizers.Tokenizer:
    vocab = {"a": 0, "b": 1, **specials}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # bos, eos, pad, vocabulary, whether BOS is added
        ("qwen3", (None, 151645, 151643, 151669, False)),
        ("mistral", (1, 2, None, 32000, True)),
        ("mistral_model", (1, 2, None, 32000, True)),
        ("t5", (None, 1, 0, 32000, False)),
        ("small", (None, None, None, 2000, False)),
    ],
)
def test_roles_of_real_tokenizers(tokenizer, name, expected):
    t = tokenizer(name)
    assert (t.bos_id, t.eos_id, t.pad_id, t.vocab_size, t.adds_bos) == expected


def test_bare_file_alone_falls_back_to_declared_tokens(shared_data, tmp_path):
    """The vocabulary holds "</s>" as an ordinary piece; only a declared token may be EOS."""
    source = shared_data / "tokenizers/qwen3/tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    alone = load_tokenizer(tmp_path / "tokenizer.json")
    assert alone.eos_token == "<|endoftext|>"
    assert alone.chat_template is None


def test_truncation_and_padding_of_the_file_are_ignored():
    made = word_level()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    t = load_tokenizer(made)
    assert t.engine.encode_batch(["a b a b"], control=True)[0].tolist() == [0, 1, 0, 1]


def test_bos_and_eos_by_the_post_processor():
    made = word_level(**{"[X]": 2, "[Y]": 3})
    made.add_special_tokens(["[X]", "[Y]"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[X] $A [Y]", special_tokens=[("[X]", 2), ("[Y]", 3)]
    )
    t = load_tokenizer(made)
    assert (t.bos_token, t.eos_token, t.adds_bos) == ("[X]", "[Y]", True)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            AutoLike(),
            r"found an object of type AutoLike\. Save it, e\.g\. tokenizer\.save_pretrained\(FOLD",
        ),
        ("s3://key:secret@bucket/t", r"^tokenizer s3://bucket/t: .* Copy it to a local folder"),
        ("Qwen/Qwen3-0.6B", r"hf download Qwen/Qwen3-0\.6B --local-dir FOLDER"),
        ("nowhere/tokenizer/x.json", "readable file or folder"),
    ],
)
def test_a_tokenizer_that_is_elsewhere_names_the_way(
    source: object, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match=found):
        load_tokenizer(source)


def folder(tmp_path: Path, made: tokenizers.Tokenizer, **files: object) -> Path:
    made.save(str(tmp_path / "tokenizer.json"))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_settings_may_spell_tokens_as_objects(tmp_path):
    made = word_level(**{"<e>": 2, "<b>": 3})
    where = folder(
        tmp_path,
        made,
        tokenizer_config={"eos_token": {"content": "<e>"}, "add_bos_token": True},
        special_tokens_map={"bos_token": "<b>", "eos_token": "b"},
    )
    t = load_tokenizer(where)
    assert (t.eos_id, t.bos_id, t.adds_bos) == (2, 3, True)
    assert t.specials == {"<e>": 2, "<b>": 3}


def test_template_files_win_over_the_settings(tmp_path):
    where = folder(
        tmp_path,
        word_level(),
        tokenizer_config={"chat_template": "{{ 1 }}"},
        chat_template={"chat_template": "{{ 2 }}"},
    )
    assert load_tokenizer(where).chat_template == "{{ 2 }}"
    (where / "chat_template.jinja").write_text("{{ 3 }}")
    assert load_tokenizer(where).chat_template == "{{ 3 }}"
    (where / "mine.txt").write_text("{{ 4 }}")
    assert load_tokenizer(where, chat_template=str(where / "mine.txt")).chat_template == "{{ 4 }}"


BAD = {
    "nothing there": (lambda p: p / "none.json", {}, "readable"),
    "empty folder": (lambda p: p, {}, "folder must hold one of tokenizer.json"),
    "not a tokenizer.json": (lambda p: write(p, b"{}"), {}, "tokenizers library"),
    "not a model": (lambda p: write(p, b"junk"), {}, "SentencePiece"),
    "syntax": (lambda p: word_level(), {"chat_template": "a\n{% if %}"}, "line 2"),
    "unclosed": (lambda p: word_level(), {"chat_template": "{% generation %}"}, "valid Jinja"),
    "bad settings": (
        lambda p: folder(p, word_level(), tokenizer_config=["x"]),
        {},
        "tokenizer_config.json: it must hold a JSON object",
    ),
    "unknown EOS": (
        lambda p: folder(p, word_level(), tokenizer_config={"eos_token": "<zz>"}),
        {},
        "eos_token must be in the vocabulary",
    ),
}


def write(folder: Path, content: bytes) -> Path:
    path = folder / "some.file"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", BAD)
def test_bad_tokenizers_give_one_sentence(tmp_path, name):
    make, options, text = BAD[name]
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(make(tmp_path), **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_sentencepiece_names_the_extra(shared_data, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "packstore.tokenizer.engines.sentencepiece", raising=False)
    with pytest.raises(MissingExtraError, match=r"packstore\[sentencepiece\]"):
        load_tokenizer(shared_data / "tokenizers/mistral_v1/tokenizer.model")


def test_model_and_json_agree(tokenizer, records):
    """The converted tokenizer.json and the SentencePiece library give the same ids."""
    texts = [r["chosen"] for r in records("pairs/chat_en.jsonl")] + ["a</s>b", "", " x  y "]
    one = tokenizer("mistral").engine.encode_batch(texts, control=False)
    two = tokenizer("mistral_model").engine.encode_batch(texts, control=False)
    assert one[1].tolist() == two[1].tolist()
    assert one[0].tolist() == two[0].tolist()
    texts = ["<s>Hello</s>", "a</s>b<s>", "</s>"]
    one = tokenizer("mistral").engine.encode_batch(texts, control=True)
    two = tokenizer("mistral_model").engine.encode_batch(texts, control=True)
    assert one[0].tolist() == two[0].tolist()
