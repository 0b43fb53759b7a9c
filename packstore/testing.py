"""Helpers for tests of packstore and of its users: random examples and exact
comparison.
"""

from __future__ import annotations

import numpy as np

from packstore.format.arrays import Examples, to_offsets
from packstore.format.schema import KINDS


def random_examples(
    n: int,
    *,
    seed: int = 0,
    kind: str = "preference",
    vocab_size: int = 50,
    max_prompt: int = 12,
    max_response: int = 9,
    edges: bool = True,
) -> Examples:
    """Returns `n` random examples that obey every rule of the format.

    The sequences of an example mostly have the same prompt. With `edges`, some examples
    have prompts with a partial or no common prefix, prompts of one token, responses
    that repeat the prompt's tokens, and unsupervised gaps in a response.
    """
    rng = np.random.default_rng(seed)
    ids: list[np.ndarray] = []
    supervised: list[np.ndarray] = []
    lengths: list[int] = []
    counts: list[int] = []
    for _ in range(n):
        k = KINDS[kind] or int(rng.integers(2, 6))
        shared = rng.integers(0, vocab_size, rng.integers(1, max_prompt + 1))
        for i in range(k):
            prompt = shared.copy()
            if (
                edges and i and rng.random() < 0.2
            ):  # the prompts differ from some token on
                prompt[rng.integers(0, len(prompt)) :] = rng.integers(0, vocab_size)
            response = rng.integers(0, vocab_size, rng.integers(1, max_response + 1))
            on = np.ones(len(response), bool)
            if edges and len(on) > 2 and rng.random() < 0.2:
                on[rng.integers(1, len(on))] = False
            ids.append(np.concatenate([prompt, response]))
            supervised.append(np.concatenate([np.zeros(len(prompt), bool), on]))
            lengths.append(len(ids[-1]))
        counts.append(k)
    return Examples(
        input_ids=np.concatenate(ids).astype(np.int32)
        if ids
        else np.empty(0, np.int32),
        supervised=np.concatenate(supervised) if ids else np.empty(0, np.bool_),
        sequence_offsets=to_offsets(np.array(lengths, np.int64)),
        example_offsets=to_offsets(np.array(counts, np.int64)),
        reward=rng.normal(size=len(lengths)).astype(np.float32),
        example_ids=np.arange(n, dtype=np.int64),
    )


def assert_examples_equal(a: Examples, b: Examples) -> None:
    """Asserts that both hold the same examples, in the same order, bit for bit."""
    for name in Examples.__slots__:
        if name == "columns":
            assert set(a.columns) == set(b.columns), (set(a.columns), set(b.columns))
            for column in a.columns:
                np.testing.assert_array_equal(
                    a.columns[column], b.columns[column], column
                )
        else:
            x, y = getattr(a, name), getattr(b, name)
            if x is None or y is None:
                assert x is y, f"{name}: only one has them"
                continue
            assert x.dtype == y.dtype, f"{name}: {x.dtype} is not {y.dtype}"
            np.testing.assert_array_equal(x, y, name)
