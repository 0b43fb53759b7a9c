"""Tokenizers of all forms: the tokens by role, the files beside them, and what cannot
be read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers
from children import run_python
from hub import served

from packstore.cli import main
from packstore.errors import CompatibilityError, MissingExtraError, TokenizerError
from packstore.tokenizer import load_tokenizer, recorded_tokenizer

IDS = {"prompt": [0], "chosen": [1], "rejected": [0]}


def word_level(**specials: int) -> tokenizers.Tokenizer:
    vocab = {"a": 0, "b": 1, **specials}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


@pytest.fixture
def facts(pack):
    """What the manifest records of a tokenizer: the given names of it, in order."""

    def load(source, *names, template=None):
        packed = pack(source, IDS, chat_template=template)
        recorded = packed.dataset.manifest.provenance["tokenizer"]
        return tuple(recorded[name] for name in names)

    return load


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, and an empty cache of the hub, without a network."""
    monkeypatch.chdir(tmp_path)
    # Its variables of the environment are read when it is imported, which was before.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache")
    )
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(
            "qwen3", (None, 151645, 151643, 151669, False), marks=pytest.mark.slow
        ),
        ("mistral", (1, 2, None, 32000, True)),
        ("mistral_model", (1, 2, None, 32000, True)),
        ("t5", (None, 1, 0, 32000, False)),
        ("small", (None, None, None, 2000, False)),
    ],
)
def test_roles_of_real_tokenizers(tokenizer, facts, name, expected):
    names = ("bos_id", "eos_id", "pad_id", "vocab_size", "adds_bos")
    assert facts(tokenizer(name).file, *names) == expected


def test_bare_file_alone_falls_back_to_declared_tokens(tokenizer, tmp_path, facts):
    """The vocabulary holds "</s>" as an ordinary piece; only a declared token may be
    EOS.
    """
    source = tokenizer("few_merges").file / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    assert facts(tmp_path, "eos_token", "chat_template") == ("<|endoftext|>", None)


def test_truncation_and_padding_of_the_file_are_ignored(pack):
    made = word_level()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    record = {"prompt": "a b", "chosen": " a b", "rejected": " b"}
    sequences = pack(made, record).sequences
    assert [ids for ids, _ in sequences] == [[0, 1, 0, 1], [0, 1, 1]]


def test_bos_and_eos_by_the_post_processor(facts):
    made = word_level(**{"[X]": 2, "[Y]": 3})
    made.add_special_tokens(["[X]", "[Y]"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[X] $A [Y]", special_tokens=[("[X]", 2), ("[Y]", 3)]
    )
    assert facts(made, "bos_token", "eos_token", "adds_bos") == ("[X]", "[Y]", True)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (object(), "token ids"),
        (transformers.CanineTokenizer(), "CanineTokenizer"),
        ("s3://key:secret@bucket/t", "s3://bucket/t"),
        ("Qwen/Qwen3-0.6B", r"hf download Qwen/Qwen3-0\.6B"),
        ("gpt2", "gpt2"),
        ("nowhere/tokenizer/x.json", "nowhere/tokenizer"),
    ],
)
def test_a_tokenizer_that_is_elsewhere_names_the_way(
    source: object, found: str, hub: Path, facts
) -> None:
    with pytest.raises(TokenizerError, match=found):
        facts(source)


def test_a_hub_out_of_reach_is_told_from_a_name_that_it_lacks(tmp_path: Path) -> None:
    code = "from packstore.tokenizer import load_tokenizer; load_tokenizer('me/modle')"
    with served({"models/me/model": {}}) as (env, _):
        env = env | {"HF_HOME": str(tmp_path)}
        absent = run_python("-c", code, env=env).stderr.splitlines()[-1]
    unreachable = run_python("-c", code, env=env).stderr.splitlines()[-1]
    for error in (absent, unreachable):
        assert "tokenizer me/modle" in error
        assert "hf download me/modle" in error
    assert f"no connection to {env['HF_ENDPOINT']}" in unreachable
    assert "no connection" not in absent


def test_names_on_the_hub(hub: Path, facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache, as without a network; a local folder of that name wins."""
    commit = "0" * 40
    repository = hub / "cache" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    (repository / "snapshots" / commit).mkdir(parents=True)
    settings = {"eos_token": "b", "chat_template": "{{ 1 }}"}
    folder(repository / "snapshots" / commit, word_level(), tokenizer_config=settings)
    names = ("eos_token", "chat_template", "path")
    assert facts("some/model", *names) == ("b", "{{ 1 }}", "some/model")
    recorded = {**load_tokenizer("some/model").provenance(), "path": "some/model"}
    provenance = {"tokenizer": recorded}
    with pytest.raises(TokenizerError, match="some/model"):
        recorded_tokenizer(provenance, None, "ds", "Name it")
    named = recorded_tokenizer(provenance, "some/model", "ds", "Name it")
    assert named.sha256 == recorded["sha256"]
    Path("some/model").mkdir(parents=True)
    folder(Path("some/model"), word_level(), tokenizer_config={"eos_token": "a"})
    assert facts("some/model", "eos_token") == ("a",)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(TokenizerError, match="pip install huggingface-hub"):
        facts("some/other")


def test_tokenizers_of_transformers(facts, tmp_path, pack) -> None:
    """What the object says of its tokens and template is what its folder says."""
    made = word_level(**{"<e>": 2, "<b>": 3})
    made.add_special_tokens(["<e>", "<b>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<b> $A", special_tokens=[("<b>", 3)]
    )
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>")
    saved.chat_template = {
        "default": "{{ 1 }}",
        "tool_use": "{{ 2 }}",
        "rag": "{{ 3 }}",
    }
    saved.save_pretrained(tmp_path)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    names = ("vocab_sha256", "probe_sha256", "bos_id", "eos_id", "pad_id", "adds_bos")
    names += ("chat_template", "tool_use_template")
    assert facts(fast, *names) == facts(tmp_path, *names)
    assert facts(fast, *names[2:]) == (3, 2, None, True, "{{ 1 }}", "{{ 2 }}")
    fast.eos_token, fast.chat_template = "b", "{{ 4 }}"
    assert facts(fast, "eos_token", "chat_template") == ("b", "{{ 4 }}")
    assert facts(saved, "chat_template", "name", template="rag") == (
        "{{ 3 }}",
        "TokenizersBackend",
    )
    # Saved by transformers it has other bytes, but is the tokenizer of the dataset.
    dataset = pack(saved, {"prompt": "a", "response": "b"}).dataset
    assert main(["show", dataset.url, "--tokenizer", str(tmp_path)]) == 0


def folder(tmp_path: Path, made: tokenizers.Tokenizer, **files: object) -> Path:
    made.save(str(tmp_path / "tokenizer.json"))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return tmp_path


def test_settings_may_spell_tokens_as_objects(tmp_path, facts):
    made = word_level(**{"<e>": 2, "<b>": 3})
    where = folder(
        tmp_path,
        made,
        tokenizer_config={"eos_token": {"content": "<e>"}, "add_bos_token": True},
        special_tokens_map={"bos_token": "<b>", "eos_token": "b"},
    )
    assert facts(where, "eos_id", "bos_id", "adds_bos") == (2, 3, True)


def test_template_files_win_over_the_settings(tmp_path, facts):
    where = folder(
        tmp_path,
        word_level(),
        tokenizer_config={"chat_template": "{{ 1 }}"},
        chat_template={"chat_template": "{{ 2 }}"},
    )
    assert facts(where, "chat_template") == ("{{ 2 }}",)
    (where / "chat_template.jinja").write_text("{{ 3 }}", encoding="utf-8")
    assert facts(where, "chat_template") == ("{{ 3 }}",)
    (where / "mine.txt").write_text("{{ 4 }}", encoding="utf-8")
    assert facts(where, "chat_template", template=str(where / "mine.txt")) == (
        "{{ 4 }}",
    )


BAD = {
    "nothing there": (lambda p: p / "none.json", None, "readable"),
    "empty folder": (lambda p: p, None, "folder must hold one of tokenizer.json"),
    "not a tokenizer.json": (lambda p: write(p, b"{}"), None, "tokenizers library"),
    "not pulled": (
        lambda p: write(
            p, b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
        ),
        None,
        "Run git lfs pull",
    ),
    "not a model": (lambda p: write(p, b"junk"), None, "SentencePiece"),
    "syntax": (lambda p: word_level(), "a\n{% if %}", "line 2"),
    "unclosed": (lambda p: word_level(), "{% generation %}", "valid Jinja"),
    "bad settings": (
        lambda p: folder(p, word_level(), tokenizer_config=["x"]),
        None,
        "tokenizer_config.json: it must hold a JSON object",
    ),
    "unknown EOS": (
        lambda p: folder(p, word_level(), tokenizer_config={"eos_token": "<zz>"}),
        None,
        "eos_token must be in the vocabulary",
    ),
}


def write(folder: Path, content: bytes) -> Path:
    path = folder / "some.file"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", BAD)
def test_bad_tokenizers_give_one_sentence(tmp_path, facts, name):
    make, template, text = BAD[name]
    with pytest.raises(TokenizerError) as caught:
        facts(make(tmp_path), template=template)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_sentencepiece_names_the_extra(tokenizer, facts, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(
        sys.modules, "packstore.tokenizer.engines.sentencepiece", raising=False
    )
    with pytest.raises(MissingExtraError, match=r"packstore\[sentencepiece\]"):
        facts(tokenizer("mistral_model").file)


@pytest.mark.parametrize("answer", ["keep", "control"])
def test_model_and_json_agree(tokenizer, pack, records, answer):
    """The converted tokenizer.json and the SentencePiece library give the same ids."""
    texts = [r["chosen"] for r in records("pairs/chat_en.jsonl")[:60]]
    texts += ["a</s>b", " x  y ", "<s>Hello</s>", "a</s>b<s>", "</s>"]
    some = [{"prompt": text, "chosen": f"- {text}", "rejected": "no"} for text in texts]
    one, two = (
        pack(tokenizer(name), *some, on={"special_tokens": answer})
        for name in ("mistral", "mistral_model")
    )
    assert (one.examples, one.noted) == (two.examples, two.noted)
    events = (
        f"special_tokens_{'literal' if answer == 'keep' else answer}",
        "rendered_text",
    )
    assert sum(one.noted.get(event, 0) for event in events) == 4


def test_what_only_a_manifest_names_is_neither_fetched_nor_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        pytest.fail("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    (tmp_path / "tokenizer.json").write_text("not parsed", encoding="utf-8")
    for path, mentioned in {
        "someone/beacon": "someone/beacon",
        str(tmp_path): "sha256",
        str(tmp_path / "tokenizer.json"): "sha256",
    }.items():
        recorded = {"tokenizer": {"path": path, "sha256": "0" * 64}}
        with pytest.raises((TokenizerError, CompatibilityError), match=mentioned):
            recorded_tokenizer(recorded, None, "ds", "Give it")
