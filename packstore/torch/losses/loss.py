"""The loss of a batch as a sum and a count, so that packing never changes the weight of a pair."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.layout import segment_ids
from packstore.torch.logprobs.logprobs import segment_token_counts
from packstore.torch.losses.divisor import StepDivisor
from packstore.torch.losses.formulas import Rows, sft
from packstore.torch.losses.pairs import (
    PairChoice,
    Pairs,
    SequenceSums,
    against_all_lower,
    index_best,
    index_pairs,
)
from packstore.torch.losses.step_loss import (
    Gradients,
    LossOutput,
    StepLoss,
    above_zero,
    check_weight,
    choice,
    divide,
)
from packstore.torch.losses.terms import Names, make_terms
from packstore.torch.metrics import SumAndCount, wide_dtype

SftAverage = Literal["token", "sequence_sum", "sequence_mean"]
Reduction = Literal["sum", "pack_mean"]


class PreferenceLoss(StepLoss):
    """A loss of :data:`~packstore.torch.losses.formulas.LOSSES`, one of your own, or a mix.

    Every pair weighs the same in any pack, batch or rank: each loss is divided by the count of the
    whole optimizer step, which a loader's batch carries.

    Args:
        name: name of the loss; or a function of :class:`~packstore.torch.Pairs` that returns their
            losses `[n]`, whose keyword-only arguments are its parameters; or a mix, name or
            function -> weight, as in ``{"dpo": 0.8, "bco_pair": 0.2}``, or -> ``{"weight": 0.8,
            "beta": 0.1}`` with parameters for that member alone.
        sft_weight: weight of an added likelihood loss of the best response; 0: none.
        sft_average: how that loss (and the loss ``sft``) averages: ``token``, over all tokens;
            ``sequence_sum`` and ``sequence_mean``, sums or means of sequences, over sequences.
        average_logps: compare means over tokens where the loss compares sums.
        pairs: kind ``scored`` only: ``best_vs_rest``, ``all`` pairs, or ``adjacent`` ranks; never
            responses of equal reward. An example with more responses has more pairs.
        reduction: ``sum``; or ``pack_mean``, the mean over the pairs of each pack, averaged over
            packs, which is biased: a pair weighs more, the fewer share its pack (0.5 to 5.6 on real
            data). It exists only to reproduce NeMo-Aligner.
        weight_field: carried or joined column of numbers of at least 0, the weight of each example:
            every sum is then weighted, and divided by the sum of the weights of the whole step,
            which :func:`count_step` counts, as no loader does.
        router_aux_loss_coef: weight of the load-balancing loss of experts, which log-probs of
            :func:`~packstore.torch.packed_logps` carry if the model's config asks for it; default:
            the config's coefficient; 0: none.
        reference: False if a function of your own needs no reference model.
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
        weight_field: str | None = None,
        router_aux_loss_coef: float | None = None,
        reference: bool = True,
        gradients: Gradients = "mean",
        **parameters: float,
    ) -> None:
        super().__init__(router_aux_loss_coef, gradients)
        self.terms = make_terms(name, parameters, average_logps, reference)
        self.sft_weight, self.weight_field = sft_weight, weight_field
        self.sft_average = choice("sft_average", sft_average, get_args(SftAverage))
        self.pairs: PairChoice = choice("pairs", pairs, get_args(PairChoice))
        self.reduction = choice("reduction", reduction, get_args(Reduction))
        self.only_sft = self.terms[0].variant is sft
        choice("average_logps", average_logps, (True, False))
        check_weight("sft_weight", sft_weight)
        if not sft_weight + sum(m.weight for m in self.terms):
            raise ConfigError("the weights of a loss must not all be 0.")
        if self.rows != "pairs" and (sft_weight or reduction != "sum"):
            where, rule = f"loss {self.terms[0].name!r}", "bad answers must not be learned"
            if self.scores:
                rule = "scores have no likelihood, and no mean of packs"
            elif reduction != "sum":
                rule = "each example must weigh the same"
            raise ConfigError(sentence(where, rule, "sft_weight or a reduction"))
        if self.rows == "lists" and pairs != "best_vs_rest":
            rule, found = "it ranks all responses of an example", f"pairs={pairs!r}"
            raise ConfigError(sentence(repr(self), rule, found, "Leave pairs out"))
        if self.only_sft and (sft_weight or reduction != "sum"):
            raise ConfigError("loss 'sft' takes neither sft_weight nor a reduction.")
        if weight_field is not None and reduction != "sum":
            raise ConfigError("weight_field weights the pairs of a sum: leave reduction out.")
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

    @property
    def rows(self) -> Rows:
        """Kind of the rows that the loss compares."""
        return self.terms[0].variant.rows

    @property
    def single(self) -> bool:
        """True if the loss judges each answer alone."""
        return self.rows == "answers"

    @property
    def scores(self) -> bool:
        """True if the loss takes a reward model's scores in place of log-probs."""
        return self.rows in ("scores", "lists")

    def check_data(self, dataset: Dataset) -> None:
        """Raises :class:`CompatibilityError` for a dataset that the loss has no use for."""
        manifest, where = dataset.manifest, f"loss {self.terms[0].name!r} on {dataset.url}"
        if manifest.kind == "sft" and not self.only_sft:
            rule = "an example must have responses to compare"
            raise CompatibilityError(sentence(where, rule, "kind 'sft'", "Use loss sft"))
        alone = manifest.totals.sequences == manifest.totals.examples
        if manifest.kind == "scored" and alone and not self.single:
            rule = "an example must have several responses"
            remedy = "Use kto or bco, or pack the responses to a prompt in one record"
            raise CompatibilityError(sentence(where, rule, "single answers, good or bad", remedy))

    @property
    def _beta(self) -> float:
        """Scale of the implicit rewards; 1 for a function without a beta."""
        return self.terms[0].parameters.get("beta", 1.0)

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
            logps: `[S]`, log-probs of the policy in nats, from :func:`segment_logps`; for a loss
                of scores those of :func:`~packstore.torch.segment_scores`.
            batch: the batch.
            ref_logps: `[S]`, the same of the reference model; default: the batch's.
            divisor: divides the loss, for experts: the result of :func:`count_step`, or one number
                if there is no SFT term. Default: the count of the whole optimizer step, divided by
                the number of ranks if their gradients are averaged; without a loader's plan, the
                batch's own count.
        """
        sums = SequenceSums.of(logps, batch, self._reference(batch, ref_logps))
        output = partial(self._output, sums, self._weighted(batch))
        return self._divided(logps, batch, divisor, output)

    def _output(
        self,
        sums: SequenceSums,
        batch: PackedBatch,
        count: Tensor | float | None,
        sft_divisor: float | None,
    ) -> LossOutput:
        """The loss without router losses."""
        if self.only_sft:
            term = self._likelihood(sums, batch)
            weighted = self.terms[0].weight * term[0], term[1]
            weights = batch.weights.to(sums.logps.dtype)
            best = sums.logps[index_best(batch)] * weights
            metrics = {"loss": term, "logps/chosen": (best.sum(), weights.sum())}
            return LossOutput(divide(weighted, count), *weighted, None, None, metrics)
        chosen, rejected, example, weights = self._pairs(batch, sums.logps)
        pairs = self._take(sums, batch, chosen, rejected)
        losses = self._losses(pairs, chosen, batch.num_segments)
        term = self._reduce(self._total(losses), weights, example, batch)
        metrics = self._metrics(pairs, weights)
        if len(losses) > 1:
            for member, values in zip(self.terms, losses, strict=True):
                metrics[f"loss/{member.name}"] = self._reduce(values, weights, example, batch)
        loss = divide(term, count)
        sft_sum = sft_count = None
        if self.sft_weight:
            sft_sum, sft_count = likelihood = self._likelihood(sums, batch)
            loss = loss + self.sft_weight * divide(likelihood, sft_divisor)
            metrics |= {"preference_loss": term, "sft_loss": likelihood}
        # Summed over the batches of a step and divided by its count, this is the step's loss.
        whole = loss * (above_zero(term[1]) if count is None else count)
        metrics = {"loss": (whole, term[1]), **metrics}
        return LossOutput(loss, *term, sft_sum, sft_count, metrics)

    def per_example(
        self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns loss and implicit rewards of each example, without router losses.

        Both are means over the pairs of an example (the loss ``plackett_luce`` is of all its
        responses), NaN without any. The likelihood of a response
        is its mean over tokens, unless `sft_average` is ``sequence_sum``. Arguments and errors are
        those of a call; weights do not count.

        Returns:
            Losses `[E]`, and rewards `[E, 2]` of chosen and rejected; None for the loss ``sft``.
        """
        sums = SequenceSums.of(logps, batch, self._reference(batch, ref_logps))
        best = index_best(batch)
        responses = sums.take(best, best)
        likelihood = sft(responses)
        if self.sft_average != "sequence_sum":
            likelihood = likelihood / responses.chosen_tokens
        if self.only_sft:
            return self.terms[0].weight * likelihood, None
        chosen, rejected, example, _ = self._pairs(batch, logps)
        pairs = self._take(sums, batch, chosen, rejected)
        losses = self._total(self._losses(pairs, chosen, batch.num_segments))
        beta = self._beta
        values = torch.stack([losses, beta * pairs.u, beta * pairs.v], 1)
        there = torch.ones_like(values)
        if self.single:
            there[:, 1], there[:, 2] = pairs.chosen_reward > 0, pairs.chosen_reward <= 0
        zeros = values.new_zeros(len(best), 3)
        total, count = (zeros.index_add(0, example, x) for x in (values * there, there))
        if self.rows == "lists":  # a sum over the rows of an example
            count[:, 0].clamp_(max=1)
        mean = total / count
        return mean[:, 0] + self.sft_weight * likelihood, mean[:, 1:]

    def units(self, batch: PackedBatch) -> tuple[str, str | None]:
        """See :meth:`StepLoss.units`."""
        alike = self.rows in ("answers", "lists") or batch.kind == "preference"
        unit = "examples" if alike else f"pairs_{self.pairs}"
        sft_unit = "best_tokens" if self.sft_average == "token" else "examples"
        if self.reduction == "pack_mean":
            unit = sft_unit = "packs"
        return (sft_unit, None) if self.only_sft else (unit, sft_unit if self.sft_weight else None)

    def _count(self, batch: PackedBatch, unit: str) -> Tensor:
        if unit == "best_tokens":
            return (batch.weights * segment_token_counts(batch)[index_best(batch)]).sum()
        if unit == "examples":
            return batch.weights.sum()
        _, _, example, weights = self._pairs(batch, batch.weights)
        return self._reduce(weights, weights, example, batch)[1]

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

    def _pairs(self, batch: PackedBatch, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Chosen and rejected segment, example and weight of each pair, `[n]`.

        The weight is 1, or 0 of a filler; of single answers a share of their example's.
        """
        if batch.kind == "sft":
            rule, remedy = "an example must have judged responses", "Use PreferenceLoss('sft')"
            where, found = f"loss {self.terms[0].name!r}", "a dataset of kind 'sft'"
            raise CompatibilityError(sentence(where, rule, found, remedy))
        if self.single:
            responses = batch.num_responses.long()
            example = segment_ids(responses, batch.num_segments)
            answer = torch.arange(len(example), device=example.device)
            weights = batch.weights.to(like.dtype) / responses
            return answer, answer, example, weights[example]
        chosen, rejected, example = index_pairs(
            batch, "all" if self.rows == "lists" else self.pairs
        )
        return chosen, rejected, example, batch.weights[example].to(like.dtype)

    def _take(
        self, sums: SequenceSums, batch: PackedBatch, chosen: Tensor, rejected: Tensor
    ) -> Pairs:
        """The pairs, or single answers; of a pair one is good and one bad, whatever its rewards."""
        pairs = sums.take(chosen, rejected)
        if self.single and batch.kind == "preference":
            return replace(pairs, chosen_reward=1 - 2 * (chosen % 2).to(sums.logps))
        return pairs

    def _losses(self, pairs: Pairs, chosen: Tensor, size: int) -> list[Tensor]:
        """The losses of each member, `[n]`."""
        if self.rows == "lists":
            pairs, share = against_all_lower(pairs, chosen, size)
            return [share * member(pairs) for member in self.terms]
        return [member(pairs) for member in self.terms]

    def _total(self, losses: list[Tensor]) -> Tensor:
        """The weighted sum of the losses of all members, `[n]`."""
        parts = zip(self.terms, losses, strict=True)
        return torch.stack([member.weight * values for member, values in parts]).sum(0)

    def _reduce(
        self, losses: Tensor, weights: Tensor, example: Tensor, batch: PackedBatch
    ) -> SumAndCount:
        """Sum and count of the pairs; or of packs, where each is the mean over its pairs."""
        if self.rows in ("answers", "lists"):  # the shares of an example are not exactly 1
            return (losses * weights).sum(), batch.weights.sum().to(losses.dtype)
        if self.reduction == "sum":
            return (losses * weights).sum(), weights.sum()
        packs, zeros = batch.pack_ids[example], losses.new_zeros(batch.num_packs)
        sums = zeros.index_add(0, packs, losses * weights)
        counts = zeros.index_add(0, packs, weights)
        return (sums / counts.clamp(min=1)).sum(), (counts > 0).to(losses.dtype).sum()

    def _likelihood(self, sums: SequenceSums, batch: PackedBatch) -> SumAndCount:
        """Sum and count of the likelihood loss of the best responses."""
        best = index_best(batch)
        pairs = sums.take(best, best)
        weights = batch.weights.to(sums.logps.dtype)
        losses = sft(pairs)
        if self.sft_average == "token":
            return (losses * weights).sum(), (weights * pairs.chosen_tokens).sum()
        if self.sft_average == "sequence_mean":
            losses = losses / pairs.chosen_tokens
        example = torch.arange(len(best), device=best.device)
        return self._reduce(losses, weights, example, batch)

    def _metrics(self, pairs: Pairs, weights: Tensor) -> dict[str, SumAndCount]:
        """Log-probs and rewards, ``beta * (policy - reference)``; of means too if the loss is."""
        wide = weights.to(wide_dtype(weights.device))
        if self.single:
            reward, good = self._beta * pairs.u, pairs.chosen_reward > 0
            right = (pairs.u > self.terms[0].parameters.get("baseline", 0.0)) == good
            metrics = {"rewards/accuracies": (right, wide), "rewards/squares": (reward**2, wide)}
            for side, of_side in (("chosen", wide * good), ("rejected", wide * ~good)):
                metrics[f"rewards/{side}"] = reward, of_side
                metrics[f"logps/{side}"] = pairs.chosen, of_side
            return {name: ((x.to(w) * w).sum(), w.sum()) for name, (x, w) in metrics.items()}
        values = {"logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected}
        values = {} if self.scores else values
        seen, beta = {"rewards": pairs}, self._beta
        if self.terms[0].averaged:
            seen["rewards_per_token"] = pairs.per_token()
        for name, each in seen.items():
            u, v, d = beta * each.u, beta * each.v, beta * each.d
            values |= {
                f"{name}/chosen": u,
                f"{name}/rejected": v,
                f"{name}/margins": d,
                f"{name}/accuracies": (each.d > 0).to(d.dtype),
                f"{name}/squares": (u**2 + v**2) / 2,
            }
        return {n: ((x.to(wide) * wide).sum(), wide.sum()) for n, x in values.items()}
