"""Metrics of all examples and of each group: exact over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NotRequired, TypedDict, TypeVar

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from packstore.errors import ConfigError, quote
from packstore.format.arrays import SOURCE_SHIFT
from packstore.io.dataset.dataset import Dataset
from packstore.torch.batch.collate import PackedBatch
from packstore.torch.batch.transfer import sent
from packstore.torch.losses.divisor import StepDivisor
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.metrics import add_sums, all_reduce_sums, distributed, wide_dtype

T = TypeVar("T")

FILE = "file"
"""Groups by input file, unless a column has this name."""

UNDIVIDED = StepDivisor(1.0, 1.0)
"""Metrics are sums and counts, which no divisor changes; counting a batch would wait for it."""

Key = tuple[str | None, str]
"""Group (None: all examples) and metric."""


class Figures(TypedDict):
    """Result of an evaluation.

    Members:
        metrics: the mean of each metric of the loss over all pairs (or tokens); ``examples``; for
            the loss ``sft`` also ``perplexity``, the exponential of the mean over tokens.
        by: the same for each value of the grouping column; empty without one.
        rows: if requested, a row for each example; see :mod:`.example_rows`.
    """

    metrics: dict[str, float]
    by: dict[str, dict[str, float]]
    rows: NotRequired[pa.Table]


class GroupedMetrics:
    """Sums metrics over batches, for all examples and for each group.

    Args:
        loss_fn: the loss whose metrics are summed.
        dataset: the dataset of the batches.
        by: a carried or joined column of texts, integers or booleans, or ``file``; None: no groups.
    """

    def __init__(
        self,
        loss_fn: PreferenceLoss,
        dataset: Dataset,
        by: str | None = None,
    ) -> None:
        self.loss_fn, self.by = loss_fn, by
        self._files = dataset.manifest.source_names
        self._sums: dict[Key, Tensor] = {}

    def add(
        self,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None,
        on_cpu: PackedBatch | None = None,
    ) -> None:
        """Adds a batch of this rank; reads no value of the device.

        Args:
            logps: `[S]`, log-probs of the policy in nats.
            batch: the batch, on the same device.
            ref_logps: `[S]`, log-probs of the reference; None: the batch's, or none are needed.
            on_cpu: the same batch on the CPU, for the names of groups; default: `batch`.

        Raises:
            ConfigError: `by` is no column of the batch.
        """
        for group, part in self._groups(batch, on_cpu or batch):
            metrics = self.loss_fn(logps, part, ref_logps, divisor=UNDIVIDED).metrics
            examples = part.weights.sum()
            every = {**metrics, "examples": (examples, torch.zeros_like(examples))}
            add_sums(self._sums, {(group, name): both for name, both in every.items()})

    def figures(self, device: torch.device) -> Figures:
        """Means over all ranks, which may have seen different groups; collective, from `device`."""
        keys = _all_keys(self._sums)
        zero = torch.zeros(2, dtype=wide_dtype(device), device=device)
        totals = all_reduce_sums(
            [x for key in keys for x in self._sums.get(key, zero)], device=device
        )
        figures: Figures = {"metrics": {}, "by": {}}
        for (group, name), total, count in zip(keys, totals[::2], totals[1::2], strict=True):
            place = figures["metrics"] if group is None else figures["by"].setdefault(group, {})
            if name == "examples":
                place[name] = total
            else:
                place[name] = total / count if count else math.nan
        # A group with only fillers has no examples.
        figures["by"] = {name: own for name, own in figures["by"].items() if own["examples"]}
        for place in (figures["metrics"], *figures["by"].values()):
            if "sft_loss" in place:  # two means, over different counts
                place["loss"] = (
                    place["preference_loss"] + self.loss_fn.sft_weight * place["sft_loss"]
                )
            if self.loss_fn.only_sft and self.loss_fn.sft_average == "token":
                place["perplexity"] = math.exp(min(place["loss"], 700.0))
        return figures

    def _groups(
        self, batch: PackedBatch, on_cpu: PackedBatch
    ) -> Iterator[tuple[str | None, PackedBatch]]:
        """Yields the batch, then for each group the batch with all other examples at weight 0."""
        yield None, batch
        if self.by is None:
            return
        names = np.array(self._values(on_cpu, self.by), object)
        for name in sorted(set(names)):
            own = sent(torch.from_numpy(names == name), batch.weights.device)
            yield name, batch.replace(weights=batch.weights * own)

    def _values(self, batch: PackedBatch, by: str) -> list[str]:
        """The group of each example."""
        if by not in batch.columns:
            if by == FILE:
                return [self._file(i >> SOURCE_SHIFT) for i in batch.example_ids.tolist()]
            known = ", ".join([FILE, *batch.columns])
            must = f"by must be a carried or joined column, of {known}"
            raise ConfigError(f"{must}; found {quote(by)}.")
        column = batch.columns[by]
        if isinstance(column, Tensor):
            if column.is_floating_point():
                must = "by must be a column of texts, integers or booleans"
                raise ConfigError(f"{must}; {by} is not.")
            column = column.cpu().numpy()
        return [str(value) for value in column.tolist()]

    def _file(self, number: int) -> str:
        return self._files[number] if number < len(self._files) else f"source {number}"


def of_all_ranks(own: list[T]) -> list[T]:
    """Gathers the lists of all ranks, in rank order."""
    if not distributed():
        return own
    found: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    return [value for part in found for value in part]


def _all_keys(sums: dict[Key, Tensor]) -> list[Key]:
    """The keys of all ranks, in the same order on each."""
    keys = list(dict.fromkeys(of_all_ranks(list(sums))))
    groups = sorted({group for group, _ in keys if group is not None})
    order: dict[str | None, int] = {None: -1, **{g: i for i, g in enumerate(groups)}}
    return sorted(keys, key=lambda key: order[key[0]])
