"""The faster engine gives the ids of the reference, or is found, named and not used.

Nothing but a changed library makes wrong ids, or makes it go away, so these tests
change it.
"""

import json
import logging
import pickle
import sys

import fastokens
import numpy as np
import pytest
import tokenizers

import packstore
from packstore.errors import TokenizerError, WrongEngineError

SETTINGS = {"pack_size": 256, "row_group_tokens": 1024, "num_workers": 0}


def engine_of(dataset):
    return dataset.manifest.provenance["tokenizer"]["engine"]


@pytest.mark.parametrize(
    "name", ["mistral", "small", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_the_same_examples_from_real_records(
    pack, tokenizer, records, monkeypatch, name
):
    every = {
        file: records(file)
        for file in ("pairs/chat_zh.jsonl", "pairs/hh_harmless.jsonl.gz")
    }
    some = [r for rows in every.values() for r in rows[:: max(1, len(rows) // 40)]]
    some.append(
        {**some[0], "unused": "x" * (3 << 20)}
    )  # the faster engine pays for much input
    fast = pack(tokenizer(name), *some)
    monkeypatch.delattr(fastokens.Tokenizer, "from_json_str")
    reference = pack(tokenizer(name), *some)
    assert [engine_of(packed.dataset) for packed in (fast, reference)] == [
        "fastokens",
        "tokenizers",
    ]
    assert (fast.examples, fast.rejects) == (reference.examples, reference.rejects)
    assert fast.noted == reference.noted


@pytest.fixture
def model(tmp_path, request):
    """Bytes as tokens, and a name of the test: a file that was read wrong is not tried
    again.
    """
    names = {
        c: i
        for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({**names, request.node.name: 256}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_added_tokens_whose_ids_are_not_those_of_the_file(model, tmp_path):
    """The reference numbers them anew, behind the vocabulary; the faster library does
    not.
    """
    with open(model, encoding="utf-8") as file:
        data = json.load(file)
    added = {
        "id": 999,
        "content": "zq",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    data["added_tokens"] = [{**added, "normalized": False, "special": False}]
    path = tmp_path / "renumbered.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    records = records_with(400, bad=390)
    made = packstore.pack(records, tmp_path / "ds", str(path), **SETTINGS)
    assert engine_of(made) == "fastokens"
    ids = np.concatenate([packs.input_ids for packs in made.iter_packs()])
    assert (
        ids.max() == tokenizers.Tokenizer.from_file(str(path)).token_to_id("zq") == 257
    )


def test_huge_ids_do_not_reach_the_faster_engine(model, tmp_path, monkeypatch):
    """It would make a table of them."""
    with open(model, encoding="utf-8") as file:
        data = json.load(file)
    data["model"]["vocab"]["huge"] = 2**32 - 1
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    read = []
    monkeypatch.setattr(fastokens.Tokenizer, "from_json_str", read.append)
    with pytest.raises(TokenizerError, match="16777216"):
        packstore.pack(records_with(400), tmp_path / "ds", str(path), **SETTINGS)
    assert not read


def test_a_platform_without_a_wheel(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    monkeypatch.delitem(
        sys.modules, "packstore.tokenizer.engines.fastokens", raising=False
    )
    records = [
        {"prompt": f"{i}", "chosen": "a" * 99, "rejected": "b"} for i in range(99)
    ]
    made = packstore.pack(records, str(tmp_path / "out"), model, **SETTINGS)
    assert engine_of(made) == "tokenizers"


@pytest.fixture
def spoil(monkeypatch, model):
    """Makes the faster library swap the ids of two characters where they stand side by
    side.
    """
    encode = fastokens.Tokenizer.encode_batch_flat
    id_of = tokenizers.Tokenizer.from_file(model).token_to_id

    def swap(first, second):
        def wrong(self, texts, **how):
            flat, offsets = encode(self, texts, **how)
            ids, a, b = (
                np.frombuffer(flat, np.int32).copy(),
                id_of(first),
                id_of(second),
            )
            at = np.flatnonzero((ids[:-1] == a) & (ids[1:] == b))
            ids[at], ids[at + 1] = b, a
            return ids.tobytes(), offsets

        monkeypatch.setattr(fastokens.Tokenizer, "encode_batch_flat", wrong)

    return swap


def records_with(number, bad=None):
    made = [
        {"prompt": f"prompt {i}", "chosen": f"yes {i}", "rejected": f"no {i}"}
        for i in range(number)
    ]
    if bad is not None:
        made[bad]["rejected"] = "a rare text: zq, once"
    return made


@pytest.mark.parametrize(
    ("letters", "bad", "said"),
    [
        ("qu", None, "its ids differ on probe texts"),
        (
            "zq",
            30,
            "item 31: tokenizer engine fastokens must give the ids of the reference",
        ),
        ("zq", 150, "All records are tokenized again, with the reference."),
    ],
    ids=["probes", "first records", "in the job"],
)
def test_a_wrong_engine_is_replaced(model, tmp_path, spoil, caplog, letters, bad, said):
    records = records_with(400, bad)
    expected = packstore.pack(
        records, tmp_path / "expected", model, partitions=1, **SETTINGS
    )
    assert engine_of(expected) == "fastokens"
    spoil(*letters)
    with caplog.at_level(logging.WARNING):
        made = packstore.pack(records, tmp_path / "ds", model, partitions=1, **SETTINGS)
    assert said in caplog.text
    assert engine_of(made) == "tokenizers"
    for a, b in zip(made.iter_packs(), expected.iter_packs(), strict=True):
        np.testing.assert_array_equal(a.input_ids, b.input_ids)
        np.testing.assert_array_equal(a.example_ids, b.example_ids)
    again = packstore.pack(records, tmp_path / "ds", model, partitions=1, **SETTINGS)
    assert again.version == 1  # another engine is no other dataset


def test_in_three_partitions(model, tmp_path, spoil):
    spoil("z", "q")
    source = tmp_path / "in.jsonl"
    lines = map(json.dumps, records_with(400, bad=150))
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    made = packstore.pack(source, tmp_path / "ds", model, partitions=3, **SETTINGS)
    assert engine_of(made) == "tokenizers"


def test_what_is_appended(model, tmp_path, spoil):
    packstore.pack(records_with(10), tmp_path / "few", model, **SETTINGS)
    spoil("z", "q")
    grown = packstore.append(
        tmp_path / "few", records_with(400, bad=150), model, num_workers=0
    )
    assert grown.manifest.records.packed == 410


def test_records_that_can_be_read_only_once_fail(model, tmp_path, spoil):
    spoil("z", "q")
    with pytest.raises(WrongEngineError) as caught:
        packstore.pack(
            iter(records_with(400, bad=150)), tmp_path / "ds", model, **SETTINGS
        )
    for part in ("item 151", "': zq, on' as [", "pip uninstall fastokens"):
        assert part in str(caught.value)
    assert not (tmp_path / "ds" / "manifest-000001.json").exists()
    copy = pickle.loads(pickle.dumps(caught.value))  # as it comes out of a worker
    assert (str(copy), copy.tokenizer) == (str(caught.value), caught.value.tokenizer)
