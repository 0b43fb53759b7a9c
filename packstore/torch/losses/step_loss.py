"""The base of losses: a sum, divided by its count over the whole optimizer step."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packstore.config.settings import check_class
from packstore.errors import ConfigError, quote, sentence
from packstore.format.schema import KINDS
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.frameworks import check_steps
from packstore.torch.logprobs.logprobs import segment_token_counts
from packstore.torch.losses.terms import check_weight, is_number
from packstore.torch.metrics import (
    SumAndCount,
    all_reduce_sums,
    is_distributed,
    wide_dtype,
)
from packstore.torch.models.routers import carried

Gradients = Literal["mean", "sum"]

PASS_COUNT = (
    "Pass what count_step(batches, loss_fn) gives, or a StepDivisor with examples"
)


@dataclass(frozen=True)
class StepDivisor:
    """Divisors of the sums of a :class:`~packstore.torch.LossOutput`.

    Attributes:
        count: divides `loss_sum`; for a step, the sum of `count` over its batches.
        sft_count: divides `sft_sum`, or None.
        examples: divides `router_sum`; None: `count` does, if it counts examples.
    """

    count: float
    sft_count: float | None = None
    examples: float | None = None

    def averaged(self, times: int) -> StepDivisor:
        """Returns the divisor for a trainer that averages over `times` parts instead of
        summing.

        DDP and FSDP average gradients over the ranks; Accelerate also divides each loss
        by `gradient_accumulation_steps`.
        """
        rest = (x if x is None else x / times for x in (self.sft_count, self.examples))
        return StepDivisor(self.count / times, *rest)

    def above_zero(self) -> StepDivisor:
        """Returns it with 1 in place of 0, as what was counted may consist of
        fillers.
        """
        rest = (x if x is None else x or 1.0 for x in (self.sft_count, self.examples))
        return StepDivisor(self.count or 1.0, *rest)


UNDIVIDED = StepDivisor(1.0, 1.0)
"""For metrics, which are sums and counts that no divisor changes; counting would wait
for them.
"""


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The part of an optimizer step's loss that a batch contributes; all tensors are
    scalars.

    Attributes:
        loss: ``loss_sum`` plus the weighted SFT term and router losses, each divided by
            its count over the whole optimizer step, or by the given divisor. Call
            ``backward()`` on it.
        loss_sum, count: sum of the losses of all pairs, and their number; of weighted
            ones, of losses times weights, and of weights.
        sft_sum, sft_count: the same of the SFT term, or None.
        metrics: name -> (sum, count), without gradient;
            :class:`~packstore.torch.Metrics` adds them over batches and ranks.
        router_sum, router_count: sum over examples of the load-balancing loss of
            experts, each the mean over an example's sequences, and their number; or
            None.
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
        scores: True if the loss takes a reward model's scores in place of log-probs.
    """

    reference = scores = False
    sft_weight: float = 0.0
    weight_field: str | None = None

    def __init__(
        self, router_aux_loss_coef: float | None, gradients: Gradients
    ) -> None:
        check_weight("router_aux_loss_coef", router_aux_loss_coef or 0)
        self.router_aux_loss_coef = router_aux_loss_coef
        self.gradients = choice("gradients", gradients, get_args(Gradients))

    @classmethod
    def _settings(cls) -> list[str]:
        """Returns the names of its own arguments, beside the parameters of the
        function.
        """
        return list(inspect.getfullargspec(cls).kwonlyargs)

    @abstractmethod
    def units(self, batch: PackedBatch) -> tuple[str, str | None]:
        """Returns what the loss and its SFT term are divided by.

        Of `examples`, `packs`, `sequences`, their `tokens`, and
        :data:`packstore.format.arrays.COUNTS`.
        """

    def count(self, batch: PackedBatch) -> StepDivisor:
        """Counts what a batch adds to the divisor of its optimizer step; needs no
        log-probs.
        """
        weighted = self._weighted(batch)
        unit, sft_unit = self.units(batch)
        sft_count = None if sft_unit is None else float(self._count(weighted, sft_unit))
        return StepDivisor(
            float(self._count(weighted, unit)), sft_count, float(batch.weights.sum())
        )

    def planned(self, batch: PackedBatch) -> StepDivisor | None:
        """Returns the divisor of the batch's step; None if the loader did not
        count it.
        """
        if (step := batch.step) is None or self.weight_field is not None:
            return None
        known = {**(step.counts or {}), "examples": step.examples}
        if responses := KINDS[batch.kind]:
            known["sequences"] = step.examples * responses
        if responses == 1 and "best_tokens" in known:
            known["tokens"] = known["best_tokens"]
        if batch.kind == "preference" and step.packs is not None:
            known["packs"] = step.packs
        unit, sft_unit = self.units(batch)
        if not {unit, sft_unit or unit} <= known.keys():
            return None
        sft_count = None if sft_unit is None else known[sft_unit]
        return StepDivisor(known[unit], sft_count, step.examples).above_zero()

    def _weighted(self, batch: PackedBatch) -> PackedBatch:
        """Returns the batch with its weights times the column of `weight_field`, if
        there is one.

        A bad weight raises on the CPU; a device would wait for it: there the loss
        becomes nan.
        """
        if self.weight_field is None:
            return batch
        column = batch.columns.get(self.weight_field)
        if not isinstance(column, Tensor):
            rule = "it must name a carried or joined column of numbers"
            columns = ", ".join(batch.columns) or "none"
            found = f"{quote(self.weight_field)}, where columns are: {columns}"
            remedy = "Carry the column when packing (carry=…), or join it as side data"
            raise ConfigError(
                sentence("loss setting weight_field", rule, found, remedy)
            )
        column = column.to(wide_dtype(column.device))
        bad = ~(column.isfinite() & (column >= 0))
        if bad.device.type == "cpu" and bad.any():
            example = int(bad.long().argmax())
            where = (
                f"column {self.weight_field!r}, example {batch.example_ids[example]}"
            )
            rule, remedy = (
                "a weight must be finite and at least 0",
                "Correct the column",
            )
            raise ConfigError(sentence(where, rule, f"{column[example]:g}", remedy))
        weighted = copy.copy(batch)
        weighted.weights = batch.weights * column.masked_fill(bad, torch.nan)
        return weighted

    def _count(self, batch: PackedBatch, unit: str) -> Tensor:
        if unit == "examples":
            return batch.weights.sum()
        weights = sequence_weights(batch)
        if unit == "tokens":
            weights = weights * segment_token_counts(batch)
        return weights.sum()

    def _divided(
        self,
        logps: Tensor,
        batch: PackedBatch,
        divisor: StepDivisor | Tensor | float | None,
        output: Callable[[Any, Any], LossOutput],
    ) -> LossOutput:
        """Adds router losses to `output`, made from the divisors of the loss and its
        SFT term.
        """
        if logps.requires_grad and batch.step is not None:
            check_steps(
                batch.step.batches, batch.step.last, divided=divisor is not None
            )
        count, sft_count, examples = self._divisors(batch, divisor)
        out = output(count, sft_count)
        metrics = dict(out.metrics)
        if routers := _router_term(logps, batch, self.router_aux_loss_coef):
            if count is not None and examples is None:
                if self.weight_field is not None or self.units(batch)[0] != "examples":
                    rule = "router losses are divided by the number of examples"
                    raise ConfigError(
                        sentence("divisor", rule, "another count alone", PASS_COUNT)
                    )
                examples = count
            coefficient, term = routers
            added = coefficient * divide(term, examples)
            total, number = metrics["loss"]
            whole = total + added.detach() * (
                above_zero(number) if count is None else count
            )
            metrics |= {"loss": (whole, number), "aux_loss": term}
            out = replace(
                out, loss=out.loss + added, router_sum=term[0], router_count=term[1]
            )
        detached = {name: (x.detach(), n.detach()) for name, (x, n) in metrics.items()}
        return replace(out, metrics=detached)

    def _divisors(
        self, batch: PackedBatch, divisor: StepDivisor | Tensor | float | None
    ) -> tuple[Any, Any, Any]:
        """Divisors of the pairs, of the SFT term and of router losses; None: their own
        counts.
        """
        if divisor is None and (step := batch.step) is not None:
            planned = self.planned(batch)
            if planned is not None:
                divisor = planned.averaged(
                    step.ranks if self.gradients == "mean" else 1
                )
            elif step.batches * step.ranks > 1:
                rule = "a loss must be divided by the count of its whole optimizer step"
                found = (
                    f"a step of {step.batches} batches on {step.ranks} ranks that "
                    "nobody counted"
                )
                remedy = (
                    "Pass divisor=count_step(batches, loss_fn).averaged(ranks) with "
                    "all batches of "
                    "the step"
                )
                if self.weight_field is None:
                    remedy += ", or pack the data anew: the pack index then counts them"
                raise ConfigError(sentence(repr(self), rule, found, remedy))
        if divisor is None:
            return None, None, None
        if not isinstance(divisor, StepDivisor):
            one = isinstance(divisor, Tensor) and divisor.numel() == 1
            if not (one or (is_number(divisor) and divisor > 0)):
                rule, found = (
                    "it must be a number above 0, or a tensor of one",
                    quote(divisor),
                )
                raise ConfigError(sentence("argument divisor", rule, found, PASS_COUNT))
            divisor = StepDivisor(divisor)  # type: ignore[arg-type]
        if self.sft_weight and divisor.sft_count is None:
            rule = "the SFT term needs a count of its own"
            raise ConfigError(sentence("divisor", rule, "none", PASS_COUNT))
        return divisor.count, divisor.sft_count, divisor.examples


def count_step(
    batches: Sequence[PackedBatch],
    loss_fn: StepLoss,
    *,
    group: Any = None,
    device: torch.device | None = None,
) -> StepDivisor:
    """Counts an optimizer step, over its batches and all ranks; a collective call.

    Args:
        batches: this rank's batches of the step, maybe none; one suffices if its loader
            counted the step.
        loss_fn: the loss.
        group: the data-parallel process group; default: all ranks, if torch.distributed
            runs.
        device: device that the group communicates from, which with NCCL is the rank's
            GPU; default: that of the batches. Counting batches on the CPU waits for no
            device.

    Raises:
        ConfigError: the batches belong to different steps, or some of an uncounted step
            are missing.
    """
    check_class("argument loss_fn", loss_fn, StepLoss, "The order is batches, loss_fn")
    check_class("argument batches", batches, Sequence, "Give a list of them")
    steps = [batch.step for batch in batches if batch.step is not None]
    if len(indices := {step.index for step in steps}) > 1:
        raise ConfigError(
            "count_step: batches must be of one optimizer step; found steps "
            f"{sorted(indices)}."
        )
    planned = loss_fn.planned(batches[0]) if batches else None
    if planned is not None:
        return planned
    numbers = {step.batch for step in steps}
    if steps and numbers != set(range(steps[0].batches)):
        rule = (
            f"it must get all {steps[0].batches} batches of the step, which nobody "
            "counted"
        )
        remedy = "Collect them until step.last"
        raise ConfigError(sentence("count_step", rule, str(len(numbers)), remedy))
    counts = [loss_fn.count(batch) for batch in batches]
    if not is_distributed():
        device = None  # the counts are numbers already
    elif device is None and batches:
        device = batches[0].weights.device
    sums = [
        sum(x or 0 for x in each) for each in zip(*map(astuple, counts), strict=True)
    ]
    count, sft_count, examples = all_reduce_sums(sums or [0, 0, 0], group, device)
    divisor = StepDivisor(count, sft_count if loss_fn.sft_weight else None, examples)
    return divisor.above_zero()


def sequence_weights(batch: PackedBatch) -> Tensor:
    """Returns the weight of each sequence, `[S]`: 1, or 0 of a filler."""
    return batch.weights[batch.segment_examples]


def divide(term: SumAndCount, divisor: Tensor | float | None) -> Tensor:
    """Returns sum / count, or sum / divisor; an empty sum gives 0."""
    total, count = term
    return total / (above_zero(count) if divisor is None else divisor)


def above_zero(count: Tensor) -> Tensor:
    """Returns a count with 1 in place of 0."""
    return count.masked_fill(count == 0, 1)


def _router_term(
    logps: Tensor, batch: PackedBatch, coefficient: float | None
) -> tuple[float, SumAndCount] | None:
    """Weight and term of the router losses that log-probs carry, if they are to be
    added.
    """
    losses = carried(logps) if logps.requires_grad else None
    if losses is None:
        if coefficient and logps.requires_grad:
            where = f"router_aux_loss_coef {coefficient}"
            rule = "log-probs of a policy must carry router losses"
            remedy = (
                "Use packed_logps, with a model whose config has that "
                "coefficient "
                "above 0"
            )
            raise ConfigError(sentence(where, rule, "none", remedy))
        return None
    if len(losses.values) != batch.num_segments:
        rule = (
            f"must be one number for each of the batch's {batch.num_segments} segments"
        )
        raise ConfigError(sentence("router losses", rule, str(len(losses.values))))
    coefficient = losses.settings.coefficient if coefficient is None else coefficient
    if not coefficient:
        return None
    zeros = losses.values.new_zeros(batch.num_examples)
    sums = zeros.index_add(0, batch.segment_examples, losses.values)
    weights = batch.weights.to(sums)
    return coefficient, ((sums / batch.num_responses * weights).sum(), weights.sum())
