"""A row for each example: log-probs, loss, margins and carried columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from packstore.torch.batch.collate import PackedBatch
from packstore.torch.batch.transfer import Fetched
from packstore.torch.losses.grouped_metrics import of_all_ranks
from packstore.torch.losses.loss import PreferenceLoss


class ExampleRows:
    """Collects the rows of all batches; each example once, fillers left out.

    Columns of the table, with a row for each example, by ascending `example_id`:

    - `example_id`: as in the dataset;
    - `logps`, `ref_logps`: of its responses, in their order, in nats; the second with a reference;
    - `loss`, and but for the loss ``sft`` `rewards/chosen`, `rewards/rejected`, `rewards/margins`:
      see :meth:`PreferenceLoss.per_example`;
    - the carried columns.

    Args:
        loss_fn: the loss.
        carry: names of the carried columns.
    """

    def __init__(self, loss_fn: PreferenceLoss, carry: Iterable[str]) -> None:
        self._loss_fn, self._carry = loss_fn, tuple(carry)
        self._parts: list[tuple[list[Fetched | None], PackedBatch]] = []

    def add(
        self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None, on_cpu: PackedBatch
    ) -> None:
        """Adds a batch of this rank; reads no value of the device.

        Args:
            logps: `[S]`, log-probs of the policy in nats.
            batch: the batch, on the same device.
            ref_logps: `[S]`, log-probs of the reference; None: the batch's, or none are needed.
            on_cpu: the same batch on the CPU.
        """
        loss, rewards = self._loss_fn.per_example(logps, batch, ref_logps)
        reference = None
        if self._loss_fn.reference:
            reference = batch.ref_logps if ref_logps is None else ref_logps
        values = (logps, reference, loss, rewards)
        self._parts.append(([None if v is None else Fetched(v) for v in values], on_cpu))

    def table(self) -> pa.Table:
        """Returns the rows of all ranks; a collective call."""
        rows = of_all_ranks([self._rows(values, batch) for values, batch in self._parts])
        tables = [pa.table(own) for own in rows if len(own["example_id"])]
        joined = pa.concat_tables(tables, promote_options="default")
        _, first = np.unique(joined["example_id"].to_numpy(), return_index=True)
        return joined.take(first)

    def _rows(self, values: list[Fetched | None], batch: PackedBatch) -> dict[str, Any]:
        logps, reference, loss, rewards = (
            None if value is None else value().double().numpy() for value in values
        )
        assert logps is not None
        kept = np.flatnonzero(batch.weights.numpy() > 0)
        ends = batch.num_responses.numpy().cumsum()[:-1]

        def of_responses(numbers: np.ndarray) -> list[list[float]]:
            parts = np.split(numbers[: batch.num_responses.sum()], ends)
            return [parts[i].tolist() for i in kept]

        found: dict[str, Any] = {"example_id": batch.example_ids.numpy()[kept]}
        found["logps"] = of_responses(logps)
        if reference is not None:
            found["ref_logps"] = of_responses(reference)
        assert loss is not None
        found["loss"] = loss[kept]
        if rewards is not None:
            found["rewards/chosen"], found["rewards/rejected"] = rewards[kept].T
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        for name in self._carry:
            column = np.asarray(batch.columns[name])[kept]
            found[name] = column.tolist() if column.dtype == object else column
        return found
