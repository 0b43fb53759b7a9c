"""The loss of a batch as a sum and a count, so that packing never changes the weight of a pair."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.torch.batch.collate import PackedBatch
from packstore.torch.logprobs.logprobs import segment_token_counts
from packstore.torch.losses.divisor import StepDivisor, check_accumulation, default_divisor
from packstore.torch.losses.formulas import sft
from packstore.torch.losses.loss_output import (
    LossOutput,
    detached,
    divide,
    router_term,
    with_routers,
)
from packstore.torch.losses.loss_terms import Names, is_number, make_terms
from packstore.torch.losses.pairs import (
    PairChoice,
    PairIndex,
    Pairs,
    SequenceSums,
    index_best,
    index_pairs,
)
from packstore.torch.metrics import SumAndCount, wide_dtype

__all__ = ["LossOutput", "PairChoice", "PreferenceLoss"]

SftAverage = Literal["token", "sequence_sum", "sequence_mean"]
Reduction = Literal["sum", "pack_mean"]
Gradients = Literal["mean", "sum"]

PASS_COUNT = "Pass what count_step(batches, loss_fn) gives, or a StepDivisor with examples"


class PreferenceLoss:
    """One of the losses of :data:`~packstore.torch.losses.formulas.LOSSES`, or a mix of them.

    Every pair weighs the same in any pack, batch or rank: each loss is divided by the count of the
    whole optimizer step, which a loader's batch carries.

    Args:
        name: name of the loss; or a mix, name -> weight, as in ``{"dpo": 0.8, "bco_pair": 0.2}``,
            or name -> ``{"weight": 0.8, "beta": 0.1}`` with parameters for that member alone.
        sft_weight: weight of an added likelihood loss of the best response; 0: none.
        sft_average: how that loss (and the loss ``sft``) averages: ``token``, the mean over all
            tokens; ``sequence_sum``, the sum over each sequence, averaged over sequences;
            ``sequence_mean``, the mean over each sequence, averaged over sequences.
        average_logps: compare means over tokens where the loss compares sums.
        pairs: kind ``ranked`` only: ``best_vs_rest``, ``all`` pairs, or ``adjacent`` ranks.
            Responses of equal reward are never compared. Weights are per pair: an example with more
            responses has more pairs.
        reduction: ``sum``; or ``pack_mean``, the mean over the pairs of each pack, averaged over
            packs, which is biased: a pair weighs more, the fewer share its pack (0.5 to 3.3 on real
            data). It exists only to reproduce NeMo-Aligner.
        router_aux_loss_coef: weight of the load-balancing loss of experts, which log-probs of
            :func:`~packstore.torch.packed_logps` carry if the model's config asks for it; default:
            the config's coefficient; 0: none.
        gradients: how gradients are reduced over ranks: ``mean``, as in DDP and FSDP, or ``sum``.
            On one rank both are the same.
        parameters: parameters of the loss, such as `beta`; in a mix, of every member that takes
            them.

    Raises:
        UnknownNameError: the loss, or a parameter of it, is unknown.
        ConfigError: a value is out of range, or two contradict each other.
    """

    def __init__(
        self,
        name: Names = "dpo",
        *,
        sft_weight: float = 0.0,
        sft_average: SftAverage = "token",
        average_logps: bool = False,
        pairs: PairChoice = "best_vs_rest",
        reduction: Reduction = "sum",
        router_aux_loss_coef: float | None = None,
        gradients: Gradients = "mean",
        **parameters: float,
    ) -> None:
        self.terms = make_terms(name, parameters, average_logps)
        self.sft_weight = sft_weight
        self.sft_average = _choice("sft_average", sft_average, get_args(SftAverage))
        self.pairs: PairChoice = _choice("pairs", pairs, get_args(PairChoice))
        self.reduction = _choice("reduction", reduction, get_args(Reduction))
        self.router_aux_loss_coef = router_aux_loss_coef
        self.gradients = _choice("gradients", gradients, get_args(Gradients))
        self.only_sft = self.terms[0].name == "sft"
        _choice("average_logps", average_logps, (True, False))
        if not (is_number(sft_weight) and sft_weight >= 0):
            raise ConfigError(f"sft_weight must be at least 0; found {quote(sft_weight)}.")
        given = router_aux_loss_coef
        if given is not None and not (is_number(given) and given >= 0):
            raise ConfigError(f"router_aux_loss_coef must be at least 0; found {quote(given)}.")
        if not sft_weight + sum(m.weight for m in self.terms):
            raise ConfigError("the weights of a loss must not all be 0.")
        if self.only_sft and (sft_weight or reduction != "sum"):
            raise ConfigError("loss 'sft' takes neither sft_weight nor a reduction.")
        if sft_weight and reduction == "pack_mean" and sft_average == "token":
            raise ConfigError(
                "reduction 'pack_mean' has no token mean over a batch: set sft_average to "
                "'sequence_sum' or 'sequence_mean'."
            )

    def __repr__(self) -> str:
        return f"PreferenceLoss({' + '.join(map(str, self.terms))})"

    @property
    def reference(self) -> bool:
        """True if the loss compares with a reference model."""
        return any(member.variant.reference for member in self.terms)

    def __call__(
        self,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None = None,
        *,
        divisor: StepDivisor | Tensor | float | None = None,
    ) -> LossOutput:
        """Computes the loss of a batch.

        Args:
            logps: `[S]`, log-probs of the policy in nats, from :func:`segment_logps`.
            batch: the batch.
            ref_logps: `[S]`, the same of the reference model; default: the batch's.
            divisor: divides the loss, for experts: the result of :func:`count_step`, or one number
                if there is no SFT term. Default: the count of the whole optimizer step, divided by
                the number of ranks if their gradients are averaged; without a loader's plan, the
                batch's own count.

        Raises:
            ConfigError: a reference or router losses are required and missing, a tensor has another
                shape or is rounded to 16 bits, the count of the step is unknown, or Accelerate
                accumulates by other steps.
            CompatibilityError: the batch holds single sequences and the loss compares two.
        """
        sums = SequenceSums.of(logps, batch, self._reference(batch, ref_logps))
        if logps.requires_grad:
            check_accumulation(batch, given=divisor is not None)
        count, sft_count, examples = self._divisors(batch, divisor)
        out = self._output(sums, batch, count, sft_count)
        routers = router_term(logps, batch, self.router_aux_loss_coef)
        if routers is None:
            return out
        if count is not None and examples is None:
            examples = self._examples(batch, count)
        return with_routers(out, routers, count, examples)

    def _output(
        self,
        sums: SequenceSums,
        batch: PackedBatch,
        count: Tensor | float | None,
        sft_divisor: float | None,
    ) -> LossOutput:
        """The loss without router losses."""
        if self.only_sft:
            term, metrics = self._likelihood(sums, batch)
            loss = self.terms[0].weight * divide(term, count)
            return LossOutput(loss, *term, None, None, {"loss": detached(term), **metrics})
        index, weights = self._weights(batch, sums.logps)
        pairs = sums.take(index.chosen, index.rejected)
        losses = [member(pairs) for member in self.terms]
        parts = zip(self.terms, losses, strict=True)
        total = torch.stack([member.weight * values for member, values in parts]).sum(0)
        term = self._reduce(total, weights, index.example, batch)
        metrics = self._metrics(pairs, weights)
        if len(losses) > 1:
            for member, values in zip(self.terms, losses, strict=True):
                own = self._reduce(values, weights, index.example, batch)
                metrics[f"loss/{member.name}"] = detached(own)
        loss = divide(term, count)
        sft_sum = sft_count = None
        if self.sft_weight:
            likelihood, _ = self._likelihood(sums, batch)
            loss = loss + self.sft_weight * divide(likelihood, sft_divisor)
            metrics |= {"preference_loss": detached(term), "sft_loss": detached(likelihood)}
            sft_sum, sft_count = likelihood
        # Summed over the batches of a step and divided by its count, this is the step's loss.
        whole = loss * (term[1].clamp(min=1) if count is None else count)
        metrics = {"loss": detached((whole, term[1])), **metrics}
        return LossOutput(loss, *term, sft_sum, sft_count, metrics)

    def per_example(
        self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns loss and implicit rewards of each example, without router losses.

        Both are means over the pairs of an example, NaN without any. The likelihood of a response
        is its mean over tokens, unless `sft_average` is ``sequence_sum``. Arguments and errors are
        those of a call; weights do not count.

        Returns:
            Losses `[E]`, and rewards `[E, 2]` of chosen and rejected; None for the loss ``sft``.
        """
        sums = SequenceSums.of(logps, batch, self._reference(batch, ref_logps))
        best = index_best(batch)
        own = sums.take(best, best)
        likelihood = (
            sft(own) if self.sft_average == "sequence_sum" else sft(own) / own.chosen_tokens
        )
        if self.only_sft:
            return self.terms[0].weight * likelihood, None
        index, _ = self._weights(batch, logps)
        pairs = sums.take(index.chosen, index.rejected)
        losses = torch.stack([member.weight * member(pairs) for member in self.terms]).sum(0)
        found = torch.stack([losses, self._beta * pairs.u, self._beta * pairs.v], 1)
        total = found.new_zeros(len(best), 3).index_add(0, index.example, found)
        count = found.new_zeros(len(best)).index_add(0, index.example, torch.ones_like(losses))
        mean = total / count[:, None]
        return mean[:, 0] + self.sft_weight * likelihood, mean[:, 1:]

    def count(self, batch: PackedBatch) -> StepDivisor:
        """Counts what a batch adds to the divisor of its optimizer step; needs no log-probs."""
        tokens = segment_token_counts(batch)[index_best(batch)]
        by_token = self.sft_average == "token"
        examples = float(batch.weights.sum())
        sft_count = float((batch.weights * tokens).sum()) if by_token else examples
        if self.only_sft:
            return StepDivisor(sft_count, examples=examples)
        index, weights = self._weights(batch, batch.weights)
        _, count = self._reduce(weights, weights, index.example, batch)
        if self.reduction == "pack_mean":
            sft_count = float(count)
        return StepDivisor(float(count), sft_count if self.sft_weight else None, examples)

    def _divisors(
        self, batch: PackedBatch, divisor: StepDivisor | Tensor | float | None
    ) -> tuple[Tensor | float | None, float | None, Tensor | float | None]:
        """Divisors of the pairs, of the SFT term and of router losses; None: their own counts."""
        divisor = default_divisor(batch, self) if divisor is None else divisor
        if isinstance(divisor, StepDivisor):
            if self.sft_weight and divisor.sft_count is None:
                raise ConfigError("divisor: the SFT term needs its own sft_count; found None.")
            return divisor.count, divisor.sft_count, divisor.examples
        if self.sft_weight and divisor is not None:
            needed = "the SFT term has a count of its own"
            raise ConfigError(sentence("divisor", needed, "one number", PASS_COUNT))
        return divisor, None, None

    def _examples(self, batch: PackedBatch, count: Tensor | float) -> Tensor | float:
        """The divisor of router losses, where only that of the loss without them is given."""
        if self.by_example(batch):
            return count
        needed = "router losses are divided by the number of examples"
        raise ConfigError(sentence("divisor", needed, "another count alone", PASS_COUNT))

    def by_example(self, batch: PackedBatch) -> bool:
        """True if the loss of this batch is divided by a number of examples."""
        if self.only_sft:
            return bool(self.sft_average != "token")
        return batch.kind == "preference" and self.reduction == "sum"

    def _reference(self, batch: PackedBatch, ref_logps: Tensor | None) -> Tensor | None:
        if not self.reference:
            return None
        ref_logps = batch.ref_logps if ref_logps is None else ref_logps
        if ref_logps is None:
            raise ConfigError(
                f"loss {self.terms[0].name!r} compares with a reference model: pass "
                "ref_logps=…, the segment_logps of the reference model on the same batch."
            )
        return ref_logps.detach()

    def _weights(self, batch: PackedBatch, like: Tensor) -> tuple[PairIndex, Tensor]:
        """The pairs of the batch and their weights, 1 or 0, `[n]`."""
        if batch.kind == "sft":
            where = f"loss {self.terms[0].name!r}"
            needed = "an example must have responses to compare"
            raise CompatibilityError(
                sentence(where, needed, "a dataset of kind 'sft'", "Use PreferenceLoss('sft')")
            )
        index = index_pairs(batch, self.pairs)
        return index, batch.weights[index.example].to(like.dtype)

    def _reduce(
        self, losses: Tensor, weights: Tensor, example: Tensor, batch: PackedBatch
    ) -> SumAndCount:
        if self.reduction == "sum":
            return (losses * weights).sum(), weights.sum()
        return _pack_means(losses, weights, batch.pack_ids[example], batch.num_packs)

    def _likelihood(
        self, sums: SequenceSums, batch: PackedBatch
    ) -> tuple[SumAndCount, dict[str, SumAndCount]]:
        """The likelihood loss of the best responses, and its metrics."""
        best = index_best(batch)
        pairs = sums.take(best, best)
        weights = batch.weights.to(sums.logps.dtype)
        losses = sft(pairs)
        if self.sft_average == "sequence_mean":
            losses = losses / pairs.chosen_tokens
        metrics = {"logps/chosen": detached(((pairs.chosen * weights).sum(), weights.sum()))}
        if self.sft_average == "token":
            term = (losses * weights).sum(), (weights * pairs.chosen_tokens).sum()
        else:
            example = torch.arange(len(best), device=best.device)
            term = self._reduce(losses, weights, example, batch)
        return term, metrics

    @property
    def _beta(self) -> float:
        """Beta of the first member, which scales the rewards."""
        return self.terms[0].parameters["beta"]

    def _metrics(self, pairs: Pairs, weights: Tensor) -> dict[str, SumAndCount]:
        """Rewards are ``beta * (policy - reference)``, summed over tokens.

        If the first member compares means over tokens, those are added.
        """
        values = _rewards("rewards", pairs, self._beta)
        if self.terms[0].averaged:
            values |= _rewards("rewards_per_token", pairs.per_token(), self._beta)
        values |= {"logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected}
        wide = weights.to(wide_dtype(weights.device))
        return {n: detached(((x.to(wide) * wide).sum(), wide.sum())) for n, x in values.items()}


def _rewards(name: str, pairs: Pairs, beta: float) -> dict[str, Tensor]:
    """Metrics of implicit rewards, `[n]` each."""
    return {
        f"{name}/chosen": beta * pairs.u,
        f"{name}/rejected": beta * pairs.v,
        f"{name}/margins": beta * pairs.d,
        f"{name}/accuracies": (pairs.d > 0).to(pairs.chosen.dtype),
        f"{name}/squares": beta**2 * (pairs.u**2 + pairs.v**2) / 2,
    }


def _pack_means(losses: Tensor, weights: Tensor, packs: Tensor, num_packs: int) -> SumAndCount:
    """Sum over packs of the mean over their pairs, and the number of packs with pairs."""
    zeros = losses.new_zeros(num_packs)
    sums = zeros.index_add(0, packs, losses * weights)
    counts = zeros.index_add(0, packs, weights)
    return (sums / counts.clamp(min=1)).sum(), (counts > 0).to(losses.dtype).sum()


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ConfigError(
            f"{name} must be one of: {', '.join(map(str, choices))}; found {quote(value)}."
        )
    return value
