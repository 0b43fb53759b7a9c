"""The steps of NeMo-Aligner's packing script, plainly done again.

JSON lines; three encodings of each pair; lists of ids and labels; first-fit over
shuffled lengths; an object array in an ``.npy``. Two steps are kinder than there: sums
of packs are kept rather than added up anew, and a pack is found by its number rather
than by removing examples from lists.

The same work as packstore's but for: no EOS, as is the default there; labels by the
length of the prompt's ids, where that script stops unless these begin the whole;
nothing is refused or counted, and a pair that is longer than a pack gets one of its
own; no compression, no checksums.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from peers_etl.child import Task, Watch


def pack(task: Task, watch: Watch) -> None:
    """The whole job in one process, as there."""
    tokenizer = tokenizers.Tokenizer.from_file(
        str(Path(task.tokenizer, "tokenizer.json"))
    )
    watch.stage("load tokenizer")
    with open(task.source, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    watch.stage("read")
    examples = [_encode(tokenizer, record) for record in records]
    watch.stage("tokenize")
    lengths = [len(example["input_ids"]) for example in examples]
    packs = first_fit_shuffled(lengths, task.pack_size)
    watch.stage("pack")
    rows = np.array(
        [_joined([examples[i] for i in members]) for members in packs], dtype=object
    )
    watch.stage("fill")
    np.save(Path(task.out, "packed.npy"), rows, allow_pickle=True)
    watch.stage("write")
    watch.counts.update(tokens=sum(lengths), packs=len(packs))


def _encode(tokenizer: tokenizers.Tokenizer, record: dict[str, str]) -> dict[str, Any]:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    prompt = encode(record["prompt"])
    sides = [encode(record["prompt"] + record[side]) for side in ("chosen", "rejected")]
    labels = [[-100] * len(prompt) + ids[len(prompt) :] for ids in sides]
    return {
        "input_ids": sides[0] + sides[1],
        "labels": labels[0] + labels[1],
        "reward": [1.0, 0.0],
        "lengths": [len(ids) for ids in sides],
    }


def first_fit_shuffled(lengths: list[int], pack_size: int) -> list[list[int]]:
    """Each example, in random order, into the first pack that has room: quadratic."""
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    packs: list[list[int]] = []
    room: list[int] = []
    for i in order:
        length = lengths[i]
        for pack, left in enumerate(room):
            if left >= length:
                packs[pack].append(i)
                room[pack] -= length
                break
        else:
            packs.append([i])
            room.append(pack_size - length)
    return packs


def _joined(examples: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: [] for name in ("input_ids", "labels", "reward", "lengths")
    }
    for example in examples:
        for name, values in row.items():
            values += example[name]
    row["seq_boundaries"] = [0, *np.cumsum(row["lengths"]).tolist()]
    return row
