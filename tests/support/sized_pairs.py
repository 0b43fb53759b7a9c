"""Rows of random pairs with lengths of one's choice, and the logits of each sequence
alone.

The prompt of a pair begins like the chosen sequence before it, as the turns of a
dialogue do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packstore.format import Examples, to_offsets
from packstore.pack.fill import fill
from packstore.torch import PackedBatch, collate

Sizes = Iterable[tuple[int, int, int]]
"""Tokens of prompt, chosen and rejected of each pair."""


LAYOUTS = ("concat", "shared_prefix", "tree")


def row_of(sizes: Sizes, layout: str = "shared_prefix") -> PackedBatch:
    """A batch of one pack of such pairs.

    In the layout ``tree`` they share prefixes over the whole pack.
    """
    examples = pairs(*sizes)
    edges = np.array([0, examples.num_examples])
    if layout == "tree":
        packs = fill(examples, edges, "shared_prefix", share="pack")
    else:
        packs = fill(examples, edges, layout)
    return collate(packs, "preference")


def alone(model: Any, batch: PackedBatch) -> list[Tensor]:
    """The logits of each sequence by the model's own attention, called in the plainest
    way.
    """
    ids = batch.input_ids if batch.kv_index is None else batch.input_ids[batch.kv_index]
    sequences = ids.split(batch.lengths.tolist())
    # Tables of `dynamic` depend on earlier calls.
    fresh = "dynamic" in str(getattr(model.config, "rope_parameters", ""))
    models = (copy.deepcopy(model) if fresh else model for _ in sequences)
    calls = zip(models, sequences, strict=True)
    return [each(input_ids=x[None], use_cache=False).logits[0] for each, x in calls]


def in_row(logits: list[Tensor], batch: PackedBatch) -> Tensor:
    """Logits of the row's tokens `[T, V]`, from those of its sequences."""
    places = zip(batch.segment_ids, batch.position_ids, strict=True)
    return torch.stack([logits[segment][position] for segment, position in places])


def pairs(*sizes: tuple[int, int, int]) -> Examples:
    """One pair for each (tokens of prompt, of chosen, of rejected)."""
    rng = np.random.default_rng(0)
    ids, on = [], []
    before = np.zeros(0, np.int64)
    for prompt, *responses in sizes:
        turn = rng.integers(0, 50, max(prompt - len(before), 0))
        shared = np.concatenate([before[:prompt], turn])
        for response in responses:
            ids.append(np.concatenate([shared, rng.integers(0, 50, response)]))
            on.append(np.arange(prompt + response) >= prompt)
        before = ids[-2]
    return Examples(
        input_ids=np.concatenate(ids).astype(np.int32),
        supervised=np.concatenate(on),
        sequence_offsets=to_offsets(np.array([len(x) for x in ids])),
        example_offsets=to_offsets(np.full(len(sizes), 2)),
        reward=np.tile(np.float32([1, 0]), len(sizes)),
        example_ids=np.arange(len(sizes)),
    )
