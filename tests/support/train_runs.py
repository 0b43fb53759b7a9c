"""A tiny model to train, and what a run leaves in its folder, read as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def save_gpt2(folder: Path) -> str:
    """A GPT-2 of two layers in float64, which computes in float64 throughout."""
    torch.manual_seed(0)
    off = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    size = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**size, **off, bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    GPT2LMHeadModel(config).double().save_pretrained(folder)
    return str(folder)


def records(output: Path, metric: str = "loss") -> list[dict[str, Any]]:
    """The records that have this metric: those of training, or with ``eval/loss`` of validation."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if metric in record]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in records(output)]


def checkpoints(output: Path) -> list[Path]:
    return sorted((output / "checkpoints").glob("step-*"))


def state_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    return state


def change_state(checkpoint: Path, **changes: Any) -> None:
    state = {**state_of(checkpoint), **changes}
    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
