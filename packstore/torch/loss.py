"""The loss of a batch as a sum and a count, so that packing never changes what a pair weighs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packstore.errors import CompatibilityError, ConfigError, UnknownNameError, quote, sentence
from packstore.torch.collate import PackedBatch
from packstore.torch.logprobs import segment_token_counts
from packstore.torch.loss_variants import LOSSES
from packstore.torch.loss_variants.sft import sft
from packstore.torch.pairs import PairChoice, Pairs, index_best, index_pairs

SftAverage = Literal["token", "sequence_sum", "sequence_mean"]
Reduction = Literal["sum", "pack_mean"]
SumAndCount = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class LossOutput:
    """What a batch adds to the loss of an optimizer step; all tensors are scalars.

    Attributes:
        loss: ``loss_sum / count`` plus the weighted SFT term, or with the given divisors in place
            of the counts. To be differentiated.
        loss_sum: sum of the losses of all pairs.
        count: number of pairs.
        sft_sum: the SFT term's own sum, or None.
        sft_count: what it is divided by, or None.
        metrics: name -> (sum, count), without gradient; add both over batches and ranks.
    """

    loss: Tensor
    loss_sum: Tensor
    count: Tensor
    sft_sum: Tensor | None
    sft_count: Tensor | None
    metrics: Mapping[str, SumAndCount]


class PreferenceLoss:
    """One of the losses of :data:`~packstore.torch.loss_variants.LOSSES`.

    Args:
        name: which one.
        sft_weight: weight of the added likelihood loss of the best response; 0: none.
        sft_average: what that is (and what the loss ``sft`` is): ``token``, the mean over all
            tokens; ``sequence_sum``, the sum over each sequence, averaged over sequences;
            ``sequence_mean``, the mean over each sequence, averaged over sequences.
        pairs: kind ``ranked`` only: the best response against each other one, ``all`` pairs, or
            ``adjacent`` ranks. Responses of equal reward are never compared.
        reduction: ``sum``; or ``pack_mean``, the mean over the pairs of each pack, averaged over
            packs. That is biased: a pair weighs more, the fewer share its pack, which weights real
            pairs by 0.6 to 3 times. It exists only to reproduce NeMo-Aligner.
        parameters: of the loss, such as `beta`.

    Raises:
        UnknownNameError: no such loss, or no such parameter of it.
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        name: str = "dpo",
        *,
        sft_weight: float = 0.0,
        sft_average: SftAverage = "token",
        pairs: PairChoice = "best_vs_rest",
        reduction: Reduction = "sum",
        **parameters: float,
    ) -> None:
        self.variant = LOSSES.load(name)
        self.name, self.sft_weight = name, sft_weight
        self.sft_average = _choice("sft_average", sft_average, get_args(SftAverage))
        self.pairs: PairChoice = _choice("pairs", pairs, get_args(PairChoice))
        self.reduction = _choice("reduction", reduction, get_args(Reduction))
        if not (math.isfinite(sft_weight) and sft_weight >= 0):
            raise ConfigError(f"sft_weight must be at least 0; found {sft_weight}.")
        if name == "sft" and (sft_weight or reduction != "sum"):
            raise ConfigError("loss 'sft' takes neither sft_weight nor a reduction.")
        known = inspect.signature(self.variant.function).parameters
        defaults = {n: p.default for n, p in known.items() if p.kind is p.KEYWORD_ONLY}
        self.parameters = {**defaults, **_checked(name, parameters, tuple(defaults))}
        nothing = torch.zeros(0)
        self.variant(Pairs(*[nothing] * 8), **self.parameters)

    def __repr__(self) -> str:
        values = "".join(f", {name}={value}" for name, value in self.parameters.items())
        return f"PreferenceLoss({self.name!r}{values})"

    def __call__(
        self,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None = None,
        *,
        divisor: Tensor | float | None = None,
        sft_divisor: Tensor | float | None = None,
    ) -> LossOutput:
        """The loss of a batch.

        Args:
            logps: `[S]`, what :func:`segment_logps` gave for the policy.
            batch: the batch.
            ref_logps: `[S]`, the same of the reference model; default: those of the batch.
            divisor: number of pairs of the whole optimizer step, over its batches and all ranks;
                default: of this batch.
            sft_divisor: the same for the SFT term, the sum of all `sft_count`.

        Raises:
            ConfigError: a reference is needed and missing, or a tensor has another shape.
            CompatibilityError: the batch holds single sequences and the loss compares two.
        """
        sums = _Sums.of(logps, batch, self._reference(batch, ref_logps))
        if self.name == "sft":
            term, metrics = self._likelihood(sums, batch)
            return _output(term, divisor, metrics)
        if batch.kind == "sft":
            raise CompatibilityError(
                sentence(
                    f"loss {self.name!r}",
                    "an example must have responses to compare",
                    "a dataset of kind 'sft'",
                    "Use PreferenceLoss('sft')",
                )
            )
        index = index_pairs(batch, self.pairs)
        weights = batch.weights[index.example].to(logps.dtype)
        pairs = sums.take(index.chosen, index.rejected)
        losses = self.variant(pairs, **self.parameters)
        if self.reduction == "sum":
            term = (losses * weights).sum(), weights.sum()
        else:
            term = _pack_means(losses, weights, batch.pack_ids[index.example], batch.num_packs)
        out = _output(term, divisor, self._metrics(pairs, weights))
        if not self.sft_weight:
            return out
        sft_term, _ = self._likelihood(sums, batch)
        loss = out.loss + self.sft_weight * _divide(sft_term, sft_divisor)
        metrics = {**out.metrics, "sft_loss": _detached(sft_term)}
        return LossOutput(loss, *term, *sft_term, metrics)

    def _reference(self, batch: PackedBatch, ref_logps: Tensor | None) -> Tensor | None:
        if not self.variant.reference:
            return None
        ref_logps = batch.ref_logps if ref_logps is None else ref_logps
        if ref_logps is None:
            raise ConfigError(
                f"loss {self.name!r} compares with a reference model: pass ref_logps=…, the "
                "segment_logps of the reference model on the same batch."
            )
        return ref_logps.detach()

    def _likelihood(
        self, sums: _Sums, batch: PackedBatch
    ) -> tuple[SumAndCount, dict[str, SumAndCount]]:
        """The likelihood loss of the best responses, and its metrics."""
        best = index_best(batch)
        pairs = sums.take(best, best)
        weights = batch.weights.to(sums.logps.dtype)
        losses = sft(pairs)
        if self.sft_average == "sequence_mean":
            losses = losses / pairs.chosen_tokens
        counts = weights * pairs.chosen_tokens if self.sft_average == "token" else weights
        metrics = {"logps/chosen": _detached(((pairs.chosen * weights).sum(), weights.sum()))}
        return ((losses * weights).sum(), counts.sum()), metrics

    def _metrics(self, pairs: Pairs, weights: Tensor) -> dict[str, SumAndCount]:
        """Rewards are ``beta * (policy - reference)``, of means where the loss looks at those."""
        seen = pairs.per_token() if self.variant.averaged else pairs
        beta = self.parameters["beta"]
        values = {
            "rewards/chosen": beta * seen.u,
            "rewards/rejected": beta * seen.v,
            "rewards/margins": beta * seen.d,
            "rewards/accuracies": (seen.d > 0).to(weights.dtype),
            "logps/chosen": pairs.chosen,
            "logps/rejected": pairs.rejected,
        }
        count = weights.sum()
        return {name: _detached(((x * weights).sum(), count)) for name, x in values.items()}


@dataclass(frozen=True, eq=False)
class _Sums:
    """Per-sequence numbers of a batch, `[S]` each."""

    logps: Tensor
    ref_logps: Tensor
    tokens: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None) -> _Sums:
        for name, values in (("logps", logps), ("ref_logps", ref_logps)):
            if values is not None and values.shape != (batch.num_segments,):
                must = f"must be one number for each of the batch's {batch.num_segments} segments"
                raise ConfigError(sentence(name, must, f"shape {tuple(values.shape)}"))
        return cls(
            logps,
            torch.zeros_like(logps) if ref_logps is None else ref_logps.to(logps),
            segment_token_counts(batch).to(logps),
            batch.rewards.to(logps),
        )

    def take(self, chosen: Tensor, rejected: Tensor) -> Pairs:
        both = (self.logps, self.ref_logps, self.tokens, self.rewards)
        return Pairs(*(values[side] for values in both for side in (chosen, rejected)))


def _output(
    term: SumAndCount, divisor: Tensor | float | None, metrics: Mapping[str, SumAndCount]
) -> LossOutput:
    metrics = {"loss": _detached(term), **metrics}
    return LossOutput(_divide(term, divisor), *term, None, None, metrics)


def _divide(term: SumAndCount, divisor: Tensor | float | None) -> Tensor:
    """Sum over count, or over the divisor; a sum over nothing is 0."""
    total, count = term
    return total / (count.clamp(min=1) if divisor is None else divisor)


def _detached(term: SumAndCount) -> SumAndCount:
    return term[0].detach(), term[1].detach()


def _pack_means(losses: Tensor, weights: Tensor, packs: Tensor, num_packs: int) -> SumAndCount:
    """Sum over packs of the mean over their pairs, and the number of packs that have any."""
    zeros = losses.new_zeros(num_packs)
    sums = zeros.index_add(0, packs, losses * weights)
    counts = zeros.index_add(0, packs, weights)
    return (sums / counts.clamp(min=1)).sum(), (counts > 0).to(losses.dtype).sum()


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ConfigError(f"{name} must be one of: {', '.join(choices)}; found {quote(value)}.")
    return value


def _checked(name: str, given: Mapping[str, float], known: tuple[str, ...]) -> dict[str, float]:
    """The given parameters, each known and a number; beta scales and so is above 0."""
    for parameter, value in given.items():
        if parameter not in known:
            raise UnknownNameError(
                f"loss {name!r} has no parameter {quote(parameter)}; "
                f"it takes: {', '.join(known) or 'none'}."
            )
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"loss {name!r}: {parameter} must be a number; found {quote(value)}.")
        if parameter == "beta" and value <= 0:
            raise ConfigError(f"loss {name!r}: beta must be above 0; found {value}.")
    return dict(given)
