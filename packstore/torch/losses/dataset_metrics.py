"""Metrics of a whole dataset, of groups of its examples, and a row for each example.

They are exact over batches and ranks: sums and counts are added up, and divided once at
the end. Adding a batch never waits for the device. Fillers are examples of weight 0,
which pad a batch: they count nowhere.
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
from packstore.torch.losses.distill import DistillLoss
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.step_loss import UNDIVIDED
from packstore.torch.metrics import (
    add_sums,
    all_reduce_sums,
    is_distributed,
    wide_dtype,
)

T = TypeVar("T")

EvaluatedLoss = PreferenceLoss | DistillLoss
"""Losses that have metrics of a dataset: others need more than a batch."""

FILE = "file"
"""Value of `by` that groups examples by their input file, unless a column has this
name.
"""

LARGEST_EXPONENT = 700.0
"""The exponential of a larger loss overflows float64."""


class Figures(TypedDict):
    """Result of an evaluation.

    Members:
        metrics: the mean of each metric of the loss over all pairs (or tokens);
            ``examples``; for the loss ``sft`` also ``perplexity``, the exponential of
            the mean over tokens.
        by: the same for each value of the grouping column, the most frequent first;
            empty without one.
        rows: if requested, a row for each example; see :class:`ExampleRows`.
    """

    metrics: dict[str, float]
    by: dict[str, dict[str, float]]
    rows: NotRequired[pa.Table]


class GroupedMetrics:
    """Sums of metrics over batches, for all examples and for each group.

    Args:
        loss_fn: a PreferenceLoss or DistillLoss.
        dataset: the dataset, for names of input files.
        by: column that groups examples, or :data:`FILE`; None: no groups.
    """

    def __init__(
        self, loss_fn: EvaluatedLoss, dataset: Dataset | None, by: str | None
    ) -> None:
        self.loss_fn = loss_fn
        self.by = by
        # number of the input file -> its name
        self._files = dict(enumerate(dataset.manifest.source_names if dataset else ()))
        # (group, or None for all examples; metric) -> sum and count, `[2]`
        self._sums: dict[tuple[str | None, str], Tensor] = {}

    def add(
        self,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None,
        on_cpu: PackedBatch,
    ) -> None:
        """Add a batch of this rank; `on_cpu` is the same batch on the CPU, for names
        of groups.
        """
        self._add_group(None, logps, batch, ref_logps)
        if self.by is None:
            return
        groups = np.array(self._groups(on_cpu, self.by), object)
        device = batch.weights.device
        for name in sorted(set(groups)):
            in_group = tensor_to_device(torch.from_numpy(groups == name), device)
            group = batch.replace(weights=batch.weights * in_group)
            self._add_group(name, logps, group, ref_logps)

    def _add_group(
        self,
        name: str | None,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None,
    ) -> None:
        """Add a batch, in which examples outside of the group have weight 0."""
        # `UNDIVIDED`, as only the sums and counts of the metrics are used.
        output = self.loss_fn(logps, batch, ref_logps, divisor=UNDIVIDED)
        num_examples = batch.weights.sum()  # weights are 0 or 1
        metrics = {
            **output.metrics,
            "examples": (num_examples, torch.zeros_like(num_examples)),
        }
        terms = {(name, metric): term for metric, term in metrics.items()}
        add_sums(self._sums, terms)

    def figures(self, device: torch.device) -> Figures:
        """Return means over all ranks, which may have seen different groups.

        A collective call: the ranks exchange tensors on `device`.
        """
        groups: dict[str | None, dict[str, float]] = {None: {}}
        for (group, metric), (total, count) in self._totals(device).items():
            metrics = groups.setdefault(group, {})
            if metric == "examples":
                metrics[metric] = total
            else:
                metrics[metric] = total / count if count else math.nan
        for metrics in groups.values():
            self._derive(metrics)

        of_all_examples = groups.pop(None)
        by_group = {}
        for group, metrics in sorted(groups.items(), key=_largest_first):
            if metrics["examples"]:  # a group of fillers only has none
                by_group[str(group)] = metrics
        return {"metrics": of_all_examples, "by": by_group}

    def _totals(
        self, device: torch.device
    ) -> dict[tuple[str | None, str], tuple[float, float]]:
        """Return sum and count of each group and metric over all ranks."""
        all_keys = dict.fromkeys(all_gather_lists(list(self._sums)))
        # All ranks gather the same list, and the sort is stable: ranks agree on the
        # order.
        ordered = sorted(all_keys, key=_group_name)
        # float64, unless the device lacks it
        zero = torch.zeros(2, dtype=wide_dtype(device), device=device)
        # sum, count, sum, count, ... in one list, for a single call between ranks
        flat = [x for key in ordered for x in self._sums.get(key, zero)]
        totals = all_reduce_sums(flat, device=device)
        sums_and_counts = zip(totals[::2], totals[1::2], strict=True)
        return dict(zip(ordered, sums_and_counts, strict=True))

    def _derive(self, metrics: dict[str, float]) -> None:
        """Add the metrics that are functions of other means."""
        if "sft_loss" in metrics:
            # The two parts are means over different counts: their sum is no mean.
            sft_term = self.loss_fn.sft_weight * metrics["sft_loss"]
            metrics["loss"] = metrics["preference_loss"] + sft_term

        if self.loss_fn.has_perplexity:
            metrics["perplexity"] = math.exp(min(metrics["loss"], LARGEST_EXPONENT))

    def _groups(self, batch: PackedBatch, by: str) -> list[str]:
        """Return the group of each example."""
        column = batch.columns.get(by)
        if column is None and by == FILE:
            # The high bits of an id are the number of the input file.
            sources = (batch.example_ids >> SOURCE_SHIFT).tolist()
            return [self._files.get(number, f"source {number}") for number in sources]
        is_fraction = isinstance(column, Tensor) and column.is_floating_point()
        if column is None or is_fraction:
            columns = ", ".join([FILE, *batch.columns])
            raise ConfigError(
                "by must be a carried or joined column of texts, integers or booleans, "
                f"of {columns}; found {quote(by)}."
            )
        return [str(value) for value in column.tolist()]


def _largest_first(group: tuple[str | None, dict[str, float]]) -> tuple[float, str]:
    """Return the sort key of a group: most examples first, then by name."""
    name, metrics = group
    return -metrics["examples"], str(name)


def _group_name(key: tuple[str | None, str]) -> str:
    """Return the group of a metric, "" for all examples."""
    group, _ = key
    return group or ""


class ExampleRows:
    """A table with a row for each example, once each, without fillers.

    Columns of the table, with a row for each example, by ascending `example_id`:

    - `example_id`, and the carried columns named by `carry`;
    - `logps` and, with a reference, `ref_logps`: lists, for its responses in their
      order, in nats; for a reward model `scores` in their place; none for a
      DistillLoss;
    - `loss` and, except for the loss ``sft``, `rewards/chosen`, `rewards/rejected`,
      `rewards/margins`: see :meth:`PreferenceLoss.per_example`.
    """

    def __init__(self, loss_fn: EvaluatedLoss, carry: Iterable[str]) -> None:
        self._loss_fn = loss_fn
        self._carried_columns = tuple(carry)
        self._batches: list[tuple[dict[str, CpuCopy], PackedBatch]] = []

    def add(
        self,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None,
        on_cpu: PackedBatch,
    ) -> None:
        """Add a batch of this rank; arguments as of :meth:`GroupedMetrics.add`."""
        loss, rewards = self._loss_fn.per_example(logps, batch, ref_logps)
        values = {"loss": loss}
        if self._loss_fn.scores:
            values["scores"] = logps
        elif isinstance(self._loss_fn, PreferenceLoss):
            values["logps"] = logps
        if ref_logps is None:
            ref_logps = batch.ref_logps
        if self._loss_fn.reference and ref_logps is not None:
            values["ref_logps"] = ref_logps
        if rewards is not None:
            values["rewards"] = rewards
        copies = {name: CpuCopy(x) for name, x in values.items()}
        self._batches.append((copies, on_cpu))

    def table(self) -> pa.Table:
        """Return the rows of all ranks; a collective call."""
        columns_of_batches = [
            self._columns(copies, batch) for copies, batch in self._batches
        ]
        tables = [
            pa.table(columns)
            for columns in all_gather_lists(columns_of_batches)
            if len(columns["example_id"])
        ]
        # A column that holds only None in some batch has another type there.
        table = pa.concat_tables(tables, promote_options="default")
        _, first_rows = np.unique(table["example_id"].to_numpy(), return_index=True)
        return table.take(first_rows)

    def _columns(
        self, copies: dict[str, CpuCopy], batch: PackedBatch
    ) -> dict[str, Any]:
        """Return the columns of a batch on the CPU, with its examples of weight > 0."""
        values = {name: copy.wait().double().numpy() for name, copy in copies.items()}
        examples = np.flatnonzero(batch.weights.numpy() > 0)
        columns: dict[str, Any] = {"example_id": batch.example_ids.numpy()[examples]}

        ends = batch.num_responses.numpy().cumsum()  # of each example's responses
        for name in ("logps", "scores", "ref_logps"):
            if name in values:
                values_of_responses = values[name][: ends[-1]]
                values_of_examples = np.split(values_of_responses, ends[:-1])
                columns[name] = [values_of_examples[i].tolist() for i in examples]

        columns["loss"] = values["loss"][examples]
        if "rewards" in values:
            chosen, rejected = values["rewards"][examples].T
            columns["rewards/chosen"] = chosen
            columns["rewards/rejected"] = rejected
            columns["rewards/margins"] = chosen - rejected

        for name in self._carried_columns:
            column = np.asarray(batch.columns[name])[examples]
            columns[name] = column.tolist() if column.dtype == object else column
        return columns


def all_gather_lists(values: list[T]) -> list[T]:
    """Gather the lists of all ranks, in rank order; a collective call."""
    if not is_distributed():
        return values
    gathered: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return [value for part in gathered for value in part]
