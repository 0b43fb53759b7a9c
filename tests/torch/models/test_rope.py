"""RoPE tables that depend on the longest position: those of each sequence alone, in any row."""

from __future__ import annotations

import copy
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sized_pairs import pairs
from torch import Tensor

from packstore.errors import BackendError
from packstore.torch import PackedBatch, collate, packed_logps, use_packed_attention
from packstore.torch.parallel import pad_batch, pad_segments
from packstore.torch.parallel.context import ContextShard, ContextSplit

LIMIT = 24
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 1.5],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
YARN = {**DYNAMIC, "rope_type": "yarn", "original_max_position_embeddings": LIMIT}
MSCALES = {"long_mscale": 1.3, "short_mscale": 1.1}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CASES = [
    ("llama", LONGROPE),
    ("qwen3", LONGROPE),
    ("phi3", LONGROPE),
    ("phimoe", {**LONGROPE, **MSCALES}),
    ("llama", DYNAMIC),
    ("internlm3", DYNAMIC),
    ("hunyuan_v1_dense", {**DYNAMIC, "alpha": 10.0}),
    ("gemma3_text", {"full_attention": LONGROPE, "sliding_attention": {**DYNAMIC, "factor": 2.0}}),
    ("llama", {**DYNAMIC, "rope_type": "linear"}),
    ("llama", YARN),
    ("llama", LLAMA3),
    (
        "olmo3",
        {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ),
]
NAMES = [f"{n}-{r.get('rope_type', 'by-layer')}" for n, r in CASES]


ACROSS = ((4, 6, 9), (30, 8, 5), (20, 3, 2), (40, 12, 12), (2, 1, 1), (26, 9, 9))
"""Tokens of prompt, chosen and rejected: sequences on both sides of the limit, no pair across."""


ACROSS_ALIKE = ((4, 6, 9), (30, 8, 8), (20, 3, 2), (40, 12, 12), (2, 1, 1), (26, 9, 9))
"""The same, with both sides of a long pair of one length."""


def model_of(kit: SimpleNamespace, name: str, rope: dict[str, Any]) -> Any:
    """With positions up to the limit where `dynamic` begins there."""
    size = {"max_position_embeddings": LIMIT} if "dynamic" in str(rope) else {}
    if name == "phi3":  # its own setting goes over that of the tables
        size["original_max_position_embeddings"] = LIMIT
    return kit.tiny_family(name, torch.float32, rope_parameters=copy.deepcopy(rope), **size).eval()


def alone(model: Any, batch: PackedBatch) -> Tensor:
    """The logits of the row, each sequence by its own copy of a model that has computed nothing."""
    ids = batch.input_ids if batch.kv_index is None else batch.input_ids[batch.kv_index]
    logits = [copy.deepcopy(model)(x[None]).logits[0] for x in ids.split(batch.lengths.tolist())]
    places = zip(batch.segment_ids, batch.position_ids, strict=True)
    return torch.stack([logits[segment][position] for segment, position in places])


def skip_broken_tables(model: Any) -> None:
    """Skips where the model fails by itself, as transformers 5.17 does at the second long row."""
    try:
        for _ in range(2):
            model(torch.arange(1, 2 * LIMIT)[None] % 9, use_cache=False)
    except UnboundLocalError as error:
        pytest.skip(f"transformers {transformers.__version__}, the model by itself: {error}")


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize(("name", "rope"), CASES, ids=NAMES)
@torch.no_grad()
def test_each_sequence_has_the_logits_that_it_has_alone(
    kit: SimpleNamespace, name: str, rope: dict[str, Any], layout: str
) -> None:
    model = model_of(kit, name, rope)
    if "longrope" in str(rope) and "rope_type" not in rope:
        skip_broken_tables(copy.deepcopy(model))
    sizes = ACROSS if layout == "concat" or "dynamic" not in str(rope) else ACROSS_ALIKE
    batch = collate(kit.packed(pairs(*sizes), [len(sizes)], layout), "preference")
    expected = alone(model, batch)
    use_packed_attention(model, "reference")
    for _ in range(2):  # the second call may not depend on the first
        found = model(**batch.model_inputs()).logits[0]
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
@torch.no_grad()
def test_the_log_probs_of_a_pair_do_not_depend_on_its_neighbours(
    kit: SimpleNamespace, rope: dict[str, Any]
) -> None:
    model = use_packed_attention(model_of(kit, "llama", rope))
    both = collate(kit.packed(pairs((5, 6, 4), (60, 10, 9)), [2], "concat"), "preference")
    one = collate(kit.packed(pairs((5, 6, 4)), [1], "concat"), "preference")
    assert (packed_logps(model, both)[:2] - packed_logps(model, one)).abs().max() < 1e-4


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_shared_prefix_of_sequences_with_different_tables_is_refused(
    kit: SimpleNamespace, rope: dict[str, Any]
) -> None:
    model = use_packed_attention(model_of(kit, "llama", rope))
    examples = pairs((4, 2, 2), (20, 9, 3))
    batch = collate(kit.packed(examples, [2], "shared_prefix"), "preference")
    with pytest.raises(BackendError, match=r"found 23 and 29 tokens, .*Pack with layout='concat'"):
        packed_logps(model, batch)
    packed_logps(model, collate(kit.packed(examples, [2], "concat"), "preference"))


def test_dynamic_tables_differ_for_each_length_beyond_the_limit(kit: SimpleNamespace) -> None:
    model = use_packed_attention(model_of(kit, "llama", DYNAMIC))
    batch = collate(kit.packed(pairs((30, 9, 3)), [1], "shared_prefix"), "preference")
    with pytest.raises(BackendError, match="found 33 and 39 tokens, and other tables beyond 24"):
        packed_logps(model, batch)


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@torch.no_grad()
def test_padding_is_no_part_of_the_length(kit: SimpleNamespace, layout: str) -> None:
    """A sequence of 23 tokens, padded to 32, keeps the short table."""
    model = use_packed_attention(model_of(kit, "llama", LONGROPE))
    batch = collate(kit.packed(pairs((20, 3, 3), (30, 2, 2)), [2], layout), "preference")
    expected = packed_logps(model, batch)
    padded = pad_batch(pad_segments(batch, 32), num_tokens=256)
    assert padded.max_seqlen_k > LIMIT
    assert (packed_logps(model, padded)[:4] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_the_first_part_of_a_long_sequence_has_its_tables(
    kit: SimpleNamespace, rope: dict[str, Any]
) -> None:
    """As a context-parallel rank holds it: its own positions stay below the limit."""
    model = use_packed_attention(model_of(kit, "llama", rope))
    batch = collate(kit.packed(pairs((20, 8, 8), (4, 4, 4)), [2], "concat"), "preference")
    tables = {}

    def keep(_: Any, __: Any, output: Any) -> None:
        tables["seen"] = torch.cat(output, -1)[0]

    model.model.rotary_emb.register_forward_hook(keep)
    model(**batch.model_inputs())
    whole = tables["seen"]
    padded = pad_segments(batch, 4)
    split = ContextSplit.zigzag(padded.cu_seqlens, 2)
    for rank in range(2):
        shard = ContextShard.of(padded, split, rank)
        inputs = shard.model_inputs()
        tables.clear()
        with suppress(Exception):  # no other ranks to gather keys from
            model(**inputs)
        assert torch.equal(tables["seen"], whole[shard.index])


def test_without_a_layout_it_is_refused(kit: SimpleNamespace) -> None:
    model = use_packed_attention(model_of(kit, "llama", LONGROPE))
    with pytest.raises(BackendError, match="RoPE of type 'longrope' must know the segments"):
        model(torch.arange(5)[None])
    model.set_attn_implementation("sdpa")  # to generate
    model(torch.arange(5)[None])


def test_a_model_with_tables_of_an_unknown_module_runs_once_per_sequence(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(kit, "llama", LONGROPE)
    del model.model.rotary_emb.rope_type
    use_packed_attention(model)
    assert "a module of its own makes RoPE tables" in caplog.text


@torch.no_grad()
def test_copies_of_a_prepared_model_have_hooks_of_their_own(kit: SimpleNamespace) -> None:
    model = use_packed_attention(use_packed_attention(model_of(kit, "llama", DYNAMIC)))
    assert len(model.model.rotary_emb._forward_hooks) == 1
    batch = collate(kit.packed(pairs(*ACROSS), [len(ACROSS)], "concat"), "preference")
    expected = packed_logps(model, batch)
    twin = copy.deepcopy(model)
    del model
    assert torch.equal(packed_logps(twin, batch), expected)


@torch.no_grad()
def test_modules_in_a_list_are_refused_under_the_compiler(kit: SimpleNamespace) -> None:
    """No parent of theirs is called, and a graph cannot read the layout of the thread."""
    packs = kit.packed(pairs(*ACROSS_ALIKE), [len(ACROSS_ALIKE)], "concat")
    batch = collate(packs, "preference")
    model = kit.tiny_family("granite_swa", torch.float32, rope_parameters=copy.deepcopy(LONGROPE))
    model = use_packed_attention(model.eval(), "reference")
    model(**batch.model_inputs())
    torch._dynamo.reset()
    with pytest.raises(BackendError, match="run it without torch"):
        torch.compile(model, backend="eager")(**batch.model_inputs())
    torch._dynamo.reset()
