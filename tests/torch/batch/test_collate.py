"""PackedBatch against a count token by token, and its four ways into a model."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, is_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.errors import ConfigError, UnknownNameError
from packstore.testing import random_examples
from packstore.torch import (
    PackCollator,
    PackedBatch,
    PreferenceLoss,
    collate,
    packed_logps,
    packed_seq_params,
    pad_batch,
    pad_segments,
    use_packed_attention,
)

EXAMPLES = random_examples(6, seed=1)


def assert_batches_equal(a: PackedBatch, b: PackedBatch) -> None:
    names = (
        "input_ids",
        "labels",
        "position_ids",
        "segment_ids",
        "target_index",
        "cu_seqlens_k",
    )
    names += ("kv_index", "weights", "pack_ids", "sources")
    for name in (
        *names,
        *(name for name in PackedBatch.__annotations__ if name[0] != "_"),
    ):
        x, y = getattr(a, name), getattr(b, name)
        same = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        assert same, name


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["preference", "sft", "scored"]),
    layout=st.sampled_from(["concat", "shared_prefix"]),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_derived_columns(
    kit: SimpleNamespace, seed: int, kind: str, layout: str, sizes: list[int]
) -> None:
    examples = random_examples(sum(sizes), seed=seed, kind=kind)
    batch = collate(kit.packed(examples, sizes, layout), kind)
    segment = token = 0
    for example, k in enumerate(examples.num_responses.tolist()):
        first = token
        for sequence in range(segment, segment + k):
            start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
            whole = slice(*examples.sequence_offsets[sequence : sequence + 2])
            length = whole.stop - whole.start
            left_out = length - (end - start)
            assert start == token
            assert batch.lengths[sequence] == length
            assert batch.position_ids[start:end].tolist() == list(
                range(left_out, length)
            )
            assert set(batch.segment_ids[start:end].tolist()) == {sequence}
            keys = [*range(first, first + left_out), *range(start, end)]
            place = slice(*batch.cu_seqlens_k[sequence : sequence + 2].tolist())
            index = (
                torch.arange(batch.num_tokens)
                if batch.kv_index is None
                else batch.kv_index
            )
            assert index[place].tolist() == keys
            ids = examples.input_ids[whole]
            assert batch.input_ids[keys].tolist() == ids.tolist()
            on = np.where(examples.supervised[whole], ids, -100)
            assert batch.labels[start:end].tolist() == on[left_out:].tolist()
            token = end
        assert batch.example_ids[example] == example
        segment += k
    assert (batch.num_segments, batch.num_tokens) == (segment, token)
    assert (batch.num_packs, batch.num_examples) == (len(sizes), sum(sizes))
    assert batch.pack_ids.tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()
    assert batch.max_seqlen == batch.cu_seqlens.diff().max()
    assert batch.max_seqlen_k == batch.lengths.max()
    assert (
        batch.target_index.tolist()
        == (batch.labels != -100).nonzero().flatten().tolist()
    )
    assert batch.rewards.tolist() == examples.reward.tolist()
    assert batch.kv_index is None or layout == "shared_prefix"
    int64 = (
        "input_ids",
        "labels",
        "position_ids",
        "segment_ids",
        "target_index",
        "pack_ids",
    )
    assert {getattr(batch, name).dtype for name in (*int64, "example_ids")} == {
        torch.int64
    }
    int32 = ("cu_seqlens", "cu_seqlens_k", "lengths", "num_responses")
    assert {getattr(batch, name).dtype for name in int32} == {torch.int32}
    assert {batch.rewards.dtype, batch.weights.dtype} == {torch.float32}
    assert type(batch.max_seqlen) is type(batch.max_seqlen_k) is int


@pytest.mark.parametrize("kind", ["preference", "scored"])
@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_rows_of_row_groups(kit: SimpleNamespace, kind: str, layout: str) -> None:
    """Fields that are computed later: the same batch, however it travels."""
    examples = random_examples(6, seed=2, kind=kind)
    packs = kit.packed(examples, [1, 3, 2], layout)
    first = kit.packed(examples.take(np.arange(4)), [1, 3], layout)
    for parts in ([packs.row(i) for i in range(3)], [first, packs.row(2)]):
        assert_batches_equal(collate(parts, kind), collate(packs, kind))
    order = [2, 0, 1]
    rows = [packs.row(i) for i in order]
    expected = collate([packs.row(i) for i in order], kind, fillers=1)
    for change in (
        lambda batch: batch,
        lambda batch: batch.to("cpu"),
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda batch: batch.replace(step=None),
    ):
        assert_batches_equal(change(collate(rows, kind, fillers=1)), expected)
    small = pickle.dumps(collate(rows, kind))
    assert len(small) < len(pickle.dumps(collate(rows, kind).replace())) / 2
    for row, i in zip(rows, order, strict=True):
        for plain in (
            row,
            pickle.loads(pickle.dumps(row)),
            replace(row, stand_in=False),
        ):
            for name in ("input_ids", "labels", "token_offsets", "seq_boundaries"):
                assert np.array_equal(getattr(plain, name), getattr(packs.row(i), name))
    assert collate(
        [replace(rows[1], stand_in=True), rows[0]], kind
    ).weights.tolist() == [0, 1, 1]


def test_the_first_token_of_a_segment_is_no_target(kit: SimpleNamespace) -> None:
    """Nothing predicts it, even if its label is set."""
    supervised = np.ones_like(EXAMPLES.supervised)
    examples = replace(EXAMPLES, supervised=supervised)
    batch = collate(kit.packed(examples, [2, 4], "concat"), "preference")
    firsts = set(batch.cu_seqlens[:-1].tolist())
    assert batch.target_index.tolist() == [
        i for i in range(batch.num_tokens) if i not in firsts
    ]


def test_fillers_and_reference(kit: SimpleNamespace) -> None:
    packs = kit.packed(EXAMPLES, [1, 3, 2], "concat")
    batch = collate(
        packs, "preference", ref_logps=np.arange(12, dtype=np.float32), fillers=1
    )
    assert batch.weights.tolist() == [1, 1, 1, 1, 0, 0]
    assert batch.ref_logps.tolist() == list(range(12))
    with pytest.raises(ConfigError, match="ref_logps"):
        collate(packs, "preference", ref_logps=np.zeros(3, np.float32))
    with pytest.raises(UnknownNameError, match="'dpo'"):
        collate(packs, "dpo")
    with pytest.raises(UnknownNameError, match="'pairs'"):
        PackCollator("pairs")
    with pytest.raises(ConfigError, match="pack"):
        collate([], "preference")


def test_the_batch_owns_its_memory_and_travels(kit: SimpleNamespace) -> None:
    packs = kit.packed(EXAMPLES, [6], "shared_prefix")
    packs.input_ids.flags.writeable = False
    batch = collate(packs, "preference")
    before = batch.input_ids.clone()
    batch.input_ids.add_(1)
    assert torch.equal(torch.from_numpy(packs.input_ids.astype(np.int64)), before)
    assert_batches_equal(pickle.loads(pickle.dumps(batch)), batch)
    assert batch.to("meta").kv_index.device.type == "meta"  # type: ignore[union-attr]
    assert batch.to("meta").max_seqlen == batch.max_seqlen


@pytest.mark.parametrize("derived", [False, True])
def test_keys_of_whole_segments_have_the_offsets_of_the_queries(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, derived: bool
) -> None:
    """The same tensor, for which torch looks: cuDNN computes causal attention only
    then.
    """
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", torch.Tensor.clone
    )  # which needs CUDA
    for change in (
        lambda batch: batch,
        lambda batch: batch.to("meta"),
        lambda batch: batch.pin_memory(),
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda batch: batch.replace(step=None),
        lambda batch: pad_segments(batch, 4),
        lambda batch: pad_batch(batch, num_tokens=300, num_segments=30, max_seqlen=40),
        lambda batch: pad_batch(
            pad_segments(batch, 4), num_tokens=400, num_segments=30
        ),
    ):
        batch = collate(kit.packed(EXAMPLES, [2, 4], "concat"), "preference")
        if derived:
            assert batch.layout.cu_seqlens_k is batch.cu_seqlens
        changed = change(batch)
        layout = changed.layout
        assert changed.cu_seqlens_k is changed.cu_seqlens
        assert layout.cu_seqlens_q is layout.cu_seqlens_k is changed.cu_seqlens
        if layout.cu_seqlens_q.device.type == "cpu":
            assert layout.sizes == (changed.cu_seqlens.diff().tolist(),) * 2
    shared = collate(kit.packed(EXAMPLES, [6], "shared_prefix"), "preference")
    assert not torch.equal(shared.cu_seqlens_k, shared.cu_seqlens)


def test_wrappers_of_modules_leave_a_batch_as_it_is(kit: SimpleNamespace) -> None:
    """FSDP copies dataclasses among the inputs, and casts their tensors."""
    batch = collate(kit.packed(EXAMPLES, [6], "shared_prefix"), "preference")
    assert not is_dataclass(batch.replace(step=None))


def test_flash_inputs(kit: SimpleNamespace) -> None:
    batch = collate(kit.packed(EXAMPLES, [2, 4], "concat"), "preference")
    flash = batch.model_inputs("flash")
    assert flash["cu_seq_lens_q"] is flash["cu_seq_lens_k"] is batch.cu_seqlens
    assert flash["max_length_q"] == flash["max_length_k"] == batch.max_seqlen
    assert (
        flash["input_ids"].shape == flash["position_ids"].shape == (1, batch.num_tokens)
    )
    assert flash["use_cache"] is False
    assert "attention_mask" not in flash


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_padded_inputs_are_the_sequences(kit: SimpleNamespace, layout: str) -> None:
    """Without the padding that segments declare."""
    plain = collate(kit.packed(EXAMPLES, [2, 4], layout), "preference")
    for batch in (plain, pad_segments(plain, 8)):
        padded = batch.model_inputs("padded")
        assert padded["input_ids"].shape == (12, batch.max_seqlen_k)
        for i in range(12):
            ids = EXAMPLES.input_ids[
                slice(*EXAMPLES.sequence_offsets[i : i + 2])
            ].tolist()
            assert padded["input_ids"][i].tolist() == ids + [0] * (
                batch.max_seqlen_k - len(ids)
            )
            assert padded["attention_mask"][i].sum() == len(ids)
        assert torch.equal(batch.unpad(padded["input_ids"]), batch.input_ids)


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_inference_mode_takes_nothing_from_training(
    kit: SimpleNamespace, layout: str
) -> None:
    """A reference that runs first, in inference mode; a batch made and moved there."""
    made = use_packed_attention(kit.tiny_model())
    packs = kit.packed(EXAMPLES, [6], layout)
    gradients = []
    for mode in (torch.no_grad, torch.inference_mode):
        made.zero_grad()
        with mode():
            batch = collate(packs, "preference").to("cpu").replace(step=None)
            reference = packed_logps(made, batch)
        PreferenceLoss("dpo")(
            packed_logps(made, batch), batch, reference - 1
        ).loss.backward()
        gradients.append([p.grad.clone() for p in made.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_batch_shows_what_it_holds(kit: SimpleNamespace) -> None:
    batch = collate(
        kit.packed(random_examples(5), [2, 3], "shared_prefix"), "preference"
    )
    size = f"2 packs, 5 examples, 10 segments, {batch.num_tokens} tokens on cpu"
    assert repr(batch) == f"PackedBatch(preference: {size})"
    fields = (
        "input_ids labels position_ids segment_ids cu_seqlens cu_seqlens_k "
        "kv_index weights"
    )
    for name in [*fields.split(), "kind", "num_tokens", "rewards", "columns", "step"]:
        assert name in dir(batch)
        assert batch[name] is getattr(batch, name)
    for name in ("input_id", "to", "_signed_ids", "model_inputs"):
        with pytest.raises(KeyError, match=f"'{name}'"):
            batch[name]


def test_unknown_styles_are_refused(kit: SimpleNamespace) -> None:
    batch = collate(kit.packed(EXAMPLES, [6], "shared_prefix"), "preference")
    with pytest.raises(UnknownNameError, match="'fsdp'"):
        batch.model_inputs("fsdp")  # type: ignore[arg-type]


@dataclass
class PackedSeqParams:
    """The fields that Megatron-Core's class of this name has had in all its
    versions.
    """

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None


def test_megatron_knows_real_and_padded_segments(kit: SimpleNamespace) -> None:
    plain = collate(kit.packed(EXAMPLES, [2, 4], "concat"), "preference")
    found = PackedSeqParams(**packed_seq_params(plain))
    assert found.qkv_format == "thd"
    assert found.cu_seqlens_q is found.cu_seqlens_kv is plain.cu_seqlens
    assert found.cu_seqlens_q_padded is found.cu_seqlens_kv_padded is None
    assert type(found.max_seqlen_q) is type(found.max_seqlen_kv) is int
    batch = pad_segments(plain, 8)
    found = PackedSeqParams(**packed_seq_params(batch))
    assert found.cu_seqlens_q is found.cu_seqlens_kv is plain.cu_seqlens
    assert found.cu_seqlens_q_padded is found.cu_seqlens_kv_padded is batch.cu_seqlens
    assert found.max_seqlen_q == found.max_seqlen_kv == batch.max_seqlen
    inputs = batch.model_inputs("megatron")
    assert inputs["max_seqlen"].tolist() == [[batch.max_seqlen]]
    for name, expected in (("cu_seqlens", batch), ("cu_seqlens_unpadded", plain)):
        assert inputs[name].tolist() == [[*expected.cu_seqlens.tolist(), -1]]
        assert inputs[f"{name}_argmin"].tolist() == [[int(inputs[name].argmin())]]
    assert "cu_seqlens_unpadded" not in plain.model_inputs("megatron")
    elsewhere = batch.to("meta").model_inputs("megatron")
    assert (
        elsewhere["cu_seqlens"].device.type == elsewhere["tokens"].device.type == "meta"
    )
    assert (
        elsewhere["cu_seqlens_argmin"].device.type
        == elsewhere["max_seqlen"].device.type
        == "cpu"
    )
