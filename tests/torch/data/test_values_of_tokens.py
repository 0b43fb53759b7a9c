"""Values of tokens arrive at their tokens, wherever packs and batches go.

A value encodes the number of a record, its sequence, and the position in it.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packstore
import packstore.torch as pt
from packstore.config import ReadConfig
from packstore.errors import ConfigError
from packstore.format import Examples, to_offsets
from packstore.testing import random_examples

COLUMNS = {
    "single": "token<float32>",
    "half": "token<float16>",
    "top": "token<top3,float16>",
    "coarse": "token<top3,uint8>",
}


def values_at(number: Any, sequence: Any, position: Any) -> dict[str, Any]:
    """Values of all columns for tokens, which are exact in the types of the columns.

    Args:
        number: int `[n]`, number of each token's record.
        sequence: int `[n]`, number of its sequence in the record.
        position: int `[n]`, its position in the sequence.
    """
    code = (number * 8 + sequence) * 256 + position
    ids = code[:, None] * 4 + np.arange(3)
    halves = -(code % 509)[:, None] - np.arange(3)
    # The lowest of each record is -255, so that its scale is 1.
    coarse = np.stack([-(code % 100), -100 - code % 100, np.full_like(code, -255)], 1)
    return {
        "single": code.astype(np.float32),
        "half": halves[:, 0].astype(np.float16),
        "top": pt.TopK(ids.astype(np.int32), halves.astype(np.float16)),
        "coarse": pt.TopK(ids[:, ::-1].astype(np.int32), coarse.astype(np.float32)),
    }


def values_of(examples: Examples, numbers: Any) -> dict[str, Any]:
    """Values of all supervised tokens; `numbers` are those of the examples."""
    places = []
    for number, sequences in zip(
        numbers, pairwise(examples.example_offsets), strict=True
    ):
        for sequence, s in enumerate(range(*sequences)):
            tokens = slice(*examples.sequence_offsets[s : s + 2])
            for position in np.flatnonzero(examples.supervised[tokens]):
                places.append((number, sequence, position))
    return values_at(*np.array(places).T)


def assert_columns(
    columns: Any, batch: pt.PackedBatch, numbers: Any, segments: Any, positions: Any
) -> None:
    """Assert that columns have the values of tokens, and zeros behind them.

    Args:
        columns: of the batch, or of a share of it.
        batch: the batch.
        numbers: int `[E]`, number of each example's record.
        segments: int `[n]`, segment of each token; S for padding.
        positions: int `[n]`, its position in its sequence.
    """
    num_real = int((segments < batch.num_segments).sum())
    real = slice(num_real)
    segments, positions = segments[real].numpy(), positions[real].numpy()
    examples = batch.segment_examples.numpy()[segments]
    first_segments = (batch.num_responses.cumsum(0) - batch.num_responses).numpy()
    sequences = segments - first_segments[examples]
    expected = values_at(np.asarray(numbers)[examples], sequences, positions)

    assert columns.keys() == expected.keys()
    for name, values in expected.items():
        assert isinstance(columns[name], pt.TopK) == isinstance(values, pt.TopK)
        for actual, wanted in zip(parts(columns[name]), parts(values), strict=True):
            np.testing.assert_array_equal(actual[real].numpy(), wanted, name)
            assert actual.numpy().dtype == wanted.dtype
            assert not actual[num_real:].any()


def assert_values(batch: pt.PackedBatch, numbers: Any) -> None:
    """Assert that each target of a batch has its values; `numbers` of the examples."""
    segments = batch.targets.segments
    positions = batch.position_ids[batch.target_index]
    assert_columns(batch["token_columns"], batch, numbers, segments, positions)
    for values in batch.token_columns.values():
        assert all(len(part) == len(segments) for part in parts(values))
    real = segments[segments < batch.num_segments]
    counts = torch.bincount(batch.segment_examples[real], minlength=batch.num_examples)
    assert torch.equal(batch["num_targets"], counts)


def parts(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, pt.TopK) else (values,)


def random_records(kind: str, seed: int) -> tuple[list[dict[str, Any]], Examples]:
    """Records of token ids, some of which begin alike, and the same as examples."""
    examples = random_examples(14, seed=seed, kind=kind, max_prompt=6, edges=False)
    common = np.arange(20, dtype=np.int32)
    records = []
    sequences = []
    supervised = []
    for first, end in pairwise(examples.example_offsets):
        responses = []
        for s in range(first, end):
            tokens = slice(*examples.sequence_offsets[s : s + 2])
            ids = np.concatenate([common, examples.input_ids[tokens]])
            prompt = len(ids) - int(examples.supervised[tokens].sum())
            responses.append(ids[prompt:].tolist())
            sequences.append(ids)
            supervised.append(np.arange(len(ids)) >= prompt)
        record: dict[str, Any] = {"prompt": ids[:prompt].tolist()}
        if kind == "preference":
            record |= dict(zip(("chosen", "rejected"), responses, strict=True))
        else:
            record |= {"responses": responses, "scores": list(range(end - first))}
        records.append(record)
    return records, replace(
        examples,
        input_ids=np.concatenate(sequences),
        supervised=np.concatenate(supervised),
        sequence_offsets=to_offsets(np.array([len(ids) for ids in sequences])),
    )


def write_side(
    url: str, dataset: Any, ids: Any, examples: Examples, first_number: int = 0
) -> str:
    """Write the values of all examples; their records count from `first_number`."""
    num_targets = np.diff(target_offsets(examples))
    with pt.SideWriter(url, dataset, COLUMNS) as writer:
        values = values_of(examples, first_number + np.arange(len(ids)))
        writer.write(ids, values, examples.num_responses, num_targets)
    return url


def target_offsets(examples: Examples) -> Any:
    """Where the supervised tokens of each example begin."""
    tokens = examples.sequence_offsets[examples.example_offsets]
    return to_offsets(examples.supervised.view(np.int8))[tokens]


def batches_of(data: pt.PackedDataset, **how: Any) -> list[pt.PackedBatch]:
    batches = list(pt.PackedDataLoader(data, packs_per_batch=2, **how))
    assert len(batches) > 1
    return batches


@pytest.mark.parametrize("kind", ["preference", "scored"])
def test_datasets(tmp_path: Path, kind: str) -> None:
    """Files, an append, packs of another size and layout, concat, mix and workers."""
    records, examples = random_records(kind, seed=1)
    more_records, more_examples = random_records(kind, seed=2)
    starts = np.array([0, 5, 9, 14])  # the number of the first record of each file
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for file, (first, end) in zip(files, pairwise(starts), strict=True):
        lines = [json.dumps(record) + "\n" for record in records[first:end]]
        Path(file).write_text("".join(lines), encoding="utf-8")

    how: Any = {"pack_size": 400, "layout": "concat", "row_group_tokens": 100}
    data = packstore.pack(files[:2], str(tmp_path / "data"), **how)
    data = packstore.append(data, files[2])
    more = packstore.pack(more_records, str(tmp_path / "more"), **how)
    both = packstore.concat([data, more], str(tmp_path / "both"))
    how |= {"layout": "shared_prefix", "share_prefixes": "pack", "seed": 5}
    again = packstore.pack(data, str(tmp_path / "again"), **how | {"pack_size": 100})

    files_of_records = np.repeat(np.arange(3), np.diff(starts))
    ids = (files_of_records << 40) + np.arange(14) - starts[files_of_records]
    side = write_side(str(tmp_path / "side"), data, ids, examples)
    more_side = write_side(
        str(tmp_path / "more-side"), more, np.arange(14), more_examples, 14
    )

    def numbers_of(batch: pt.PackedBatch) -> Any:
        ids = batch.example_ids.numpy()
        # The second source of the mix is the last file of `both`.
        file = (ids >> 40) + 3 * batch.sources.numpy()
        return starts[file] + (ids & 0xFFFF)

    joined = pt.PackedDataset(again, side=side)
    mix = {
        pt.PackedDataset(data, side=side): 1,
        pt.PackedDataset(more, side=more_side): 1,
    }
    for dataset in (
        joined,
        pt.PackedDataset(data, side=side),
        pt.PackedDataset(both, side=[side, more_side]),
        pt.PackedDataset.mix(mix, stopping_strategy="all_exhausted"),
    ):
        for batch in batches_of(pickle.loads(pickle.dumps(dataset))):
            assert_values(batch, numbers_of(batch))
    if kind == "scored":
        for batch in batches_of(joined, num_workers=2):
            assert_values(batch, numbers_of(batch))

    partial = pt.PackedDataset.mix({joined: 1, pt.PackedDataset(more): 1})
    for batch in batches_of(partial):
        assert bool(batch.token_columns) == (not batch.sources.any())

    spoil_first_row_group(again)
    reading = ReadConfig(on_error="quarantine")
    damaged = pt.PackedDataset(again, side=side, reading=reading)
    batches = batches_of(damaged)
    assert damaged.quarantined
    assert any((batch.weights == 0).any() for batch in batches)
    for batch in batches:
        assert_values(batch, numbers_of(batch))


def spoil_first_row_group(dataset: packstore.Dataset) -> None:
    path = Path(dataset.shard_urls[0])
    data = bytearray(path.read_bytes())
    data[8] ^= 1  # in its first page
    path.write_bytes(data)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from(["preference", "scored"]),
    st.sampled_from(["concat", "shared_prefix", "forest"]),
    st.sampled_from([2, 4]),
    st.sampled_from(["zigzag", "contiguous"]),
)
def test_batches(
    kit: SimpleNamespace, seed: int, kind: str, layout: str, num_ranks: int, how: str
) -> None:
    """Packs in another order, padding, shares of a row, and whole sequences."""
    examples = random_examples(6, seed=seed, kind=kind)
    packs = kit.packed(examples, [2, 1, 3], layout)
    packs = replace(packs, token_columns=values_of(examples, examples.example_ids))
    batch = pt.collate([packs.row(i) for i in (2, 0, 1)], kind)
    numbers = batch.example_ids
    assert_values(batch, numbers)
    assert_values(batch.to_concat(), numbers)

    padded = pt.pad_segments(batch, 2 * num_ranks)
    assert_values(padded, numbers)
    padded = pt.pad_batch(
        padded,
        num_tokens=padded.num_tokens + 8 * num_ranks,
        max_seqlen=80,
        num_targets=len(batch.target_index) + 5,
    )
    assert_values(padded, padded.example_ids)
    copied = pickle.loads(pickle.dumps(padded))
    assert_values(copied, padded.example_ids)

    split = getattr(pt.ContextSplit, how)(padded.cu_seqlens, num_ranks)
    shards = [pt.ContextShard.of(padded, split, rank) for rank in range(num_ranks)]
    for shard in shards:
        targets = shard.targets
        # A target is the token behind the row that predicts it.
        positions = padded.position_ids[shard.index[targets.rows]] + 1
        assert_columns(
            shard.token_columns, padded, padded.example_ids, targets.segments, positions
        )
    num_targets = sum(len(shard.token_columns["single"]) for shard in shards)
    assert num_targets == len(padded.target_index)
    for moved in (padded.to("meta"), shards[0].to("meta")):
        for values in moved.token_columns.values():
            assert all(part.is_meta for part in parts(values))


def test_columns_of_different_types_are_refused(kit: SimpleNamespace) -> None:
    packs = kit.packed(random_examples(4), [2, 2], "concat")
    n = int(packs.supervised.sum())
    ids = np.tile(np.arange(3, dtype=np.int32), (n, 1))
    columns = [np.zeros(n, np.float32)]
    columns += [pt.TopK(ids[:, :k], -ids[:, :k].astype(np.float16)) for k in (2, 3)]
    rows = [replace(packs, token_columns={"teacher": x}) for x in columns]
    for pair, mentioned in ((rows[:2], "numbers and the top 2"), (rows[1:], "top 3")):
        with pytest.raises(ConfigError, match=f"teacher.*{mentioned}"):
            pt.collate(pair, "preference")
