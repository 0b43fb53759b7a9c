"""Random datasets of every kind and layout on the disk, for readers and queries."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import packstore

KINDS = ("preference", "sft", "scored")

LAYOUTS: dict[str, dict[str, Any]] = {
    "concat": {"layout": "concat"},
    "shared_prefix": {"layout": "shared_prefix"},
    "trees": {"layout": "shared_prefix", "share_prefixes": "pack"},
}
"""Name -> settings of `pack`; in trees, examples share the beginnings of others."""

VOCABULARY = 40
"""Token ids of random datasets are below it."""

SOURCES = ("web", "books", "ü")


def random_records(kind: str, n: int, seed: int) -> list[dict[str, Any]]:
    """Return records of token ids, with a column `source`.

    Prompts are turns of a few dialogues, so that many records begin alike. Responses
    have tokens that are not supervised.
    """
    rng = random.Random(seed)
    dialogues = [_random_ids(rng, 24) for _ in range(5)]
    records = []
    for _ in range(n):
        prompt = rng.choice(dialogues)[: rng.randint(1, 24)] + _random_ids(rng, 3)
        record: dict[str, Any] = {"source": rng.choice(SOURCES)}
        if kind == "sft":
            response = _random_ids(rng, 9)
            record["input_ids"] = prompt + response
            record["labels"] = [-100] * len(prompt) + _with_gaps(rng, response)
        elif kind == "preference":
            record["prompt"] = prompt
            for side in ("chosen", "rejected"):
                record[side] = _random_ids(rng, 9)
                record[f"{side}_labels"] = _with_gaps(rng, record[side])
                record[f"{side}_reward"] = rng.randint(-8, 8) / 4
        else:
            responses = [_random_ids(rng, 9) for _ in range(rng.randint(1, 4))]
            record["prompt"] = prompt
            record["responses"] = responses
            record["response_labels"] = [_with_gaps(rng, ids) for ids in responses]
            record["scores"] = [rng.randint(-8, 8) / 4 for _ in responses]
        records.append(record)
    return records


def random_dataset(
    folder: Path, kind: str, layout: str, *, n: int = 60, seed: int = 0
) -> packstore.Dataset:
    """Pack random records into several packs, row groups and shards.

    Args:
        folder: the new dataset.
        kind: in `KINDS`.
        layout: in `LAYOUTS`.
        n: number of records.
        seed: random seed.
    """
    return packstore.pack(
        random_records(kind, n, seed),
        folder,
        kind=kind,
        carry=["source"],
        pack_size=160,
        row_group_tokens=480,
        shard_tokens=960,
        max_drop_rate=1,
        num_workers=0,
        **LAYOUTS[layout],
    )


def _random_ids(rng: random.Random, longest: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=rng.randint(1, longest))


def _with_gaps(rng: random.Random, ids: list[int]) -> list[int]:
    """Return labels that leave out some ids, but not the last."""
    labels = [token if rng.random() < 0.8 else -100 for token in ids]
    labels[-1] = ids[-1]
    return labels
