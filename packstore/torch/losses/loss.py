"""`PreferenceLoss`: the loss of a batch as a sum and a count, so that packing never
changes the weight of a pair; and checks of the data and of the first step.

The rows of a batch (``pairs.py``) go through the terms of the loss (``terms.py``); the
base class (``step_loss.py``) has the divisors. An SFT term is the added likelihood loss
of the best response of each example.
"""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch
from torch import Tensor

from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.format.arrays import COUNTS
from packstore.io.dataset.dataset import Dataset
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.losses.formulas import sft
from packstore.torch.losses.pairs import (
    PairChoice,
    PairRows,
    Rows,
    Sequences,
    SequenceSums,
)
from packstore.torch.losses.step_loss import (
    UNDIVIDED,
    Gradients,
    LossOutput,
    StepDivisor,
    StepLoss,
    divide,
    divisor_of,
)
from packstore.torch.losses.terms import Names, check_weight, parse_terms
from packstore.torch.metrics import SumAndCount

logger = logging.getLogger(__name__)

SftAverage = Literal["token", "sequence_sum", "sequence_mean"]
Reduction = Literal["sum", "pack_mean"]

CAUSES_OF_MISMATCH = (
    "reference log-probs that were made with another dtype of the output head (bf16 "
    "logits are off by about 0.3 nats a sequence), with dropout on in either model, "
    "from another template or tokenizer, by another attention (or without packing), "
    "with a LoRA adapter active, or of another checkpoint"
)


class PreferenceLoss(StepLoss):
    """A loss of :data:`~packstore.torch.losses.formulas.LOSSES`, one of your own, or a
    mix.

    Every pair weighs the same in any pack, batch or rank: each loss is divided by the
    count of the whole optimizer step, which a loader's batch carries.

    Args:
        name: name of the loss; or a function of :class:`~packstore.torch.Pairs` that
            returns their losses `[n]`; its keyword-only arguments are parameters;
            or a mix, name or function -> weight, as in ``{"dpo": 0.8, "bco_pair":
            0.2}``, or -> ``{"weight": 0.8, "beta": 0.1}`` with parameters for that
            member alone.
        sft_weight: weight of an added likelihood loss of the best response; 0: none.
        sft_average: how that loss (and the loss ``sft``) averages: ``token``, over all
            tokens; ``sequence_sum`` and ``sequence_mean``, sums or means of sequences,
            over sequences.
        average_logps: compare means over tokens where the loss compares sums.
        pairs: kind ``scored`` only: ``best_vs_rest``, ``all`` pairs, or ``adjacent``
            ranks; never responses of equal reward. An example with more responses has
            more pairs.
        reduction: ``sum``; or ``pack_mean``, the mean over the pairs of each pack,
            averaged over packs, which is biased: the fewer pairs share a pack, the more
            each weighs (0.5 to 5.6 times its fair weight on real data). It exists
            only to reproduce NeMo-Aligner.
        weight_field: carried or joined column of numbers of at least 0, the weight of
            each example: every sum is then weighted, and divided by the sum of the
            weights of the whole step. Loaders do not count these: call
            :func:`count_step`.
        router_aux_loss_coef: weight of the load-balancing loss of experts, which
            log-probs of :func:`~packstore.torch.packed_logps` carry if the model's
            config asks for it; default: the config's coefficient; 0: none.
        reference: False if a function of your own needs no reference model.
        gradients: how gradients are reduced over ranks: ``mean``, as in DDP and FSDP,
            or ``sum``. On one rank both are the same.
        parameters: parameters of the loss, such as `beta`; in a mix, of every member
            that takes them.

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
        choice("reference", reference, (True, False))
        choice("average_logps", average_logps, (True, False))
        check_weight("sft_weight", sft_weight)
        self.sft_weight = sft_weight
        self.sft_average = choice("sft_average", sft_average, get_args(SftAverage))
        self.pairs: PairChoice = choice("pairs", pairs, get_args(PairChoice))
        self.reduction = choice("reduction", reduction, get_args(Reduction))
        self.weight_field = weight_field

        self.terms = parse_terms(
            name,
            parameters=parameters,
            average_logps=average_logps,
            reference=reference,
            settings=self._setting_names(),
        )
        self.reference = any(term.variant.reference for term in self.terms)
        self._reads_rewards = any(term.reads_rewards for term in self.terms)
        self._sft_rows = Sequences(self.sft_average)
        self.rows = self._make_rows()
        self.scores = self.rows.takes_scores
        self._check_settings()

    def _make_rows(self) -> PairRows:
        """Return the rows of all terms; the first term sets the scale of rewards."""
        first = self.terms[0]
        if first.variant is sft:
            return self._sft_rows
        return first.variant.rows(
            self.pairs,
            beta=first.parameters.get("beta", 1.0),  # a function may have none
            baseline=first.parameters.get("baseline", 0.0),
            averaged=first.averaged,
        )

    def _check_settings(self) -> None:
        """Raise ConfigError for settings that contradict each other or the loss."""
        if self.sft_weight + sum(term.weight for term in self.terms) == 0:
            raise ConfigError("the weights of a loss must not all be 0.")
        if self.reduction == "pack_mean" and self.rows.no_pack_mean:
            self._refuse_setting(self.rows.no_pack_mean)
        if self.sft_weight and self.rows.no_sft_term:
            self._refuse_setting(self.rows.no_sft_term)
        if self.rows.sums_over_example and self.pairs != "best_vs_rest":
            raise ConfigError(
                sentence(
                    where=repr(self),
                    rule="it ranks all responses of an example",
                    found=f"pairs={self.pairs!r}",
                    remedy="Leave pairs out",
                )
            )
        if self.weight_field is not None and self.reduction == "pack_mean":
            raise ConfigError(
                "weight_field weights the pairs of a sum: leave reduction out."
            )
        averages_tokens = self.sft_weight and self.sft_average == "token"
        if averages_tokens and self.reduction == "pack_mean":
            raise ConfigError(
                "reduction 'pack_mean' has no token mean over a batch: set sft_average "
                "to 'sequence_sum' or 'sequence_mean'."
            )

    def _refuse_setting(self, reason: str) -> None:
        raise ConfigError(
            sentence(
                where=f"loss {self.terms[0].name!r}",
                rule=reason,
                found="sft_weight or a reduction",
            )
        )

    @property
    def has_perplexity(self) -> bool:
        """See :attr:`StepLoss.has_perplexity`: only of the loss ``sft``."""
        # Only that loss compares no responses, so that none need be judged.
        is_sft_loss = not self.rows.needs_judged_responses
        return is_sft_loss and self.sft_average == "token"

    def ranks_on_host(self, kind: str) -> bool:
        """See :meth:`StepLoss.ranks_on_host`."""
        return kind == "scored" and self.rows.ranks_scored

    def __repr__(self) -> str:
        terms = " + ".join(str(term) for term in self.terms)
        return f"PreferenceLoss({terms})"

    def check_data(self, dataset: Dataset) -> None:
        """Raise :class:`CompatibilityError` if the loss has no use for a dataset."""
        manifest = dataset.manifest
        where = f"loss {self.terms[0].name!r} on {dataset.url}"
        takes_single_answers = self.rows.takes_single_answers
        if manifest.kind == "sft" and self.rows.needs_judged_responses:
            rule = "an example must have responses to compare"
            remedy = "Use loss sft, or pack pairs"
            if takes_single_answers:
                rule = "an answer must have a score"
                remedy = "Use loss sft, or pack scored answers"
            raise CompatibilityError(
                sentence(where=where, rule=rule, found="kind 'sft'", remedy=remedy)
            )

        has_single_answers = manifest.totals.sequences == manifest.totals.examples
        if (
            manifest.kind == "scored"
            and has_single_answers
            and not takes_single_answers
        ):
            rule = "an example must have several responses to compare"
            remedy = "Use kto or bco, or pack the responses to a prompt in one record"
            if not self.rows.needs_judged_responses:
                rule = "an example must be an answer to learn"
                remedy = (
                    "Pack again without the scores, so that all answers are learned "
                    "(--ignore COLUMN), or use kto or bco"
                )
            raise CompatibilityError(
                sentence(
                    where=where,
                    rule=rule,
                    found="kind 'scored': single answers, good and bad",
                    remedy=remedy,
                )
            )

        unit = self.rows.unit(manifest.kind)
        if self.sft_weight or not unit.startswith("pairs"):
            return
        counts = dataset.pack_index.counts
        if counts is not None and not counts[:, COUNTS.index(unit)].any():
            raise CompatibilityError(
                sentence(
                    where=where,
                    rule="some pairs must differ in score",
                    found="none that do",
                    remedy="Leave it out, or pack other scores",
                )
            )

    def __call__(
        self,
        logps: Tensor,
        batch: PackedBatch,
        ref_logps: Tensor | None = None,
        *,
        divisor: StepDivisor | Tensor | float | None = None,
    ) -> LossOutput:
        """Compute the loss of a batch.

        Args:
            logps: `[S]`, log-probs of the policy in nats, from :func:`segment_logps`;
                for a loss of scores from :func:`~packstore.torch.segment_scores`.
            batch: the batch.
            ref_logps: `[S]`, the same of the reference model; default: the batch's.
            divisor: the result of :func:`count_step`, or one number if there is no SFT
                term; only needed without a loader's plan, or for another average.
                Default: the count of the whole optimizer step, divided by the number of
                ranks if their gradients are averaged; without a loader's plan, the
                batch's own count.
        """
        sums = SequenceSums.of(logps, batch, self._reference_logps(batch, ref_logps))
        weighted = self._weight_examples(batch)
        divisors = self._resolve_divisors(logps, batch, divisor)

        rows = self._select(sums, weighted)
        losses, losses_of_terms = self._losses(rows)
        loss_sum, count = self._reduce(losses, rows, weighted)
        loss = divide((loss_sum, count), divisors.count)

        metrics = self.rows.metrics(rows)
        if len(self.terms) > 1:
            for term, values in zip(self.terms, losses_of_terms, strict=True):
                metrics[f"loss/{term.name}"] = self._reduce(values, rows, weighted)

        sft_sum: Tensor | None = None
        sft_count: Tensor | None = None
        if self.sft_weight:
            best = self._sft_rows.select(sums, weighted)
            sft_sum, sft_count = self._reduce(sft(best.compared), best, weighted)
            sft_loss = divide((sft_sum, sft_count), divisors.sft_count)
            loss = loss + self.sft_weight * sft_loss
            metrics["preference_loss"] = (loss_sum, count)
            metrics["sft_loss"] = (sft_sum, sft_count)

        # The metric "loss" is a sum over batches, divided by their counts. Times its
        # divisor, the loss of this batch adds up to the loss of the step.
        share_of_step = loss * divisor_of(count, divisors.count)
        output = LossOutput(
            loss=loss,
            loss_sum=loss_sum,
            count=count,
            sft_sum=sft_sum,
            sft_count=sft_count,
            metrics={"loss": (share_of_step, count), **metrics},
        )
        return self._add_router_losses(output, logps, batch, divisors)

    def per_example(
        self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return loss and implicit rewards of each example, without router losses.

        Both are means over the pairs of an example (the loss ``plackett_luce`` is of
        all its responses), NaN without any. The likelihood of a response is its mean
        over tokens, unless `sft_average` is ``sequence_sum``. Arguments and errors are
        the same as for a call; weights do not count.

        Returns:
            Losses `[E]`, and rewards `[E, 2]` of chosen and rejected; None for the loss
            ``sft``.
        """
        sums = SequenceSums.of(logps, batch, self._reference_logps(batch, ref_logps))
        rows = self._select(sums, batch)
        losses_of_rows, _ = self._losses(rows)
        losses, rewards = self.rows.per_example(rows, losses_of_rows, batch)

        best = self._sft_rows.select(sums, batch)
        likelihood, _ = self._sft_rows.per_example(best, sft(best.compared), batch)
        return losses + self.sft_weight * likelihood, rewards

    def units(self, batch: PackedBatch) -> tuple[str, str | None]:
        """See :meth:`StepLoss.units`."""
        unit = self.rows.unit(batch.kind)
        sft_unit = self._sft_rows.unit(batch.kind)
        if self.reduction == "pack_mean":
            unit = "packs"
            sft_unit = "packs"
        if not self.sft_weight:
            return unit, None
        return unit, sft_unit

    def _count_unit(self, batch: PackedBatch, unit: str) -> Tensor:
        """Return the divisor of a batch's losses, or of its SFT term."""
        if unit == "examples":
            return batch.weights.sum()
        sums = _placeholder_sums(batch)
        if unit == "best_tokens":
            rows = self._sft_rows.select(sums, batch)
        else:
            rows = self._select(sums, batch)
        _, count = self._reduce(rows.weights, rows, batch)
        return count

    def count_sides(self, batch: PackedBatch) -> Tensor:
        """Count good and bad answers of a batch, or both sides of its pairs, `[2]`.

        Pairs of equal rewards do not count if the loss reads rewards.
        """
        rows = self._select(_placeholder_sums(batch), batch)
        weights = rows.weights
        if self._reads_rewards and not self.rows.takes_single_answers:
            weights = weights * (rows.pairs.dr != 0)
        num_chosen = (weights * rows.has_chosen).sum()
        num_rejected = (weights * rows.has_rejected).sum()
        return torch.stack([num_chosen, num_rejected])

    def _reference_logps(
        self, batch: PackedBatch, ref_logps: Tensor | None
    ) -> Tensor | None:
        """Return the argument, or the batch's log-probs; None without a reference."""
        if not self.reference:
            return None
        if ref_logps is None:
            ref_logps = batch.ref_logps
        if ref_logps is None:
            raise ConfigError(
                f"loss {self.terms[0].name!r} compares with a reference model: pass "
                "ref_logps=…, the segment_logps of the reference model on the same "
                "batch."
            )
        return ref_logps.detach()

    def _select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        """Return the rows of a batch that the loss is a function of."""
        if batch.kind == "sft" and self.rows.needs_judged_responses:
            raise CompatibilityError(
                sentence(
                    where=f"loss {self.terms[0].name!r}",
                    rule="an example must have judged responses",
                    found="a dataset of kind 'sft'",
                    remedy="Use PreferenceLoss('sft')",
                )
            )
        return self.rows.select(sums, batch)

    def _losses(self, rows: Rows) -> tuple[Tensor, list[Tensor]]:
        """Return the weighted sum of all terms, `[n]`, and the losses of each term."""
        losses = [rows.share * term(rows.compared) for term in self.terms]
        weighted = [
            term.weight * values
            for term, values in zip(self.terms, losses, strict=True)
        ]
        total = weighted[0]
        for values in weighted[1:]:
            total = total + values
        return total, losses

    def _reduce(self, losses: Tensor, rows: Rows, batch: PackedBatch) -> SumAndCount:
        """Return the sum of the losses of all rows, and their divisor.

        With reduction ``pack_mean``: the sum of the packs' mean losses, and the number
        of packs that have rows.
        """
        if self.reduction == "sum":
            return (losses * rows.weights).sum(), rows.count
        pack = batch.pack_ids[rows.example]
        zeros = losses.new_zeros(batch.num_packs)
        sums = zeros.index_add(0, pack, losses * rows.weights)
        counts = zeros.index_add(0, pack, rows.weights)
        means = sums / counts.clamp(min=1)
        return means.sum(), (counts > 0).to(losses.dtype).sum()


def _placeholder_sums(batch: PackedBatch) -> SequenceSums:
    """Return sums to count rows by: rewards stand in for log-probs, which no count
    reads.
    """
    return SequenceSums.of(batch.rewards.to(batch.weights), batch, ref_logps=None)


def warn_about_one_sided_data(
    loss_fn: PreferenceLoss, num_chosen: float, num_rejected: float
) -> None:
    """Warn if one side had no responses, so that training had nothing to compare.

    Args:
        loss_fn: the loss.
        num_chosen, num_rejected: sums of :meth:`PreferenceLoss.count_sides`.
    """
    if num_chosen and num_rejected:
        return
    rule = "pairs must differ in their rewards"
    actual = "none that do"
    remedy = "Pack rewards that differ, or take a loss that does not read them"
    if loss_fn.rows.takes_single_answers:
        rule = "some answers must be good, with a score above 0, and some bad"
        actual = f"{num_chosen:,.0f} good and {num_rejected:,.0f} bad ones"
        remedy = "Take a threshold off the scores by SQL when packing (page Recipes)"
    where = f"data of {loss_fn!r}"
    logger.warning(sentence(where=where, rule=rule, found=actual, remedy=remedy))


class FirstStepCheck:
    """Compares policy and reference once, at the first batch of a training run.

    Before the first step, the policy is its reference, and the loss has a known value:
    ln 2 for ``dpo``. A mismatch is logged as a warning with the likely causes; training
    goes on. Do not use it in a run that resumes from a checkpoint: the policy has
    changed there.

    Args:
        loss_fn: the loss; one without a reference model is not checked.
        tolerance: allowed mean difference of a sequence's log-probs, in nats.
    """

    def __init__(self, loss_fn: PreferenceLoss, *, tolerance: float = 0.1) -> None:
        self.loss_fn = loss_fn
        self.tolerance = tolerance
        self._is_done = not loss_fn.reference

    @torch.no_grad()
    def __call__(
        self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None = None
    ) -> float | None:
        """Check the first batch; later calls return at once.

        Returns:
            Mean absolute difference of `logps` `[S]` of the policy and `ref_logps`
            `[S]`, by default the batch's, in nats; None if nothing was compared.
        """
        if ref_logps is None:
            ref_logps = batch.ref_logps
        if self._is_done or ref_logps is None:
            return None
        self._is_done = True
        ref_logps = ref_logps.to(logps)
        gaps = (logps - ref_logps).abs()
        mean_gap = float(gaps.mean())
        if mean_gap <= self.tolerance:
            return mean_gap

        loss = self._mean_loss(logps, batch, ref_logps)
        expected_loss = self._mean_loss(ref_logps, batch, ref_logps)
        logger.warning(
            sentence(
                where=f"first step of {self.loss_fn!r}",
                rule=(
                    "policy and reference must agree at first, and the loss be "
                    f"{expected_loss:.4g}"
                ),
                found=(
                    f"{loss:.4g}, sequences {mean_gap:.2g} nats apart "
                    f"({float(gaps.max()):.2g} at most)"
                ),
                remedy=f"Likely causes: {CAUSES_OF_MISMATCH}",
            )
        )
        return mean_gap

    def _mean_loss(self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor) -> float:
        """Return the mean loss of the batch alone."""
        output = self.loss_fn(logps, batch, ref_logps, divisor=UNDIVIDED)
        return float(divide((output.loss_sum, output.count), None))
