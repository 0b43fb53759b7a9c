"""GRPO on packs: a tiny model learns to repeat the larger of two digits, in seconds on
a CPU.

Each step samples eight answers to each of 16 prompts and rewards every digit that is
right. The answers are packed with their prompt once, and trained on twice::

    python examples/grpo.py [--steps 80]
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import packstore.torch as pt

PROMPTS, ANSWERS, LENGTH, DIGITS = 16, 8, 4, 10


def sample(
    model: LlamaForCausalLM, prompts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws an answer to each prompt; returns it and its log-probs, `[n,
    LENGTH]` each.
    """
    ids, logps = prompts, []
    for _ in range(LENGTH):
        chances = model(input_ids=ids).logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(chances.exp(), 1)
        ids, logps = torch.cat([ids, drawn], 1), [*logps, chances.gather(1, drawn)]
    return ids[:, prompts.shape[1] :], torch.cat(logps, 1)


def train(steps: int) -> list[float]:
    """Returns the mean reward of each step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(
        vocab_size=DIGITS, max_position_embeddings=16, **sizes, **heads
    )
    model = LlamaForCausalLM(config)
    loss_fn = pt.PolicyLoss(average="token", clip_low=0.2, clip_high=0.28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    curve: list[float] = []
    for step in range(steps):
        prompts = torch.randint(DIGITS, (PROMPTS, 2))
        model.set_attn_implementation("sdpa")  # its own, to sample
        with torch.no_grad():
            answers, old_logps = sample(model, prompts.repeat_interleave(ANSWERS, 0))
        answers, old_logps = (
            x.view(PROMPTS, ANSWERS, LENGTH) for x in (answers, old_logps)
        )
        rewards = (answers == prompts.amax(1)[:, None, None]).float().mean(-1)
        advantages = rewards - rewards.mean(1, keepdim=True)
        advantages /= rewards.std(1, keepdim=True) + 1e-4
        groups = [
            {
                "prompt": prompts[i],
                "responses": answers[i],
                "scores": advantages[i],
                "logprobs": old_logps[i],
            }
            for i in range(PROMPTS)
        ]
        batches = pt.pack_in_memory(
            groups, pack_size=256, token_values={"old_logps": "logprobs"}
        )
        pt.use_packed_attention(model)
        for _ in range(2):  # in the second pass, ratios are clipped
            for batch in batches:
                logps = pt.packed_logps(model, batch, per_token=True)
                loss_fn(logps, batch).loss.backward()  # takes old_logps of the batch
            optimizer.step()
            optimizer.zero_grad()
        curve.append(float(rewards.mean()))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: reward {curve[-1]:.2f}")
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    train(parser.parse_args().steps)
