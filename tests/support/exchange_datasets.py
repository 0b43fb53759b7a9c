"""Records of random token ids, for exports."""

from __future__ import annotations

import random
from typing import Any

VOCABULARY = 49


def chats(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records of kind ``sft``: ids, and labels that also leave gaps in a response."""
    rng, records = random.Random(seed), []
    for _ in range(n):
        prompt = rng.choices(range(VOCABULARY), k=rng.randint(1, 12))
        response = rng.choices(range(VOCABULARY), k=rng.randint(1, 9))
        labels = [token if rng.random() < 0.9 else -100 for token in response]
        labels[-1] = response[-1]
        records.append(
            {"input_ids": prompt + response, "labels": [-100] * len(prompt) + labels}
        )
    return records


def pairs(n: int, seed: int = 0, prompt_tokens: int = 0) -> list[dict[str, Any]]:
    """Records of kind ``preference``, with `prompt_tokens` more in each prompt."""
    rng, records = random.Random(seed), []
    for i in range(n):
        prompt, chosen, rejected = (
            rng.choices(range(VOCABULARY), k=rng.randint(1, 9)) for _ in range(3)
        )
        prompt += rng.choices(range(VOCABULARY), k=prompt_tokens)
        rewards = {"chosen_reward": rng.random(), "rejected_reward": -rng.random()}
        records.append(
            {
                "prompt": prompt,
                "chosen": [*chosen, i % 7],
                "rejected": rejected,
                **rewards,
            }
        )
    return records
