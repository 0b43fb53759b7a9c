"""Hugging Face: ``datasets.map`` with a fast tokenizer, TRL's ``pack_dataset``,
``to_parquet``.

Neither library packs pairs: TRL's ``DPOTrainer`` tokenizes record by record while it
starts, and pads; its ``pack_dataset`` packs single sequences, for SFT. This is the
script that a user could write with both, and it does less than packstore, in several
ways in its favour:

- it tokenizes in batches, three texts a pair as the trainer does, with labels by the
  length of the prompt's ids: no search for the place where prompt and whole part;
- an example is the chosen and the rejected sequence behind each other. Their border is
  not stored, nor are rewards and record numbers, so no trainer could split a pack into
  pairs again without more columns;
- nothing is refused or counted: empty answers stay, and what exceeds a pack is cut off;
- ``pack_dataset`` packs a thousand examples at a time, so its packs are less full;
- no checksums, and the file is Snappy Parquet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import transformers
from trl import pack_dataset

from peers_etl.child import Task, Watch


def pack_in_two(task: Task, watch: Watch) -> None:
    """With two processes, each of which tokenizes on one core."""
    pack(task, watch, 2)


def pack(task: Task, watch: Watch, processes: int | None = None) -> None:
    """In one process the tokenizer uses all cores."""
    datasets.disable_progress_bars()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(task.tokenizer)
    assert tokenizer.is_fast
    end = tokenizer.eos_token_id
    watch.stage("load tokenizer")

    def texts(batch: dict[str, Any], side: str) -> list[str]:
        if isinstance(batch["prompt"][0], str):
            return [p + r for p, r in zip(batch["prompt"], batch[side], strict=True)]
        turns = [p + r for p, r in zip(batch["prompt"], batch[side], strict=True)]
        return list(tokenizer.apply_chat_template(turns, tokenize=False))

    def encode(batch: dict[str, Any]) -> dict[str, list[list[int]]]:
        prompts, last = batch["prompt"], [end]
        if not isinstance(prompts[0], str):
            last = []  # the template ends the turn
            prompts = tokenizer.apply_chat_template(
                prompts, tokenize=False, add_generation_prompt=True
            )
        before = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        ids: list[list[int]] = [[] for _ in before]
        labels: list[list[int]] = [[] for _ in before]
        for side in ("chosen", "rejected"):
            whole = tokenizer(texts(batch, side), add_special_tokens=False)["input_ids"]
            for i, (prompt, row) in enumerate(zip(before, whole, strict=True)):
                ids[i] += [*row, *last]
                labels[i] += [*[-100] * len(prompt), *row[len(prompt) :], *last]
        return {"input_ids": ids, "labels": labels}

    cache = str(Path(task.out, "cache"))
    records = datasets.load_dataset(
        "json", data_files=task.source, split="train", cache_dir=cache
    )
    watch.stage("read")
    ids = records.map(
        encode, batched=True, remove_columns=records.column_names, num_proc=processes
    )
    watch.stage("tokenize")
    packed = pack_dataset(ids, seq_length=task.pack_size, strategy="bfd")
    watch.stage("pack")
    packed.to_parquet(str(Path(task.out, "packed.parquet")))
    watch.stage("write")
    tokens = sum(map(sum, packed.with_format("arrow")["seq_lengths"].to_pylist()))
    watch.counts.update(tokens=tokens, packs=len(packed))
