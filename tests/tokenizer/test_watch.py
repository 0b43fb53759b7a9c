"""Engines are watched: one that is wrong on a rare text is found, named, and not used."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import packstore
from packstore.config import PackConfig
from packstore.errors import WrongEngineError
from packstore.etl.sources import open_examples
from packstore.format import seeds
from packstore.format.arrays import example_id
from packstore.tokenizer import fastest, load_tokenizer
from packstore.tokenizer.engines import ENGINES
from packstore.tokenizer.engines.fastokens import FastokensEngine
from packstore.tokenizer.watch import FEWEST, ONE_IN, EngineWatch

SETTINGS: dict[str, Any] = {"pack_size": 256, "row_group_tokens": 1024, "num_workers": 0}


class Wrong(FastokensEngine):
    """Swaps two ids where a q follows a z: the engines agree on all other texts."""

    def encode_batch(self, texts: Any, *, control: bool) -> Any:
        ids, offsets = super().encode_batch(texts, control=control)
        ids, z, q = ids.copy(), self.token_to_id("z"), self.token_to_id("q")
        at = np.flatnonzero((ids[:-1] == z) & (ids[1:] == q))
        ids[at], ids[at + 1] = q, z
        return ids, offsets


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES._entries, "fastokens", f"{__name__}:Wrong")
    monkeypatch.setattr(fastest, "_misread", set())
    Wrong.__module__ = __name__


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Bytes as tokens."""
    names = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(names, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def records(number: int, bad: int | None = None) -> list[dict[str, str]]:
    found = [
        {"prompt": f"prompt {i}", "chosen": f"yes {i}", "rejected": f"no {i}"}
        for i in range(number)
    ]
    if bad is not None:
        found[bad]["rejected"] = "a rare text: zq, once"
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """400 records; the one with the rare text is behind those that are compared beforehand."""
    path = tmp_path / "in.jsonl"
    lines = map(json.dumps, records(400, bad=150))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def engine_of(dataset: packstore.Dataset) -> str:
    return str(dataset.manifest.provenance["tokenizer"]["engine"])


@pytest.mark.usefixtures("wrong")
def test_an_engine_that_was_asked_for_fails_the_job(
    source: Path, model: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongEngineError) as caught:
        packstore.pack(source, tmp_path / "ds", model, tokenizer_engine="fastokens", **SETTINGS)
    text = str(caught.value)
    z, q = (load_tokenizer(model).engine.token_to_id(c) for c in "zq")
    assert f"{source}, line 151: tokenizer engine fastokens must give the ids of the ref" in text
    assert "found ': zq, on' as [" in text
    assert f"{q}, {z}, " in text.split("not")[0]
    assert f"{z}, {q}, " in text.split("not")[1]
    assert "tokenizer_engine to tokenizers" in text
    assert not (tmp_path / "ds" / "manifest-000001.json").exists()


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize("partitions", [1, 3])
def test_one_that_auto_chose_is_replaced(
    source: Path, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, partitions: int
) -> None:
    settings = {**SETTINGS, "partitions": partitions}
    with caplog.at_level(logging.WARNING):
        found = packstore.pack(source, tmp_path / "ds", model, **settings)
    assert "line 151: tokenizer engine fastokens must" in caplog.text
    assert "All records are tokenized again, with the reference." in caplog.text
    assert engine_of(found) == "tokenizers"
    expected = packstore.pack(
        source, tmp_path / "expected", model, tokenizer_engine="tokenizers", **settings
    )
    for a, b in zip(found.iter_packs(), expected.iter_packs(), strict=True):
        np.testing.assert_array_equal(a.input_ids, b.input_ids)
        np.testing.assert_array_equal(a.example_ids, b.example_ids)


@pytest.mark.usefixtures("wrong")
def test_a_call_that_is_repeated_in_another_process_has_nothing_to_do(
    source: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packstore.pack(source, tmp_path / "ds", model, **SETTINGS)
    monkeypatch.setattr(fastest, "_misread", set())
    again = packstore.pack(source, tmp_path / "ds", model, **SETTINGS)
    assert (again.version, engine_of(again)) == (1, "tokenizers")


def test_the_error_comes_out_of_workers_as_it_is() -> None:
    error = WrongEngineError("line 1: wrong.")
    error.tokenizer = "abc"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.tokenizer) == ("line 1: wrong.", "abc")


@pytest.mark.usefixtures("wrong")
def test_what_is_appended_too(source: Path, model: str, tmp_path: Path) -> None:
    packstore.pack(records(10), tmp_path / "ds", model, **SETTINGS)
    grown = packstore.append(tmp_path / "ds", source, model, num_workers=0)
    assert grown.manifest.records.packed == 410


@pytest.mark.usefixtures("wrong")
def test_records_that_can_be_read_only_once_fail(model: str, tmp_path: Path) -> None:
    with pytest.raises(WrongEngineError, match="item 151"):
        packstore.pack(iter(records(400, bad=150)), tmp_path / "ds", model, **SETTINGS)


def test_right_engines_pass(source: Path, model: str, tmp_path: Path) -> None:
    found = packstore.pack(source, tmp_path / "ds", model, tokenizer_engine="fastokens", **SETTINGS)
    assert engine_of(found) == "fastokens"


def test_which_records_does_not_depend_on_blocks(model: str, source: Path) -> None:
    watch = EngineWatch(load_tokenizer(model, engine="fastokens"), PackConfig(), "preference", 7, 2)
    n = 50_000
    ordinals = np.arange(n)
    ids = example_id(3, 0) + ordinals
    whole = watch.chosen(ordinals, ids).tolist()
    parts = [range(a, min(a + 777, n)) for a in range(0, n, 777)]
    pieces = [watch.chosen(ordinals[list(p)], ids[list(p)]) + p[0] for p in parts]
    assert np.concatenate(pieces).tolist() == whole
    assert whole[: FEWEST // 2] == list(range(FEWEST // 2))
    assert 0.5 < len(whole[FEWEST // 2 :]) * ONE_IN / n < 1.5
    other = EngineWatch(load_tokenizer(model, engine="fastokens"), PackConfig(), "preference", 8, 2)
    assert other.chosen(ordinals, ids).tolist() != whole
    assert seeds.keys_at(np.arange(5, dtype=np.uint64), 1, "x").tolist() == (
        seeds.keys(5, 1, "x").tolist()
    )


def test_only_the_reference_is_not_watched(source: Path, model: str, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace(), made.pre_tokenizer]
    )
    made.save(str(tmp_path / "whole.json"))
    cases = [(str(tmp_path / "whole.json"), "tokenizers", False)]  # its texts are not cut
    cases += [(model, "tokenizers", True), (model, "fastokens", True)]
    for path, engine, watched in cases:
        config = PackConfig(tokenizer_engine=engine)  # type: ignore[arg-type]
        tokenize = open_examples(str(source), path, config, {}).tokenize()  # type: ignore[attr-defined]
        assert (tokenize._watch is not None) == watched
