"""Batches of one shape, and steps on them as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class RepeatedCalls:
    """Stands in for a CUDA graph where there is no GPU: a replay calls the function."""

    def __init__(self, device: torch.device) -> None:
        self.function: Callable[[], Any]

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Call the function."""
        function()

    def capture(self, function: Callable[[], T]) -> T:
        """Call the function, and keep it for replays."""
        self.function = function
        return function()

    def replay(self) -> None:
        """Call the function again."""
        self.function()


def graphed_step(model: Any, loss_fn: Any, cuda: bool, backend: str = "auto") -> Any:
    """Return a `GraphedStep` with a reference of log-probs 0.

    Args:
        model: prepared for packs.
        loss_fn: the loss.
        cuda: False: without a graph, see :class:`RepeatedCalls`.
        backend: of the head.
    """
    from packstore.torch import GraphedStep, PackedPolicy

    def reference(batch: Any) -> torch.Tensor:
        device = batch.cu_seqlens.device
        return torch.zeros(batch.num_segments, device=device)

    settings = {} if cuda else {"graph": RepeatedCalls}
    policy = PackedPolicy(model, backend=backend)
    return GraphedStep(policy, loss_fn, reference=reference, **settings)


def pad_to_one_shape(batches: Sequence[Any], num_tokens: int) -> list[Any]:
    """Return the batches padded to the sizes that the largest of them needs.

    Args:
        batches: on the CPU, of one layout.
        num_tokens: tokens of each padded batch.
    """
    from packstore.torch import pad_batch

    sizes: dict[str, int] = {
        "num_tokens": num_tokens,
        "max_seqlen": max(batch.max_seqlen_k for batch in batches),
        "num_targets": max(len(batch.target_index) for batch in batches),
    }
    if any(batch.key_runs is not None for batch in batches):
        sizes["num_keys"] = max(
            batch.num_keys + num_tokens - batch.num_tokens for batch in batches
        )
    padded = [pad_batch(batch, **sizes) for batch in batches]
    sizes["num_segments"] = max(batch.num_segments for batch in padded)
    if "num_keys" in sizes:
        # One more pair of segments, the last of which takes the missing runs.
        sizes["num_segments"] += 2
        padded = [pad_batch(batch, **sizes) for batch in batches]
        sizes["num_runs"] = max(batch.key_runs.shape[1] for batch in padded)
    return [pad_batch(batch, **sizes) for batch in batches]
