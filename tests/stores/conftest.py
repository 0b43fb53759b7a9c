"""Fixtures of the tests on real stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_jobs import trained_tokenizer, write_jsonl
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return trained_tokenizer(["what comes after this question?"])


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
    write_jsonl(path, records)
    return path
