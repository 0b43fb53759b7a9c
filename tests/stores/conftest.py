"""What the tests on real stores have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

QUICK = {"retry_attempts": 3, "retry_backoff": 0.01}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level, with a handful of merges."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    t.train_from_iterator(["what comes after this question?"], trainer)
    return t


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 60 pairs."""
    records: list[dict[str, Any]] = [
        {
            "prompt": f"question {i}: what comes after {i}? " + "please " * (i % 7),
            "chosen": f"After {i} comes {i + 1}." + " Yes." * (i % 5),
            "rejected": f"I do not know what comes after {i}.",
        }
        for i in range(60)
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path
