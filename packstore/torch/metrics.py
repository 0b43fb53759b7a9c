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

    Example::

        metrics = Metrics()
        for batch in step:
            metrics.add(out.metrics)        # does not synchronise the device
        logged = metrics.means()            # one all-reduce; resets the sums

    Every mean is the sum over all pairs divided by their number; `sft_loss` has a count
    of its own. So `loss` is the loss of the optimizer step, or of several steps,
    weighted by their pairs.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, SumAndCount]) -> None:
        """Add the metrics of one batch: name -> (sum, count)."""
        add_sums(self._sums, metrics)

    def means(self, group: Any = None) -> dict[str, float]:
        """Return the mean of each metric over the batches of all ranks since the last
        call.

        A collective call if torch.distributed runs: every rank must have added batches.

        Args:
            group: process group; default: all ranks.
        """
        totals = self.totals(group)
        self._sums = {}
        return {
            name: total / count if count else math.nan
            for name, (total, count) in totals.items()
        }

    def totals(self, group: Any = None) -> dict[str, tuple[float, float]]:
        """Return sum and count of each metric over all ranks; keep the sums.

        A collective call.

        Args:
            group: process group; default: all ranks.
        """
        values = [value for pair in self._sums.values() for value in pair]
        reduced = all_reduce_sums(values, group)
        pairs = zip(reduced[::2], reduced[1::2], strict=True)
        return dict(zip(self._sums, pairs, strict=True))


def add_sums(sums: dict[Key, Tensor], terms: Mapping[Key, SumAndCount]) -> None:
    """Add sums and counts to `sums`, each `[2]`, without gradient."""
    for key, term in terms.items():
        wide = [value.detach().to(wide_dtype(value.device)) for value in term]
        pair = torch.stack(wide)
        if key in sums:
            pair = sums[key] + pair
        sums[key] = pair


def all_reduce_sums(
    values: Sequence[Tensor | float],
    group: Any = None,
    device: torch.device | None = None,
) -> list[float]:
    """Sum scalars over the ranks, in float64 where the device has it.

    Args:
        values: scalars, as many on each rank.
        group: process group; default: all ranks.
        device: device to communicate from; default: the device of the first tensor,
            else the CPU.
    """
    if not values:
        return []
    if device is None:
        tensors = [value for value in values if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
    dtype = wide_dtype(device)
    scalars = [torch.as_tensor(value, dtype=dtype, device=device) for value in values]
    flat = torch.stack(scalars)
    if is_distributed():
        dist.all_reduce(flat, group=group)
    sums: list[float] = flat.tolist()
    return sums


def is_distributed() -> bool:
    """Return True if torch.distributed runs."""
    return dist.is_available() and dist.is_initialized()


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device without it."""
    return torch.float32 if device.type == "mps" else torch.float64
