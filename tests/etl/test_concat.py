"""Datasets that grow: what is appended, and several as one."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_jobs import SETTINGS, pairs, trained_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

import packstore
from packstore import Dataset
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    DatasetExistsError,
    DatasetNotFoundError,
    TokenizerError,
)

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


def pack(out: Path | str, records: Any, **settings: Any) -> Dataset:
    return packstore.pack(records, str(out), **{**SETTINGS, **settings})


def examples(dataset: Dataset) -> list[tuple[int, str]]:
    """Id and tokens of every example, in the order of the dataset."""
    found = []
    for batch in dataset.iter_batches():
        for row in batch.to_pylist():
            bounds = row["seq_boundaries"]
            for k, example in enumerate(row["example_ids"]):
                parts = [row["input_ids"][bounds[i] : bounds[i + 1]] for i in (2 * k, 2 * k + 1)]
                found.append((example, str(parts)))
    return found


def test_append_adds_a_version(tmp_path: Path) -> None:
    place = tmp_path / "ds"
    first = pack(place, pairs(60))
    before = {p: p.stat().st_ino for p in place.rglob("*") if p.is_file()}
    second = packstore.append(first, pairs(40, 60))
    third = packstore.append(str(place), pairs(25, 100))
    assert (second.version, third.version) == (2, 3)
    assert {p: p.stat().st_ino for p in before} == before
    for i, shard in enumerate(first.manifest.shards):
        assert third.manifest.shards[i].path == shard.path
    for dataset in (first, second, third):
        assert dataset.verify().ok
    assert packstore.open(place, version=1).manifest.to_json() == first.manifest.to_json()
    assert examples(third)[: len(examples(first))] == examples(first)
    tokens = {text for _, text in examples(pack(tmp_path / "all", pairs(125)))}
    assert {text for _, text in examples(third)} == tokens
    ids = [example for example, _ in examples(third)]
    assert sorted(ids) == [
        *range(60),
        *((1 << 40) + i for i in range(40)),
        *((2 << 40) + i for i in range(25)),
    ]
    assert [s["records"] for s in third.manifest.provenance["sources"]] == [60, 40, 25]
    assert third.manifest.records.packed == third.manifest.records.read == 125
    assert packstore.clean(str(place)).leftovers == []


def test_statistics_and_index_are_those_of_the_packs(tmp_path: Path) -> None:
    """`verify` counts anew; the index must be that of one dataset of the same shards."""
    grown = packstore.append(pack(tmp_path / "a", pairs(60)), pairs(40, 60))
    assert grown.manifest.pack_index is not None
    sizes = grown.pack_index
    bare = Dataset(grown.location, _without_index(grown), grown.version)
    for name in ("tokens", "examples", "squares"):
        np.testing.assert_array_equal(getattr(sizes, name), getattr(bare.pack_index, name))
    as_one = packstore.concat([grown], str(tmp_path / "b"))
    assert as_one.manifest.pack_index is not None
    assert as_one.manifest.pack_index.sha256 == grown.manifest.pack_index.sha256
    assert as_one.manifest.statistics == grown.manifest.statistics
    assert as_one.manifest.lineage == grown.manifest.lineage


def _without_index(dataset: Dataset) -> Any:
    import dataclasses

    return dataclasses.replace(dataset.manifest, pack_index=None)


@pytest.mark.parametrize("where", ["local", "memory", "from_memory"])
def test_concat_copies_shards_as_they_are(tmp_path: Path, where: str) -> None:
    memory = f"memory://{uuid.uuid4().hex}"
    a = pack(f"{memory}/a" if where == "from_memory" else tmp_path / "a", pairs(60))
    b = pack(f"{memory}/b" if where == "from_memory" else tmp_path / "b", pairs(40, 60))
    out = f"{memory}/out" if where == "memory" else str(tmp_path / "out")
    whole = packstore.concat([a, b.url], out)
    assert whole.verify().ok
    assert [t for _, t in examples(whole)] == [t for d in (a, b) for _, t in examples(d)]
    assert [s.sha256 for s in whole.manifest.shards] == [
        s.sha256 for d in (a, b) for s in d.manifest.shards
    ]
    if where == "local":
        shard, origin = whole.manifest.shards[0].path, a.manifest.shards[0].path
        assert (tmp_path / "out" / shard).samefile(tmp_path / "a" / origin)
    twice = packstore.concat([a, b, a], out, overwrite=True)
    assert (twice.version, twice.manifest.pairs) == (2, 160)
    assert twice.verify().ok
    assert packstore.concat([twice, b], out, overwrite=True).verify().ok
    with pytest.raises(DatasetExistsError, match="must not hold a dataset yet"):
        packstore.concat([a, b], out)
    assert packstore.clean(out).leftovers == []


def test_the_same_however_it_was_combined(tmp_path: Path) -> None:
    a, b, c = (pack(tmp_path / n, pairs(30, 30 * i)) for i, n in enumerate("abc"))
    at_once = packstore.concat([a, b, c], str(tmp_path / "1"))
    in_steps = packstore.concat(
        [packstore.concat([a, b], str(tmp_path / "2")), c], str(tmp_path / "3")
    )
    assert at_once.manifest.fingerprint == in_steps.manifest.fingerprint
    assert at_once.manifest.provenance == in_steps.manifest.provenance
    assert at_once.manifest.lineage not in {d.manifest.lineage for d in (a, b, c)}


def test_what_differs_is_named(tmp_path: Path) -> None:
    a = pack(tmp_path / "a", pairs(30))
    others = {
        "pack_size 64 and 128": {"pack_size": 128},
        "layout 'concat' and 'shared_prefix'": {"layout": "shared_prefix"},
        "file_format 'parquet' and 'arrow'": {"format": "arrow"},
        r"features \(\) and \('label_spans',\)": {"labels": "spans"},
    }
    for number, (text, settings) in enumerate(others.items()):
        b = pack(tmp_path / str(number), pairs(30, 30), **settings)
        with pytest.raises(CompatibilityError, match=f"must have been made alike; found {text}"):
            packstore.concat([a, b], str(tmp_path / "out"))
    sft = [{"prompt": [5], "response": [6]}] * 9
    with pytest.raises(CompatibilityError, match="kind 'preference' and 'sft'"):
        packstore.concat([a, pack(tmp_path / "sft", sft)], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="so pack_size must be left out"):
        packstore.append(a, pairs(9), pack_size=128)
    with pytest.raises(ConfigError, match="takes a list"):
        packstore.concat(str(tmp_path / "a"), str(tmp_path / "out"))
    with pytest.raises(DatasetNotFoundError):
        packstore.append(str(tmp_path / "none"), pairs(9))
    assert packstore.open(tmp_path / "a").version == 1


def test_append_checks_what_it_extends(tmp_path: Path) -> None:
    place = tmp_path / "ds"
    first = pack(place, pairs(60))
    packstore.append(first, pairs(40, 60))
    with pytest.raises(ConfigError, match="only its newest version, 2, can be extended"):
        packstore.append(first, pairs(10, 200))
    with pytest.raises(DatasetExistsError, match="must not be in it yet; found these very"):
        packstore.append(str(place), pairs(60))
    assert packstore.append(str(place), pairs(40, 60)).version == 2  # a call that is repeated
    assert packstore.open(place).version == 2
    assert packstore.clean(str(place)).leftovers == []


def test_the_tokenizer_must_be_the_same(tmp_path: Path) -> None:
    words = ["[UNK]", "</s>", "a", "b", "c"]
    paths = []
    for number, order in enumerate((words, words[:2] + words[:1:-1])):
        vocabulary = {word: i for i, word in enumerate(order)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["</s>"])
        paths.append(str(tmp_path / f"{number}.json"))
        tokenizer.save(paths[-1])
    records = [{"prompt": "a", "chosen": "a b c", "rejected": "b c"}] * 9
    more = [{"prompt": "b", "chosen": "a b c", "rejected": "b c"}] * 9
    a, b = (
        packstore.pack(records, str(tmp_path / f"ds{i}"), path, pack_size=64, append_eos=False)
        for i, path in enumerate(paths)
    )
    for change in (
        lambda: packstore.concat([a, b], str(tmp_path / "out")),
        lambda: packstore.append(a, more, paths[1]),
        lambda: packstore.append(a, b),
    ):
        with pytest.raises(CompatibilityError, match="tokenizer vocab_sha256"):
            change()
    grown = packstore.append(a, more)
    assert grown.manifest.pairs == 18
    assert grown.verify().ok
    Path(paths[0]).unlink()
    with pytest.raises(TokenizerError, match="its tokenizer must be named"):
        packstore.append(grown, records)


def test_the_chat_template_must_be_the_same(tmp_path: Path) -> None:
    """That of the tokenizer is compared; that of a setting is the one that the dataset records."""
    folder, out, setting = tmp_path / "tokenizer", str(tmp_path / "ds"), tmp_path / "own.jinja"
    folder.mkdir()
    trained_tokenizer(["a b"]).save(str(folder / "tokenizer.json"))
    template = folder / "chat_template.jinja"
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    chats = [
        [{"messages": [{"role": r, "content": f"{r} {i}"} for r in ("user", "assistant")]}]
        for i in range(4)
    ]
    template.write_text(text)
    packstore.pack(chats[0], out, str(folder), pack_size=64)
    assert packstore.append(out, chats[1]).version == 2
    template.write_text(text.replace(": ", "; "))
    with pytest.raises(CompatibilityError, match="chat_template_sha256"):
        packstore.append(out, chats[2])
    setting.write_text(text)
    first = packstore.pack(
        chats[0], f"{out}-set", str(folder), chat_template=str(setting), pack_size=64
    )
    setting.write_text(text.replace(": ", "; "))
    grown = packstore.append(first, chats[1])
    setting.write_text(text)
    alone = packstore.pack(
        chats[1], f"{out}-alone", str(folder), chat_template=str(setting), pack_size=64
    )
    last = [row["input_ids"] for batch in grown.iter_batches() for row in batch.to_pylist()][-1]
    assert [last] == [r["input_ids"] for batch in alone.iter_batches() for r in batch.to_pylist()]


def test_a_dataset_is_packed_anew_to_be_appended(tmp_path: Path) -> None:
    a = pack(tmp_path / "a", pairs(60))
    b = pack(tmp_path / "b", pairs(40, 60), pack_size=256)
    grown = packstore.append(a, str(tmp_path / "b"))
    assert grown.verify().ok
    assert {t for _, t in examples(grown)} == {t for d in (a, b) for _, t in examples(d)}
