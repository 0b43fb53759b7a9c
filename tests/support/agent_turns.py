"""Records as agents leave them behind: a row for each turn, which extends the rows
before it, of rollouts that fork.
"""

from __future__ import annotations

import random
from typing import Any

VOCABULARY = 49
SYSTEM = list(range(20))
"""Token ids that all rows begin with."""


def agent_turns(num_tasks: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """Return token ids and labels of kind ``sft``; only the last answer of a row is
    supervised.
    """
    rng = random.Random(seed)
    records: list[dict[str, Any]] = []

    def random_ids(most: int) -> list[int]:
        return rng.choices(range(VOCABULARY), k=rng.randint(2, most))

    def add_turns(history: list[int], num_turns: int, num_forks: int) -> None:
        for _ in range(num_turns):
            answer = random_ids(9)
            labels = [-100] * len(history) + answer
            records.append({"input_ids": history + answer, "labels": labels})
            history = history + answer + random_ids(12)
        for _ in range(num_forks):
            add_turns(history, num_turns, num_forks - 1)

    for _ in range(num_tasks):
        add_turns(SYSTEM + random_ids(12), num_turns=3, num_forks=2)
    return records
