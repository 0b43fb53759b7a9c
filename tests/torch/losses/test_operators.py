"""A loss takes few operators: on a GPU each is a launch, in every micro-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packstore.testing import random_examples
from packstore.torch import Metrics, PreferenceLoss, collate


class OperatorCount(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_allocation = "empty" in func.overloadpacket.__name__
        self.number += not (func.is_view or is_allocation)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "kind", "most"), [("dpo", "preference", 70), ("kto", "scored", 95)]
)
def test_operators_of_a_batch(
    kit: SimpleNamespace, name: str, kind: str, most: int
) -> None:
    """Of loss, backward pass and metrics: half as many as if each quantity of a pair
    were gathered by itself, and each metric summed by itself.
    """
    examples = random_examples(6, kind=kind)
    batch = collate(kit.packed(examples, [2, 4], "concat"), kind)
    batch.ref_logps = torch.randn(batch.num_segments)
    logps = torch.randn(batch.num_segments, requires_grad=True)
    loss_fn = PreferenceLoss(name)
    metrics = Metrics()
    for _ in range(2):  # the second batch finds the tensors that a batch caches
        with OperatorCount() as count:
            output = loss_fn(logps, batch)
            output.loss.backward()
            metrics.add(output.metrics)
    assert count.number <= most
