"""The base of losses: a sum, divided by its count over the whole optimizer step.

Each batch contributes a sum of losses and a count of its unit: examples, tokens or
pairs. The divisor of all batches is the count of their step, over all batches and
ranks: a loader plans it (``batch.step``), or `count_step` counts it. So an example
weighs the same in any pack, batch or rank. A filler is a pack of weight 0 that repeats
other data, so that each rank has a batch. Router losses balance the experts of a
mixture model; they are divided by the number of examples.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packstore.errors import ConfigError, quote, sentence
from packstore.format.schema import KINDS
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.side_manifest import REF_LOGPS
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch, StepInfo
from packstore.torch.frameworks import check_steps
from packstore.torch.logprobs.logprobs import segment_token_counts
from packstore.torch.losses.terms import check_weight, is_number
from packstore.torch.metrics import (
    SumAndCount,
    all_reduce_sums,
    is_distributed,
    wide_dtype,
)
from packstore.torch.models.routers import take_carried_losses

Gradients = Literal["mean", "sum"]

PASS_COUNT = (
    "Pass what count_step(batches, loss_fn) gives, or a StepDivisor with examples"
)


@dataclass(frozen=True)
class StepDivisor:
    """Divisors of the sums of a :class:`~packstore.torch.LossOutput`: numbers, or
    tensors of one, whose values are not read. A CUDA graph, which keeps numbers as they
    were when it was captured, needs tensors.

    Attributes:
        count: divides `loss_sum`; the sum of ``LossOutput.count`` over the step.
        sft_count: divides `sft_sum`, or None if there is no SFT term.
        examples: divides `router_sum`; None: take `count`, if it counts examples.
    """

    count: Tensor | float
    sft_count: Tensor | float | None = None
    examples: Tensor | float | None = None

    def averaged(self, times: int) -> StepDivisor:
        """Return the divisor for a trainer that averages over `times` parts instead of
        summing.

        DDP and FSDP average gradients over the ranks; Accelerate also divides each loss
        by `gradient_accumulation_steps`.
        """
        return StepDivisor(
            count=self.count / times,
            sft_count=None if self.sft_count is None else self.sft_count / times,
            examples=None if self.examples is None else self.examples / times,
        )

    def without_zeros(self) -> StepDivisor:
        """Return the divisor with 1 in place of 0, which a step of fillers counts."""
        return StepDivisor(
            count=_replace_zero(self.count),
            sft_count=None if self.sft_count is None else _replace_zero(self.sft_count),
            examples=None if self.examples is None else _replace_zero(self.examples),
        )


UNDIVIDED = StepDivisor(count=1.0, sft_count=1.0)
"""Divisor of a call for its sums and metrics alone. They do not depend on the divisor,
and counting the batch for a true one would wait for the device.
"""


@dataclass(frozen=True, eq=False)
class BatchDivisors:
    """Divisors of the sums of one batch; None: divide by the batch's own count.

    Attributes:
        count: divides the loss.
        sft_count: divides the SFT term.
        examples: divides the router losses.
    """

    count: Tensor | float | None = None
    sft_count: Tensor | float | None = None
    examples: Tensor | float | None = None


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The part of an optimizer step's loss that a batch contributes; all tensors are
    scalars.

    Attributes:
        loss: ``loss_sum`` plus the weighted SFT term and router losses, each divided by
            its count over the whole optimizer step, or by the given divisor. Call
            ``backward()`` on it.
        loss_sum, count: weighted sum of the losses of all pairs, and sum of the weights
            (the number of pairs if all weights are 1).
        sft_sum, sft_count: sum and count of the SFT term, or None.
        metrics: name -> (sum, count), without gradient;
            :class:`~packstore.torch.Metrics` adds them over batches and ranks.
        router_sum, router_count: sum over examples of the router loss, each the mean
            over an example's sequences, and the number of examples; or None.
    """

    loss: Tensor
    loss_sum: Tensor
    count: Tensor
    sft_sum: Tensor | None
    sft_count: Tensor | None
    metrics: Mapping[str, SumAndCount]
    router_sum: Tensor | None = None
    router_count: Tensor | None = None


class StepLoss(ABC):
    """A loss that weighs the same in any pack, batch or rank.

    Args:
        router_aux_loss_coef: weight of the load-balancing loss of experts.
        gradients: how gradients are reduced over ranks.

    Attributes:
        reference: True if the loss compares with a reference model.
        ref_column: joined column with the reference's log-probs that the loss takes.
        scores: True if the loss takes a reward model's scores in place of log-probs.
        sft_weight: weight of an added SFT term; 0: none.
        weight_field: column that holds the weight of each example, or None.
    """

    reference = False
    ref_column = REF_LOGPS
    scores = False
    sft_weight: float = 0.0
    weight_field: str | None = None

    def __init__(
        self, router_aux_loss_coef: float | None, gradients: Gradients
    ) -> None:
        check_weight("router_aux_loss_coef", router_aux_loss_coef or 0)
        self.router_aux_loss_coef = router_aux_loss_coef
        self.gradients = choice("gradients", gradients, get_args(Gradients))

    @classmethod
    def _setting_names(cls) -> list[str]:
        """Return the names of the arguments that are not parameters of the function."""
        return list(inspect.getfullargspec(cls).kwonlyargs)

    @property
    def head_settings(self) -> dict[str, Any]:
        """Settings of :func:`~packstore.torch.packed_logps` for the log-probs that the
        loss takes.
        """
        return {}

    def has_reference(self, batch: PackedBatch) -> bool:
        """Return True if a batch holds the log-probs of a reference that the loss
        takes, under the name of `ref_column`.
        """
        return batch.ref_logps is not None

    @property
    def has_perplexity(self) -> bool:
        """True if the exponential of the mean loss is a perplexity."""
        return False

    def ranks_on_host(self, kind: str) -> bool:
        """Return True if the host ranks the responses of this kind of dataset.

        What the loss compares is then not part of a CUDA graph.
        """
        return False

    def check_data(self, dataset: Dataset) -> None:  # noqa: B027  (most take any)
        """Raise :class:`CompatibilityError` if the loss has no use for a dataset."""

    def check_side(  # noqa: B027  (most need none)
        self, types: Mapping[str, str], url: str
    ) -> None:
        """Raise ConfigError if the loss needs a column that no side dataset has.

        Args:
            types: joined column -> its type, such as ``token<top16,float16>``.
            url: the dataset, for messages.
        """

    @abstractmethod
    def units(self, batch: PackedBatch) -> tuple[str, str | None]:
        """Return the units that the loss and its SFT term are divided by.

        One of `examples`, `packs`, `sequences`, their `tokens`, and
        :data:`packstore.format.arrays.COUNTS`; None without an SFT term.
        """

    def count(self, batch: PackedBatch) -> StepDivisor:
        """Return the counts that a batch adds to its step's divisor, before the model
        is called.
        """
        weighted = self._weight_examples(batch)
        unit, sft_unit = self.units(batch)
        sft_count = None
        if sft_unit is not None:
            sft_count = float(self._count_unit(weighted, sft_unit))
        return StepDivisor(
            count=float(self._count_unit(weighted, unit)),
            sft_count=sft_count,
            examples=float(batch.weights.sum()),
        )

    def planned_divisor(self, batch: PackedBatch) -> StepDivisor | None:
        """Return the divisor of the batch's step; None if its loader did not count this
        loss's units.
        """
        step = batch.step
        if step is None or self.weight_field is not None:
            return None
        counts = _planned_counts(batch.kind, step)
        unit, sft_unit = self.units(batch)
        if unit not in counts:
            return None
        if sft_unit is not None and sft_unit not in counts:
            return None
        divisor = StepDivisor(
            count=counts[unit],
            sft_count=None if sft_unit is None else counts[sft_unit],
            examples=step.examples,
        )
        return divisor.without_zeros()

    def _weight_examples(self, batch: PackedBatch) -> PackedBatch:
        """Return the batch with its weights times the column of `weight_field`.

        A bad weight raises on the CPU. On a device, where a check would wait for it,
        the loss becomes nan.
        """
        if self.weight_field is None:
            return batch
        column = batch.columns.get(self.weight_field)
        if not isinstance(column, Tensor):
            columns = ", ".join(batch.columns) or "none"
            raise ConfigError(
                sentence(
                    where="loss setting weight_field",
                    rule="it must name a carried or joined column of numbers",
                    found=f"{quote(self.weight_field)}, where columns are: {columns}",
                    remedy=(
                        "Carry the column when packing (carry=…), or join it as side "
                        "data"
                    ),
                )
            )
        column = column.to(wide_dtype(column.device))
        is_bad = ~(column.isfinite() & (column >= 0))
        if is_bad.device.type == "cpu" and is_bad.any():
            example = int(is_bad.long().argmax())
            example_id = batch.example_ids[example]
            raise ConfigError(
                sentence(
                    where=f"column {self.weight_field!r}, example {example_id}",
                    rule="a weight must be finite and at least 0",
                    found=f"{column[example]:g}",
                    remedy="Correct the column",
                )
            )
        weighted = copy.copy(batch)
        weighted.weights = batch.weights * column.masked_fill(is_bad, torch.nan)
        return weighted

    def _count_unit(self, batch: PackedBatch, unit: str) -> Tensor:
        """Return the weighted number of `examples`, `sequences` or `tokens`."""
        if unit == "examples":
            return batch.weights.sum()
        weights = sequence_weights(batch)
        if unit == "tokens":
            weights = weights * segment_token_counts(batch)
        return weights.sum()

    def _resolve_divisors(
        self,
        logps: Tensor,
        batch: PackedBatch,
        divisor: StepDivisor | Tensor | float | None,
    ) -> BatchDivisors:
        """Return the divisors of a call: the argument, or the count of the step."""
        step = batch.step
        if step is not None and logps.requires_grad:
            check_steps(step.batches, step.last, divided=divisor is not None)
        if divisor is None and step is not None:
            divisor = self._step_divisor(batch, step)
        if divisor is None:
            return BatchDivisors()
        if not isinstance(divisor, StepDivisor):
            _check_number(divisor)
            divisor = StepDivisor(divisor)
        if self.sft_weight and divisor.sft_count is None:
            raise ConfigError(
                sentence(
                    where="divisor",
                    rule="the SFT term needs a count of its own",
                    found="none",
                    remedy=PASS_COUNT,
                )
            )
        return BatchDivisors(
            count=_like_sums(divisor.count, logps),
            sft_count=_like_sums(divisor.sft_count, logps),
            examples=_like_sums(divisor.examples, logps),
        )

    def _step_divisor(self, batch: PackedBatch, step: StepInfo) -> StepDivisor | None:
        """Return the divisor of a planned step; None for a step of one batch.

        Raises:
            ConfigError: the step has several batches or ranks, and no counts.
        """
        divisor = self.planned_divisor(batch)
        if divisor is not None:
            return divisor.averaged(step.ranks if self.gradients == "mean" else 1)
        if step.batches * step.ranks == 1:
            return None
        remedy = (
            "Pass divisor=count_step(batches, loss_fn).averaged(ranks) with all "
            "batches of the step"
        )
        raise ConfigError(
            sentence(
                where=repr(self),
                rule="a loss must be divided by the count of its whole optimizer step",
                found=(
                    f"a step of {step.batches} batches on {step.ranks} ranks that "
                    "nobody counted"
                ),
                remedy=remedy,
            )
        )

    def _add_router_losses(
        self,
        output: LossOutput,
        logps: Tensor,
        batch: PackedBatch,
        divisors: BatchDivisors,
    ) -> LossOutput:
        """Add the router losses that log-probs carry, if any; detach the metrics."""
        metrics = dict(output.metrics)
        router = _router_term(logps, batch, self.router_aux_loss_coef)
        if router is not None:
            coefficient, term = router
            added = coefficient * divide(term, self._router_divisor(batch, divisors))
            total, count = metrics["loss"]
            total = total + added.detach() * divisor_of(count, divisors.count)
            metrics["loss"] = (total, count)
            metrics["aux_loss"] = term
            router_sum, router_count = term
            output = replace(
                output,
                loss=output.loss + added,
                router_sum=router_sum,
                router_count=router_count,
            )
        detached = {
            name: (total.detach(), count.detach())
            for name, (total, count) in metrics.items()
        }
        return replace(output, metrics=detached)

    def _router_divisor(self, batch: PackedBatch, divisors: BatchDivisors) -> Any:
        """Return the number of examples; raise ConfigError if only pairs or tokens were
        counted.
        """
        if divisors.count is None or divisors.examples is not None:
            return divisors.examples
        unit, _ = self.units(batch)
        if self.weight_field is not None or unit != "examples":
            raise ConfigError(
                sentence(
                    where="divisor",
                    rule="router losses are divided by the number of examples",
                    found="another count alone",
                    remedy=PASS_COUNT,
                )
            )
        return divisors.count


def _planned_counts(kind: str, step: StepInfo) -> dict[str, float]:
    """Return unit -> count, for all units that a loader's plan of a step determines."""
    counts: dict[str, float] = {**(step.counts or {}), "examples": step.examples}
    num_responses = KINDS[kind]  # None if it varies
    if num_responses:
        counts["sequences"] = step.examples * num_responses
    if num_responses == 1 and "best_tokens" in counts:
        # The only sequence of an example is its best one.
        counts["tokens"] = counts["best_tokens"]
    if kind == "preference" and step.packs is not None:
        # Every pack has pairs. Of kind scored, some may have none that differ.
        counts["packs"] = step.packs
    return counts


def _replace_zero(count: Tensor | float) -> Tensor | float:
    """Return 1 in place of 0, without reading the value of a tensor."""
    if isinstance(count, Tensor):
        return count.masked_fill(count == 0, 1)
    return count or 1.0


def _like_sums(divisor: Tensor | float | None, logps: Tensor) -> Tensor | float | None:
    """Return a divisor in the dtype of the losses; another one would widen them."""
    if isinstance(divisor, Tensor):
        return divisor.to(logps).reshape(())
    return divisor


def _check_number(divisor: Any) -> None:
    """Raise ConfigError unless a divisor is a number above 0, or a tensor of one.

    The value of a tensor is not checked, as that would wait for the device.
    """
    if isinstance(divisor, Tensor):
        is_valid = divisor.numel() == 1
    else:
        is_valid = is_number(divisor) and divisor > 0
    if not is_valid:
        raise ConfigError(
            sentence(
                where="argument divisor",
                rule="it must be a number above 0, or a tensor of one",
                found=quote(divisor),
                remedy=PASS_COUNT,
            )
        )


def count_step(
    batches: Sequence[PackedBatch],
    loss_fn: StepLoss,
    *,
    group: Any = None,
    device: torch.device | None = None,
) -> StepDivisor:
    """Count an optimizer step, over its batches and all ranks; a collective call.

    Args:
        batches: this rank's batches of the step, maybe none; one suffices if its loader
            counted the step.
        loss_fn: the loss.
        group: the data-parallel process group; default: all ranks, if torch.distributed
            runs.
        device: device that the group communicates from, which with NCCL is the rank's
            GPU; default: the device of the batches. Counting batches on the CPU waits
            for no device.

    Raises:
        ConfigError: the batches belong to different steps, or some of an uncounted step
            are missing.
    """
    steps = [batch.step for batch in batches if batch.step is not None]
    _check_one_step(steps)
    divisor = loss_fn.planned_divisor(batches[0]) if batches else None
    if divisor is not None:
        return divisor
    _check_all_batches(steps)

    if not is_distributed():
        device = None  # the counts are numbers already
    elif device is None and batches:
        device = batches[0].weights.device
    counts = [loss_fn.count(batch) for batch in batches]
    sums = [
        sum(float(part.count) for part in counts),
        sum(float(part.sft_count or 0) for part in counts),
        sum(float(part.examples or 0) for part in counts),
    ]
    count, sft_count, examples = all_reduce_sums(sums, group, device)
    divisor = StepDivisor(
        count=count,
        sft_count=sft_count if loss_fn.sft_weight else None,
        examples=examples,
    )
    return divisor.without_zeros()


def _check_one_step(steps: Sequence[StepInfo]) -> None:
    """Raise ConfigError for batches of different steps."""
    indices = {step.index for step in steps}
    if len(indices) > 1:
        raise ConfigError(
            "count_step: batches must be of one optimizer step; found steps "
            f"{sorted(indices)}."
        )


def _check_all_batches(steps: Sequence[StepInfo]) -> None:
    """Raise ConfigError if some batches of a planned step are missing."""
    batch_indices = {step.batch for step in steps}
    if not steps or batch_indices == set(range(steps[0].batches)):
        return
    raise ConfigError(
        sentence(
            where="count_step",
            rule=(
                f"it must get all {steps[0].batches} batches of the step, which nobody "
                "counted"
            ),
            found=str(len(batch_indices)),
            remedy="Collect them until step.last",
        )
    )


def sequence_weights(batch: PackedBatch) -> Tensor:
    """Return the weight of each sequence, `[S]`: 1, or 0 of a filler."""
    return batch.weights[batch.segment_examples]


def divide(term: SumAndCount, divisor: Tensor | float | None) -> Tensor:
    """Return the sum of a term over the divisor, by default over its count.

    An empty term gives 0.
    """
    total, count = term
    return total / divisor_of(count, divisor)


def divisor_of(count: Tensor, divisor: Tensor | float | None) -> Tensor | float:
    """Return the divisor; without one the count, or 1 if it is 0."""
    if divisor is not None:
        return divisor
    return count.masked_fill(count == 0, 1)


def _router_term(
    logps: Tensor, batch: PackedBatch, coefficient: float | None
) -> tuple[float, SumAndCount] | None:
    """Return coefficient, and sum and count, of the router losses that log-probs carry.

    `packed_logps` attaches them to the log-probs that it returns. The result is None if
    there are none, as without gradient, or if the coefficient is 0.
    """
    if not logps.requires_grad:
        return None
    losses = take_carried_losses(logps)
    if losses is None:
        if coefficient:
            raise ConfigError(
                sentence(
                    where=f"router_aux_loss_coef {coefficient}",
                    rule="log-probs of a policy must carry router losses",
                    found="none",
                    remedy=(
                        "Use packed_logps, with a model whose config has that "
                        "coefficient above 0"
                    ),
                )
            )
        return None
    num_losses = len(losses.values)
    if num_losses != batch.num_segments:
        raise ConfigError(
            sentence(
                where="router losses",
                rule=(
                    f"must be one number for each of the batch's {batch.num_segments} "
                    "segments"
                ),
                found=str(num_losses),
            )
        )
    if coefficient is None:
        coefficient = losses.settings.coefficient
    if not coefficient:
        return None
    zeros = losses.values.new_zeros(batch.num_examples)
    sums = zeros.index_add(0, batch.segment_examples, losses.values)
    weights = batch.weights.to(sums)
    weighted_sum = (sums / batch.num_responses * weights).sum()
    return coefficient, (weighted_sum, weights.sum())
