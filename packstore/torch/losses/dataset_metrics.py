"""Figures of a whole dataset: metrics of all examples and of groups, and a row for each
example.

Exact over batches and ranks; a batch that is added waits for no value of the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NotRequired, TypedDict, TypeVar

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from packstore.errors import ConfigError, quote
from packstore.format.arrays import SOURCE_SHIFT
from packstore.io.dataset.dataset import Dataset
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.transfer import CpuCopy, tensor_to_device
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.step_loss import UNDIVIDED
from packstore.torch.metrics import (
    add_sums,
    all_reduce_sums,
    is_distributed,
    wide_dtype,
)

T = TypeVar("T")

FILE = "file"
"""Groups by input file, unless a column has this name."""


class Figures(TypedDict):
    """Result of an evaluation.

    Members:
        metrics: the mean of each metric of the loss over all pairs (or tokens);
            ``examples``; for the loss ``sft`` also ``perplexity``, the exponential of
            the mean over tokens.
        by: the same for each value of the grouping column; empty without one.
        rows: if requested, a row for each example; see :class:`ExampleRows`.
    """

    metrics: dict[str, float]
    by: dict[str, dict[str, float]]
    rows: NotRequired[pa.Table]


class GroupedMetrics:
    """Sums metrics over batches, for all examples and for each group of the column
    `by`.
    """

    def __init__(
        self, loss_fn: PreferenceLoss, dataset: Dataset | None, by: str | None
    ) -> None:
        self.loss_fn, self.by = loss_fn, by
        self._files = dict(enumerate(dataset.manifest.source_names if dataset else ()))
        self._sums: dict[
            tuple[str | None, str], Tensor
        ] = {}  # group (None: all), metric

    def add(
        self,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None,
        on_cpu: PackedBatch,
    ) -> None:
        """Adds a batch of this rank; `on_cpu` is the same batch on the CPU, for names
        of groups.
        """
        parts: dict[str | None, PackedBatch] = {None: batch}
        if (
            self.by is not None
        ):  # for each group, the batch with all other examples at weight 0
            names = np.array(self._groups(on_cpu, self.by), object)
            for name in sorted(set(names)):
                inside = tensor_to_device(
                    torch.from_numpy(names == name), batch.weights.device
                )
                parts[name] = batch.replace(weights=batch.weights * inside)
        for group, part in parts.items():
            metrics = self.loss_fn(logps, part, ref_logps, divisor=UNDIVIDED).metrics
            examples = part.weights.sum()
            every = {**metrics, "examples": (examples, torch.zeros_like(examples))}
            add_sums(self._sums, {(group, name): both for name, both in every.items()})

    def figures(self, device: torch.device) -> Figures:
        """Means over all ranks, which may have seen different groups; collective, from
        `device`.
        """
        seen = dict.fromkeys(
            key for keys in all_gather_lists([list(self._sums)]) for key in keys
        )
        keys = sorted(
            seen, key=lambda key: key[0] or ""
        )  # a stable order, the same on each rank
        zero = torch.zeros(2, dtype=wide_dtype(device), device=device)
        flat = [x for key in keys for x in self._sums.get(key, zero)]
        totals = all_reduce_sums(flat, device=device)
        groups: dict[str | None, dict[str, float]] = {None: {}}
        for (group, name), total, count in zip(
            keys, totals[::2], totals[1::2], strict=True
        ):
            mean = total if name == "examples" else total / count if count else math.nan
            groups.setdefault(group, {})[name] = mean
        for means in groups.values():
            if "sft_loss" in means:  # two means, over different counts
                likelihood = self.loss_fn.sft_weight * means["sft_loss"]
                means["loss"] = means["preference_loss"] + likelihood
            if not self.loss_fn.rows.compares and self.loss_fn.sft_average == "token":
                means["perplexity"] = math.exp(min(means["loss"], 700.0))
        metrics = groups.pop(None)
        # A group with only fillers has no examples.
        return {
            "metrics": metrics,
            "by": {str(n): g for n, g in groups.items() if g["examples"]},
        }

    def _groups(self, batch: PackedBatch, by: str) -> list[str]:
        """The group of each example."""
        column = batch.columns.get(by)
        if column is None and by == FILE:
            sources = (batch.example_ids >> SOURCE_SHIFT).tolist()
            return [self._files.get(number, f"source {number}") for number in sources]
        if column is None or (
            isinstance(column, Tensor) and column.is_floating_point()
        ):
            raise ConfigError(
                "by must be a carried or joined column of texts, integers or booleans, "
                "of "
                f"{', '.join([FILE, *batch.columns])}; found {quote(by)}."
            )
        return [str(value) for value in column.tolist()]


class ExampleRows:
    """Collects the rows of all batches; each example once, fillers left out.

    Columns of the table, with a row for each example, by ascending `example_id`:

    - `example_id`, and the carried columns named by `carry`;
    - `logps`, `ref_logps`: of its responses, in their order, in nats; the second with a
      reference; in their place `scores` of a reward model;
    - `loss`, and but for the loss ``sft`` `rewards/chosen`, `rewards/rejected`,
      `rewards/margins`: see :meth:`PreferenceLoss.per_example`.
    """

    def __init__(self, loss_fn: PreferenceLoss, carry: Iterable[str]) -> None:
        self._loss_fn, self._carry = loss_fn, tuple(carry)
        self._parts: list[tuple[dict[str, CpuCopy], PackedBatch]] = []

    def add(
        self,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None,
        on_cpu: PackedBatch,
    ) -> None:
        """Adds a batch of this rank; arguments as of :meth:`GroupedMetrics.add`."""
        loss, rewards = self._loss_fn.per_example(logps, batch, ref_logps)
        values = {"scores" if self._loss_fn.scores else "logps": logps, "loss": loss}
        reference = batch.ref_logps if ref_logps is None else ref_logps
        if self._loss_fn.reference and reference is not None:
            values["ref_logps"] = reference
        if rewards is not None:
            values["rewards"] = rewards
        self._parts.append(({name: CpuCopy(x) for name, x in values.items()}, on_cpu))

    def table(self) -> pa.Table:
        """Returns the rows of all ranks; a collective call."""
        rows = all_gather_lists(
            [self._rows(copies, batch) for copies, batch in self._parts]
        )
        tables = [pa.table(part) for part in rows if len(part["example_id"])]
        joined = pa.concat_tables(tables, promote_options="default")
        _, first = np.unique(joined["example_id"].to_numpy(), return_index=True)
        return joined.take(first)

    def _rows(self, copies: dict[str, CpuCopy], batch: PackedBatch) -> dict[str, Any]:
        values = {name: copy.wait().double().numpy() for name, copy in copies.items()}
        kept = np.flatnonzero(batch.weights.numpy() > 0)
        ends = batch.num_responses.numpy().cumsum()
        columns: dict[str, Any] = {"example_id": batch.example_ids.numpy()[kept]}
        for name in ("logps", "scores", "ref_logps"):
            if name in values:
                of_examples = np.split(values[name][: ends[-1]], ends[:-1])
                columns[name] = [of_examples[i].tolist() for i in kept]
        columns["loss"] = values["loss"][kept]
        if "rewards" in values:
            chosen, rejected = values["rewards"][kept].T
            columns |= {"rewards/chosen": chosen, "rewards/rejected": rejected}
            columns["rewards/margins"] = chosen - rejected
        for name in self._carry:
            column = np.asarray(batch.columns[name])[kept]
            columns[name] = column.tolist() if column.dtype == object else column
        return columns


def all_gather_lists(values: list[T]) -> list[T]:
    """Gathers the lists of all ranks, in rank order; a collective call."""
    if not is_distributed():
        return values
    gathered: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return [value for part in gathered for value in part]
