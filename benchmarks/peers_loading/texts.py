"""Preference examples out of real texts: prompts and answers of different records,
recombined.

Every pass over the texts takes each prompt and each answer once, in a new combination.
So a text comes again only after a million of tokens, far outside the window of any
compressor, and the sizes of compressed files are those of real data. Long prompts stand
as answers, so that most tokens are supervised, as in the published sets: labels that
are mostly -100 would compress to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from common import records
from tokenizers import Tokenizer

from peers_loading.base import PACK_SIZE, SEED

EXAMPLES = "examples.arrow"
PROMPT_TOKENS = 128
"""Prompts longer than this stand as answers."""

TOKENIZER = "tokenizers/qwen3/tokenizer.json"
FILES = (
    "pairs/hh_harmless.jsonl.gz",
    "pairs/chat_en.jsonl",
    "pairs/chat_zh.jsonl",
    "pairs/pandalm_scored.jsonl",
    "ranked/qa_k4.jsonl",
    "ranked/oasst_k2_6.jsonl",
    "sft/toolcall_en.jsonl",
    "sft/reason_tool.jsonl",
    "sft/nemo_dummy.jsonl",
)
Ids = list[np.ndarray]


def write_examples(data: Path, folder: Path, packs: int) -> dict[str, Any]:
    """Writes ``examples.arrow`` with token ids for about `packs` packs; returns its
    figures.

    Args:
        data: the folder of real data.
        folder: where the file goes.
        packs: packs of 4096 tokens that the examples fill.
    """
    found, answers = (_tokenized(data, texts) for texts in _texts(data))
    prompts = [ids for ids in found if len(ids) <= PROMPT_TOKENS]
    answers += [ids for ids in found if len(ids) > PROMPT_TOKENS]
    columns: dict[str, Ids] = {"prompt": [], "chosen": [], "rejected": []}
    left = packs * PACK_SIZE
    drawn_prompts, drawn_answers = _endless(prompts, SEED), _endless(answers, SEED + 1)
    while left > 0:
        example = (next(drawn_prompts), next(drawn_answers), next(drawn_answers))
        size = 2 * len(example[0]) + len(example[1]) + len(example[2])
        if size <= PACK_SIZE:
            left -= size
            for column, ids in zip(columns.values(), example, strict=True):
                column.append(ids)
    table = pa.table({name: _list_array(ids) for name, ids in columns.items()})
    with (
        pa.OSFile(str(folder / EXAMPLES), "wb") as file,
        pa.ipc.new_file(file, table.schema) as to,
    ):
        to.write_table(table, max_chunksize=1000)
    return {
        "prompts": len(prompts),
        "answers": len(answers),
        "tokens_of_text": sum(map(len, prompts)) + sum(map(len, answers)),
        "examples": table.num_rows,
        "tokenizer": TOKENIZER,
    }


def _texts(data: Path) -> tuple[list[str], list[str]]:
    """All prompts and all answers, each text once."""
    prompts: dict[str, None] = {}
    answers: dict[str, None] = {}
    for name in FILES:
        for record in records(data / name):
            prompt, given = _split(record)
            prompts[prompt] = None
            answers.update(dict.fromkeys(given))
    return list(filter(None, prompts)), list(filter(None, answers))


def _split(record: dict[str, Any]) -> tuple[str, list[str]]:
    """The prompt and the answers of a record of any of the files."""
    if messages := record.get("messages"):
        return _dialogue(messages[:-1]), [_dialogue(messages[-1:])]
    given = record.get("responses") or [record.get("chosen"), record.get("rejected")]
    return _dialogue(record["prompt"]), [_dialogue(answer) for answer in given]


def _dialogue(value: Any) -> str:
    if isinstance(value, list):
        return "\n\n".join(str(message.get("content") or "") for message in value)
    return value if isinstance(value, str) else ""


def _tokenized(data: Path, texts: list[str]) -> Ids:
    tokenizer = Tokenizer.from_file(str(data / TOKENIZER))
    found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [np.array(encoding.ids, np.int32) for encoding in found]
    return [x for x in ids if len(x)]


def _endless(items: Ids, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    while True:
        for i in rng.permutation(len(items)).tolist():
            yield items[i]


def _list_array(ids: Ids) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(ids))
