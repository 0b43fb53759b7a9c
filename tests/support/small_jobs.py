"""Ingredients of small jobs: records, a file of them, settings, a tokenizer, a later
time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import packstore

SETTINGS: dict[str, Any] = {"pack_size": 64, "row_group_tokens": 128, "shard_tokens": 1}
"""Every row group is a shard."""

DAY = 86_400.0
CLOCK = time.time


def pairs(n: int, first: int = 0) -> list[dict[str, list[int]]]:
    """Records of token ids, which need no tokenizer."""
    return [
        {
            "prompt": [5, 6, 7],
            "chosen": [8, 10 + i, 11 + i],
            "rejected": [9] * (1 + i % 7),
        }
        for i in range(first, first + n)
    ]


def pack(out: str | Path, records: Any = None, **settings: Any) -> packstore.Dataset:
    """Packs records, or the path of some, into a new place; `settings` win over
    SETTINGS.
    """
    return packstore.pack(records or pairs(60), str(out), **{**SETTINGS, **settings})


def write_jsonl(path: Path, records: Iterable[object]) -> str:
    """Writes one record to a line; returns the path."""
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


def trained_tokenizer(texts: Iterable[str], vocab_size: int = 300) -> Tokenizer:
    """A byte-level tokenizer that reads any text, with a handful of merges from
    `texts`.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def stopping(stage: str, most: float) -> Callable[..., None]:
    """Progress that interrupts a job once more than so much of a stage is done."""

    def progress(now: str, done: int, total: int | None, unit: str) -> None:
        if now == stage and done > most:
            raise KeyboardInterrupt

    return progress


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Makes everything that is there now so much older."""
    monkeypatch.setattr(time, "time", lambda: CLOCK() + seconds)


def write_tokenizer(path: Path) -> Path:
    """Writes a ``tokenizer.json`` to which every word but ``?`` is the same token."""
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return path
