"""Selects the rows of a batch, the comparisons that a loss makes, and their weights.

A batch holds S sequences (segments) of E examples; a row is one comparison among the
responses of an example, and a loss returns one value for each of the n rows. Each kind
of row is a class with its selection, weights and metrics, and `Rows` is the selection
for one batch. ``PairRows`` compares two responses, ``Answers`` judges one, ``Scores``
and ``Lists`` compare scores of a reward model, ``Sequences`` takes the best response of
each example.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packstore.errors import ConfigError, sentence
from packstore.format.arrays import Int64, range_indices, to_offsets
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.transfer import tensor_to_device
from packstore.torch.logprobs.logprobs import segment_token_counts
from packstore.torch.metrics import SumAndCount, weighted_sums

PairChoice = Literal["best_vs_rest", "all", "adjacent"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """n pairs, each quantity a tensor `[n]`; sums run over the supervised tokens of a
    sequence.

    Attributes:
        chosen, rejected: log-probs of the policy, summed, in nats.
        ref_chosen, ref_rejected: the same of the reference model; zeros if the loss
            needs none.
        chosen_tokens, rejected_tokens: number of tokens summed.
        chosen_reward, rejected_reward: ground-truth rewards.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor

    # Loss and metrics read these several times, and each operator is a launch.

    @cached_property
    def u(self) -> Tensor:
        """Log-ratio of policy and reference on the chosen response."""
        return self.chosen - self.ref_chosen

    @cached_property
    def v(self) -> Tensor:
        """Log-ratio of policy and reference on the rejected response."""
        return self.rejected - self.ref_rejected

    @cached_property
    def d(self) -> Tensor:
        """``u - v``, the implicit margin."""
        return self.u - self.v

    @cached_property
    def dr(self) -> Tensor:
        """Gap between the ground-truth rewards."""
        return self.chosen_reward - self.rejected_reward

    def per_token(self) -> Pairs:
        """Return the same pairs with means over tokens instead of sums."""
        return replace(
            self,
            chosen=self.chosen / self.chosen_tokens,
            rejected=self.rejected / self.rejected_tokens,
            ref_chosen=self.ref_chosen / self.chosen_tokens,
            ref_rejected=self.ref_rejected / self.rejected_tokens,
        )


class SequenceSums(NamedTuple):
    """The quantities of a batch's sequences, `[S]` each.

    Attributes:
        logps: log-probs of the policy, summed over supervised tokens, in nats.
        ref_logps: the same of the reference model; 0 without one.
        tokens: number of supervised tokens, at least 1.
        rewards: ground-truth rewards.
    """

    logps: Tensor
    ref_logps: Tensor
    tokens: Tensor
    rewards: Tensor

    @classmethod
    def of(
        cls, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None
    ) -> SequenceSums:
        """Combine log-probs `[S]` with the token counts and rewards of their batch.

        Raises:
            ConfigError: log-probs are of 16 bits, or of another shape.
        """
        _validate_log_probs("logps", logps, batch)
        if ref_logps is None:
            ref_logps = torch.zeros_like(logps)
        else:
            _validate_log_probs("ref_logps", ref_logps, batch)

        # Padding segments have no tokens: 0 / 0 would stay nan despite their weight
        # of 0.
        tokens = segment_token_counts(batch).clamp(min=1)
        return cls(
            logps=logps,
            ref_logps=ref_logps.to(logps),
            tokens=tokens.to(logps),
            rewards=batch.rewards.to(logps),
        )

    def pair(self, chosen: Tensor | slice, rejected: Tensor | slice) -> Pairs:
        """Return the pairs of segments `chosen` and `rejected`.

        Each is int64 `[n]`, or a slice of n segments.
        """
        # One gather of a side in place of three; log-probs alone have a gradient.
        constants = torch.stack([self.ref_logps, self.tokens, self.rewards])
        ref_chosen, chosen_tokens, chosen_reward = constants[:, chosen].unbind()
        ref_rejected, rejected_tokens, rejected_reward = constants[:, rejected].unbind()
        return Pairs(
            chosen=self.logps[chosen],
            rejected=self.logps[rejected],
            ref_chosen=ref_chosen,
            ref_rejected=ref_rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            chosen_reward=chosen_reward,
            rejected_reward=rejected_reward,
        )


def _validate_log_probs(name: str, logps: Tensor, batch: PackedBatch) -> None:
    """Raise ConfigError unless there is one log-prob per segment, of 32 or 64 bits."""
    require_wide_log_probs(name, logps)
    if logps.shape != (batch.num_segments,):
        rule = (
            f"must be one number for each of the batch's {batch.num_segments} segments"
        )
        raise ConfigError(sentence(name, rule, f"shape {tuple(logps.shape)}"))


def require_wide_log_probs(name: str, logps: Tensor) -> None:
    """Raise ConfigError for log-probs of 16 bits, in the argument `name`."""
    if logps.dtype.itemsize >= 4:
        return
    raise ConfigError(
        sentence(
            where=name,
            rule="log-probs must be float32, as 16 bits are off by a nat at 300 nats",
            found=str(logps.dtype),
            remedy=(
                "Under FSDP2, give fully_shard MixedPrecisionPolicy("
                "param_dtype=torch.bfloat16, reduce_dtype=torch.float32, "
                "output_dtype=None, cast_forward_inputs=False)"
            ),
        )
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """The n rows of a batch, and the divisor of the sum of their losses.

    Attributes:
        pairs: log-probs, token counts and rewards of both sides of each row.
        compared: the pairs that the loss is called with: mostly `pairs`, but means over
            tokens or log-summed scores for some kinds of rows.
        chosen: int64 `[n]`, the segment of the chosen response.
        example: int64 `[n]`, the example of each row.
        weights: `[n]`, weight of each row's loss; 0 in a filler (a pack that repeats
            other data, so that each rank has a batch).
        count: scalar, the divisor of the sum of the losses.
        share: `[n]`, factor on the loss of each row, for rows that share one loss.
        has_chosen, has_rejected: bool `[n]`, or True for all rows: False where a single
            answer is not good, or not bad, and so has no such side.
    """

    pairs: Pairs
    compared: Pairs
    chosen: Tensor
    example: Tensor
    weights: Tensor
    count: Tensor
    share: Tensor | float = 1.0
    has_chosen: Tensor | bool = True
    has_rejected: Tensor | bool = True


class PairRows:
    """Pairs of responses, and the base of other rows.

    Kind ``preference``: the two sequences of each example, in their order. Kind
    ``scored``: by reward, the best against each other response, or all pairs, or
    adjacent ranks; responses of equal reward are never compared. Every pair weighs the
    same, so an example of K responses weighs K - 1, or K (K - 1) / 2 with ``all``.

    Args:
        choice: the responses of kind ``scored`` that are compared.
        beta: factor on log-ratios in the metrics of rewards.
        baseline: log-ratio above which an answer counts as good.
        averaged: the loss compares means over tokens.

    Attributes:
        takes_scores: True if scores of a reward model take the place of log-probs.
        needs_judged_responses: False if kind ``sft``, which has none, will do.
        takes_single_answers: True if a row is one answer, good or bad.
        ranks_scored: True if rows of kind ``scored`` follow from a ranking by reward,
            on the host.
        weighs_examples_equally: True if an example counts 1, however many rows it has.
        sums_over_example: True if the loss of an example is the sum over its rows, not
            their mean.
        no_pack_mean: why reduction ``pack_mean`` is refused; empty: it is allowed.
        no_sft_term: why an SFT term is refused; empty: it is allowed.
    """

    takes_scores = False
    needs_judged_responses = True
    takes_single_answers = False
    ranks_scored = True
    weighs_examples_equally = False
    sums_over_example = False
    no_pack_mean = ""
    no_sft_term = ""

    def __init__(
        self,
        choice: PairChoice,
        *,
        beta: float = 1.0,
        baseline: float = 0.0,
        averaged: bool = False,
    ) -> None:
        self.choice = choice
        self.beta = beta
        self.baseline = baseline
        self.averaged = averaged

    def unit(self, kind: str) -> str:
        """Return the name of the divisor :attr:`Rows.count`, for a kind of dataset."""
        if self.weighs_examples_equally or kind == "preference":
            return "examples"
        return f"pairs_{self.choice}"

    def select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Return the rows of a batch."""
        if batch.kind == "preference":
            example = torch.arange(batch.num_examples, device=batch.lengths.device)
            chosen = 2 * example
            end = 2 * batch.num_examples
            pairs = sums.pair(slice(0, end, 2), slice(1, end, 2))
            weights = batch.weights
        else:
            chosen, rejected, example = self._pair_by_reward(batch)
            pairs = sums.pair(chosen, rejected)
            weights = batch.weights[example]

        weights = weights.to(sums.logps.dtype)
        return Rows(
            pairs=pairs,
            compared=pairs,
            chosen=chosen,
            example=example,
            weights=weights,
            count=weights.sum(),
        )

    def _pair_by_reward(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return chosen segment, rejected segment and example, int64 `[n]` each.

        Pairs are formed of places in the ranking, and turned into segments at the end.
        """
        rewards, num_responses = batch.cpu_rewards_and_counts
        ranking = _rank_by_reward(rewards, num_responses)
        example = np.repeat(np.arange(len(num_responses)), num_responses)
        # Of each place, the place of the best response of the same example.
        best = to_offsets(num_responses)[:-1][example]

        # Each response but the best is the worse one of at least one pair.
        places = np.arange(len(ranking))
        worse = places[places > best]
        if self.choice == "best_vs_rest":
            better = best[worse]
        elif self.choice == "adjacent":
            better = worse - 1
        else:
            num_better = worse - best[worse]
            better = range_indices(best[worse], num_better)
            worse = np.repeat(worse, num_better)

        differs = rewards[ranking[better]] > rewards[ranking[worse]]
        better = better[differs]
        worse = worse[differs]
        device = batch.lengths.device
        return (
            tensor_to_device(torch.from_numpy(ranking[better]), device),
            tensor_to_device(torch.from_numpy(ranking[worse]), device),
            tensor_to_device(torch.from_numpy(example[worse]), device),
        )

    def metrics(self, rows: Rows) -> dict[str, SumAndCount]:
        """Return log-probs and rewards; also rewards per token if the loss averages."""
        values: dict[str, Tensor] = {}
        if not self.takes_scores:
            values["logps/chosen"] = rows.pairs.chosen
            values["logps/rejected"] = rows.pairs.rejected
        values |= self._reward_metrics("rewards", rows.pairs)
        if self.averaged:
            values |= self._reward_metrics("rewards_per_token", rows.pairs.per_token())

        return weighted_sums(values, rows.weights)

    def _reward_metrics(self, prefix: str, pairs: Pairs) -> dict[str, Tensor]:
        """Return the implicit rewards of both sides, `[n]` each."""
        margin = pairs.d
        chosen = self.beta * pairs.u
        rejected = self.beta * pairs.v
        return {
            f"{prefix}/chosen": chosen,
            f"{prefix}/rejected": rejected,
            f"{prefix}/margins": self.beta * margin,
            f"{prefix}/accuracies": (margin > 0).to(margin.dtype),
            f"{prefix}/squares": (chosen**2 + rejected**2) / 2,
        }

    def per_example(
        self, rows: Rows, losses: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Return losses `[E]` and implicit rewards `[E, 2]` (chosen, rejected).

        Args:
            rows: the rows of the batch.
            losses: `[n]`, the losses of the rows.
            batch: the batch.
        """
        rewards_chosen = self.beta * rows.pairs.u
        rewards_rejected = self.beta * rows.pairs.v
        values = torch.stack([losses, rewards_chosen, rewards_rejected], dim=1)
        is_present = torch.ones_like(values)  # [n, 3]
        is_present[:, 1] = rows.has_chosen
        is_present[:, 2] = rows.has_rejected

        zeros = values.new_zeros(batch.num_examples, 3)
        total = zeros.index_add(0, rows.example, values * is_present)
        count = zeros.index_add(0, rows.example, is_present)
        if self.sums_over_example:
            count[:, 0].clamp_(max=1)
        mean = total / count
        return mean[:, 0], mean[:, 1:]


class Answers(PairRows):
    """Single answers, good or bad, each of which is both sides of its row."""

    takes_single_answers = True
    ranks_scored = False
    weighs_examples_equally = True
    no_pack_mean = "each example must weigh the same"
    no_sft_term = "bad answers must not be learned"

    def select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Return the rows of a batch; the K answers of an example share its weight."""
        example = batch.segment_examples
        answer = torch.arange(len(example), device=example.device)
        every_segment = slice(None)
        pairs = sums.pair(every_segment, every_segment)
        if batch.kind == "preference":
            # The first answer is good and the second bad, whatever their rewards.
            rewards = 1 - 2 * (answer % 2).to(sums.logps)  # 1, -1, 1, -1, ...
            pairs = replace(pairs, chosen_reward=rewards)
        is_good = pairs.chosen_reward > 0

        shares = batch.weights.to(sums.logps.dtype) / batch.num_responses
        # Not the sum of the shares, as rounded shares do not add up to 1.
        count = batch.weights.sum().to(shares)
        return Rows(
            pairs=pairs,
            compared=pairs,
            chosen=answer,
            example=example,
            weights=shares[example],
            count=count,
            has_chosen=is_good,
            has_rejected=~is_good,
        )

    def metrics(self, rows: Rows) -> dict[str, SumAndCount]:
        """Return log-probs and rewards: good answers as chosen, bad as rejected."""
        log_ratio = rows.pairs.u
        reward = self.beta * log_ratio
        is_right = (log_ratio > self.baseline) == rows.has_chosen
        all_answers = {"rewards/accuracies": is_right, "rewards/squares": reward**2}
        good_answers = {"rewards/chosen": reward, "logps/chosen": rows.pairs.chosen}
        bad_answers = {"rewards/rejected": reward, "logps/rejected": rows.pairs.chosen}
        return {
            **weighted_sums(all_answers, rows.weights),
            **weighted_sums(good_answers, rows.weights * rows.has_chosen),
            **weighted_sums(bad_answers, rows.weights * rows.has_rejected),
        }


class Scores(PairRows):
    """Pairs of scores of a reward model."""

    takes_scores = True
    no_pack_mean = "scores have no likelihood, and no mean of packs"
    no_sft_term = no_pack_mean


class Lists(Scores):
    """Scores, each against all scores of lower reward at once.

    Arguments are those of `PairRows`, but all pairs are compared, whatever `choice` is.
    """

    weighs_examples_equally = True
    sums_over_example = True

    def __init__(
        self,
        choice: PairChoice,
        *,
        beta: float = 1.0,
        baseline: float = 0.0,
        averaged: bool = False,
    ) -> None:
        super().__init__("all", beta=beta, baseline=baseline, averaged=averaged)

    def select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Return all pairs; the pairs of one chosen response share one loss.

        All of these have the rejected score ``log sum_l e^r_l`` over the responses l
        that the chosen one is paired with, and each the same part of the loss.
        """
        rows = super().select(sums, batch)
        chosen = rows.chosen
        lower_scores = rows.pairs.rejected
        zeros = torch.zeros_like(sums.logps)

        # The log-sum-exp over the pairs of each chosen segment. Scores are taken
        # relative to the highest one, so that no exponential overflows.
        highest = (zeros - torch.inf).scatter_reduce(
            0, chosen, lower_scores.detach(), "amax"
        )
        highest = highest[chosen]
        exponentials = (lower_scores - highest).exp()
        sum_of_exponentials = zeros.index_add(0, chosen, exponentials)[chosen]
        log_sum = highest + sum_of_exponentials.log()
        num_pairs = zeros.index_add(0, chosen, torch.ones_like(lower_scores))
        return replace(
            rows,
            compared=replace(rows.pairs, rejected=log_sum),
            count=batch.weights.sum().to(lower_scores),
            share=1 / num_pairs[chosen],
        )


class Sequences(PairRows):
    """The best sequence of each example: by reward if scored, else the first.

    Args:
        average: average of the likelihood loss, see ``PreferenceLoss``.
    """

    needs_judged_responses = False
    no_pack_mean = "it is the likelihood, which has a divisor of its own"
    no_sft_term = no_pack_mean

    def __init__(self, average: str) -> None:
        super().__init__("best_vs_rest")
        self.average = average

    def unit(self, kind: str) -> str:
        """Return the name of the divisor :attr:`Rows.count`."""
        return "best_tokens" if self.average == "token" else "examples"

    def select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Return the rows of a batch."""
        weights = batch.weights.to(sums.logps.dtype)
        example = torch.arange(batch.num_examples, device=weights.device)
        best = example
        if batch.kind == "preference":
            best = 2 * example
        elif batch.kind == "scored":
            rewards, num_responses = batch.cpu_rewards_and_counts
            first_places = np.cumsum(num_responses) - num_responses
            best_segments = _rank_by_reward(rewards, num_responses)[first_places]
            best = tensor_to_device(torch.from_numpy(best_segments), weights.device)

        pairs = sums.pair(best, best)
        compared = pairs.per_token() if self.average == "sequence_mean" else pairs
        count = weights.sum()
        if self.average == "token":
            count = (weights * pairs.chosen_tokens).sum()
        return Rows(
            pairs=pairs,
            compared=compared,
            chosen=best,
            example=example,
            weights=weights,
            count=count,
        )

    def metrics(self, rows: Rows) -> dict[str, SumAndCount]:
        """Return log-probs, and the loss without the term's weight: the perplexity is
        computed from it.
        """
        losses = -rows.compared.chosen * rows.weights
        logps = rows.pairs.chosen * rows.weights
        return {
            "loss": (losses.sum(), rows.count),
            "logps/chosen": (logps.sum(), rows.weights.sum()),
        }

    def per_example(
        self, rows: Rows, losses: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, None]:
        """Return losses `[E]`, per token if `average` is ``token``; no rewards."""
        if self.average == "token":
            losses = losses / rows.pairs.chosen_tokens
        return losses, None


def _rank_by_reward(rewards: np.ndarray, num_responses: np.ndarray) -> Int64:
    """Return the segments by example, then by descending reward, int64 `[S]`.

    Ties keep their order. ``_rank_by_reward([0.2, 0.9, 0.1, 0.4], [2, 2])`` is
    ``[1, 0, 3, 2]``.

    Args:
        rewards: `[S]`, reward of each segment.
        num_responses: int `[E]`, number of segments of each example.
    """
    example = np.repeat(np.arange(len(num_responses)), num_responses)
    return np.lexsort((-rewards, example))
