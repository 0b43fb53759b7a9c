"""Small datasets, packed from token ids: each example is a pack."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import packstore
from packstore import Dataset

PACK_SIZE = 64
Record = dict[str, Any]


def records(n: int, kind: str = "preference", seed: int = 0) -> list[Record]:
    """`n` random records of token ids below 50, of up to 42 tokens (kind
    preference).
    """
    rng = np.random.default_rng(seed)

    def tokens(most: int, *end: int) -> list[int]:
        return [*rng.integers(0, 40, rng.integers(1, most + 1)).tolist(), *end]

    def record() -> Record:
        prompt = tokens(6)
        if kind == "preference":  # the ends differ, as sides must
            return {
                "prompt": prompt,
                "chosen": tokens(14, 48),
                "rejected": tokens(14, 49),
            }
        if kind == "sft":
            answer = tokens(9)
            labels = [-100] * len(prompt) + answer
            return {"input_ids": prompt + answer, "labels": labels}
        k = int(rng.integers(2, 6))
        scores = rng.integers(0, 3, k).astype(float)
        scores[0] = 3.0  # so that not all are equal
        answers = [tokens(4, 40 + i) for i in range(k)]
        return {"prompt": prompt, "responses": answers, "scores": scores.tolist()}

    return [record() for _ in range(n)]


def stored_row(record: Record, number: int) -> Record:
    """The pack of one record in layout concat, with plain labels, by the words of the
    format.
    """
    if "input_ids" in record:
        sides, rewards = [(record["input_ids"], record["labels"])], [1.0]
    else:
        prompt = record["prompt"]
        answers = record.get("responses") or [record["chosen"], record["rejected"]]
        sides = [(prompt + a, [-100] * len(prompt) + a) for a in answers]
        rewards = record.get("scores") or [1.0, 0.0]
    lengths = [len(ids) for ids, _ in sides]
    return {
        "input_ids": [token for ids, _ in sides for token in ids],
        "labels": [label for _, labels in sides for label in labels],
        "reward": rewards,
        "lengths": lengths,
        "seq_boundaries": list(accumulate(lengths, initial=0)),
        "example_ids": [number],
        **({"num_responses": [len(sides)]} if "responses" in record else {}),
    }


def rows(data: Dataset) -> list[Record]:
    """The packs of a dataset, in file order, as plain values."""
    return [row for batch in data.iter_batches() for row in batch.to_pylist()]


def made(
    url: str | Path, source: int | list[Any] = 60, kind: str = "", **settings: Any
) -> Dataset:
    """A dataset of these records, or so many random ones, in small row groups and
    shards.
    """
    kind = kind or "preference"
    how = {"strategy": "none", "shuffle": False, "pack_size": PACK_SIZE, "kind": kind}
    how |= {"row_group_tokens": 200, "shard_tokens": 250}
    what = records(source, kind) if isinstance(source, int) else source
    return packstore.pack(what, str(url), **{**how, **settings})


@pytest.fixture
def ds(tmp_path: Path) -> Dataset:
    """60 preference pairs in several row groups and shards of a local folder."""
    return made(tmp_path / "ds")


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file (test modules cannot import it)."""
    helpers: tuple[Callable[..., Any], ...] = (records, stored_row, rows, made)
    return SimpleNamespace(PACK_SIZE=PACK_SIZE, **{h.__name__: h for h in helpers})
