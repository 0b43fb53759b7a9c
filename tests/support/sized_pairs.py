"""Random pairs with lengths of one's choice."""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Examples, to_offsets


def pairs(*sizes: tuple[int, int, int]) -> Examples:
    """One pair for each (tokens of prompt, of chosen, of rejected)."""
    rng = np.random.default_rng(0)
    ids, on = [], []
    for prompt, *responses in sizes:
        shared = rng.integers(0, 50, prompt)
        for response in responses:
            ids.append(np.concatenate([shared, rng.integers(0, 50, response)]))
            on.append(np.arange(prompt + response) >= prompt)
    return Examples(
        input_ids=np.concatenate(ids).astype(np.int32),
        supervised=np.concatenate(on),
        sequence_offsets=to_offsets(np.array([len(x) for x in ids])),
        example_offsets=to_offsets(np.full(len(sizes), 2)),
        reward=np.tile(np.float32([1, 0]), len(sizes)),
        example_ids=np.arange(len(sizes)),
    )
