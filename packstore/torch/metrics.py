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


def weighted_sums(
    values: Mapping[str, Tensor], weights: Tensor
) -> dict[str, SumAndCount]:
    """Return sum and count of metrics.

    Args:
        values: metric -> its values, `[n]`.
        weights: `[n]`, weights of the values of each metric.
    """
    if not values:
        return {}
    wide_weights = weights.to(wide_dtype(weights.device))
    # All metrics at once: alone, each would take four operators, which are as many
    # launches on a GPU.
    stacked = torch.stack(list(values.values())).to(wide_weights)
    totals = (stacked * wide_weights).sum(1).unbind()
    count = wide_weights.sum()
    return {name: (total, count) for name, total in zip(values, totals, strict=True)}


def add_sums(sums: dict[Key, Tensor], terms: Mapping[Key, SumAndCount]) -> None:
    """Add sums and counts to `sums`, each `[2]`, without gradient."""
    if not terms:
        return
    values = [value.detach() for term in terms.values() for value in term]
    dtype = wide_dtype(values[0].device)
    wide = [value.to(dtype) for value in values]
    added = torch.stack(wide).view(-1, 2)  # [n, 2]
    # All keys at once, but that new ones begin at 0.
    zero = added.new_zeros(2)
    totals = torch.stack([sums.get(key, zero) for key in terms]) + added
    sums.update(zip(terms, totals.unbind(), strict=True))


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
