"""Windows that models put into the mask, which packed attention never builds."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packstore.errors import BackendError
from packstore.testing import random_examples
from packstore.torch import collate, use_packed_attention
from packstore.torch.models.mask import RequestedMask

MASK_ONLY: dict[str, dict[str, Any]] = {
    "phimoe": {},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "smollm3": {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
}


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("name", list(MASK_ONLY))
def test_a_window_that_stands_in_the_mask_alone_is_applied(
    kit: SimpleNamespace, name: str, layout: str
) -> None:
    model = kit.tiny_family(name, torch.float32, sliding_window=4, **MASK_ONLY[name]).eval()
    batch = collate(kit.packed(random_examples(3, seed=3), [3], layout), "preference")
    assert int(batch.lengths.max()) > 8
    ids = batch.input_ids if batch.kv_index is None else batch.input_ids[batch.kv_index]
    own = [model(input_ids=x[None]).logits[0] for x in ids.split(batch.lengths.tolist())]
    expected = torch.stack(
        [own[s][p] for s, p in zip(batch.segment_ids, batch.position_ids, strict=True)]
    )
    for backend in ("reference", "sdpa"):
        use_packed_attention(model, backend)
        found = model(**batch.model_inputs()).logits[0]
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_two_windows_for_one_layer_are_refused(kit: SimpleNamespace) -> None:
    model = use_packed_attention(kit.tiny_family("mistral", torch.float32))
    batch = collate(kit.packed(random_examples(2, seed=0), [2], "concat"), "preference")
    model(**batch.model_inputs())
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config.sliding_window = 9
    with pytest.raises(BackendError, match=r"must be that of its mask; found a window of 9, and 4"):
        model(**batch.model_inputs())


def test_a_mask_function_of_its_own_is_refused(kit: SimpleNamespace) -> None:
    from transformers.masking_utils import create_causal_mask

    model = use_packed_attention(kit.tiny_family("llama", torch.float32))
    rows = model.get_input_embeddings()(torch.arange(4)[None])
    with pytest.raises(BackendError, match=r"a mask function of its own.*'per_sequence'"):
        create_causal_mask(model.config, rows, None, None, or_mask_function=lambda *_: True)


def test_models_that_change_the_mask_run_once_per_sequence(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    model = use_packed_attention(kit.tiny_family("doge", torch.float32))
    batch = collate(kit.packed(random_examples(2, seed=0), [2], "concat"), "preference")
    model(**batch.model_inputs())
    assert "runs whole once per sequence" in caplog.text
    assert "must hand the mask to attention as it is; found a model that reads" in caplog.text
    with pytest.raises(BackendError, match="a model that cuts it"):
        RequestedMask(4)[:, :, :, :3]


def test_the_stand_in_can_be_copied() -> None:
    """Hooks that move inputs to devices ask for ``to``; checkpoints copy and pickle."""
    mask = RequestedMask(4)
    assert not hasattr(mask, "to")
    for made in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert (made.window, made.chunk) == (4, None)
