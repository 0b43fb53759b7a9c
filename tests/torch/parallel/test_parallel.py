"""Padding, splits and fixed shapes against counts by hand: nothing that is real may
move.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from forests import forest_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import pad
from torch.utils._pytree import keystr, tree_flatten_with_path

from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    ContextShard,
    ContextSplit,
    PackedBatch,
    PreferenceLoss,
    collate,
    context_shard,
    packed_logps,
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
DATASETS = itertools.count()


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
        num_tokens = (batch.num_tokens // 120 + 2) * 120
        keys = {} if layout == "concat" else {"num_keys": 1500}
        batch = pad_batch(batch, num_tokens=num_tokens, num_segments=240, **keys)
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


def shapes_of(batch: PackedBatch) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a batch and its layout; cached ones too."""
    shapes = {}
    for owner in (batch, batch.layout):
        leaves, _ = tree_flatten_with_path(dict(sorted(vars(owner).items())))
        for path, value in leaves:
            if isinstance(value, Tensor):
                shapes[type(owner).__name__ + keystr(path)] = tuple(value.shape)
    return shapes


@settings(max_examples=30, deadline=None)
@given(SEEDS, KINDS, LAYOUTS, st.sampled_from([1, 3, 8]))
def test_sizes_from_the_manifest(
    kit: SimpleNamespace, seed: int, kind: str, layout: str, multiple: int
) -> None:
    """Every batch of a dataset fits them, and has the shapes of every other."""
    if layout == "forest":
        layout = "shared_prefix"
        _, packs = forest_packs(seed, kind, num_packs=4)
    else:
        examples = random_examples(12, seed=seed, kind=kind)
        packs = kit.packed(examples, [1, 3, 5, 3], layout)
    url = f"memory://sizes-{next(DATASETS)}"
    dataset = kit.write(url, packs, kind, layout)
    sizes = static_sizes(dataset.manifest, 2, multiple=multiple)
    assert sizes["num_tokens"] % multiple == sizes["max_seqlen"] % multiple == 0
    shapes = []
    for rows in ((0, 1), (1, 1), (3, 0), (2,)):
        packs_of_batch = [packs.row(row) for row in rows]
        batch = pad_segments(collate(packs_of_batch, kind), multiple)
        padded = pad_batch(batch, **sizes).to("cpu")
        assert (padded.cu_seqlens.diff() % multiple == 0).all()
        assert padded.max_seqlen == padded.max_seqlen_k == sizes["max_seqlen"]
        assert int(padded.cu_seqlens_k.diff().max()) <= sizes["max_seqlen"]
        assert int(padded.num_responses.sum()) == sizes["num_segments"]
        assert (padded.kv_index is None) == (layout == "concat")
        assert padded.num_packs == 2
        shapes.append(shapes_of(padded))
    assert shapes == [shapes[0]] * 4
    assert len(shapes[0]) > 20


def test_a_dataset_without_packs_has_no_sizes(kit: SimpleNamespace) -> None:
    examples = random_examples(4)
    packs = kit.packed(examples, [2, 2], "concat")
    dataset = kit.write("memory://no-sizes", packs, "preference", "concat")
    with pytest.raises(ConfigError, match="static_sizes"):
        static_sizes(dataset.manifest, 0)


def test_sizes_of_a_mix_fit_packs_of_all(kit: SimpleNamespace) -> None:
    batches = []
    manifests = []
    for layout, length in (("concat", 60), ("shared_prefix", 9)):
        examples = random_examples(6, seed=length, max_prompt=length)
        packs = kit.packed(examples, [4, 2], layout)
        url = f"memory://mix-sizes-{layout}"
        manifests.append(kit.write(url, packs, "preference", layout).manifest)
        batches += [packs.row(0), packs.row(1)]
    sizes = static_sizes(manifests, 2)
    shapes = [
        shapes_of(pad_batch(collate([one, other], "preference"), **sizes))
        for one, other in product(batches, repeat=2)
    ]
    assert shapes == [shapes[0]] * len(shapes)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("layout", ["shared_prefix", "forest"])
def test_padding_keys_change_no_loss(
    kit: SimpleNamespace, layout: str, backend: str
) -> None:
    """Nor a gradient: no query sees them."""
    model = use_packed_attention(kit.tiny_model().double(), backend)
    loss_fn = PreferenceLoss("dpo", sft_weight=0.5)
    for seed in range(3):
        batch = make(kit, seed, "preference", layout)
        sizes = SIZES | {"num_keys": 3 * SIZES["num_tokens"], "num_segments": 80}
        padded = pad_batch(batch, **sizes, num_runs=500)
        values = []
        for one in (batch, padded):
            model.zero_grad()
            loss = loss_fn(packed_logps(model, one), one).loss
            loss.backward()
            gradients = [p.grad.flatten() for p in model.parameters()]
            values.append(torch.cat([loss.detach()[None], *gradients]))
        assert (values[0] - values[1]).abs().max() < 1e-12
        assert values[0].abs().max() > 1e-3


def test_padding_keys_are_spread(kit: SimpleNamespace) -> None:
    """No token has many more copies than others: their gradients are summed in turn."""
    batch = make(kit, 0, "preference", "shared_prefix")
    sizes = {"num_tokens": 300, "num_segments": 200, "max_seqlen": 40}
    few = pad_batch(batch, **sizes, num_keys=batch.num_keys + 300)
    many = pad_batch(batch, **sizes, num_keys=5000, num_runs=1000)
    assert many.key_runs.shape == (3, 1000)
    copies = [one.kv_index.bincount(minlength=300) for one in (few, many)]
    assert copies[0].max() <= copies[1].max() <= 5000 / 300 * 2
    assert (many.key_runs[0].diff() >= 0).all()
    for name, size in (("num_keys", 300), ("num_runs", 30)):
        with pytest.raises(ConfigError, match=f"{name}={size}"):
            pad_batch(batch, **sizes, **{"num_keys": 5000, name: size})


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
