"""The metrics of a model over a whole dataset, each example once, also by a carried column.

::

    figures = evaluate(model, packstore.open("held-out-8k"), loss="dpo", reference=ref, by="source")
    figures["metrics"]["rewards/accuracies"], figures["by"]["forum"]["loss"]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from packstore.errors import ConfigError, quote
from packstore.io.dataset import Dataset
from packstore.io.side import Side
from packstore.torch.collate import PackedBatch
from packstore.torch.compatibility import check_model
from packstore.torch.dataset import PackedDataset
from packstore.torch.head import PackedPolicy
from packstore.torch.loader import PackedDataLoader
from packstore.torch.loss import PreferenceLoss
from packstore.torch.metrics import SumAndCount, all_reduce_sums, wide_dtype

Key = tuple[str | None, str]
"""Group, None for all examples, and metric."""


class Figures(TypedDict):
    """What an evaluation gives.

    Members:
        metrics: the metrics of the loss, each its mean over all pairs (or tokens); ``examples``;
            of the loss ``sft`` also ``perplexity``, the exponential of the mean over tokens.
        by: the same of each value of the column, by name; empty without a column.
    """

    metrics: dict[str, float]
    by: dict[str, dict[str, float]]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    *,
    loss: PreferenceLoss | str = "dpo",
    reference: nn.Module | None = None,
    side: Sequence[Side | str | PathLike[str]] = (),
    by: str | None = None,
    **batching: Any,
) -> Figures:
    """The metrics of `model` over `dataset`, exact for any packs, batches and ranks.

    A collective call where torch.distributed runs: the ranks share the packs.

    Args:
        model: as :func:`~packstore.torch.load.load_model` gives it, whole on every rank.
        dataset: packed; with fewer packs than ranks, some ranks only fill up.
        loss: the loss, or its name.
        reference: the reference model, on the device of `model`.
        side: side datasets to join, such as precomputed ``ref_logps``.
        by: a carried or joined column of texts, integers or booleans.
        batching: `packs_per_batch` (default 1) or `tokens_per_batch`.

    Raises:
        ConfigError: the loss needs a reference and there is none, or there is no such column.
        CompatibilityError: model, side dataset or loss do not belong to the dataset.
        UnknownNameError: no such loss.
    """
    loss_fn = loss if isinstance(loss, PreferenceLoss) else PreferenceLoss(loss)
    models = [model] if reference is None or not loss_fn.reference else [model, reference]
    for one in models:
        check_model(dataset, one)
    data = PackedDataset(dataset, shuffle=False, side=side)
    loader = PackedDataLoader(data, mode="eval", **batching)
    policies = [PackedPolicy(m) for m in models]
    device = next(iter(model.parameters())).device
    before = [m.training for m in models]
    sums: dict[Key, Tensor] = {}
    try:
        for m in models:
            m.eval()
        for batch in loader:
            here = batch.to(device)
            logps, *others = (policy(here) for policy in policies)
            ref_logps = others[0] if others else None
            for group, part in _groups(here, by):
                _add(sums, group, part, loss_fn(logps, part, ref_logps).metrics)
    finally:
        for m, training in zip(models, before, strict=True):
            m.train(training)
    return _figures(sums, loss_fn, device)


def _groups(batch: PackedBatch, by: str | None) -> Iterator[tuple[str | None, PackedBatch]]:
    """The batch, and the batch with weight 0 but for the examples of each value of the column."""
    yield None, batch
    if by is None:
        return
    if by not in batch.columns:
        known = ", ".join(batch.columns) or "none"
        raise ConfigError(f"by must be a carried or joined column, of {known}; found {quote(by)}.")
    column = batch.columns[by]
    if isinstance(column, Tensor):
        if column.is_floating_point():
            raise ConfigError(f"by must be a column of texts, integers or booleans; {by} is not.")
        column = column.cpu().numpy()
    names = np.array([str(value) for value in column.tolist()], object)
    for name in sorted(set(names)):
        own = torch.from_numpy(names == name).to(batch.weights)
        yield name, replace(batch, weights=batch.weights * own)


def _add(
    sums: dict[Key, Tensor],
    group: str | None,
    batch: PackedBatch,
    metrics: Mapping[str, SumAndCount],
) -> None:
    """Adds the metrics of one batch, as sums and counts."""
    examples = batch.weights.sum()
    every = {**metrics, "examples": (examples, torch.zeros_like(examples))}
    for name, both in every.items():
        new = torch.stack([x.to(wide_dtype(x.device)) for x in both])
        sums[group, name] = sums[group, name] + new if (group, name) in sums else new


def _figures(sums: dict[Key, Tensor], loss_fn: PreferenceLoss, device: torch.device) -> Figures:
    """Means over all ranks, of which each saw other groups."""
    keys = _all_keys(sums)
    zero = torch.zeros(2, dtype=wide_dtype(device), device=device)
    totals = all_reduce_sums([x for key in keys for x in sums.get(key, zero)], device=device)
    figures: Figures = {"metrics": {}, "by": {}}
    for (group, name), total, count in zip(keys, totals[::2], totals[1::2], strict=True):
        place = figures["metrics"] if group is None else figures["by"].setdefault(group, {})
        if name == "examples":
            place[name] = total
        else:
            place[name] = total / count if count else math.nan
    # A group that only fillers belong to has no examples.
    figures["by"] = {name: own for name, own in figures["by"].items() if own["examples"]}
    if loss_fn.only_sft and loss_fn.sft_average == "token":
        for place in (figures["metrics"], *figures["by"].values()):
            place["perplexity"] = math.exp(min(place["loss"], 700.0))
    return figures


def _all_keys(sums: dict[Key, Tensor]) -> list[Key]:
    """The keys of all ranks, in one order on each."""
    keys = list(sums)
    if dist.is_available() and dist.is_initialized():
        found: list[list[Key]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, keys)
        keys = list(dict.fromkeys(key for own in found for key in own))
    groups = sorted({group for group, _ in keys if group is not None})
    order: dict[str | None, int] = {None: -1, **{g: i for i, g in enumerate(groups)}}
    return sorted(keys, key=lambda key: order[key[0]])
