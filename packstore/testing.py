"""Helpers for tests, ours and users': random examples, and exact comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from packstore.format.arrays import Bool, Examples, Int64, to_offsets
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
    """Return random examples that obey every rule of the format.

    The sequences of an example mostly have the same prompt.

    Args:
        n: number of examples.
        seed: random seed.
        kind: ``preference``, ``sft`` or ``scored``.
        vocab_size: number of different token ids.
        max_prompt: maximum tokens of a prompt.
        max_response: maximum tokens of a response.
        edges: also make edge cases: prompts of an example that share only a part or
            nothing, and an unsupervised token inside a response.
    """
    rng = np.random.default_rng(seed)
    ids: list[Int64] = []
    supervised: list[Bool] = []
    num_responses: list[int] = []
    for _ in range(n):
        num_responses.append(KINDS[kind] or int(rng.integers(2, 6)))
        shared_prompt = rng.integers(0, vocab_size, rng.integers(1, max_prompt + 1))
        for i in range(num_responses[-1]):
            prompt = shared_prompt.copy()
            if edges and i > 0 and rng.random() < 0.2:
                # Differs from the shared prompt from some token on.
                token = rng.integers(0, vocab_size)
                fork = rng.integers(0, len(prompt))
                prompt[fork:] = token

            response = rng.integers(0, vocab_size, rng.integers(1, max_response + 1))
            is_supervised = np.ones(len(response), bool)
            if edges and len(response) > 2 and rng.random() < 0.2:
                is_supervised[rng.integers(1, len(response))] = False

            ids.append(np.concatenate([prompt, response]))
            supervised.append(
                np.concatenate([np.zeros(len(prompt), bool), is_supervised])
            )

    lengths = np.array([len(sequence) for sequence in ids], np.int64)
    return Examples(
        input_ids=np.concatenate([np.empty(0, np.int32), *ids]).astype(np.int32),
        supervised=np.concatenate([np.empty(0, np.bool_), *supervised]),
        sequence_offsets=to_offsets(lengths),
        example_offsets=to_offsets(np.array(num_responses, np.int64)),
        reward=rng.normal(size=len(lengths)).astype(np.float32),
        example_ids=np.arange(n, dtype=np.int64),
    )


def assert_examples_equal(a: Examples, b: Examples) -> None:
    """Assert that both hold the same examples, in the same order, bit for bit."""
    for name in Examples.__slots__:
        if name != "columns":
            _assert_arrays_equal(name, getattr(a, name), getattr(b, name))
    assert set(a.columns) == set(b.columns), (set(a.columns), set(b.columns))
    for name, values in a.columns.items():
        np.testing.assert_array_equal(values, b.columns[name], name)


def _assert_arrays_equal(name: str, a: Any, b: Any) -> None:
    if a is None or b is None:
        assert a is b, f"{name}: only one has them"
        return
    assert a.dtype == b.dtype, f"{name}: {a.dtype} is not {b.dtype}"
    np.testing.assert_array_equal(a, b, name)
