"""Losses on the tokens of sampled responses: the clipped policy gradient of PPO and
GRPO.

The policy that is trained may differ from the older policy that sampled the responses;
the ratio of both probabilities of a token corrects for it. Tensors `[n]` hold a value
for each supervised token of a batch, in the order of ``batch.target_index``; tensors
`[S]` one for each sequence.
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
from packstore.format.arrays import TopK
from packstore.io.manifest.side_manifest import REF_TOKEN_LOGPS
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.logprobs.logprobs import by_segment, segment_token_counts
from packstore.torch.losses.formulas import Variant, bounded_exp, check_range
from packstore.torch.losses.pairs import require_wide_log_probs
from packstore.torch.losses.step_loss import Gradients, LossOutput, StepDivisor
from packstore.torch.losses.terms import (
    check_function,
    check_weight,
    complete_parameters,
    name_of,
)
from packstore.torch.losses.token_loss import Average, TokenLoss

Ratio = Literal["token", "sequence"]

OLD_LOGPS = "old_logps"
"""Column of tokens with the log-probs of the policy that sampled."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """n supervised tokens, each quantity a tensor `[n]`, in the order of
    ``batch.target_index``.

    Attributes:
        logps: log-probs of the policy, in nats.
        log_ratio: `logps` minus the log-probs of the policy that sampled; with
            ``ratio="sequence"`` the mean of these over the token's sequence.
        advantages: the advantage of each token.
        sequences: int64, index of each token's sequence; S for padding.
        ref_logps: log-probs of a reference model, in nats, or None.
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
    low = 1 - check_range("clipped", "clip_low", clip_low, 0, 1)
    high = 1 + check_range("clipped", "clip_high", clip_high, 0, 1e6)
    ratio = bounded_exp(tokens.log_ratio)
    gain = ratio * tokens.advantages
    clipped_gain = ratio.clamp(low, high) * tokens.advantages
    return -torch.minimum(gain, clipped_gain)


class PolicyLoss(TokenLoss):
    """A loss of each supervised token, averaged over the whole optimizer step.

    Args:
        function: a function of :class:`~packstore.torch.Tokens` that returns their
            losses `[n]`; its keyword-only arguments are parameters.
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

    ref_column = REF_TOKEN_LOGPS

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
        super().__init__(average, router_aux_loss_coef, gradients)
        self.ratio = choice("ratio", ratio, get_args(Ratio))
        check_weight("kl_weight", kl_weight)
        self.kl_weight = kl_weight
        self.reference = kl_weight > 0

        check_class("PolicyLoss", function, Callable, "Give a function of Tokens")
        self.name = name_of(function)
        self.parameters = complete_parameters(
            self.name,
            Variant(function, reference=False),
            parameters,
            self._setting_names(),
        )
        self.function: Callable[[Tokens], Tensor] = partial(function, **self.parameters)
        self._check_function()

    def _check_function(self) -> None:
        """Raise ConfigError if the function couples two sequences of a batch.

        It is called with a random batch of two sequences, of two tokens and of one.
        """
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(4, 3, generator=generator).double()
        batch = _make_tokens(draws, sequences=torch.tensor([0, 0, 1]))
        first = _make_tokens(draws[:, :2], sequences=torch.tensor([0, 0]))
        second = _make_tokens(draws[:, 2:], sequences=torch.tensor([0]))
        check_function(f"loss {self.name!r}", self.function, batch, [first, second])

    @property
    def head_settings(self) -> dict[str, Any]:
        """See :attr:`StepLoss.head_settings`."""
        return {"per_token": True}

    def has_reference(self, batch: PackedBatch) -> bool:
        """See :meth:`StepLoss.has_reference`."""
        return self.ref_column in batch.token_columns

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
        """Compute the loss of a batch.

        Values of tokens and sequences are in the order of the batch, which is not that
        of the records: :func:`~packstore.torch.pack_in_memory` and
        :class:`~packstore.torch.PackCollator` move them. ``batch.example_ids`` holds
        the indices of the records.

        Args:
            logps: `[n]`, log-probs of the policy in nats, from
                ``packed_logps(model, batch, per_token=True)``.
            batch: the batch.
            advantages: `[n]` or `[S]`; default: the batch's rewards.
            old_logps: `[n]`, log-probs of the policy that sampled, or with
                ``ratio="sequence"`` their sums `[S]`; default:
                ``batch.token_columns["old_logps"]``, or without that column `logps`, as
                in the first step on fresh samples.
            ref_logps: `[n]`, the same of a reference model; needed if `kl_weight` is
                above 0. Default: ``batch.token_columns["ref_token_logps"]``.
            divisor: as of :class:`~packstore.torch.PreferenceLoss`.

        Raises:
            ConfigError: values have another shape, a column of these names holds the
                top k, or `kl_weight` has no `ref_logps`.
        """
        tokens = self._select_tokens(logps, batch, advantages, old_logps, ref_logps)
        policy_losses = self.function(tokens)
        losses = policy_losses
        if self.kl_weight:
            losses = policy_losses + self.kl_weight * tokens.kl
        return self._output(
            logps,
            batch,
            losses=losses,
            values=self._metrics(tokens, policy_losses),
            divisor=divisor,
        )

    def _select_tokens(
        self,
        logps: Tensor,
        batch: PackedBatch,
        advantages: Tensor | None,
        old_logps: Tensor | None,
        ref_logps: Tensor | None,
    ) -> Tokens:
        """Return the supervised tokens of a batch, with all quantities as `[n]`."""
        require_wide_log_probs("logps", logps)
        _check_token_shape("logps", logps, batch)
        sequences = batch.targets.segments
        # Padding has index S, which would be out of range. It gets the values of the
        # last sequence, at weight 0.
        valid_sequences = sequences.clamp(max=batch.num_segments - 1)

        if old_logps is not None:
            old_logps = self._old_logps_of_tokens(
                old_logps, logps, batch, valid_sequences
            )
        else:
            old_logps = _stored_logps(OLD_LOGPS, batch, logps)
        if old_logps is None:
            old_logps = logps
        log_ratio = logps - old_logps.detach()
        if self.ratio == "sequence":
            token_counts = segment_token_counts(batch).clamp(min=1)
            mean_log_ratio = by_segment(batch, log_ratio) / token_counts
            log_ratio = mean_log_ratio[valid_sequences]

        if advantages is None:
            advantages = batch.rewards[valid_sequences].to(logps)
        else:
            advantages = advantages.to(logps).detach()
            if not _is_per_token("advantages", advantages, batch):
                advantages = advantages[valid_sequences]

        if ref_logps is not None:
            require_wide_log_probs("ref_logps", ref_logps)
            _check_token_shape("ref_logps", ref_logps, batch)
            ref_logps = ref_logps.to(logps).detach()
        elif self.kl_weight:
            ref_logps = _stored_logps(self.ref_column, batch, logps)
            if ref_logps is None:
                raise ConfigError(
                    "kl_weight compares with a reference model: pass ref_logps, [n], "
                    f"or join a column {self.ref_column} of tokens."
                )
        return Tokens(
            logps=logps,
            log_ratio=log_ratio,
            advantages=advantages,
            sequences=sequences,
            ref_logps=ref_logps,
        )

    def _old_logps_of_tokens(
        self, old_logps: Tensor, logps: Tensor, batch: PackedBatch, sequences: Tensor
    ) -> Tensor:
        """Return the log-probs of the policy that sampled, `[n]`, like `logps`.

        If they are sums over sequences, `[S]`, each token gets the mean of its
        sequence, `sequences[token]`. (Only the mean over a sequence counts then.)
        """
        require_wide_log_probs("old_logps", old_logps)
        old_logps = old_logps.to(logps)
        if self.ratio == "token":
            _check_token_shape("old_logps", old_logps, batch)
            return old_logps
        if _is_per_token("old_logps", old_logps, batch):
            return old_logps
        means = old_logps / segment_token_counts(batch).clamp(min=1)
        return means[sequences]

    def _metrics(self, tokens: Tokens, policy_losses: Tensor) -> dict[str, Tensor]:
        """Return metrics of each token, `[n]`; `policy_losses` are without the KL."""
        ratio = bounded_exp(tokens.log_ratio)
        values = {"ratio": ratio, "logps": tokens.logps}
        if tokens.ref_logps is not None:
            values["kl"] = tokens.kl
            values["policy_loss"] = policy_losses
        if {"clip_low", "clip_high"} <= self.parameters.keys():
            highest = 1 + self.parameters["clip_high"]
            lowest = 1 - self.parameters["clip_low"]
            is_above = (tokens.advantages > 0) & (ratio > highest)
            is_below = (tokens.advantages < 0) & (ratio < lowest)
            values["clipped"] = is_above | is_below
        return values


def _stored_logps(name: str, batch: PackedBatch, logps: Tensor) -> Tensor | None:
    """Return the batch's column of tokens of this name, `[n]`, like `logps`.

    None if the batch has none.
    """
    values = batch.token_columns.get(name)
    if values is None:
        return None
    if isinstance(values, TopK):
        raise ConfigError(
            sentence(
                where=f"column {name}",
                rule="PolicyLoss takes one log-prob for each supervised token",
                found=f"the top {values.ids.shape[1]}",
                remedy="Give these values another name",
            )
        )
    return values.to(logps)


def _check_token_shape(name: str, values: Tensor, batch: PackedBatch) -> None:
    """Raise ConfigError unless there is one value for each supervised token."""
    num_tokens = len(batch.target_index)
    if tuple(values.shape) != (num_tokens,):
        rule = (
            f"must be one number for each of the batch's {num_tokens} supervised tokens"
        )
        raise _shape_error(name, values, rule)


def _is_per_token(name: str, values: Tensor, batch: PackedBatch) -> bool:
    """Return True for values `[n]` of supervised tokens, False for `[S]` of sequences.

    Raises:
        ConfigError: the shape is neither, or n = S, so that it could be both.
    """
    shape = tuple(values.shape)
    num_tokens = len(batch.target_index)
    num_sequences = batch.num_segments
    if num_tokens != num_sequences and shape == (num_tokens,):
        return True
    if num_tokens != num_sequences and shape == (num_sequences,):
        return False
    token_counts = segment_token_counts(batch).clamp(min=1)
    # With n = S, both are the same only if each sequence has one token.
    if shape == (num_tokens,) and bool((token_counts == 1).all()):
        return True
    rule = (
        f"must be one number for each of the batch's {num_tokens} supervised tokens or "
        f"{num_sequences} sequences, where they differ"
    )
    raise _shape_error(name, values, rule)


def _shape_error(name: str, values: Tensor, rule: str) -> ConfigError:
    """Return the error for values of another shape."""
    return ConfigError(
        sentence(
            where=name,
            rule=rule,
            found=f"shape {tuple(values.shape)}",
            remedy="packed_logps(model, batch, per_token=True) returns such log-probs",
        )
    )


def _make_tokens(draws: Tensor, sequences: Tensor) -> Tokens:
    """Return tokens to try a function on, from random numbers `[4, n]`."""
    logps, log_ratio, advantages, ref_logps = draws
    return Tokens(
        logps=-logps.abs(),
        log_ratio=log_ratio,
        advantages=advantages,
        sequences=sequences,
        ref_logps=-ref_logps.abs(),
    )
