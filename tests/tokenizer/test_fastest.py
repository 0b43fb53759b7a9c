"""The faster engine gives the ids of the reference, or is found, named and not used.

Nothing but a changed engine makes wrong ids, so these tests change one.
"""

import json
import logging
import pickle

import numpy as np
import pytest
import tokenizers

import packstore
from packstore.config import PackConfig
from packstore.errors import WrongEngineError
from packstore.tokenizer import RecordTokenizer, fastest
from packstore.tokenizer.engines.fastokens import FastokensEngine

KINDS = {
    "pairs/chat_zh.jsonl": "preference",
    "pairs/hh_harmless.jsonl.gz": "preference",
    "sft/reason_tool.jsonl": "sft",
}
SETTINGS = {"pack_size": 256, "row_group_tokens": 1024, "num_workers": 0}


@pytest.mark.parametrize("file", KINDS)
@pytest.mark.parametrize("name", ["qwen3", "mistral", "small"])
def test_the_same_examples_from_real_records(tokenizer, records, rows, name, file):
    fast, reference = tokenizer(name), tokenizer(name, engine="tokenizers")
    assert (fast.engine_name, reference.engine_name) == ("fastokens", "tokenizers")
    every = records(file)
    some = rows(every[:: max(1, len(every) // 40)])
    config = PackConfig(pack_size=8192)
    found, expected = (RecordTokenizer(t, config, KINDS[file])(some) for t in (fast, reference))
    assert found[1] == expected[1]
    for array in ("input_ids", "supervised", "sequence_offsets", "example_offsets"):
        np.testing.assert_array_equal(getattr(found[0], array), getattr(expected[0], array))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Bytes as tokens."""
    names = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(names, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    made.save(str(path))
    return str(path)


@pytest.fixture
def spoil(monkeypatch):
    """Makes the faster engine swap the ids of two characters where they stand side by side."""
    encode = FastokensEngine.encode_batch

    def swap(first, second):
        def wrong(self, texts, *, control):
            ids, offsets = encode(self, texts, control=control)
            ids, a, b = ids.copy(), self.token_to_id(first), self.token_to_id(second)
            at = np.flatnonzero((ids[:-1] == a) & (ids[1:] == b))
            ids[at], ids[at + 1] = b, a
            return ids, offsets

        monkeypatch.setattr(FastokensEngine, "encode_batch", wrong)

    monkeypatch.setattr(fastest, "_misread", set())
    return swap


def records_with(number, bad=None):
    made = [
        {"prompt": f"prompt {i}", "chosen": f"yes {i}", "rejected": f"no {i}"}
        for i in range(number)
    ]
    if bad is not None:
        made[bad]["rejected"] = "a rare text: zq, once"
    return made


def engine_of(dataset):
    return dataset.manifest.provenance["tokenizer"]["engine"]


@pytest.mark.parametrize(
    ("letters", "bad", "said"),
    [
        ("qu", None, "its ids differ on probe texts"),
        ("zq", 30, "item 31: tokenizer engine fastokens must give the ids of the reference"),
        ("zq", 150, "All records are tokenized again, with the reference."),
    ],
    ids=["probes", "first records", "in the job"],
)
def test_a_wrong_engine_is_replaced(model, tmp_path, spoil, caplog, letters, bad, said):
    records = records_with(400, bad)
    expected = packstore.pack(records, tmp_path / "expected", model, partitions=1, **SETTINGS)
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


def test_in_three_partitions_and_for_what_is_appended(model, tmp_path, spoil):
    spoil("z", "q")
    source = tmp_path / "in.jsonl"
    lines = map(json.dumps, records_with(400, bad=150))
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    made = packstore.pack(source, tmp_path / "ds", model, partitions=3, **SETTINGS)
    assert engine_of(made) == "tokenizers"
    fastest._misread.clear()
    packstore.pack(records_with(10), tmp_path / "few", model, **SETTINGS)
    grown = packstore.append(tmp_path / "few", source, model, num_workers=0)
    assert grown.manifest.records.packed == 410


def test_records_that_can_be_read_only_once_fail(model, tmp_path, spoil):
    spoil("z", "q")
    with pytest.raises(WrongEngineError) as caught:
        packstore.pack(iter(records_with(400, bad=150)), tmp_path / "ds", model, **SETTINGS)
    for part in ("item 151", "': zq, on' as [", "pip uninstall fastokens"):
        assert part in str(caught.value)
    assert not (tmp_path / "ds" / "manifest-000001.json").exists()
    copy = pickle.loads(pickle.dumps(caught.value))  # as it comes out of a worker
    assert (str(copy), copy.tokenizer) == (str(caught.value), caught.value.tokenizer)
