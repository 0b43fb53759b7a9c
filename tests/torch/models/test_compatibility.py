"""Dataset, tokenizer and model that do not belong together are refused, and no
others.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import packstore
from packstore import Dataset
from packstore.errors import CompatibilityError, ConfigError
from packstore.testing import random_examples
from packstore.torch import PackedDataset, check_model, check_tokenizer

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("mistral_v1", "qwen3")]
REAL = ("small_bpe", "t5_unigram", *SLOW)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
Make = Callable[..., Dataset]


@pytest.fixture(scope="module")
def real(shared_data: Path) -> Path:
    return shared_data / "tokenizers"


@pytest.fixture
def make(tmp_path: Path, real: Path) -> Make:
    """Packs two records with a tokenizer, by its name or path."""
    lines = tmp_path / "pairs.jsonl"
    record = {"prompt": "Say it:", "chosen": " yes", "rejected": " no"}
    lines.write_text(2 * (json.dumps(record) + "\n"), encoding="utf-8")

    def pack(tokenizer: str | Path = "small_bpe", **settings: Any) -> Dataset:
        out = tmp_path / f"ds-{len(list(tmp_path.iterdir()))}"
        return packstore.pack(
            str(lines), str(out), real / tokenizer, pack_size=64, **settings
        )

    return pack


def told(ds: Dataset, **changes: Any) -> Any:
    """The manifest with other facts about the tokenizer; None removes one."""
    tokenizer = {**ds.manifest.provenance["tokenizer"], **changes}
    tokenizer = {name: value for name, value in tokenizer.items() if value is not None}
    return replace(
        ds.manifest, provenance={**ds.manifest.provenance, "tokenizer": tokenizer}
    )


@pytest.mark.parametrize("name", REAL)
def test_the_same_tokenizer_in_every_form(
    make: Make, real: Path, tmp_path: Path, name: str
) -> None:
    ds = make(name)
    loaded = AutoTokenizer.from_pretrained(real / name)
    loaded.save_pretrained(tmp_path / "saved")
    file = real / name / "tokenizer.json"
    for form in (
        real / name,
        str(file),
        tmp_path / "saved",
        Tokenizer.from_file(str(file)),
    ):
        check_tokenizer(ds, form)
    with pytest.raises(CompatibilityError, match="tokenizer"):
        check_tokenizer(
            ds, real / ("t5_unigram" if name != "t5_unigram" else "small_bpe")
        )
    loaded.add_special_tokens({"pad_token": "<|a new one|>"})
    check_tokenizer(ds.manifest, SimpleNamespace(tokenizer=loaded))


def swap(value: Any) -> None:
    names = {i: token for token, i in value["model"]["vocab"].items()}
    value["model"]["vocab"][names[100]], value["model"]["vocab"][names[101]] = 101, 100


def fewer(value: Any) -> None:
    last = max(value["model"]["vocab"], key=value["model"]["vocab"].get)
    del value["model"]["vocab"][last]
    value["model"]["merges"] = [
        m for m in value["model"]["merges"] if "".join(m) != last
    ]


def merge_less(value: Any) -> None:
    del value["model"]["merges"][50:]


def more(value: Any) -> None:
    size = max(value["model"]["vocab"].values()) + 1
    token = {"id": size, "content": "<new>", "special": True, "normalized": False}
    value["added_tokens"].append(
        {**token, "single_word": False, "lstrip": False, "rstrip": False}
    )


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        (swap, True),
        (fewer, True),
        (merge_less, True),
        (lambda value: value.update(normalizer={"type": "Lowercase"}), True),
        (more, False),
    ],
)
def test_a_tokenizer_that_was_changed(
    make: Make,
    real: Path,
    tmp_path: Path,
    change: Callable[[Any], None],
    is_refused: bool,
) -> None:
    value = json.loads(
        (real / "small_bpe" / "tokenizer.json").read_text(encoding="utf-8")
    )
    change(value)
    file = tmp_path / "edited" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(json.dumps(value), encoding="utf-8")
    ds = make()
    for form in (file.parent, file, Tokenizer.from_file(str(file))):
        with (
            pytest.raises(CompatibilityError, match="tokenizer")
            if is_refused
            else nullcontext()
        ):
            check_tokenizer(ds, form)


@pytest.mark.parametrize("role", ["bos", "eos"])
def test_special_ids(make: Make, real: Path, role: str) -> None:
    loaded, ds = AutoTokenizer.from_pretrained(real / "small_bpe"), make()
    setattr(loaded, f"{role}_token", loaded.convert_ids_to_tokens(0))
    check_tokenizer(told(ds, **{f"{role}_id": 0}), loaded)
    with pytest.raises(CompatibilityError, match=role.upper()):
        check_tokenizer(told(ds, **{f"{role}_id": 3}), loaded)


def with_template(real: Path, folder: Path, text: str, where: str = "jinja") -> Path:
    shutil.copytree(real / "small_bpe", folder)
    folder.chmod(0o755)
    if where == "jinja":
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
        return folder
    named = [{"name": "default", "template": text}, {"name": "tools", "template": "x"}]
    value = {"chat_template": text if where == "config" else named}
    value["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


@pytest.mark.parametrize("where", ["jinja", "config", "named"])
def test_chat_templates(make: Make, real: Path, tmp_path: Path, where: str) -> None:
    same = with_template(real, tmp_path / "same", TEMPLATE, where)
    spaced = with_template(real, tmp_path / "spaced", TEMPLATE + "\n", where)
    other = with_template(real, tmp_path / "other", TEMPLATE + "!", where)
    ds = make(same)
    assert ds.manifest.provenance["tokenizer"]["chat_template"] == TEMPLATE
    for folder in (same, spaced, real / "small_bpe"):
        check_tokenizer(ds, folder)
        check_tokenizer(ds, AutoTokenizer.from_pretrained(folder))
    for form in (other, other / "tokenizer.json", AutoTokenizer.from_pretrained(other)):
        with pytest.raises(CompatibilityError, match="chat_template"):
            check_tokenizer(ds, form)
        check_tokenizer(ds, form, chat_template=False)


def test_a_template_that_was_chosen(
    make: Make, real: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_template(real, tmp_path / "own", TEMPLATE)
    check_tokenizer(make(folder, chat_template="chatml"), folder)
    assert "another chat template" in caplog.text


def test_datasets_of_a_mix(
    make: Make, real: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of token ids record no tokenizer, and are taken."""
    ids = {"prompt": [5, 6], "chosen": [7], "rejected": [8]}
    none = packstore.pack([ids], str(tmp_path / "ids"), pack_size=64)
    check_tokenizer(none, real / "small_bpe")
    assert "records no tokenizer" in caplog.text
    AutoTokenizer.from_pretrained(real / "small_bpe").save_pretrained(
        tmp_path / "saved"
    )
    own, other = (
        with_template(real, tmp_path / x, TEMPLATE + x) for x in ("own", "other")
    )
    mix = {none: 1, make(): 1, make(tmp_path / "saved"): 1, make(own): 1}
    PackedDataset.mix(mix)
    with pytest.raises(CompatibilityError, match="datasets 1 and 4"):
        PackedDataset.mix({**mix, make("t5_unigram"): 1})
    with pytest.raises(CompatibilityError, match="chat template"):
        PackedDataset.mix({**mix, make(other): 1})


def test_vocabulary_of_a_model(make: Make) -> None:
    manifest = told(make(), vocab_size=50)
    for size in (50, 64):
        check_model(manifest, LlamaConfig(vocab_size=size))
    for model in (LlamaConfig(vocab_size=49), SimpleNamespace(vocab_size=49)):
        with pytest.raises(CompatibilityError, match="49"):
            check_model(manifest, model)
    check_model(told(make(), vocab_size=None), LlamaConfig(vocab_size=1))
    with pytest.raises(ConfigError, match="Linear"):
        check_model(manifest, nn.Linear(1, 1))


def test_the_tokenizer_beside_a_model(
    make: Make, real: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another tokenizer's ids would be other words to it, though its vocabulary holds
    them.
    """

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=40_000, num_attention_heads=1, eos_token_id=None, **sizes
    )

    def model(name: str, tokenizer: Path | None) -> LlamaForCausalLM:
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        if tokenizer is not None:
            shutil.copy(tokenizer / "tokenizer.json", tmp_path / name)
        return LlamaForCausalLM.from_pretrained(tmp_path / name)

    ds, saved = make(), tmp_path / "saved"
    caplog.clear()
    AutoTokenizer.from_pretrained(real / "small_bpe").save_pretrained(saved)
    for name, tokenizer in (
        ("own", real / "small_bpe"),
        ("again", saved),
        ("none", None),
    ):
        check_model(ds, model(name, tokenizer))
    assert not caplog.text
    with pytest.raises(CompatibilityError, match="tokenizer"):
        check_model(ds, model("other", real / "t5_unigram"))
    (tmp_path / "own" / "tokenizer.json").write_text("{}", encoding="utf-8")
    check_model(ds, LlamaForCausalLM.from_pretrained(tmp_path / "own"))
    assert "is not compared with the model's: tokenizer" in caplog.text


def test_the_tokenizer_of_a_model_of_the_hub(
    make: Make, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the hub's cache, where the model was loaded from: a folder of that name does
    not exist.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def config(name: str, tokenizer: Path) -> LlamaConfig:
        cached = tmp_path / f"models--{name.replace('/', '--')}"
        snapshot = cached / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        shutil.copy(tokenizer / "tokenizer.json", snapshot)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("0123", encoding="utf-8")
        return LlamaConfig(vocab_size=40_000, eos_token_id=None, name_or_path=name)

    ds = make()
    check_model(ds, config("me/own", real / "small_bpe"))
    with pytest.raises(CompatibilityError, match="tokenizer"):
        check_model(ds, config("me/other", real / "t5_unigram"))


def test_special_ids_of_a_model(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    ds = make()
    for own, eos, logged in (
        *((7, 7, False), ([5, 7], 7, False), (None, 7, False)),
        *((5, None, False), (5, 7, True)),
    ):
        config = LlamaConfig(
            vocab_size=50_000, eos_token_id=own, bos_token_id=None, pad_token_id=9
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            check_model(told(ds, eos_id=eos, bos_id=3, pad_id=4), config)
        text = "eos_token_id 5, but the dataset was packed with 7"
        assert (text in caplog.text) == logged


def test_a_file_without_transformers(
    make: Make, real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that the dataset was packed with needs no library at all."""
    ds = make()
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    check_tokenizer(ds, real / "small_bpe")
    with pytest.raises(ImportError, match="train"):
        check_tokenizer(ds, real / "t5_unigram")


@pytest.mark.parametrize("name", ["gpt2", "opt", "ctrl", "llama"])
def test_sequences_beyond_the_positions_of_a_model(
    kit: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Beyond a table they are refused, and beyond those of RoPE named."""
    dataset = kit.write(
        str(tmp_path / "d"), kit.packed(random_examples(9, seed=1), [9], "concat")
    )
    longest = dataset.manifest.statistics.longest_sequence
    check_model(
        dataset, kit.tiny_family(name, torch.float32, max_position_embeddings=longest)
    )
    assert not caplog.text
    model = kit.tiny_family(name, torch.float32, max_position_embeddings=longest - 1)
    if name == "llama":
        check_model(dataset, model)
        assert (
            f"of {longest} tokens, and the model was made for {longest - 1}"
            in caplog.text
        )
        caplog.clear()
        model.config.rope_parameters = {
            "rope_type": "dynamic",
            "factor": 2.0,
            "rope_theta": 1e4,
        }
        check_model(dataset, model)
        assert not caplog.text
        return
    for each, config in ((dataset, model), (dataset.manifest, model.config)):
        with pytest.raises(CompatibilityError, match=f"max_length={longest - 1}"):
            check_model(each, config)
