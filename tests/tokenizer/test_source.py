from __future__ import annotations

import hashlib
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import packstore.tokenizer.engines as engines
from packstore.errors import MissingExtraError, TokenizerError
from packstore.format.schema import CARRY_TYPES
from packstore.tokenizer import load_tokenizer
from packstore.tokenizer.engines import ENGINES
from packstore.tokenizer.records.fields import TYPES


class AutoLike:
    """An object that is no tokenizer of the library `tokenizers`, as transformers has them."""


def word_level(**specials: int) -> tokenizers.Tokenizer:
    vocab = {"a": 0, "b": 1, **specials}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def test_engine_folder_is_the_registry():
    folder = Path(engines.__file__).parent
    assert {p.stem for p in folder.glob("*.py")} - {"__init__"} == set(ENGINES)


def test_carry_types_are_those_of_the_schema():
    assert set(TYPES) == set(CARRY_TYPES)


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


def test_bare_file_takes_the_settings_beside_it(shared_data):
    bare = load_tokenizer(shared_data / "tokenizers/qwen3/tokenizer.json")
    folder = load_tokenizer(shared_data / "tokenizers/qwen3")
    assert bare == folder
    assert set(bare.files) == {"tokenizer_config.json"}


def test_bare_file_alone_falls_back_to_declared_tokens(shared_data, tmp_path):
    """The vocabulary holds "</s>" as an ordinary piece; only a declared token may be EOS."""
    source = shared_data / "tokenizers/qwen3/tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    alone = load_tokenizer(tmp_path / "tokenizer.json")
    assert alone.eos_token == "<|endoftext|>"
    assert alone.chat_template is None


def test_provenance(shared_data, tokenizer):
    path = shared_data / "tokenizers/qwen3/tokenizer.json"
    found = tokenizer("qwen3", engine="tokenizers").provenance()
    assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    text = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))[
        "chat_template"
    ]
    assert found["chat_template"] == text
    assert found["chat_template_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert found["engine_version"] == tokenizers.__version__
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("name", ["qwen3", "mistral_model"])
def test_pickles(tokenizer, name):
    t = tokenizer(name)
    ids = t.engine.encode_batch(["ab <s>"], control=True)[0].tolist()
    again = pickle.loads(pickle.dumps(t))
    assert again == t
    assert again.engine.encode_batch(["ab <s>"], control=True)[0].tolist() == ids
    assert again.template.source == t.template.source


def test_tokenizer_object():
    t = load_tokenizer(word_level(**{"<eos>": 2}))
    assert (t.eos_id, t.vocab_size, t.engine_name) == (2, 3, "tokenizers")
    assert t.engine.encode_batch(["b a"], control=True)[0].tolist() == [1, 0]


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
    "not UTF-8": (lambda p: write(p, b"{\xff}"), {}, "tokenizers library"),
    "no template": (lambda p: word_level(), {"chat_template": "nope"}, "chatml, plain"),
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


def test_both_modes_at_once_in_threads(tokenizer):
    engine = tokenizer("qwen3", engine="tokenizers").engine
    texts = [f"x{special}y {n}" for n, special in enumerate(list(engine.specials) * 20)]
    expected = {control: engine.encode_batch(texts, control=control) for control in (False, True)}
    assert len(expected[False][0]) > len(expected[True][0])
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(
                lambda i: engine.encode_batch(texts, control=i % 3 == 0), range(40), timeout=120
            )
        )
    for i, (ids, offsets) in enumerate(found):
        np.testing.assert_array_equal(ids, expected[i % 3 == 0][0])
        np.testing.assert_array_equal(offsets, expected[i % 3 == 0][1])
