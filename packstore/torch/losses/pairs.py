"""The rows that a loss is a function of, both sides of each; a class for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packstore.config.settings import check_class
from packstore.errors import ConfigError, sentence
from packstore.format.arrays import Int64, range_indices, to_offsets
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.transfer import tensor_to_device
from packstore.torch.logprobs.logprobs import segment_token_counts
from packstore.torch.metrics import SumAndCount, wide_dtype

ORDER = "The order is logps, batch, and log-probs of others"

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

    @property
    def u(self) -> Tensor:
        """Log-ratio of policy and reference on the chosen response."""
        return self.chosen - self.ref_chosen

    @property
    def v(self) -> Tensor:
        """Log-ratio of policy and reference on the rejected response."""
        return self.rejected - self.ref_rejected

    @property
    def d(self) -> Tensor:
        """``u - v``, the implicit margin."""
        return self.u - self.v

    @property
    def dr(self) -> Tensor:
        """Gap between the ground-truth rewards."""
        return self.chosen_reward - self.rejected_reward

    def per_token(self) -> Pairs:
        """Returns the same pairs with means over tokens instead of sums."""
        return replace(
            self,
            chosen=self.chosen / self.chosen_tokens,
            rejected=self.rejected / self.rejected_tokens,
            ref_chosen=self.ref_chosen / self.chosen_tokens,
            ref_rejected=self.ref_rejected / self.rejected_tokens,
        )


class SequenceSums(NamedTuple):
    """Per-sequence sums of a batch, `[S]` each; `ref_logps` is 0 without a
    reference.
    """

    logps: Tensor
    ref_logps: Tensor
    tokens: Tensor
    rewards: Tensor

    @classmethod
    def of(
        cls, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None
    ) -> SequenceSums:
        """Combines log-probs `[S]` of policy and reference with the batch's counts and
        rewards.
        """
        for name, values in (("logps", logps), ("ref_logps", ref_logps)):
            if values is None:
                continue
            check_precision(name, values)
            if values.shape != (batch.num_segments,):
                rule = (
                    "must be one number for each of the batch's "
                    f"{batch.num_segments} segments"
                )
                raise ConfigError(sentence(name, rule, f"shape {tuple(values.shape)}"))
        return cls(
            logps,
            torch.zeros_like(logps) if ref_logps is None else ref_logps.to(logps),
            # Padding segments have no tokens: 0 / 0 would stay nan despite their weight
            # of 0.
            segment_token_counts(batch).clamp(min=1).to(logps),
            batch.rewards.to(logps),
        )

    def take(self, chosen: Tensor, rejected: Tensor) -> Pairs:
        """Returns the pairs of segments `chosen` and `rejected`, int64 `[n]` each."""
        return Pairs(*(values[side] for values in self for side in (chosen, rejected)))


def check_precision(where: str, logps: Tensor) -> Tensor:
    """Returns log-probs; refuses what is none, and those in 16 bits."""
    check_class(f"argument {where}", logps, Tensor, ORDER)
    if logps.dtype.itemsize < 4:
        rule = "log-probs must be float32, as 16 bits are off by a nat at 300 nats"
        remedy = (
            "Under FSDP2, give fully_shard "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16,"
            " reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)"
        )
        raise ConfigError(sentence(where, rule, str(logps.dtype), remedy))
    return logps


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a batch that a loss is a function of, `[n]` each, and what it is
    divided by.
    """

    pairs: Pairs
    compared: Pairs  # as the loss sees them
    chosen: Tensor  # the segment
    example: Tensor
    weights: Tensor  # 1, or 0 of a filler
    count: Tensor  # divisor of the sum of their losses
    share: Tensor | float = 1.0  # of a row in the loss of its example
    sides: tuple[Any, Any] = (
        True,
        True,
    )  # whether a row has a chosen and a rejected response


class PairRows:
    """Pairs of responses, and the base of other rows.

    Kind ``preference``: the two sequences of each example, in their order. Kind
    ``scored``: by reward, the best against each other response, or all pairs, or
    adjacent ranks; responses of equal reward are never compared. Every pair weighs the
    same, so an example of K responses weighs K - 1, or K (K - 1) / 2 with ``all``.
    """

    scores = False  # takes a reward model's scores in place of log-probs
    compares = True  # needs judged responses, which kind ``sft`` does not have
    alone = False  # takes a single answer to each prompt
    by_example = False  # every example weighs the same, however many rows it has
    summed = False  # an example's loss is the sum over its rows, not their mean
    refused = "", ""  # why the loss takes no reduction, and no sft_weight

    def __init__(
        self, choice: PairChoice, term: Mapping[str, float], averaged: bool
    ) -> None:
        self.choice, self.averaged = choice, averaged
        # Rewards are those of the first term of the loss; a function may have no beta.
        self.beta, self.baseline = term.get("beta", 1.0), term.get("baseline", 0.0)

    def unit(self, kind: str) -> str:
        """Returns what :attr:`Rows.count` counts."""
        alike = self.by_example or kind == "preference"
        return "examples" if alike else f"pairs_{self.choice}"

    def select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Returns the rows of a batch."""
        chosen, rejected, example = self._index(batch)
        pairs, weights = (
            sums.take(chosen, rejected),
            batch.weights[example].to(sums.logps.dtype),
        )
        return Rows(pairs, pairs, chosen, example, weights, weights.sum())

    def _index(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Chosen and rejected segment, and example, int64 `[n]` each."""
        device = batch.lengths.device
        if batch.kind == "preference":
            examples = torch.arange(batch.num_examples, device=device)
            return 2 * examples, 2 * examples + 1, examples
        rewards, responses = batch.cpu_rewards_and_counts
        order = _by_rank(rewards, responses)
        example = np.repeat(np.arange(len(responses)), responses)
        start = to_offsets(responses)[:-1][example]
        worse = np.arange(len(order))
        worse = worse[worse > start]
        better = worse - 1
        if self.choice == "best_vs_rest":
            better = start[worse]
        elif self.choice == "all":
            rank = worse - start[worse]
            better, worse = range_indices(start[worse], rank), np.repeat(worse, rank)
        strict = rewards[order[better]] > rewards[order[worse]]
        better, worse = better[strict], worse[strict]
        of_pairs = order[better], order[worse], example[worse]
        chosen, rejected, of_example = (
            tensor_to_device(torch.from_numpy(x), device) for x in of_pairs
        )
        return chosen, rejected, of_example

    def metrics(self, rows: Rows) -> dict[str, SumAndCount]:
        """Returns log-probs and rewards; those of means too, if the loss
        compares them.
        """
        pairs, values = rows.pairs, dict[str, Tensor]()
        if not self.scores:
            values = {"logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected}
        seen = {"rewards": pairs}
        if self.averaged:
            seen["rewards_per_token"] = pairs.per_token()
        for name, each in seen.items():
            u, v, d = self.beta * each.u, self.beta * each.v, self.beta * each.d
            values |= {
                f"{name}/chosen": u,
                f"{name}/rejected": v,
                f"{name}/margins": d,
                f"{name}/accuracies": (each.d > 0).to(d.dtype),
                f"{name}/squares": (u**2 + v**2) / 2,
            }
        return {name: _weighted(x, rows.weights) for name, x in values.items()}

    def per_example(
        self, rows: Rows, losses: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Returns losses `[E]` and rewards `[E, 2]` of examples, from the losses of the
        rows.
        """
        u, v = self.beta * rows.pairs.u, self.beta * rows.pairs.v
        values = torch.stack([losses, u, v], 1)
        there = torch.ones_like(values)
        there[:, 1], there[:, 2] = rows.sides
        zeros = values.new_zeros(batch.num_examples, 3)
        total, count = (
            zeros.index_add(0, rows.example, x) for x in (values * there, there)
        )
        if self.summed:
            count[:, 0].clamp_(max=1)
        mean = total / count
        return mean[:, 0], mean[:, 1:]


class Answers(PairRows):
    """Single answers, good or bad, which are both sides of their rows."""

    alone = by_example = True
    refused = "each example must weigh the same", "bad answers must not be learned"

    def select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Returns the rows of a batch; the weight is a share of the example's."""
        example = batch.segment_examples
        answer = torch.arange(len(example), device=example.device)
        weights = batch.weights.to(sums.logps.dtype) / batch.num_responses
        pairs = sums.take(answer, answer)
        if batch.kind == "preference":  # one is good and one bad, whatever the rewards
            pairs = replace(pairs, chosen_reward=1 - 2 * (answer % 2).to(sums.logps))
        count = batch.weights.sum().to(
            weights
        )  # the shares of an example are not exactly 1
        good = pairs.chosen_reward > 0
        return Rows(
            pairs, pairs, answer, example, weights[example], count, sides=(good, ~good)
        )

    def metrics(self, rows: Rows) -> dict[str, SumAndCount]:
        """Returns log-probs and rewards, of good answers as chosen and of bad ones as
        rejected.
        """
        good, bad = rows.sides
        reward, right = self.beta * rows.pairs.u, (rows.pairs.u > self.baseline) == good
        values = {
            "rewards/accuracies": (right, True),
            "rewards/squares": (reward**2, True),
        }
        for side, there in (("chosen", good), ("rejected", bad)):
            values[f"rewards/{side}"] = reward, there
            values[f"logps/{side}"] = rows.pairs.chosen, there
        return {
            name: _weighted(x, rows.weights * there)
            for name, (x, there) in values.items()
        }


class Scores(PairRows):
    """Pairs of scores of a reward model."""

    scores = True
    refused = ("scores have no likelihood, and no mean of packs",) * 2


class Lists(Scores):
    """Scores, each against all of lower reward at once."""

    by_example = summed = True

    def __init__(
        self, choice: PairChoice, term: Mapping[str, float], averaged: bool
    ) -> None:
        super().__init__("all", term, averaged)

    def select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Returns all pairs; those of a chosen response are seen as equal, and share
        its loss.

        Rejected is the log of the summed exponentials of all that it is paired with.
        """
        rows = super().select(sums, batch)
        chosen, lower, zeros = (
            rows.chosen,
            rows.pairs.rejected,
            torch.zeros_like(sums.logps),
        )
        counts = zeros.index_add(0, chosen, torch.ones_like(lower))
        most = (zeros - torch.inf).scatter_reduce(0, chosen, lower.detach(), "amax")[
            chosen
        ]
        rest = zeros.index_add(0, chosen, (lower - most).exp())[chosen]
        return replace(
            rows,
            compared=replace(rows.pairs, rejected=most + rest.log()),
            count=batch.weights.sum().to(lower),
            share=1 / counts[chosen],
        )


class Sequences(PairRows):
    """The best sequence of each example: by reward if scored, else the first."""

    compares = False
    refused = ("it is the likelihood, by a count of its own",) * 2

    def __init__(self, sft_average: str) -> None:
        super().__init__("best_vs_rest", {}, False)
        self.average = sft_average

    def unit(self, kind: str) -> str:
        """Returns what :attr:`Rows.count` counts."""
        return "best_tokens" if self.average == "token" else "examples"

    def select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Returns the rows of a batch."""
        weights = batch.weights.to(sums.logps.dtype)
        best = example = torch.arange(batch.num_examples, device=weights.device)
        if batch.kind == "preference":
            best = 2 * example
        elif batch.kind == "scored":
            rewards, responses = batch.cpu_rewards_and_counts
            firsts = _by_rank(rewards, responses)[np.cumsum(responses) - responses]
            best = tensor_to_device(torch.from_numpy(firsts), weights.device)
        pairs = sums.take(best, best)
        compared = pairs.per_token() if self.average == "sequence_mean" else pairs
        count = (
            weights * pairs.chosen_tokens if self.average == "token" else weights
        ).sum()
        return Rows(pairs, compared, best, example, weights, count)

    def metrics(self, rows: Rows) -> dict[str, SumAndCount]:
        """Returns log-probs, and the loss without its weight, as perplexity follows
        from it.
        """
        loss, logps = (
            -rows.compared.chosen * rows.weights,
            rows.pairs.chosen * rows.weights,
        )
        return {
            "loss": (loss.sum(), rows.count),
            "logps/chosen": (logps.sum(), rows.weights.sum()),
        }

    def per_example(
        self, rows: Rows, losses: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, None]:
        """Returns losses `[E]`, of which those by token are means; no rewards."""
        return (
            losses / rows.pairs.chosen_tokens if self.average == "token" else losses,
            None,
        )


def _weighted(values: Tensor, weights: Tensor) -> SumAndCount:
    """Sum and count of a metric."""
    wide = weights.to(wide_dtype(weights.device))
    return (values.to(wide) * wide).sum(), wide.sum()


def _by_rank(rewards: np.ndarray, responses: np.ndarray) -> Int64:
    """Segments sorted by example, then by descending reward; ties keep their order."""
    return np.lexsort((-rewards, np.repeat(np.arange(len(responses)), responses)))
