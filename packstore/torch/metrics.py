"""Metrics as sums and counts: exact over batches and ranks of any size."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

SumAndCount = tuple[Tensor, Tensor]
Key = TypeVar("Key", bound=Hashable)


class Metrics:
    """Sums the metrics of batches, and returns their means over all batches and ranks.

    ::

        metrics = Metrics()
        for batch in step:
            metrics.add(out.metrics)        # does not synchronise the device
        logged = metrics.means()            # one all-reduce; resets the sums

    Every mean is the sum over all pairs (for `sft_loss`: over its own count) divided by
    their number. So `loss` is the loss of the optimizer step, or of several, weighted
    by their pairs.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, SumAndCount]) -> None:
        """Adds the metrics of one batch: name -> (sum, count)."""
        add_sums(self._sums, metrics)

    def means(self, group: Any = None) -> dict[str, float]:
        """Returns the mean of each metric over all batches added on all ranks since the
        last call.

        A collective call if torch.distributed runs: every rank must have added batches.

        Args:
            group: process group; default: all ranks.
        """
        totals = self.totals(group)
        self._sums = {}
        return {name: s / n if n else math.nan for name, (s, n) in totals.items()}

    def totals(self, group: Any = None) -> dict[str, tuple[float, float]]:
        """Returns sum and count of each metric over all ranks, and keeps them; a
        collective call.

        Args:
            group: process group; default: all ranks.
        """
        flat = [value for both in self._sums.values() for value in both]
        totals = all_reduce_sums(flat, group)
        pairs = zip(totals[::2], totals[1::2], strict=True)
        return dict(zip(self._sums, pairs, strict=True))


def add_sums(sums: dict[Key, Tensor], terms: Mapping[Key, SumAndCount]) -> None:
    """Adds sums and counts to `sums`, each `[2]`, without gradient."""
    for key, both in terms.items():
        new = torch.stack([x.detach().to(wide_dtype(x.device)) for x in both])
        sums[key] = sums[key] + new if key in sums else new


def all_reduce_sums(
    values: Sequence[Tensor | float],
    group: Any = None,
    device: torch.device | None = None,
) -> list[float]:
    """Sums scalars over the ranks in float64, from `device`, by default that of a
    tensor or CPU.
    """
    if not values:
        return []
    tensors = [x for x in values if isinstance(x, Tensor)]
    device = device or (tensors[0].device if tensors else torch.device("cpu"))
    dtype = wide_dtype(device)
    flat = torch.stack([torch.as_tensor(x, dtype=dtype, device=device) for x in values])
    if is_distributed():
        dist.all_reduce(flat, group=group)
    sums: list[float] = flat.tolist()
    return sums


def is_distributed() -> bool:
    """Returns True if torch.distributed runs."""
    return dist.is_available() and dist.is_initialized()


def wide_dtype(device: torch.device) -> torch.dtype:
    """Returns float64, or float32 on a device without it."""
    return torch.float32 if device.type == "mps" else torch.float64
