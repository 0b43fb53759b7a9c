"""Datasets of random examples, and the rows of packs as plain lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packstore.config import PackConfig
from packstore.format.arrays import Examples, Packs, Tally
from packstore.io.dataset.dataset import Dataset, open
from packstore.io.dataset.pack_index import put_index
from packstore.io.manifest.manifest import build_manifest, commit_manifest
from packstore.io.shards.shard import PackShape
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
from packstore.pack.fill import fill, unpack
from packstore.testing import random_examples

PACK_SIZE = 300
VOCAB = 50


def write_dataset(
    url: str,
    examples: Examples,
    *,
    kind: str = "preference",
    layout: str = "concat",
    per_pack: int = 3,
    carry: dict[str, str] | None = None,
    tokenizer: dict[str, Any] | None = None,
    row_group_tokens: int = 300,
) -> Dataset:
    """The examples in order, `per_pack` of them to each pack."""
    n = examples.num_examples
    packs = fill(examples, np.append(np.arange(0, n, per_pack), n).astype(np.int64), layout)
    config = PackConfig(row_group_tokens=row_group_tokens, layout=layout)  # type: ignore[arg-type]
    shape = PackShape(kind=kind, layout=layout, pack_size=PACK_SIZE, carry=carry or {})
    location = Location(url)
    provenance = {
        "sources": [{"path": "x", "bytes": 3, "sha256": "0" * 64, "records": n}],
        "tokenizer": tokenizer,
        "settings": {},
        "package_version": "0",
    }
    with ShardWriter(location, shape, config, "run") as writer:
        writer.write(packs)
        finished = writer.finish()
        shards = [part.shard for part in finished]
        manifest = build_manifest(
            shape, config, shards, writer.counter, Tally(read=n), {}, provenance
        )
        index = put_index(location, (part.sizes for part in finished), 1)
        commit_manifest(location, replace(manifest, pack_index=index))
    return open(url)


def rows(dataset: Dataset) -> list[dict[str, list[Any]]]:
    """The five columns of every pack."""
    return [row_of(packs.row(i)) for packs in dataset.iter_packs() for i in range(len(packs))]


def row_of(pack: Packs) -> dict[str, list[Any]]:
    names = ("input_ids", "labels", "reward", "lengths", "seq_boundaries")
    return {name: getattr(pack, name).tolist() for name in names}


def all_examples(dataset: Dataset) -> Examples:
    return Examples.concat([unpack(packs) for packs in dataset.iter_packs()])


@pytest.fixture
def kit(tmp_path: Path) -> SimpleNamespace:
    """Helpers of the tests of this folder."""
    made = iter(range(1000))

    def dataset(n: int = 20, seed: int = 0, kind: str = "preference", **how: Any) -> Dataset:
        examples = random_examples(n, seed=seed, kind=kind, vocab_size=VOCAB)
        return write_dataset(str(tmp_path / f"dataset{next(made)}"), examples, kind=kind, **how)

    def left(folder: Path) -> list[str]:
        return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))

    given: dict[str, Callable[..., Any]] = {
        "dataset": dataset,
        "rows": rows,
        "row_of": row_of,
        "examples": all_examples,
        "write": write_dataset,
        "left": left,
    }
    return SimpleNamespace(**given)
