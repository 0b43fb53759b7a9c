"""Real records against plain references: other libraries called directly, one text at a time."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tokenizers

from packstore.config import TokenizeConfig
from packstore.tokenizer import RecordTokenizer, detect_kind
from packstore.tokenizer.chat.messages import normalize_messages, normalize_tools

CONFIG = TokenizeConfig(pack_size=65536)
TEXT_FILES = [
    "nemo/dummy-dpo.jsonl",
    "pairs/hh_harmless.jsonl.gz",
    "pairs/pandalm_scored.jsonl",
    "ranked/qa_k4.jsonl",
]
CHAT_FILES = [
    "pairs/chat_en.jsonl",
    "pairs/chat_zh.jsonl",
    "pairs/hh_harmless_messages.jsonl.gz",
    "pairs/toolcall_zh.jsonl",
    "ranked/oasst_k2_6.jsonl",
]
SFT_FILES = ["sft/nemo_dummy.jsonl", "sft/reason_tool.jsonl", "sft/toolcall_en.jsonl"]
TOKENIZERS = ["qwen3", "mistral", "mistral_model", "t5", "small"]


def crossed(rows, columns):
    """All pairs; those with neither the first row nor the first column are slow."""
    return [
        pytest.param(a, b, marks=() if a == rows[0] or b == columns[0] else pytest.mark.slow)
        for a, b in itertools.product(rows, columns)
    ]


@functools.cache
def plain_encoder(shared_data, name):
    """Text -> ids, by the library itself, without special tokens; and (BOS, EOS)."""
    folder = shared_data / "tokenizers"
    if name == "mistral_model":
        file = str(folder / "mistral_v1/tokenizer.model")
        return sentencepiece.SentencePieceProcessor(model_file=file).encode, ([1], [2])
    paths = {"qwen3": "qwen3", "mistral": "mistral_v1", "t5": "t5_unigram", "small": "small_bpe"}
    ends = {"qwen3": ([], [151645]), "mistral": ([1], [2]), "t5": ([], [1]), "small": ([], [])}
    library = tokenizers.Tokenizer.from_file(str(folder / paths[name] / "tokenizer.json"))
    return lambda text: library.encode(text, add_special_tokens=False).ids, ends[name]


@functools.cache
def library_of(payload):
    return tokenizers.Tokenizer.from_str(payload.decode())


def agreeing(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def responses_of(record):
    if "responses" in record:
        return record["responses"]
    return [record.get(f"{side}_response", record.get(side)) for side in ("chosen", "rejected")]


@pytest.mark.parametrize(("file", "name"), crossed(TEXT_FILES, TOKENIZERS))
def test_plain_text(shared_data, tokenizer, records, rows, sequences, file, name):
    some = records(file)[: 40 if "ranked" in file else 150]
    kind = detect_kind(some[0], CONFIG)
    examples, tally = RecordTokenizer(tokenizer(name), CONFIG, kind)(rows(some))
    kept = [r for r in some if all(text.strip() for text in responses_of(r))]
    assert tally.read == len(some)
    assert dict(tally.dropped) == (
        {"empty_side": len(some) - len(kept)} if len(kept) < len(some) else {}
    )
    encode, (bos, eos) = plain_encoder(shared_data, name)
    expected = []
    for record in kept:
        before = encode(record["prompt"])
        for response in responses_of(record):
            ids = encode(record["prompt"] + response)
            start = len(bos) + agreeing(before, ids)
            ids = [*bos, *ids, *eos]
            expected.append((ids, [i >= start for i in range(len(ids))]))
    assert sequences(examples) == expected
    assert examples.example_ids.tolist() == [i for i, r in enumerate(some) if r in kept]


@pytest.mark.parametrize(
    ("file", "named"),
    crossed(CHAT_FILES, [("qwen3", None), ("mistral", "plain"), ("t5", "plain"), ("small", None)]),
)
def test_chat(shared_data, tokenizer, records, rows, sequences, rendered, file, named):
    name, template = named
    some = records(file)[:60]
    ours = tokenizer(name, template)
    kind = detect_kind(some[0], CONFIG)
    examples, tally = RecordTokenizer(ours, CONFIG, kind)(rows(some))
    kept = [r for r in some if all(text.strip() for text in responses_of(r))]
    assert tally.kept == len(kept)
    assert set(tally.dropped) <= {"empty_side"}
    library, _ = plain_encoder(shared_data, name)
    eos = ours.eos_id if template else None

    def encode(text):
        """The text as the template wrote it, its "</s>" by hand where the file declares none."""
        cut = text.split("</s>") if name == "t5" else [text]
        ids = [library(part) if part else [] for part in cut]
        return [t for i, part in enumerate(ids) for t in ([eos, *part] if i else part)]

    expected = []
    for record in kept:
        prompt, tools = normalize_messages(record["prompt"]), normalize_tools(record.get("tools"))
        opened = rendered(ours.chat_template, prompt, tools, prompt=True)
        # Qwen3's template writes an empty thinking block before answers; nobody learns it.
        before = encode(opened + "<think>\n\n</think>\n\n" * (name == "qwen3"))
        for response in responses_of(record):
            whole = [*prompt, {"role": "assistant", "content": response}]
            ids = encode(rendered(ours.chat_template, whole, tools))
            start = agreeing(before, ids)
            assert start > 0
            expected.append((ids, [i >= start for i in range(len(ids))]))
    assert sequences(examples) == expected


TURNS = {
    # what a turn of the assistant is, read off the finished text
    "qwen3": r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>\n)",
    "small": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)",
    "mistral": r"\n\nAssistant:(.*?</s>)",
}


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize(("file", "name"), crossed(SFT_FILES, list(TURNS)))
def test_turns_of_a_dialogue(
    shared_data, tokenizer, records, rows, sequences, rendered, file, name, turns
):
    some = records(file)[:40]
    ours = tokenizer(name)
    config = TokenizeConfig(pack_size=65536, supervised_turns=turns)
    examples, tally = RecordTokenizer(ours, config, "sft")(rows(some))
    assert (tally.kept, dict(tally.dropped)) == (len(some), {})
    library = library_of(ours.payload)
    for record, (ids, on) in zip(some, sequences(examples), strict=True):
        messages = normalize_messages(record["messages"])
        text = rendered(ours.chat_template, messages, normalize_tools(record.get("tools")))
        encoding = library.encode(text, add_special_tokens=False)
        assert encoding.ids == ids
        spans = [m.span(1) for m in re.finditer(TURNS[name], text, re.DOTALL)]
        assert len(spans) == sum(m["role"] == "assistant" for m in messages)
        spans = spans[-1:] if turns == "last" else spans
        places = np.array(encoding.offsets)
        expected = np.zeros(len(ids), bool)
        for start, end in spans:
            expected |= (places[:, 1] > start) & (places[:, 0] < end)
        assert on == expected.tolist()
        said = ours.decode([t for t, s in zip(ids, on, strict=True) if s])
        wanted = "".join(text[start:end] for start, end in spans)
        if name == "mistral":  # the decoder takes the space at the beginning for its own
            said, wanted = said.replace(" ", ""), wanted.replace(" ", "")
        assert said == unicodedata.normalize("NFC", wanted)
