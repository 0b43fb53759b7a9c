"""The faster engine: the same ids as the reference, or not used at all."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from packstore.config import PackConfig
from packstore.errors import TokenizerError
from packstore.tokenizer import RecordTokenizer, agreeing, fastest, load_tokenizer
from packstore.tokenizer.engines.fastokens import FastokensEngine
from packstore.tokenizer.engines.gigatoken import GigatokenEngine

KINDS = {
    "nemo/dummy-dpo.jsonl": "preference",
    "pairs/chat_en.jsonl": "preference",
    "pairs/chat_zh.jsonl": "preference",
    "pairs/hh_harmless.jsonl.gz": "preference",
    "pairs/hh_harmless_messages.jsonl.gz": "preference",
    "pairs/hh_harmless_raw.jsonl.gz": "preference",
    "pairs/pandalm_scored.jsonl": "preference",
    "pairs/toolcall_zh.jsonl": "preference",
    "ranked/oasst_k2_6.jsonl": "ranked",
    "ranked/qa_k4.jsonl": "ranked",
    "sft/nemo_dummy.jsonl": "sft",
    "sft/reason_tool.jsonl": "sft",
    "sft/toolcall_en.jsonl": "sft",
}


def test_every_file_is_among_them(shared_data):
    found = {str(p.relative_to(shared_data)) for p in shared_data.glob("*/*.jsonl*")}
    assert found == set(KINDS)


@pytest.mark.parametrize("file", KINDS)
@pytest.mark.parametrize("name", ["qwen3", "mistral", "small"])
@pytest.mark.parametrize("engine", fastest.FASTER)
def test_the_same_examples_from_real_records(tokenizer, records, rows, engine, name, file):
    fast, reference = tokenizer(name, engine=engine), tokenizer(name, engine="tokenizers")
    assert tokenizer(name).engine_name == "fastokens"
    assert (fast.engine_name, reference.engine_name) == (engine, "tokenizers")
    every = records(file)
    some = rows(every[:: max(1, len(every) // 75)])
    config = PackConfig(pack_size=8192)
    found, expected = (RecordTokenizer(t, config, KINDS[file])(some) for t in (fast, reference))
    assert found[1] == expected[1]
    for array in ("input_ids", "supervised", "sequence_offsets", "example_offsets"):
        np.testing.assert_array_equal(getattr(found[0], array), getattr(expected[0], array))


def test_what_it_cannot_read_is_left_to_the_reference(tokenizer):
    assert tokenizer("t5").engine_name == "tokenizers"
    for engine in fastest.FASTER:
        with pytest.raises(TokenizerError, match="Set tokenizer_engine to tokenizers"):
            tokenizer("t5", engine=engine)


@pytest.fixture
def reference():
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["a text or two"], trainer)
    return load_tokenizer(model, engine="tokenizers")


CLASSES = {"fastokens": FastokensEngine, "gigatoken": GigatokenEngine}


def spoil(monkeypatch, name):
    """Makes an engine give one other id."""
    encode = CLASSES[name].encode_batch

    def wrong(self, texts, *, control):
        ids, offsets = encode(self, texts, control=control)
        ids = ids.copy()
        ids[-1] += 1
        return ids, offsets

    monkeypatch.setattr(CLASSES[name], "encode_batch", wrong)


def test_one_other_id_and_it_is_not_used(reference, rows, monkeypatch, caplog):
    some = rows([{"prompt": "p", "chosen": "c", "rejected": "r"}])
    used = ["fastokens", "gigatoken", "tokenizers"]
    for name, following in itertools.pairwise(used):
        fast = fastest.fastest(reference)
        assert fast.engine_name == name
        assert agreeing(fast, some, PackConfig(), "preference") is fast
        spoil(monkeypatch, name)
        assert fastest.fastest(reference).engine_name == following
        assert f"{name} is not used: its ids differ on probe texts" in caplog.text
        fast = replace(reference, engine_name=name)
        assert agreeing(fast, some, PackConfig(), "preference").engine_name == "tokenizers"
