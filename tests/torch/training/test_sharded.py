"""FSDP2 on two ranks with bfloat16 weights: by Accelerate's ``prepare``, and by
``fully_shard``.
"""

from __future__ import annotations

import math
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
from torch.nn.modules.module import register_module_forward_pre_hook
from train_runs import shard
from transformers import AutoModelForCausalLM, TrainingArguments

import packstore
from packstore.errors import ConfigError, PackstoreError
from packstore.testing import random_examples
from packstore.torch import (
    PackedPolicy,
    PackedTrainer,
    PreferenceLoss,
    collate,
    use_packed_attention,
    write_ref_logps,
)
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.reference.reference import run_on_rank_zero


def by_accelerate(settings: dict[str, Any], wrong: str) -> dict[str, Any]:
    """Trains; tells how a failure on rank 0 ends, and which modules ran."""
    settings = dict(settings)
    args = TrainingArguments(**settings.pop("arguments"))
    args.device.type  # noqa: B018 (sets up the ranks, of whose kind it then keeps a state)
    shard()
    with pytest.raises(PackstoreError) as caught:  # else the other rank would wait
        PackedTrainer(args=args, **settings, ref_logps=wrong).train()
    ran: set[str] = set()
    register_module_forward_pre_hook(lambda module, _: ran.add(type(module).__name__))
    trainer = PackedTrainer(args=args, **settings)
    trainer.train()
    trainer.save_model()
    loss = trainer.state.log_history[0]["loss"]
    return {"failure": type(caught.value).__name__, "ran": ran, "loss": loss}


def by_hand(model: Any, batch: Any) -> dict[str, Any]:
    """Log-probs with a policy that leaves outputs alone; the refusal with one that
    rounds them.
    """
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
    # Torch's default casts inputs of each layer, and so copies the layout of the row.
    policy = PackedPolicy(use_packed_attention(deepcopy(model)))
    for module in (*policy.model.model.layers, policy):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    used: list[AttentionLayout] = []
    split = AttentionLayout.split

    def recorded(layout: AttentionLayout, *rows: Any) -> Any:
        used.append(layout)
        return split(layout, *rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionLayout, "split", recorded)
        policy(batch)
    found["layouts"] = (len(used), len(set(used)))
    try:
        run_on_rank_zero(lambda: 1 // 0)
    except ArithmeticError as error:
        found["error"] = repr(error)
    except PackstoreError as error:
        found["error"] = str(error)
    return found


def on_rank(task: dict[str, Any]) -> dict[str, Any]:
    """Both ways, in one start of the processes."""
    return {
        **by_hand(task["model"], task["batch"]),
        **by_accelerate(task["settings"], task["wrong"]),
    }


@pytest.mark.slow
def test_log_probs_stay_exact_and_weights_tied(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    settings = kit.short_run(tmp_path)
    model = kit.tiny_model(dtype=torch.float32, tie_word_embeddings=True)
    model.save_pretrained(settings["model"])
    arguments = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 2,
        "logging_steps": 1,
    }
    arguments |= {"bf16": True, "learning_rate": 1e-3, "use_cpu": True, "save_steps": 2}
    settings["arguments"] = {**arguments, "disable_tqdm": True, "report_to": "none"}
    packs = kit.packed(random_examples(6, seed=4), [3, 3], "shared_prefix")
    other = use_packed_attention(kit.tiny_model(dtype=torch.float32))
    wrong = str(tmp_path / "wrong")
    write_ref_logps(other, packstore.open(settings["train_dataset"]), wrong)
    batch = collate(packs, "preference")
    task = {"settings": settings, "model": model, "batch": batch, "wrong": wrong}
    lower = deepcopy(
        model
    )  # weights alone: a buffer of rounded frequencies would be another model
    for weight in lower.parameters():
        weight.data = weight.data.bfloat16()
    expected = PackedPolicy(use_packed_attention(lower))(batch)
    ranks = launch(__file__, task, 2, tmp_path)
    for rank in ranks:
        assert "FSDPLlamaDecoderLayer" in rank["ran"]
        assert expected.dtype == rank["kept"].dtype == torch.float32
        torch.testing.assert_close(rank["kept"], expected, rtol=0, atol=0)
        assert rank["refused"][0] == "rounded"
        assert "output_dtype=None" in rank["refused"][1]
        assert rank["layouts"] == (
            2,
            1,
        )  # each layer attends; what one waited for serves all
        assert "ZeroDivisionError" in rank["error"]  # else the other rank would wait
    assert [rank["failure"] for rank in ranks] == ["CompatibilityError"] * 2
    # Accelerate's own policy would make log-probs bfloat16, 2 nats apart at 300.
    assert ranks[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    # The model is gathered for the folder of the run alone; a checkpoint keeps its
    # parts.
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert list(checkpoint.glob("pytorch_model_fsdp*"))
    assert not list(checkpoint.glob("*.safetensors"))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert trained.lm_head.weight is trained.model.embed_tokens.weight
    for before, after in zip(model.parameters(), trained.parameters(), strict=True):
        assert before.dtype == after.dtype == torch.float32
        assert not torch.equal(before, after)
