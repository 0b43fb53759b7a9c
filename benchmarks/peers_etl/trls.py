"""Hugging Face: ``datasets.map`` with a fast tokenizer, TRL's ``pack_dataset``, ``to_parquet``.

An example is the chosen and the rejected sequence of a pair behind each other, with labels, so that
a packer for single sequences packs pairs.
"""

from __future__ import annotations

from pathlib import Path

import datasets
import transformers
from trl import pack_dataset

from peers_etl.child import Task, Watch


def pack(task: Task, watch: Watch) -> None:
    """In one process; the tokenizer uses all cores."""
    _pack(task, watch, None)


def pack_in_two(task: Task, watch: Watch) -> None:
    """With two processes, each of which tokenizes on one core."""
    _pack(task, watch, 2)


def _pack(task: Task, watch: Watch, processes: int | None) -> None:
    datasets.disable_progress_bars()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(task.tokenizer, "tokenizer.json")), eos_token="<|im_end|>"
    )
    end = tokenizer.eos_token_id
    watch.stage("load tokenizer")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        prompts = tokenizer(batch["prompt"], add_special_tokens=False)["input_ids"]
        ids: list[list[int]] = [[] for _ in prompts]
        labels: list[list[int]] = [[] for _ in prompts]
        for side in ("chosen", "rejected"):
            texts = [p + r for p, r in zip(batch["prompt"], batch[side], strict=True)]
            whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
            for i, (prompt, row) in enumerate(zip(prompts, whole, strict=True)):
                ids[i] += [*row, end]
                labels[i] += [*[-100] * len(prompt), *row[len(prompt) :], end]
        return {"input_ids": ids, "labels": labels}

    cache = str(Path(task.out, "cache"))
    records = datasets.load_dataset("json", data_files=task.source, split="train", cache_dir=cache)
    watch.stage("read")
    ids = records.map(encode, batched=True, remove_columns=records.column_names, num_proc=processes)
    watch.stage("tokenize")
    packed = pack_dataset(ids, seq_length=task.pack_size, strategy="bfd")
    watch.stage("pack")
    packed.to_parquet(str(Path(task.out, "packed.parquet")))
    watch.stage("write")
