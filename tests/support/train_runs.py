"""A tiny model to train, and what a run leaves in its folder, read as files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

CONFIGURED = {  # answers that `accelerate config` proposes for FSDP
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def save_gpt2(folder: Path) -> str:
    """A GPT-2 of two layers in float64, which computes in float64 throughout."""
    torch.manual_seed(0)
    off = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    size = {
        "vocab_size": 50,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
    }
    config = GPT2Config(
        **size, **off, bos_token_id=None, eos_token_id=None, initializer_range=0.3
    )
    GPT2LMHeadModel(config).double().save_pretrained(folder)
    return str(folder)


def shard() -> None:
    """Makes the trainings of this process, a rank, sharded by FSDP2."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ |= CONFIGURED
    # Accelerate shards on accelerators only; the kind of ranks is all that it asks for.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def records(output: Path, metric: str = "loss") -> list[dict[str, Any]]:
    """The records that have this metric: those of training, or with ``eval_loss`` of
    evaluation.
    """
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))[
        "log_history"
    ]
    return [record for record in history if metric in record]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in records(output)]


def checkpoints(output: Path) -> list[Path]:
    return sorted(output.glob("checkpoint-*"), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def arguments_of(output: Path, **more: Any) -> dict[str, Any]:
    """Settings of a Trainer on the CPU that logs every step, and what is given
    besides.
    """
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    usual = {"output_dir": str(output), "learning_rate": 1e-3, "logging_steps": 1}
    return {**quiet, **usual, **more}
