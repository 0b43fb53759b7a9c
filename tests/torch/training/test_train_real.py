"""The reward-aware losses on real pairs with human votes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="training needs accelerate")

import packstore
from packstore.torch.losses.formulas import LOSSES
from packstore.torch.training.train import train

RPO = [name for name in LOSSES if name.startswith("rpo_")]
PAIRS, STEPS = 192, 12


@pytest.fixture(scope="module")
def scored(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Pairs with votes of two thirds and more for the better answer, and a tiny model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("scored")
    lines = (
        (shared_data / "pairs" / "pandalm_scored.jsonl").read_text(encoding="utf-8").splitlines()
    )
    votes = [line for line in lines if '"chosen_reward": 1.0' not in line]
    clear = [line for line in lines if '"chosen_reward": 1.0' in line]
    (folder / "rows.jsonl").write_text("\n".join((votes + clear)[:PAIRS]) + "\n")
    dataset = packstore.pack(
        str(folder / "rows.jsonl"),
        str(folder / "packed"),
        tokenizer=str(shared_data / "tokenizers" / "small_bpe" / "tokenizer.json"),
        pack_size=512,
        max_length=256,
        layout="shared_prefix",
        max_drop_rate=0.5,  # many are longer than is trained on here
    )
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=2000, **size, **heads, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rewards = np.concatenate([p.reward for p in dataset.iter_packs()]).reshape(-1, 2)
    assert len(set(map(tuple, rewards.tolist()))) == 3  # not only 1 and 0
    return {"dataset": dataset.url, "model": str(folder / "model")}


@pytest.mark.slow
@pytest.mark.parametrize("name", RPO)
def test_it_learns_from_votes(scored: dict[str, Any], tmp_path: Path, name: str) -> None:
    """The loss falls, and the chosen reward rises over the rejected one."""
    train(
        **scored,
        output=str(tmp_path),
        loss=name,
        loss_parameters={"beta": 0.1, "eta": 1.0},
        examples_per_step=32,
        packs_per_batch=4,
        epochs=4,
        max_steps=STEPS,
        learning_rate=1e-2,
        warmup=0,
        log_every=1,
    )
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    losses = [r["loss"] for r in found]
    assert len(losses) == STEPS
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:2])
    assert found[-1]["rewards/chosen"] > found[-1]["rewards/rejected"]


def test_all_of_them_are_here() -> None:
    assert sorted(RPO) == ["rpo_bwd_kl", "rpo_fwd_kl", "rpo_sq"]
