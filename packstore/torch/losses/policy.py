"""Losses on the tokens of sampled responses: the clipped policy gradient of PPO and
GRPO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packstore.config.settings import check_class
from packstore.errors import ConfigError, sentence
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.logprobs.logprobs import by_segment, segment_token_counts
from packstore.torch.losses.formulas import Variant, between, bounded_exp
from packstore.torch.losses.pairs import ORDER, check_precision
from packstore.torch.losses.step_loss import (
    Gradients,
    LossOutput,
    StepDivisor,
    StepLoss,
    divide,
    sequence_weights,
)
from packstore.torch.losses.terms import (
    check_function,
    check_parameters,
    check_weight,
    name_of,
)
from packstore.torch.metrics import SumAndCount, wide_dtype

Average = Literal["token", "sequence", "group"]
Ratio = Literal["token", "sequence"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """n supervised tokens, each quantity a tensor `[n]`, in the order of
    ``batch.target_index``.

    Attributes:
        logps: log-probs of the policy, in nats.
        log_ratio: log-ratio of the policy and the one that sampled, of each token or
            its sequence.
        advantages: of each token.
        sequences: int64, the sequence of each token; S for padding.
        ref_logps: log-probs of a reference model, or None.
    """

    logps: Tensor
    log_ratio: Tensor
    advantages: Tensor
    sequences: Tensor
    ref_logps: Tensor | None = None

    @property
    def kl(self) -> Tensor:
        """``e^g - g - 1`` with g = ref_logps - logps: estimates KL(policy ||
        reference), >= 0.

        Source: k3 of Schulman 2020, joschu.net/blog/kl-approx.html; Shao et al. 2024,
        arXiv 2402.03300, equation 4.
        """
        assert self.ref_logps is not None
        gap = self.ref_logps - self.logps
        return torch.expm1(gap.clamp(max=80)) - gap


def clipped(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, r the ratio and A the
    advantage.

    Source: Schulman et al. 2017 (PPO), arXiv 1707.06347, equation 7; with two bounds,
    Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 8. Exponents are cut at 80.
    """
    low = 1 - between("clipped", "clip_low", clip_low, 0, 1)
    high = 1 + between("clipped", "clip_high", clip_high, 0, 1e6)
    ratio = bounded_exp(tokens.log_ratio)
    gains = ratio * tokens.advantages, ratio.clamp(low, high) * tokens.advantages
    return -torch.minimum(*gains)


class PolicyLoss(StepLoss):
    """A loss of each supervised token, averaged over the whole optimizer step.

    Args:
        function: a function of :class:`~packstore.torch.Tokens` that returns their
            losses `[n]`, whose keyword-only arguments are its parameters.
        average: ``token``: over all tokens of the step (DAPO); ``sequence``: over the
            tokens of each sequence, then over sequences (GRPO); ``group``: over the
            tokens of each example's sequences, then over examples. For a sum over a
            constant (Dr. GRPO), take ``token`` and pass that constant as `divisor`.
        ratio: ``token``; or ``sequence``, the geometric mean of a sequence's ratios at
            each of its tokens (GSPO: Zheng et al. 2025, arXiv 2507.18071, equation 7).
        kl_weight: weight of an added :attr:`Tokens.kl`; 0: none.
        router_aux_loss_coef, gradients: as of :class:`~packstore.torch.PreferenceLoss`.
        parameters: parameters of the function; of ``clipped``, `clip_low` and
            `clip_high`.

    Raises:
        UnknownNameError: the function has no such parameter.
        ConfigError: a value is out of range, or the function couples sequences.
    """

    def __init__(
        self,
        function: Callable[..., Tensor] = clipped,
        *,
        average: Average = "token",
        ratio: Ratio = "token",
        kl_weight: float = 0.0,
        router_aux_loss_coef: float | None = None,
        gradients: Gradients = "mean",
        **parameters: float,
    ) -> None:
        super().__init__(router_aux_loss_coef, gradients)
        self.average = choice("average", average, get_args(Average))
        self.ratio = choice("ratio", ratio, get_args(Ratio))
        check_weight("kl_weight", kl_weight)
        self.kl_weight, self.reference = kl_weight, kl_weight > 0
        check_class("PolicyLoss", function, Callable, "Give a function of Tokens")
        self.name = name_of(function)
        variant = Variant(function, False)
        self.parameters = check_parameters(
            self.name, variant, parameters, self._settings()
        )
        self.function: Callable[[Tokens], Tensor] = partial(function, **self.parameters)
        draws = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
        of_one, of_other = (_tokens(draws[:, s]) for s in (slice(0, 2), slice(2, 3)))
        whole = _tokens(draws, torch.tensor([0, 0, 1]))
        check_function(f"loss {self.name!r}", self.function, whole, (of_one, of_other))

    def __repr__(self) -> str:
        values = "".join(f", {name}={value}" for name, value in self.parameters.items())
        return f"PolicyLoss({self.name}{values}, average={self.average!r})"

    def __call__(
        self,
        logps: Tensor,
        batch: PackedBatch,
        advantages: Tensor | None = None,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        *,
        divisor: StepDivisor | Tensor | float | None = None,
    ) -> LossOutput:
        """Computes the loss of a batch.

        Args:
            logps: `[n]`, log-probs of the policy in nats, from
                ``packed_logps(model, batch, per_token=True)``.
            batch: the batch.
            advantages: `[n]` or `[S]`; default: the batch's rewards.
            old_logps: `[n]`, the same of the policy that sampled, or with
                ``ratio="sequence"`` its sums `[S]`; default: `logps`, as in the first
                step on fresh samples.
            ref_logps: `[n]`, the same of a reference model; needed if `kl_weight` is
                above 0.
            divisor: as of :class:`~packstore.torch.PreferenceLoss`.
        """
        tokens = self._tokens(logps, batch, advantages, old_logps, ref_logps)
        return self._divided(
            logps, batch, divisor, partial(self._output, tokens, batch)
        )

    def units(self, batch: PackedBatch) -> tuple[str, str | None]:
        """See :meth:`StepLoss.units`."""
        units = {"token": "tokens", "sequence": "sequences", "group": "examples"}
        return units[self.average], None

    def _tokens(
        self,
        logps: Tensor,
        batch: PackedBatch,
        advantages: Tensor | None,
        old_logps: Tensor | None,
        ref_logps: Tensor | None,
    ) -> Tokens:
        check_class("argument batch", batch, PackedBatch, ORDER)
        sequences = batch.targets.segments
        n, S = len(sequences), batch.num_segments
        counts, rows = (
            segment_token_counts(batch).clamp(min=1),
            sequences.clamp(max=S - 1),
        )

        def per_token(
            where: str, values: Tensor, parts: Tensor | None = None
        ) -> Tensor:
            """Values `[n]`; those `[S]` of sequences are divided by `parts` and
            spread.
            """
            check_class(f"argument {where}", values, Tensor, ORDER)
            shape = tuple(values.shape)
            if shape == (n,) and (parts is None or n != S or bool((counts == 1).all())):
                return values.to(logps)
            if shape == (S,) != (n,) and parts is not None:
                return (values.to(logps) / parts)[rows]
            rule = f"must be one number for each of the batch's {n} supervised tokens"
            rule += "" if parts is None else f" or {S} sequences, where they differ"
            remedy = "packed_logps(model, batch, per_token=True) returns such log-probs"
            raise ConfigError(sentence(where, rule, f"shape {shape}", remedy))

        logps = check_precision("logps", per_token("logps", logps))
        old, parts = logps, counts if self.ratio == "sequence" else None
        if old_logps is not None:
            old = per_token("old_logps", check_precision("old_logps", old_logps), parts)
        log_ratio = logps - old.detach()
        if self.ratio == "sequence":
            log_ratio = (by_segment(batch, log_ratio) / counts)[rows]
        if advantages is None:
            advantages = batch.rewards[rows].to(logps)
        else:
            advantages = per_token(
                "advantages", advantages, torch.ones_like(counts)
            ).detach()
        if ref_logps is not None:
            ref_logps = per_token(
                "ref_logps", check_precision("ref_logps", ref_logps)
            ).detach()
        elif self.kl_weight:
            raise ConfigError(
                "kl_weight compares with a reference model: pass ref_logps, [n]."
            )
        return Tokens(logps, log_ratio, advantages, sequences, ref_logps)

    def _output(
        self, tokens: Tokens, batch: PackedBatch, count: Tensor | float | None, _: Any
    ) -> LossOutput:
        """The loss without router losses."""
        weights = torch.cat([sequence_weights(batch), batch.weights.new_zeros(1)])[
            tokens.sequences
        ]
        wide = weights.to(wide_dtype(weights.device))
        policy = self.function(tokens)
        losses, ratio = policy, bounded_exp(tokens.log_ratio)
        figures = {"ratio": ratio, "logps": tokens.logps}
        if tokens.ref_logps is not None:
            figures |= {"kl": tokens.kl, "policy_loss": policy}
        if self.kl_weight:
            losses = policy + self.kl_weight * tokens.kl
        if {"clip_low", "clip_high"} <= set(self.parameters):
            above = (tokens.advantages > 0) & (ratio > 1 + self.parameters["clip_high"])
            below = (tokens.advantages < 0) & (ratio < 1 - self.parameters["clip_low"])
            figures["clipped"] = above | below
        term = self._reduce(losses, weights.to(losses), batch)
        metrics = {
            n: ((x.to(wide) * wide).sum(), wide.sum()) for n, x in figures.items()
        }
        return LossOutput(
            divide(term, count), *term, None, None, {"loss": term, **metrics}
        )

    def _reduce(
        self, losses: Tensor, weights: Tensor, batch: PackedBatch
    ) -> SumAndCount:
        """Sum and count of what is averaged; `weights`, 1 or 0, are those of the
        tokens.
        """
        if self.average == "token":
            return (losses * weights).sum(), weights.sum()
        sums, counts = by_segment(batch, losses), segment_token_counts(batch)
        of_units = sequence_weights(batch)
        if self.average == "group":
            example = batch.segment_examples
            zeros = torch.zeros_like(batch.example_ids)
            sums = sums.new_zeros(len(zeros)).index_add(0, example, sums)
            counts, of_units = zeros.index_add(0, example, counts), batch.weights
        of_units = of_units.to(sums)
        return (sums / counts.clamp(min=1) * of_units).sum(), of_units.sum()


def _tokens(draws: Tensor, sequences: Tensor | None = None) -> Tokens:
    """Tokens of one sequence by default, to try a function."""
    if sequences is None:
        sequences = torch.zeros(draws.shape[1], dtype=torch.long)
    logps, log_ratio, advantages, ref_logps = draws
    return Tokens(-logps.abs(), log_ratio, advantages, sequences, -ref_logps.abs())
