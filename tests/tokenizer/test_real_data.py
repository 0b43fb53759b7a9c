"""Real records against plain references: other libraries called directly, one text at a
time.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece

TEXT_FILES = [
    "nemo/dummy-dpo.jsonl",
    "pairs/hh_harmless.jsonl.gz",
    "pairs/pandalm_scored.jsonl",
    "ranked/qa_k4.jsonl",
]
CHAT_FILES = [
    "pairs/toolcall_zh.jsonl",
    "pairs/chat_zh.jsonl",
    "pairs/hh_harmless_messages.jsonl.gz",
    "pairs/chat_en.jsonl",
    "ranked/oasst_k2_6.jsonl",
]
SFT_FILES = ["sft/reason_tool.jsonl", "sft/nemo_dummy.jsonl", "sft/toolcall_en.jsonl"]
ENDS = {
    "qwen3": ([], [151645]),
    "mistral": ([1], [2]),
    "mistral_model": ([1], [2]),
    "t5": ([], [1]),
    "small": ([], []),
}
"""BOS and EOS of each tokenizer."""


def crossed(rows, columns):
    """All pairs; slow are those beyond the diagonals, which meet every row and every
    column.
    """
    quick = [
        (rows[i % len(rows)], columns[i % len(columns)])
        for i in range(max(len(rows), len(columns)))
    ]
    return [
        pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow)
        for pair in itertools.product(rows, columns)
    ]


def plain_encoder(library):
    """Text -> ids, by the library itself, without special tokens."""
    if isinstance(library, sentencepiece.SentencePieceProcessor):
        return library.encode
    return lambda text: library.encode(text, add_special_tokens=False).ids


def agreeing(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a)
    )


def responses_of(record):
    if "responses" in record:
        return record["responses"]
    return [
        record.get(f"{side}_response", record.get(side))
        for side in ("chosen", "rejected")
    ]


def as_templates_take(record, field):
    """Messages and tools, with thoughts and calls that are turns of their own put into
    answers.
    """
    messages, thought = [], {}
    for raw in record[field]:
        role, content, calls = raw["role"], raw["content"], {}
        if role == "assistant_reasoning":
            thought = {"reasoning_content": content, "thinking": content}
            continue
        if role == "assistant_tool_call":
            call = {"type": "function", "function": json.loads(content)}
            if not thought and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"].append(call)
                continue
            role, content, calls = "assistant", "", {"tool_calls": [call]}
        role = "tool" if role == "observation" else role
        messages.append({"role": role, "content": content, **calls, **thought})
        thought = {}
    return messages, json.loads(record.get("tools") or "null")


@pytest.mark.parametrize(("file", "name"), crossed(TEXT_FILES, [*ENDS]))
def test_plain_text(tokenizer, records, pack, file, name):
    some = records(file)[: 40 if "scored" in file else 150]
    packed = pack(tokenizer(name), *some)
    kept = [r for r in some if all(text.strip() for text in responses_of(r))]
    assert (
        packed.dropped["empty_side"] == packed.dropped.total() == len(some) - len(kept)
    )
    encode, (bos, eos) = plain_encoder(tokenizer(name).library), ENDS[name]
    expected = []
    for record in kept:
        before = encode(record["prompt"])
        for response in responses_of(record):
            ids = encode(record["prompt"] + response)
            start = len(bos) + agreeing(before, ids)
            ids = [*bos, *ids, *eos]
            expected.append((ids, [i >= start for i in range(len(ids))]))
    assert packed.sequences == expected
    assert [*packed.examples] == [i for i, r in enumerate(some) if r in kept]


@pytest.mark.parametrize(
    ("file", "named"),
    crossed(
        CHAT_FILES,
        [("qwen3", None), ("mistral", "plain"), ("t5", "plain"), ("small", None)],
    ),
)
def test_chat(tokenizer, records, pack, rendered, file, named):
    name, template = named
    some = records(file)[:60]
    packed = pack(tokenizer(name, template), *some)
    kept = [r for r in some if all(text.strip() for text in responses_of(r))]
    assert len(packed.examples) == len(kept)
    assert set(packed.dropped) <= {"empty_side"}
    library, (_, ends) = plain_encoder(tokenizer(name).library), ENDS[name]
    source = packed.dataset.manifest.provenance["tokenizer"]["chat_template"]

    def encode(text):
        """The text as the template wrote it, its "</s>" by hand where the file declares
        none.
        """
        cut = text.split("</s>") if name == "t5" else [text]
        ids = [library(part) if part else [] for part in cut]
        return [
            t for i, part in enumerate(ids) for t in ([*ends, *part] if i else part)
        ]

    expected = []
    for record in kept:
        prompt, tools = as_templates_take(record, "prompt")
        opened = rendered(source, prompt, tools, prompt=True)
        # Qwen3's template writes an empty thinking block before answers; nobody learns
        # it.
        before = encode(opened + "<think>\n\n</think>\n\n" * (name == "qwen3"))
        for response in responses_of(record):
            whole = [*prompt, {"role": "assistant", "content": response}]
            ids = encode(rendered(source, whole, tools))
            start = agreeing(before, ids)
            assert start > 0
            expected.append((ids, [i >= start for i in range(len(ids))]))
    assert packed.sequences == expected


TURNS = {
    # what a turn of the assistant is, read off the finished text
    "qwen3": r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>\n)",
    "small": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)",
    "mistral": r"\n\nAssistant:(.*?</s>)",
}


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize(("file", "name"), crossed(SFT_FILES, list(TURNS)))
def test_turns_of_a_dialogue(tokenizer, records, pack, rendered, file, name, turns):
    some = records(file)[:40]
    packed = pack(tokenizer(name), *some, supervised_turns=turns)
    source = packed.dataset.manifest.provenance["tokenizer"]["chat_template"]
    for record, (ids, on) in zip(some, packed.sequences, strict=True):
        messages, tools = as_templates_take(record, "messages")
        text = rendered(source, messages, tools)
        encoding = tokenizer(name).library.encode(text, add_special_tokens=False)
        assert encoding.ids == ids
        spans = [m.span(1) for m in re.finditer(TURNS[name], text, re.DOTALL)]
        assert len(spans) == sum(m["role"] == "assistant" for m in messages)
        spans = spans[-1:] if turns == "last" else spans
        places = np.array(encoding.offsets)
        expected = np.zeros(len(ids), bool)
        for start, end in spans:
            expected |= (places[:, 1] > start) & (places[:, 0] < end)
        assert on == expected.tolist()
        said = packed.decode([t for t, s in zip(ids, on, strict=True) if s])
        wanted = "".join(text[start:end] for start, end in spans)
        if (
            name == "mistral"
        ):  # the decoder takes the space at the beginning for its own
            said, wanted = said.replace(" ", ""), wanted.replace(" ", "")
        assert said == unicodedata.normalize("NFC", wanted)
