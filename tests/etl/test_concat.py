"""Datasets that grow: what is appended, and several as one."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_python
from places import Files, edit_manifest, manifest_path
from small_jobs import pack, pairs, trained_tokenizer, write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers

import packstore
from packstore import Dataset, errors
from packstore.etl.dedup_and_split import pair_keys, stored_keys
from packstore.pack.fill import unpack

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


def examples(dataset: Dataset) -> list[tuple[int, str]]:
    """Id and tokens of every example, in the order of the dataset."""
    frame = packstore.scan(dataset, tokens=True).collect()
    return [
        (i, str(sides)) for i, sides in frame["example_id", "input_ids"].iter_rows()
    ]


def texts(dataset: Dataset) -> list[list[int]]:
    return [packs.input_ids.tolist() for packs in dataset.iter_packs()]


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
    assert (
        packstore.open(place, version=1).manifest.to_json() == first.manifest.to_json()
    )
    assert examples(third)[: len(examples(first))] == examples(first)
    tokens = {text for _, text in examples(pack(tmp_path / "all", pairs(125)))}
    assert {text for _, text in examples(third)} == tokens
    ids = sorted(example for example, _ in examples(third))
    assert ids == [
        (part << 40) + i for part, n in enumerate((60, 40, 25)) for i in range(n)
    ]
    assert [s["records"] for s in third.manifest.provenance["sources"]] == [60, 40, 25]
    assert third.manifest.records.packed == third.manifest.records.read == 125
    assert packstore.clean(str(place)).leftovers == []


@pytest.mark.parametrize("where", ["local", "memory", "from_memory"])
def test_concat_copies_shards_as_they_are(tmp_path: Path, where: str) -> None:
    memory = f"memory://{uuid.uuid4().hex}"
    a = pack(f"{memory}/a" if where == "from_memory" else tmp_path / "a", pairs(60))
    b = pack(f"{memory}/b" if where == "from_memory" else tmp_path / "b", pairs(40, 60))
    out = f"{memory}/out" if where == "memory" else str(tmp_path / "out")
    told: list[tuple[object, ...]] = []
    whole = packstore.concat([a, b.url], out, progress=lambda *t: told.append(t))
    shards = len(whole.manifest.shards)
    assert sorted(told) == [("copy", i + 1, shards, "files") for i in range(shards)]
    assert whole.verify().ok
    assert [t for _, t in examples(whole)] == [
        t for d in (a, b) for _, t in examples(d)
    ]
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
    with pytest.raises(errors.DatasetExistsError, match="out"):
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
        "pack_size": {"pack_size": 128},
        "layout": {"layout": "concat"},
        "file_format": {"format": "arrow"},
    }
    for number, (name, settings) in enumerate(others.items()):
        b = pack(tmp_path / str(number), pairs(30, 30), **settings)
        with pytest.raises(errors.CompatibilityError, match=name):
            packstore.concat([a, b], str(tmp_path / "out"))
    sft = [{"prompt": [5], "response": [6]}] * 9
    with pytest.raises(errors.CompatibilityError, match="kind"):
        packstore.concat([a, pack(tmp_path / "sft", sft)], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(errors.ConfigError, match="pack_size"):
        packstore.append(a, pairs(9), pack_size=128)
    with pytest.raises(errors.ConfigError, match="list"):
        packstore.concat(str(tmp_path / "a"), str(tmp_path / "out"))
    with pytest.raises(errors.DatasetNotFoundError):
        packstore.append(str(tmp_path / "none"), pairs(9))
    assert packstore.open(tmp_path / "a").version == 1


def test_append_checks_what_it_extends(tmp_path: Path) -> None:
    place = tmp_path / "ds"
    first = pack(place, pairs(60))
    packstore.append(first, pairs(40, 60))
    with pytest.raises(errors.ConfigError, match="version"):
        packstore.append(first, pairs(10, 200))
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
        packstore.pack(
            records, str(tmp_path / f"ds{i}"), path, pack_size=64, append_eos=False
        )
        for i, path in enumerate(paths)
    )
    for change in (
        lambda: packstore.concat([a, b], str(tmp_path / "out")),
        lambda: packstore.append(a, more, paths[1]),
        lambda: packstore.append(a, b),
    ):
        with pytest.raises(errors.CompatibilityError, match="vocab_sha256"):
            change()
    grown = packstore.append(a, more)
    assert grown.manifest.pairs == 18
    assert grown.verify().ok
    Path(paths[0]).unlink()
    with pytest.raises(errors.TokenizerError, match="tokenizer"):
        packstore.append(grown, records)


def test_the_chat_template_must_be_the_same(tmp_path: Path) -> None:
    """That of the tokenizer is compared; that of a setting is the one that the dataset
    records.
    """
    folder, setting = tmp_path / "tokenizer", tmp_path / "own.jinja"
    folder.mkdir()
    trained_tokenizer(["a b"]).save(str(folder / "tokenizer.json"))
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    other = text.replace(": ", "; ")
    chats = [
        [
            {
                "messages": [
                    {"role": r, "content": f"{r} {i}"} for r in ("user", "assistant")
                ]
            }
        ]
        for i in range(3)
    ]
    settings: dict[str, Any] = {"tokenizer": str(folder), "pack_size": 64}
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    first = packstore.pack(chats[0], tmp_path / "ds", **settings)
    second = packstore.append(first, chats[1])
    (folder / "chat_template.jinja").write_text(other, encoding="utf-8")
    with pytest.raises(errors.CompatibilityError, match="chat_template_sha256"):
        packstore.append(second, chats[2])
    setting.write_text(text, encoding="utf-8")
    first = packstore.pack(
        chats[0], tmp_path / "set", chat_template=str(setting), **settings
    )
    setting.write_text(other, encoding="utf-8")
    third = packstore.append(first, chats[1])
    assert texts(third) == texts(second)


def test_a_dataset_is_packed_anew_to_be_appended(tmp_path: Path) -> None:
    a = pack(tmp_path / "a", pairs(60))
    b = pack(tmp_path / "b", pairs(40, 60), pack_size=256)
    grown = packstore.append(a, str(tmp_path / "b"))
    assert grown.verify().ok
    assert {t for _, t in examples(grown)} == {
        t for d in (a, b) for _, t in examples(d)
    }


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_append_leaves_out_duplicates_of_what_is_there(
    partitions: int, layout: str, tmp_path: Path
) -> None:
    """As one job over all records would; a repeated part adds nothing, in any form."""
    settings = {"dedup": "pair", "layout": layout, "max_drop_rate": 1.0}
    old, more = pairs(60), [*pairs(50, 20), *pairs(10, 75), *pairs(3, 75)]
    whole = pack(tmp_path / "all", old + more, **settings)
    base = pack(tmp_path / "ds", old, **settings)
    files = write_jsonl(tmp_path / "more.jsonl", more)
    grown = packstore.append(base, files, partitions=partitions)
    records = grown.manifest.records
    assert records.dropped == whole.manifest.records.dropped == {"duplicate_pair": 43}
    tokens = [sorted(text for _, text in examples(d)) for d in (grown, whole)]
    assert tokens[0] == tokens[1]
    assert grown.verify().ok
    again = packstore.append(grown, iter(old[:30]))
    assert again.version == grown.version == 2
    asked = packstore.append(pack(tmp_path / "no", old), more, dedup="pair")
    assert asked.manifest.pairs == grown.manifest.pairs
    kept = packstore.append(grown, iter(old[:30]), dedup="none")
    assert kept.manifest.pairs == grown.manifest.pairs + 30


def test_the_keys_of_a_dataset_are_those_of_its_pairs_alone(tmp_path: Path) -> None:
    """A key more, of uninitialised memory, would drop a record that has it by
    chance.
    """
    dataset = pack(tmp_path / "ds", pairs(60))
    parts = [pair_keys(unpack(packs)) for packs in dataset.iter_packs()]
    assert stored_keys([dataset]).tolist() == np.concatenate(parts).tolist()


def test_append_finds_duplicates_of_text_chats_and_answers(tmp_path: Path) -> None:
    """What is stored gives the keys of what is tokenized, whatever the record was."""
    tokenizer = trained_tokenizer(["Say yes or no."])
    turns = [
        {"role": "user", "content": "Say."},
        {"role": "assistant", "content": "Yes."},
    ]
    kinds: list[list[Any]] = [
        [{"prompt": f"Say {i}.", "chosen": f"Yes {i}", "rejected": ""} for i in range(9)],
        [{"messages": [*turns, *turns, *turns[:i]]} for i in range(2)],
        [{"input_ids": [5, 6, 7 + i], "labels": [5, -100, 7 + i]} for i in range(9)],
        [{"prompt": "Say.", "responses": ["a", "b", f"c{i}"], "scores": [1, 2, 3]}
         for i in range(9)],
    ]  # fmt: skip
    for number, records in enumerate(kinds):
        settings = {
            "chat_template": "chatml",
            "on": {"empty_side": "keep"},
            "dedup": "pair",
        }
        for layout in ("concat", "shared_prefix"):
            place = tmp_path / f"{layout}-{number}"
            base = packstore.pack(records, place, tokenizer, layout=layout, **settings)
            assert packstore.append(base, iter(records), tokenizer).version == 1


def test_arguments_in_the_wrong_order_are_named(tmp_path: Path) -> None:
    base = pack(tmp_path / "ds", pairs(9))
    file = write_jsonl(tmp_path / "more.jsonl", pairs(9, 60))
    for dataset in (file, str(tmp_path / "*.jsonl")):
        for records in (base, base.url, [file, base.url]):
            with pytest.raises(errors.ConfigError, match="dataset"):
                packstore.append(dataset, records)
    with pytest.raises(errors.ConfigError, match="dataset"):
        packstore.append(pairs(9), base)  # type: ignore[arg-type]
    for out in (base, pairs(9)):
        with pytest.raises(errors.ConfigError, match="out"):
            packstore.pack("elsewhere", out)  # type: ignore[arg-type]


def test_what_is_dropped_beside_duplicates_is_told_apart(tmp_path: Path) -> None:
    """The sum is of what counts, and the advice is such that append can follow it."""
    base = pack(tmp_path / "ds", pairs(60), dedup="pair", max_length=16)
    bad = [{**record, "chosen": [1] * 16} for record in pairs(4)]
    for more in (pairs(3), pairs(4, 58)):  # with and without a new one
        with pytest.raises(errors.DropRateError, match="10%") as caught:
            packstore.append(base, more + bad)
        text = str(caught.value)
        assert re.search(r"4 of \d .*4 overlong .*[23] duplicate_pair", text)
        assert "Raise" not in text
        assert "--on" not in text
    with pytest.raises(errors.DropRateError, match="4 of 4"):
        packstore.append(base, bad, max_drop_rate=1.0)


def test_what_is_appended_is_cut_as_the_dataset_is(tmp_path: Path) -> None:
    base = pack(
        tmp_path / "ds", pairs(60), max_length=8, on={"overlong": "truncate_response"}
    )
    grown = packstore.append(base, pairs(60, 60))
    assert grown.manifest.records.noted["truncated_response"] == 34
    dropped = packstore.append(
        grown, pairs(14, 120), on={"overlong": "drop"}, max_drop_rate=1.0
    )
    assert dropped.manifest.records.dropped == {"overlong": 4}
    packed = packstore.append(
        dropped, pack(tmp_path / "other", pairs(14, 140)), max_drop_rate=1.0
    )
    assert packed.manifest.records.dropped == {"overlong": 8}


def test_append_refuses_settings_that_it_does_not_know(tmp_path: Path) -> None:
    """A later version may have one that changes the tokens."""
    base = pack(tmp_path / "ds", pairs(9))
    edit_manifest(
        base.url, lambda m: m["provenance"]["settings"].update(spelling="old")
    )
    with pytest.raises(errors.ConfigError, match="'spelling'"):
        packstore.append(base.url, pairs(3, 9))


def later_release(dataset: Dataset, **features: Any) -> tuple[str, bytes]:
    """Adds what a later release may: a further file and members that are not
    known yet.
    """
    content = f"of {dataset.url}".encode()
    sha256 = hashlib.sha256(content).hexdigest()
    path = f"data/0123456789ab-00000-{sha256[:16]}.parquet"
    Files(dataset.url).write(path, content)
    file = {"path": path, "bytes": len(content), "sha256": sha256}

    def change(manifest: Any) -> None:
        manifest |= {"further_files": [file], "deletes": {"path": path}, **features}
        manifest["provenance"]["licence"] = "CC0"
        for number, shard in enumerate(manifest["shards"]):
            shard |= {"zone": {"values": [number, 0.5, "é", None]}, "further": True}

    edit_manifest(dataset.url, change)
    return path, content


@pytest.mark.parametrize("how", ["append", "concat", "elsewhere"])
def test_what_of_a_later_release_survives(tmp_path: Path, how: str) -> None:
    """Members of shards and further files do, which writer features may ask for; others
    do not.
    """
    a, b = pack(tmp_path / "a", pairs(30)), pack(tmp_path / "b", pairs(20, 30))
    added = dict([later_release(a), later_release(b)])
    if how == "append":
        whole = packstore.append(a.url, pairs(20, 30))
        added = dict(list(added.items())[:1])
    else:
        out = a.url if how == "concat" else f"memory://{uuid.uuid4().hex}"
        whole = packstore.concat([a.url, b.url, b.url], out, overwrite=how == "concat")
    assert whole.verify().ok
    written = json.loads(Files(whole.url).read(manifest_path(whole.version)))
    assert {
        f["path"]: Files(whole.url).read(f["path"]) for f in written["further_files"]
    } == added
    assert "deletes" not in written
    assert written["provenance"]["licence"] == "CC0"
    old = [json.loads(Files(d.url).read(manifest_path(1)))["shards"] for d in (a, b)]
    came_from = old[0] if how == "append" else [*old[0], *old[1], *old[1]]
    for now, before in zip(written["shards"], came_from, strict=False):
        assert now["zone"] == before["zone"]
        assert now["further"] is True
    clean = packstore.clean(whole.url, delete=True, older_than=0, no_writers=True)
    assert clean.leftovers == []


def test_writer_features_stop_only_writers(tmp_path: Path) -> None:
    place = tmp_path / "ds"
    path, _ = later_release(pack(place, pairs(30)), writer_features=["deletes"])
    old = packstore.open(place)
    assert old.verify().ok
    assert len(examples(old)) == 30
    (place / "data" / f"0123456789ab-00000-{'0' * 16}.parquet").write_bytes(
        b"left over"
    )
    files = Files(str(place)).names()
    for change in (
        lambda: packstore.append(old, pairs(9, 30)),
        lambda: packstore.concat([old], str(tmp_path / "out")),
        lambda: packstore.concat(
            [pack(tmp_path / "b", pairs(9)), old], str(tmp_path / "out")
        ),
        lambda: packstore.clean(str(place)),
        lambda: packstore.clean(str(place), delete=True, older_than=0, no_writers=True),
    ):
        with pytest.raises(errors.UnsupportedFormatError, match="'deletes'"):
            change()
    assert Files(str(place)).names() == files
    assert not (tmp_path / "out").exists()
    Files(str(place)).write(path, b"others")
    assert any(path in problem for problem in old.verify().problems)


def test_append_runs_no_function_that_only_a_manifest_names(tmp_path: Path) -> None:
    function = tmp_path / "forms.py"
    function.write_text(
        "import pathlib, packstore\n"
        "pathlib.Path(__file__).with_suffix('.ran').touch()\n"
        "def read(record):\n"
        "    return packstore.Pair([5, 6], record['good'], record['bad'])\n",
        encoding="utf-8",
    )
    name = f"{function}:read"
    records = [{"good": [8, n], "bad": [9, n]} for n in range(40)]
    first = pack(tmp_path / "ds", records[:20], adapter=name)
    function.with_suffix(".ran").unlink()
    code = (
        f"import packstore; packstore.append({first.url!r}, [{{'good': [1], 'bad': "
        f"[2]}}])"
    )
    done = run_python("-c", code)
    assert "ConfigError" in done.stderr
    assert f"{function.name}:read" in done.stderr
    assert not function.with_suffix(".ran").exists()
    assert (
        packstore.append(first, records[20:], adapter=name).manifest.totals.examples
        == 40
    )


def test_append_refuses_to_compare_prompts(tmp_path: Path) -> None:
    base = pack(tmp_path / "ds", pairs(9), dedup="prompt")
    with pytest.raises(errors.ConfigError, match="dedup"):
        packstore.append(base, pairs(3, 9))
    assert packstore.append(base, pairs(3, 9), dedup="none").manifest.pairs == 4
