"""Batches of prefix trees against a count token by token: keys, copies, padding and
whole sequences.
"""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forests import dialogues_of, forest_packs, places_of
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.errors import ConfigError
from packstore.format import Packs, check_packs
from packstore.pack.fill import convert
from packstore.torch import (
    PackedBatch,
    PolicyLoss,
    PreferenceLoss,
    collate,
    packed_logps,
    packed_seq_params,
    pad_batch,
    pad_segments,
    segment_logps,
    use_packed_attention,
)

SEEDS = st.integers(0, 1000)
KINDS = st.sampled_from(["preference", "sft", "scored"])


def keys_of(batch: PackedBatch) -> list[list[int]]:
    """The places in the row of each sequence's keys."""
    assert batch.kv_index is not None
    keys = batch.kv_index.tolist()
    return [keys[a:b] for a, b in itertools.pairwise(batch.cu_seqlens_k.tolist())]


@settings(max_examples=60, deadline=None)
@given(SEEDS, KINDS)
def test_keys_ids_and_labels_of_every_sequence(seed: int, kind: str) -> None:
    examples, packs = forest_packs(seed, kind)
    check_packs(packs, layout="shared_prefix")
    batch = collate(packs, kind)
    places = places_of(packs)
    assert batch.parent_distances.dtype == torch.int32
    assert batch.parent_distances.tolist() == packs.parent_distances.tolist()
    assert keys_of(batch) == places
    segments = itertools.pairwise(batch.cu_seqlens.tolist())
    for dialogue, keys, (start, end) in zip(
        dialogues_of(examples), places, segments, strict=True
    ):
        omitted = len(keys) - (end - start)
        assert batch.input_ids[keys].tolist() == dialogue.ids
        assert batch.position_ids[start:end].tolist() == [*range(omitted, len(keys))]
        targets = [
            omitted + int(i) - start
            for i in batch.target_index
            if start <= int(i) < end
        ]
        assert targets == np.flatnonzero(dialogue.supervised).tolist()


@pytest.mark.parametrize("derived", [False, True])
def test_trees_travel(monkeypatch: pytest.MonkeyPatch, derived: bool) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # needs CUDA
    changes: list[Any] = [
        lambda batch: batch.to("cpu"),
        lambda batch: batch.pin_memory(),
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda batch: batch.replace(step=None),
        lambda batch: batch.replace(step=None).pin_memory().replace(step=None),
    ]
    for change, kind in itertools.product(changes, ("preference", "sft", "scored")):
        _, packs = forest_packs(3, kind)
        batch = collate(packs, kind)
        if derived:
            assert batch.layout.kv_index is not None
        assert keys_of(change(batch)) == places_of(packs)


def test_a_tree_on_a_device_computes_its_keys_there() -> None:
    """And waits for nothing: tensors on `meta` have no values."""
    _, packs = forest_packs(3, "sft")
    batch = collate(packs, "sft").to("meta")
    assert batch.parent_distances.is_meta
    assert batch.kv_index is not None
    assert batch.kv_index.is_meta
    assert batch.kv_index.shape == (sum(map(len, places_of(packs))),)
    assert batch.layout.num_queries == batch.num_tokens
    whole = batch.to_concat()
    assert whole.input_ids.shape == whole.labels.shape == batch.kv_index.shape
    padded = pad_batch(batch, num_tokens=batch.num_tokens + 7, max_seqlen=80)
    assert padded.kv_index is not None
    assert len(padded.kv_index) == len(batch.kv_index) + 7


def test_other_parents_are_other_keys() -> None:
    """Two whole sequences begin like the third, which leaves out two tokens."""
    ids = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 3, 8, 9]
    packs = Packs(
        signed_ids=np.array(ids, np.int32),
        reward=np.zeros(3, np.float32),
        lengths=np.array([5, 5, 5], np.int32),
        seq_boundaries=np.array([0, 5, 10, 13], np.int32),
        parent_distances=np.array([0, 0, 2], np.int32),
        example_ids=np.arange(3),
        num_responses=np.ones(3, np.int32),
        token_offsets=np.array([0, 13]),
        sequence_offsets=np.array([0, 3]),
        example_offsets=np.array([0, 3]),
    )
    batch = collate(packs, "sft")
    assert keys_of(batch)[2] == [0, 1, 10, 11, 12]
    other = torch.tensor([0, 0, 1], dtype=torch.int32)
    changed = batch.replace(parent_distances=other)
    assert keys_of(changed)[2] == [5, 6, 10, 11, 12]
    assert keys_of(batch)[2] == [0, 1, 10, 11, 12]


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    kind=KINDS,
    multiple=st.sampled_from([1, 2, 3, 8]),
    extra=st.integers(0, 20),
    moved=st.booleans(),
)
def test_padding_is_nobodys_key(
    seed: int, kind: str, multiple: int, extra: int, moved: bool
) -> None:
    """Keys of a padded segment are those before, and its own padding behind them."""
    _, packs = forest_packs(seed, kind)
    batch = collate(packs, kind)
    padded = pad_segments(batch, multiple)
    if moved:
        padded = padded.to("cpu").replace(step=None)
    size = padded.num_tokens + extra
    padded = pad_batch(padded, num_tokens=size, num_segments=80, num_targets=400)

    starts = padded.cu_seqlens.tolist()
    own = batch.cu_seqlens.diff().tolist()
    places = [
        start + i for start, n in zip(starts, own, strict=False) for i in range(n)
    ]
    expected = []
    for i, keys in enumerate(places_of(packs)):
        padding = range(starts[i] + own[i], starts[i + 1])
        expected.append([*(places[key] for key in keys), *padding])
    for i in range(batch.num_segments, 80):
        expected.append([*range(starts[i], starts[i + 1])])
    assert keys_of(padded) == expected
    assert padded.parent_distances[batch.num_segments :].tolist() == [0] * (
        80 - batch.num_segments
    )


@settings(max_examples=25, deadline=None)
@given(SEEDS, KINDS)
def test_whole_sequences_are_the_layout_concat(seed: int, kind: str) -> None:
    _, packs = forest_packs(seed, kind)
    reference = np.linspace(-9, -1, len(packs.lengths), dtype=np.float32)
    batch = collate(packs, kind, ref_logps=reference, fillers=1)
    expected = collate(convert(packs, "concat"), kind, ref_logps=reference, fillers=1)
    whole = batch.to_concat()
    assert whole.to_concat() is whole
    names = [name for name in PackedBatch.__annotations__ if name[0] != "_"]
    names += ["input_ids", "labels", "position_ids", "segment_ids", "target_index"]
    names += ["cu_seqlens_k", "kv_index", "weights", "pack_ids", "num_tokens"]
    for name in names:
        actual, wanted = getattr(whole, name), getattr(expected, name)
        if isinstance(wanted, torch.Tensor):
            assert actual.dtype == wanted.dtype, name
            assert torch.equal(actual, wanted), name
        else:
            assert actual == wanted, name
    assert whole.cu_seqlens_k is whole.cu_seqlens
    assert expected.to_concat() is expected


def test_styles_without_shared_keys_take_whole_sequences() -> None:
    _, packs = forest_packs(5, "sft")
    batch = collate(packs, "sft")
    whole = collate(convert(packs, "concat"), "sft")
    for style in ("flash", "megatron"):
        inputs = batch.model_inputs(style)  # type: ignore[arg-type]
        expected = whole.model_inputs(style)  # type: ignore[arg-type]
        assert inputs.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(inputs[name], value), (style, name)
            else:
                assert inputs[name] == value, (style, name)
    parameters = packed_seq_params(batch)
    assert parameters["cu_seqlens_q"].tolist() == whole.cu_seqlens.tolist()
    assert parameters["max_seqlen_kv"] == whole.max_seqlen

    padded = pad_segments(batch, 8)
    for refused in (
        padded.to_concat,
        lambda: padded.model_inputs("megatron"),
        lambda: packed_seq_params(padded),
    ):
        with pytest.raises(ConfigError, match="pad_segments"):
            refused()
    inputs = pad_segments(batch.to_concat(), 8).model_inputs("megatron")
    assert (inputs["cu_seqlens"].diff()[0, :-1] % 8 == 0).all()


@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_outputs_for_whole_sequences_have_the_same_loss(
    kit: SimpleNamespace, kind: str
) -> None:
    """An unchanged model, called in style `flash`, and the losses of the same batch."""
    _, packs = forest_packs(7, kind)
    batch = collate(packs, kind)
    model = kit.tiny_model()
    inputs = batch.model_inputs("flash")
    # transformers finds the sequences in the positions.
    logits = model(
        input_ids=inputs["input_ids"],
        position_ids=inputs["position_ids"],
        use_cache=False,
    ).logits
    prepared = use_packed_attention(kit.tiny_model(), "sdpa")
    shared = prepared(**batch.model_inputs()).logits
    whole = batch.to_concat()
    loss_fn: Any = PolicyLoss()
    if kind != "scored":
        loss_fn = PreferenceLoss("sft" if kind == "sft" else "orpo")

    results = []
    for one, rows in ((batch, shared), (batch, logits), (whole, logits)):
        rows = rows.detach().requires_grad_()
        per_token = isinstance(loss_fn, PolicyLoss)
        logps = segment_logps(one, logits=rows, per_token=per_token)
        loss = loss_fn(logps, one).loss
        results.append((logps, loss))
    for logps, loss in results[1:]:
        assert (logps - results[0][0]).abs().max() < 1e-12
        assert (loss - results[0][1]).abs() < 1e-12
    fused = packed_logps(prepared, batch)
    assert (fused - segment_logps(batch, logits=logits)).abs().max() < 1e-12
