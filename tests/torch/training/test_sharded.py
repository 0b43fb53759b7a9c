"""FSDP2 on two ranks with bfloat16 weights: by Accelerate's ``prepare``, and by ``fully_shard``."""

from __future__ import annotations

import json
import math
import os
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, PackstoreError
from packstore.testing import random_examples
from packstore.torch import PackedPolicy, PreferenceLoss, collate, use_packed_attention
from packstore.torch.reference.reference import run_on_rank_zero

pytest.importorskip("accelerate", reason="training needs accelerate")

CONFIGURED = {  # answers that `accelerate config` proposes for FSDP
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def by_accelerate(settings: dict[str, Any]) -> dict[str, Any]:
    """What a run on two ranks prepares, and what it trains."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {**CONFIGURED, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    from packstore.torch import train
    from packstore.torch.training.setup import prepare

    # Accelerate shards on accelerators only; the kind of ranks is all that it asks for.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    run = prepare(TrainConfig.of(**settings))
    batch = next(iter(run.loader))
    logps, ref_logps = run.policy(batch), run.reference(batch)
    out = run.loss_fn(logps, batch, ref_logps)
    out.loss.backward()
    inner = run.policy.model
    found = {
        "sharded": type(inner.model.layers[0]).__name__,
        "names": [name for name, _ in run.policy.named_parameters()],
        "tied": inner.lm_head.weight is inner.model.embed_tokens.weight,
        "dtypes": [logps.dtype, ref_logps.dtype, out.loss.dtype, inner.lm_head.weight.grad.dtype],
        "apart": float((logps.detach() - ref_logps).abs().max()),
        "optimized": sum(len(g["params"]) for g in run.optimizer.param_groups),
    }
    train(**settings)
    return found


def by_hand(model: Any, batch: Any) -> dict[str, Any]:
    """Log-probs with a policy that leaves outputs alone; the refusal with one that rounds them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, output in (("kept", None), ("rounded", torch.bfloat16)):
        policy = PackedPolicy(use_packed_attention(deepcopy(model)))
        precision = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, output, cast_forward_inputs=False
        )
        fully_shard(policy, mesh=mesh, mp_policy=precision)
        found[name] = policy(batch).detach()
        try:
            PreferenceLoss("simpo")(found[name], batch)
        except ConfigError as error:
            found["refused"] = (name, str(error))
    return found


def on_rank(task: dict[str, Any]) -> dict[str, Any]:
    """Both ways, in one start of the processes."""
    hand = by_hand(task["model"], task["batch"])
    try:
        run_on_rank_zero(lambda: 1 / 0)
    except (ZeroDivisionError, PackstoreError) as error:  # else the other rank would wait
        hand["failure"] = type(error).__name__
    return {"hand": hand, "accelerate": by_accelerate(task["settings"])}


def test_log_probs_stay_exact_and_weights_tied(kit: SimpleNamespace, tmp_path: Path) -> None:
    settings = kit.short_run(tmp_path)
    model = kit.tiny_model(dtype=torch.float32, tie_word_embeddings=True)
    model.save_pretrained(settings["model"])
    settings |= {"output": str(tmp_path / "out"), "max_steps": 2, "log_every": 1}
    settings |= {"mixed_precision": "bf16", "learning_rate": 1e-3}
    packs = kit.packed(random_examples(6, seed=4), [3, 3], "shared_prefix")
    batch = collate(packs, "preference")
    task = {"settings": settings, "model": model, "batch": batch}
    lower = deepcopy(model)  # weights alone: a buffer of rounded frequencies would be another model
    for weight in lower.parameters():
        weight.data = weight.data.bfloat16()
    failures = []
    expected = PackedPolicy(use_packed_attention(lower))(batch)
    for found in launch(__file__, task, 2, tmp_path):
        sharded, hand = found["accelerate"], found["hand"]
        # Accelerate's own policy would make all of them bfloat16, 2 nats apart at 300.
        assert sharded["dtypes"] == [torch.float32] * 4
        assert sharded["apart"] == 0.0
        assert sharded["sharded"] == "FSDPLlamaDecoderLayer"
        assert sharded["tied"]
        assert sharded["names"] == [name for name, _ in PackedPolicy(model).named_parameters()]
        assert sharded["optimized"] == len(sharded["names"])
        assert expected.dtype == hand["kept"].dtype == torch.float32
        torch.testing.assert_close(hand["kept"], expected, rtol=0, atol=0)
        name, said = hand["refused"]
        assert name == "rounded"
        assert "output_dtype=None" in said
        failures.append(hand["failure"])
    assert failures == ["ZeroDivisionError", "PackstoreError"]
    lines = Path(settings["output"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["loss"] == pytest.approx(math.log(2), abs=1e-7)
