"""GRPO with rollouts that are kept: a run that is killed anywhere replays to the bit.

The game is that of ``grpo.py``: a tiny model learns to repeat the larger of two digits.
Each step samples answers and appends them to a dataset, with the log-prob of each token
as side data, and then trains on the newest versions of the dataset. One version is one
step, so a restart knows what was sampled. It begins at the checkpoint::

    python examples/rollouts.py OUT [--steps 40]

OUT has the dataset in ``rollouts``, the log-probs in ``rollouts-values``, and
``checkpoint.pt``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import packstore
import packstore.torch as pt
from packstore.errors import DatasetNotFoundError

PROMPTS, ANSWERS, LENGTH, DIGITS = 16, 8, 4, 10
WINDOW = 4  # versions to train on
CLEAN_EVERY = 100  # steps

SETTINGS: dict[str, Any] = {
    "pack_size": 256,
    "token_values": {"old_logps": "logprobs"},
    "carry": ("group:string", "step:int64"),
}
"""How rollouts are packed; `append` takes these settings from the dataset."""


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=DIGITS,
        max_position_embeddings=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def sample(model: LlamaForCausalLM, step: int) -> list[dict[str, Any]]:
    """Return a record for each prompt, with answers, rewards and log-probs.

    They depend on the weights and the step only.
    """
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(DIGITS, (PROMPTS, 2), generator=generator)
    ids = prompts.repeat_interleave(ANSWERS, 0)
    logps = []
    model.set_attn_implementation("sdpa")  # its own, to sample
    for _ in range(LENGTH):
        log_probs = model(input_ids=ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(log_probs.exp(), 1, generator=generator)
        ids = torch.cat([ids, token], 1)
        logps.append(log_probs.gather(1, token))
    answers = ids[:, 2:].view(PROMPTS, ANSWERS, LENGTH)
    answer_logps = torch.cat(logps, 1).view(PROMPTS, ANSWERS, LENGTH)

    is_right = answers == prompts.amax(1)[:, None, None]
    rewards = is_right.float().mean(-1)
    return [
        {
            "prompt_ids": prompts[group].tolist(),
            "responses": answers[group].tolist(),
            "scores": rewards[group].tolist(),
            "logprobs": answer_logps[group].tolist(),
            "group": f"{step}-{group}",
            "step": step,
        }
        for group in range(PROMPTS)
    ]


def rollouts_of(step: int, model: LlamaForCausalLM, url: str) -> packstore.Dataset:
    """Return the dataset up to the rollouts of `step`; sample them if they are absent.

    Step 0 writes version 1, and so on. A job that is killed leaves a version whole or
    not at all.
    """
    try:
        newest = packstore.open(url)
    except DatasetNotFoundError:
        return packstore.pack(sample(model, step), url, **SETTINGS)
    if newest.version == step:
        return packstore.append(newest, sample(model, step))
    return packstore.open(url, version=step + 1)


def advantages_of(batch: pt.PackedBatch) -> torch.Tensor:
    """Return the reward of each answer, less the mean of its group, in deviations."""
    rewards = batch.rewards.view(-1, ANSWERS)
    advantages = rewards - rewards.mean(1, keepdim=True)
    return (advantages / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def train_on(
    rollouts: packstore.Dataset,
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
) -> float:
    """Train on the newest versions once; return the mean reward of the newest one."""
    dataset = pt.PackedDataset(
        rollouts,
        last_versions=WINDOW,
        side=f"{rollouts.url}-values",
        seed=rollouts.version,
    )
    loss_fn = pt.PolicyLoss(average="group", clip_low=0.2, clip_high=0.28)
    pt.use_packed_attention(model)
    newest_rewards = []
    for batch in pt.PackedDataLoader(dataset, examples_per_step=32):
        # PolicyLoss finds the stored log-probs in batch.token_columns["old_logps"].
        logps = pt.packed_logps(model, batch, per_token=True)
        loss_fn(logps, batch, advantages=advantages_of(batch)).loss.backward()
        if batch.step.last:
            optimizer.step()
            optimizer.zero_grad()
        is_newest = batch.columns["step"] == rollouts.version - 1
        newest_rewards.append(batch.rewards.view(-1, ANSWERS)[is_newest])
    return float(torch.cat(newest_rewards).mean())


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint: a reader finds the old one or the new one, and no part."""
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def main(out: Path, steps: int) -> None:
    torch.set_num_threads(1)  # sums in one order
    out.mkdir(parents=True, exist_ok=True)
    url = str(out / "rollouts")
    checkpoint = out / "checkpoint.pt"
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    next_step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        next_step = state["next_step"]

    for step in range(next_step, steps):
        rollouts = rollouts_of(step, model, url)
        reward = train_on(rollouts, model, optimizer)
        print(f"step {step}: reward {reward:.2f}", flush=True)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "next_step": step + 1,
        }
        save(checkpoint, state)
        if step % CLEAN_EVERY == CLEAN_EVERY - 1:
            # Each version has a manifest of all packs before it: remove the old ones.
            packstore.clean(url, keep_versions=WINDOW, delete=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    main(arguments.out, arguments.steps)
