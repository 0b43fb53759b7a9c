"""Packs built by hand, and datasets written from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packstore import Dataset, open
from packstore.config import PackConfig
from packstore.format import Examples, Packs, Tally, to_offsets
from packstore.io.dataset.pack_index import put_index
from packstore.io.manifest.commit import commit, refuse_existing
from packstore.io.manifest.manifest import Manifest, PackShape, build_manifest
from packstore.io.store.location import Location
from packstore.io.write.shard_writer import ShardWriter
from packstore.testing import random_examples

PACK_SIZE = 64
PROVENANCE = {
    "sources": [{"path": "pairs.jsonl", "bytes": 3, "sha256": "0" * 64, "records": 1}],
    "tokenizer": {"vocab_size": 50},
    "settings": {},
    "package_version": "0",
}


def concat_packs(examples: Examples, per_pack: int) -> Packs:
    """`per_pack` examples a pack, in order, in layout concat."""
    firsts = np.arange(0, examples.num_examples, per_pack)
    example_offsets = np.append(firsts, examples.num_examples)
    sequence_offsets = examples.example_offsets[example_offsets]
    token_offsets = examples.sequence_offsets[sequence_offsets]
    bounds = [
        examples.sequence_offsets[a : b + 1] - examples.sequence_offsets[a]
        for a, b in pairwise(sequence_offsets)
    ]
    return Packs(
        signed_ids=np.where(examples.supervised, examples.input_ids, ~examples.input_ids),
        reward=examples.reward,
        lengths=examples.lengths,
        seq_boundaries=np.concatenate([np.empty(0, np.int64), *bounds]).astype(np.int32),
        example_ids=examples.example_ids,
        num_responses=examples.num_responses,
        token_offsets=token_offsets,
        sequence_offsets=sequence_offsets,
        example_offsets=example_offsets,
        columns=examples.columns,
    )


def some_packs(n: int = 60, kind: str = "preference", seed: int = 0, first_id: int = 0) -> Packs:
    """`n` packs of one example of up to 42 tokens (kind preference)."""
    examples = random_examples(n, seed=seed, kind=kind, max_prompt=6, max_response=6)
    packs = concat_packs(examples, 1)
    packs.example_ids[:] += first_id
    return packs


def split(packs: Packs, cuts: Sequence[int]) -> list[Packs]:
    """The packs in portions that end at `cuts`."""
    edges = [0, *sorted(cuts), len(packs)]
    return [_rows(packs, a, b) for a, b in pairwise(edges)]


def _rows(packs: Packs, a: int, b: int) -> Packs:
    t, s, e = (
        o[a : b + 1] for o in (packs.token_offsets, packs.sequence_offsets, packs.example_offsets)
    )
    bounds = packs.boundary_offsets
    return Packs(
        signed_ids=packs.signed_ids[t[0] : t[-1]],
        reward=packs.reward[s[0] : s[-1]],
        lengths=packs.lengths[s[0] : s[-1]],
        seq_boundaries=packs.seq_boundaries[bounds[a] : bounds[b]],
        example_ids=packs.example_ids[e[0] : e[-1]],
        num_responses=packs.num_responses[e[0] : e[-1]],
        token_offsets=t - t[0],
        sequence_offsets=s - s[0],
        example_offsets=e - e[0],
        columns={name: column[e[0] : e[-1]] for name, column in packs.columns.items()},
    )


def assert_packs_equal(a: Packs, b: Packs) -> None:
    """Fails unless both are the same packs, bit for bit."""
    for name in Packs.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        if name == "columns":
            assert list(x) == list(y)
            for column in x:
                np.testing.assert_array_equal(x[column], y[column], column)
        elif name in ("ref_logps", "stand_in"):
            assert x == y
        else:
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, name)


def joined(parts: Sequence[Packs]) -> Packs:
    """The packs of `parts`, in order."""
    flat = ("signed_ids", "reward", "lengths", "seq_boundaries", "example_ids")
    arrays = {
        name: np.concatenate([getattr(p, name) for p in parts]) for name in (*flat, "num_responses")
    }
    offsets = {
        name: to_offsets(np.concatenate([np.diff(getattr(p, name)) for p in parts]))
        for name in ("token_offsets", "sequence_offsets", "example_offsets")
    }
    names = parts[0].columns
    columns = {name: np.concatenate([p.columns[name] for p in parts]) for name in names}
    return Packs(**arrays, **offsets, columns=columns)


class Written:
    """Writes datasets with small row groups and shards."""

    def __init__(
        self,
        url: str,
        kind: str = "preference",
        carry: dict[str, str] | None = None,
        layout: str = "concat",
    ) -> None:
        self.location = Location(url)
        self.shape = PackShape(
            kind=kind, layout=layout, pack_size=PACK_SIZE, carry=carry or {}, vocab_size=50
        )

    def writer(self, **settings: Any) -> ShardWriter:
        config = self.config(**settings)
        return ShardWriter(self.location, self.shape, config, "0123456789ab")

    def config(self, **settings: Any) -> PackConfig:
        return PackConfig.of(**{"row_group_tokens": 200, "shard_tokens": 250, **settings})

    def manifest(self, writer: ShardWriter, **settings: Any) -> Manifest:
        finished = writer.finish()
        tally = Tally(read=sum(part.shard.examples for part in finished) + 2)
        tally.dropped.update({"overlong": 2})
        config = self.config(**settings)
        manifest = build_manifest(self.shape, config, finished, tally, {"bound": 1}, PROVENANCE)
        index = put_index(self.location, (part.sizes for part in finished), 1)
        return replace(manifest, pack_index=index)

    def dataset(self, parts: Sequence[Packs], overwrite: bool = False, **settings: Any) -> Dataset:
        with self.writer(**settings) as writer:
            for packs in parts:
                writer.write(packs)
            version = refuse_existing(self.location, overwrite)
            commit(self.location, self.manifest(writer, **settings).to_json(), version)
        return open(self.location.url)


@pytest.fixture
def written(tmp_path: Any) -> Written:
    """Writes a dataset of kind preference to a local folder."""
    return Written(str(tmp_path / "ds"))


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file (test modules cannot import it)."""
    helpers = (Written, some_packs, concat_packs, split, joined, assert_packs_equal)
    return SimpleNamespace(PACK_SIZE=PACK_SIZE, **{h.__name__: h for h in helpers})
