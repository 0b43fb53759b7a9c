"""The inputs of a loss: per-sequence sums for both sides of each pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packstore.errors import ConfigError, sentence
from packstore.format.arrays import Int64, range_indices, to_offsets
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.transfer import sent
from packstore.torch.logprobs.logprobs import segment_token_counts

PairChoice = Literal["best_vs_rest", "all", "adjacent"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """n pairs, each quantity a tensor `[n]`; sums run over the supervised tokens of a sequence.

    Attributes:
        chosen, rejected: log-probs of the policy, summed, in nats.
        ref_chosen, ref_rejected: the same of the reference model; zeros if the loss needs none.
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
    """Per-sequence sums of a batch, `[S]` each; `ref_logps` is 0 without a reference."""

    logps: Tensor
    ref_logps: Tensor
    tokens: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None) -> SequenceSums:
        """Combines log-probs `[S]` of policy and reference with the batch's counts and rewards."""
        for name, values in (("logps", logps), ("ref_logps", ref_logps)):
            if values is None:
                continue
            check_precision(name, values)
            if values.shape != (batch.num_segments,):
                rule = f"must be one number for each of the batch's {batch.num_segments} segments"
                raise ConfigError(sentence(name, rule, f"shape {tuple(values.shape)}"))
        return cls(
            logps,
            torch.zeros_like(logps) if ref_logps is None else ref_logps.to(logps),
            # Padding segments have no tokens: 0 / 0 would stay nan despite their weight of 0.
            segment_token_counts(batch).clamp(min=1).to(logps),
            batch.rewards.to(logps),
        )

    def take(self, chosen: Tensor, rejected: Tensor) -> Pairs:
        """Returns the pairs of segments `chosen` and `rejected`, int64 `[n]` each."""
        return Pairs(*(values[side] for values in self for side in (chosen, rejected)))


def check_precision(where: str, logps: Tensor) -> Tensor:
    """Returns log-probs; refuses those in 16 bits."""
    if logps.dtype.itemsize < 4:
        rule = "log-probs must be float32, as 16 bits are off by a nat at 300 nats"
        remedy = (
            "Under FSDP2, give fully_shard MixedPrecisionPolicy(param_dtype=torch.bfloat16,"
            " reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)"
        )
        raise ConfigError(sentence(where, rule, str(logps.dtype), remedy))
    return logps


def index_pairs(batch: PackedBatch, choice: PairChoice) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the pairs of a batch: chosen and rejected segment, and example, int64 `[n]` each.

    Kind ``preference``: the two sequences of each example, in their order. Kind ``scored``: by
    reward, the best against each other response, or all pairs, or adjacent ranks; responses of
    equal reward are never compared. Every pair weighs the same, so an example of K responses weighs
    K - 1, or K (K - 1) / 2 with ``all``.
    """
    device = batch.lengths.device
    if batch.kind == "preference":
        examples = torch.arange(batch.num_examples, device=device)
        return 2 * examples, 2 * examples + 1, examples
    rewards, responses = batch.ranks
    order = _by_rank(rewards, responses)
    example = np.repeat(np.arange(len(responses)), responses)
    start = to_offsets(responses)[:-1][example]
    worse = np.arange(len(order))
    worse = worse[worse > start]
    better = worse - 1
    if choice == "best_vs_rest":
        better = start[worse]
    elif choice == "all":
        rank = worse - start[worse]
        better, worse = range_indices(start[worse], rank), np.repeat(worse, rank)
    strict = rewards[order[better]] > rewards[order[worse]]
    better, worse = better[strict], worse[strict]
    of_pairs = order[better], order[worse], example[worse]
    chosen, rejected, of_example = (sent(torch.from_numpy(x), device) for x in of_pairs)
    return chosen, rejected, of_example


def against_all_lower(pairs: Pairs, chosen: Tensor, size: int) -> tuple[Pairs, Tensor]:
    """Makes of all pairs rows of a response against all of lower reward, and their shares `[n]`.

    Rejected is the log of the summed exponentials of all that segment `chosen`, int64 `[n]` below
    `size`, is paired with: as many equal rows, which share the weight of one.
    """
    lower = pairs.rejected
    counts = lower.new_zeros(size).index_add(0, chosen, torch.ones_like(lower))
    most = lower.new_full((size,), -torch.inf).scatter_reduce(0, chosen, lower.detach(), "amax")
    sums = lower.new_zeros(size).index_add(0, chosen, (lower - most[chosen]).exp())
    return replace(pairs, rejected=most[chosen] + sums[chosen].log()), 1 / counts[chosen]


def index_best(batch: PackedBatch) -> Tensor:
    """Returns each example's best sequence, `[E]` int64: by reward if scored, else the first."""
    device = batch.lengths.device
    if batch.kind != "scored":
        step = batch.num_segments // batch.num_examples
        return torch.arange(0, batch.num_segments, step, device=device)
    rewards, responses = batch.ranks
    order = _by_rank(rewards, responses)
    return sent(torch.from_numpy(order[np.cumsum(responses) - responses]), device)


def _by_rank(rewards: np.ndarray, responses: np.ndarray) -> Int64:
    """Segments sorted by example, then by descending reward; ties keep their order."""
    return np.lexsort((-rewards, np.repeat(np.arange(len(responses)), responses)))
