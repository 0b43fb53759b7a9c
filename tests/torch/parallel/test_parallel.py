"""Padding, splits and fixed shapes against counts by hand: nothing that is real may
move.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forests import forest_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import pad

from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    ContextShard,
    ContextSplit,
    PackedBatch,
    PreferenceLoss,
    collate,
    context_shard,
    pad_batch,
    pad_segments,
    padding_multiple,
    segment_logps,
    segment_token_counts,
    static_sizes,
    use_packed_attention,
)
from packstore.torch.attention import ATTENTION, Settings

KINDS = st.sampled_from(["preference", "sft", "scored"])
LAYOUTS = st.sampled_from(["concat", "shared_prefix", "forest"])
SEEDS = st.integers(0, 1000)


def make(
    kit: SimpleNamespace, seed: int, kind: str = "preference", layout: str = "concat"
) -> PackedBatch:
    """Two packs of random examples, or, as layout ``forest``, of prefix trees."""
    if layout == "forest":
        _, packs = forest_packs(seed, kind, size=8)
    else:
        examples = random_examples(5, seed=seed, kind=kind)
        packs = kit.packed(examples, [2, 3], layout)
    batch = collate(packs, kind)
    reference = torch.linspace(-20, -10, batch.num_segments)
    strings = batch.example_ids.numpy().astype("U5")
    columns = {"w": batch.weights.clone(), "s": strings}
    return batch.replace(
        ref_logps=reference, columns=columns, sequence_columns={"a": -reference}
    )


def real_tokens(batch: PackedBatch, padded: PackedBatch) -> list[int]:
    """Positions of the batch's tokens in the padded one."""
    starts, sizes = padded.cu_seqlens.tolist(), batch.cu_seqlens.diff().tolist()
    return [
        t
        for start, n in zip(starts, sizes, strict=False)
        for t in range(start, start + n)
    ]


@given(st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_the_multiple_suits_all(context: int, sequence: int, fp8: bool) -> None:
    multiple = padding_multiple(
        context_parallel=context, sequence_parallel=sequence, fp8=fp8
    )
    suits = [
        m
        for m in range(1, multiple + 1)
        if m % (2 * context if context > 1 else 1) == 0
        and m // context % sequence == 0
        and m // context % (16 if fp8 else 1) == 0
        and m % context == 0
    ]
    assert suits == [multiple]


@settings(max_examples=25, deadline=None)
@given(SEEDS, KINDS, LAYOUTS, st.sampled_from([1, 2, 3, 8]), st.booleans())
def test_padded_segments(
    kit: SimpleNamespace, seed: int, kind: str, layout: str, multiple: int, twice: bool
) -> None:
    batch = make(kit, seed, kind, layout)
    padded = pad_segments(pad_segments(batch, 2) if twice else batch, multiple)
    before = batch.cu_seqlens.diff().tolist()
    sizes = [-(-(n + n % 2 * twice) // multiple) * multiple for n in before]
    assert padded.cu_seqlens.diff().tolist() == sizes
    for name, fill in (("input_ids", 0), ("labels", -100)):
        parts = zip(getattr(batch, name).split(before), sizes, strict=True)
        expected = [pad(part, (0, n - len(part)), value=fill) for part, n in parts]
        assert torch.equal(getattr(padded, name), torch.cat(expected)), name
    if padded is not batch:
        assert torch.equal(padded.cu_seqlens_unpadded, batch.cu_seqlens)
    left_out = (batch.cu_seqlens_k.diff() - batch.cu_seqlens.diff()).tolist()
    keys = [n + size for n, size in zip(left_out, sizes, strict=True)]
    assert padded.cu_seqlens_k.diff().tolist() == keys
    assert (padded.max_seqlen, padded.max_seqlen_k) == (max(sizes), max(keys))
    where = real_tokens(batch, padded)
    assert [where[t] for t in batch.target_index] == padded.target_index.tolist()
    for s, (n, first) in enumerate(zip(sizes, left_out, strict=True)):
        mine = range(*padded.cu_seqlens[s : s + 2])
        assert padded.position_ids[mine].tolist() == [*range(first, first + n)]
        assert padded.segment_ids[mine].tolist() == [s] * n
        if batch.kv_index is not None and padded.kv_index is not None:
            shared = batch.kv_index[int(batch.cu_seqlens_k[s]) :][:first]
            run = padded.kv_index[slice(*padded.cu_seqlens_k[s : s + 2])]
            assert run.tolist() == [*(where[t] for t in shared), *mine]
    for name in ("lengths", "rewards", "num_responses", "weights", "pack_ids"):
        assert torch.equal(getattr(padded, name), getattr(batch, name)), name


@settings(max_examples=20, deadline=None)
@given(
    SEEDS,
    LAYOUTS,
    st.integers(2, 4),
    st.sampled_from(["zigzag", "contiguous"]),
    st.booleans(),
)
def test_shares_of_a_row(
    kit: SimpleNamespace, seed: int, layout: str, size: int, how: str, static: bool
) -> None:
    """Tokens, targets and attention of all ranks together are those of the row."""
    batch = pad_segments(make(kit, seed, "preference", layout), 2 * size)
    if static:
        batch = pad_batch(
            batch, num_tokens=(batch.num_tokens // 120 + 2) * 120, num_segments=60
        )
    split = getattr(ContextSplit, how)(batch.cu_seqlens, size)
    shards = [ContextShard.of(batch, split, rank) for rank in range(size)]
    if how == "zigzag":
        for rank in range(size):
            chunks = [
                range(
                    a + c * ((b - a) // (2 * size)),
                    a + (c + 1) * ((b - a) // (2 * size)),
                )
                for a, b in pairwise(batch.cu_seqlens)
                for c in (rank, 2 * size - 1 - rank)
            ]
            assert split.index[rank].tolist() == [
                int(t) for chunk in chunks for t in chunk
            ]
    moved = shards[0].to("meta")
    for part in (moved, moved.layout, moved.targets):
        tensors = [x for x in vars(part).values() if isinstance(x, Tensor)]
        assert tensors
        assert all(x.is_meta for x in tensors)
    for name in ("input_ids", "position_ids", "segment_ids"):
        values = getattr(batch, name)
        joined = torch.cat([getattr(s, name) for s in shards])[split.inverse]
        assert torch.equal(joined, values), name
    found = sorted(
        (int(shard.index[row]), int(token), int(segment))
        for shard in shards
        for row, token, segment in zip(
            shard.targets.rows, shard.targets.ids, shard.targets.segments, strict=True
        )
    )
    wanted = batch.target_index
    columns = (wanted - 1, batch.input_ids[wanted], batch.segment_ids[wanted])
    assert found == list(zip(*(c.tolist() for c in columns), strict=True))
    q, k, v = torch.randn(3, batch.num_tokens, 2, 4, dtype=torch.float64)
    attend = ATTENTION.load("reference")
    outputs = []
    for shard in shards:
        kind = type(batch.layout)  # whose keys are all here
        names = [field.name for field in fields(kind)]
        gathered = kind(**{name: getattr(shard.layout, name) for name in names})
        rows = (
            q[shard.index],
            *(torch.cat([x[s.index] for s in shards]) for x in (k, v)),
        )
        outputs.append(attend(*rows, gathered, Settings(0.5, None if static else 4)))
        sizes = shard.layout.sizes
        assert max(sizes[0]) <= shard.layout.max_seqlen_q
        assert max(sizes[1]) <= shard.layout.max_seqlen_k
    whole = attend(q, k, v, batch.layout, Settings(0.5, None if static else 4))
    assert (torch.cat(outputs)[split.inverse] - whole).abs().max() < 1e-12


def test_splits_refuse_what_does_not_divide(kit: SimpleNamespace) -> None:
    batch = pad_segments(make(kit, 0), 2)
    with pytest.raises(ConfigError, match=r"pad_segments\(batch, 4\)"):
        ContextSplit.zigzag(batch.cu_seqlens, 2)
    odd = pad_batch(batch, num_tokens=batch.num_tokens + 1)
    with pytest.raises(ConfigError, match="pad_batch"):
        ContextSplit.contiguous(odd.cu_seqlens, 2)
    with pytest.raises(ConfigError, match="context_shard: how"):
        context_shard(batch, how="ring")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pad_segments"):
        pad_segments(batch, 0)
    with pytest.raises(ConfigError, match="context_parallel"):
        padding_multiple(context_parallel=0)


def test_fixed_shapes(kit: SimpleNamespace) -> None:
    shapes = set()
    for seed in range(3):
        batch = make(kit, seed)
        padded = pad_batch(
            batch, num_tokens=300, num_segments=30, max_seqlen=40, num_targets=150
        )
        for name in (
            "input_ids",
            "labels",
            "position_ids",
            "segment_ids",
            "target_index",
        ):
            n = len(getattr(batch, name))
            assert torch.equal(getattr(padded, name)[:n], getattr(batch, name)), name
        assert torch.equal(padded.cu_seqlens[:11], batch.cu_seqlens)
        tail = 300 - batch.num_tokens
        added = [min(40, tail - i) for i in range(0, tail, 40)]
        assert padded.lengths[10:].tolist() == added + [0] * (20 - len(added))
        assert padded.cu_seqlens.diff()[10:].tolist() == padded.lengths[10:].tolist()
        assert (padded.max_seqlen, padded.max_seqlen_k) == (40, 40)
        assert padded.weights.tolist() == [1] * 5 + [0] * 10
        assert padded.example_ids.tolist() == [*range(5), *[-1] * 10]
        assert padded.sequence_columns["a"].tolist() == (-padded.ref_logps).tolist()
        assert padded.columns["s"].tolist() == ["0", "1", "2", "3", "4"] + [""] * 10
        tensors = {n: getattr(padded, n) for n in vars(padded)}
        shapes.add(
            tuple((n, x.shape) for n, x in tensors.items() if isinstance(x, Tensor))
        )
    assert len(shapes) == 1
    for sizes, found in (
        (
            {"num_tokens": 50},
            r"pad_batch\(num_tokens=50\)",
        ),
        ({"num_segments": 31}, "num_segments"),
        *(({name: 3}, rf"{name}=3") for name in ("max_seqlen", "num_targets")),
    ):
        with pytest.raises(ConfigError, match=found):
            pad_batch(batch, **{"num_tokens": 400, **sizes})


SIZES = {"num_tokens": 500, "num_segments": 40, "max_seqlen": 60, "num_targets": 200}


@pytest.mark.parametrize("layout", ["concat", "shared_prefix", "forest"])
@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_losses_do_not_see_what_fills_up(
    kit: SimpleNamespace, kind: str, layout: str
) -> None:
    """Loss, metrics and gradients of logits or of hidden states."""
    batch = make(kit, 1, kind, layout)
    padded = pad_batch(pad_segments(batch, 4), **SIZES)
    where, real = torch.tensor(real_tokens(batch, padded)), batch.num_segments
    torch.manual_seed(0)
    outputs = torch.randn(batch.num_tokens, 12, dtype=torch.float64)
    weight = torch.randn(kit.VOCAB, 12, dtype=torch.float64)
    spread = torch.randn(padded.num_tokens, 12, dtype=torch.float64).index_copy(
        0, where, outputs
    )
    losses = [
        ("sft", {"sft_average": a}) for a in ("token", "sequence_sum", "sequence_mean")
    ]
    if kind != "sft":
        losses = [(name, {"sft_weight": 0.5}) for name in ("dpo", "orpo")]
        losses += [("dpo", {"reduction": "pack_mean"})]
    for (name, given_settings), fused in product(losses, (False, True)):
        loss_fn = PreferenceLoss(name, **given_settings)  # type: ignore[arg-type]
        seen = []
        for one, rows in ((batch, outputs), (padded, spread)):
            rows, head = rows.clone().requires_grad_(), weight.clone().requires_grad_()
            logits = {"logits": rows @ head.T}
            logps = segment_logps(
                one, **({"hidden": rows, "weight": head} if fused else logits)
            )
            out = loss_fn(logps, one)
            out.loss.backward()
            seen.append((logps, out, rows.grad, head.grad))
        (logps, out, d_rows, d_head), (p_logps, p_out, p_rows, p_head) = seen
        assert (p_logps[:real] - logps).abs().max() < 1e-12
        assert (p_logps[real:] == 0).all()
        assert (p_out.loss - out.loss).abs() < 1e-12, name
        for metric, (total, count) in out.metrics.items():
            assert abs(p_out.metrics[metric][0] - total) < 1e-10, (name, metric)
            assert p_out.metrics[metric][1] == count, (name, metric)
        assert (p_rows[where] - d_rows).abs().max() < 1e-12, name
        assert torch.equal(p_rows.count_nonzero(), p_rows[where].count_nonzero()), name
        assert (p_head - d_head).abs().max() < 1e-12, name
    counts = segment_token_counts(padded)
    assert torch.equal(counts[:real], segment_token_counts(batch))
    assert not counts[real:].any()


@pytest.mark.parametrize(
    ("kind", "multiple", "layout"),
    [
        ("preference", 1, "concat"),
        ("sft", 8, "concat"),
        ("scored", 8, "shared_prefix"),
        ("sft", 8, "forest"),
        ("scored", 1, "forest"),
    ],
)
def test_sizes_from_the_manifest(
    kit: SimpleNamespace, tmp_path: Path, kind: str, multiple: int, layout: str
) -> None:
    if layout == "forest":
        layout = "shared_prefix"
        _, packs = forest_packs(3, kind, num_packs=8)
    else:
        examples = random_examples(24, seed=3, kind=kind)
        packs = kit.packed(examples, [1, 3, 5, 2, 4, 3, 2, 4], layout)
    manifest = kit.write(str(tmp_path / "data"), packs, kind, layout).manifest
    shapes = set()
    sizes = static_sizes(manifest, 2, multiple=multiple)
    assert sizes["num_tokens"] % multiple == sizes["max_seqlen"] % multiple == 0
    for i in range(0, 8, 2):
        for pair in ((i, i + 1), (i, i), (0, i)):
            batch = pad_segments(collate([packs.row(p) for p in pair], kind), multiple)
            batch = pad_batch(batch, **sizes)
            assert (batch.cu_seqlens.diff() % multiple == 0).all()
            shapes.add(
                (
                    batch.num_tokens,
                    batch.num_segments,
                    batch.max_seqlen,
                    len(batch.target_index),
                    batch.max_seqlen_k,
                )
            )
    assert shapes == {(*sizes.values(), sizes["max_seqlen"])}
    with pytest.raises(ConfigError, match="static_sizes"):
        static_sizes(manifest, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # torch's own, in dynamo
def test_compiled_once(kit: SimpleNamespace) -> None:
    """Batches of fixed shape need no second compilation."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = use_packed_attention(kit.tiny_model(), "sdpa")
    compiled = torch.compile(model, backend=counter, dynamic=False)
    frames = []
    for seed in range(3):
        inputs = pad_batch(make(kit, seed), **SIZES).model_inputs()
        difference = compiled(**inputs).logits - model(**inputs).logits
        assert difference.abs().max() < 1e-9
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] == frames[2] > 0


def test_a_share_without_targets(kit: SimpleNamespace) -> None:
    """A rank whose tokens predict nothing adds zeros, and has gradients to reduce."""
    batch = pad_segments(make(kit, 0), 4)
    shard = ContextShard.of(batch, ContextSplit.zigzag(batch.cu_seqlens, 2), 0)
    shard = replace(shard, targets=type(shard.targets)(*[shard.index[:0]] * 3))
    hidden = torch.ones(shard.num_tokens, 4, requires_grad=True)
    weight = torch.ones(kit.VOCAB, 4, requires_grad=True)
    for given_rows in (
        {"hidden": hidden, "weight": weight},
        {"logits": hidden @ weight.T},
    ):
        logps = segment_logps(shard, **given_rows)
        assert logps.tolist() == [0] * batch.num_segments
        for gradient in torch.autograd.grad(logps.sum(), (hidden, weight)):
            assert not gradient.any()
