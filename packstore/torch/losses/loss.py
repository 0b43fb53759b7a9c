"""The loss of a batch as a sum and a count, so that packing never changes the weight of
a pair.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from packstore.config.settings import check_class
from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.format.arrays import COUNTS
from packstore.io.dataset.dataset import Dataset
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.losses.formulas import sft
from packstore.torch.losses.pairs import (
    ORDER,
    PairChoice,
    PairRows,
    Rows,
    Sequences,
    SequenceSums,
    check_precision,
)
from packstore.torch.losses.step_loss import (
    UNDIVIDED,
    Gradients,
    LossOutput,
    StepDivisor,
    StepLoss,
    above_zero,
    divide,
)
from packstore.torch.losses.terms import Names, check_weight, make_terms
from packstore.torch.metrics import SumAndCount

logger = logging.getLogger(__name__)

SftAverage = Literal["token", "sequence_sum", "sequence_mean"]
Reduction = Literal["sum", "pack_mean"]

CAUSES = (
    "reference log-probs that were made with another dtype of the output head (bf16 "
    "logits are off "
    "by about 0.3 nats a sequence), with dropout on in either model, from another "
    "template or "
    "tokenizer, by another attention (or without packing), with a LoRA adapter active, "
    "or of "
    "another checkpoint"
)


class PreferenceLoss(StepLoss):
    """A loss of :data:`~packstore.torch.losses.formulas.LOSSES`, one of your own, or a
    mix.

    Every pair weighs the same in any pack, batch or rank: each loss is divided by the
    count of the whole optimizer step, which a loader's batch carries.

    Args:
        name: name of the loss; or a function of :class:`~packstore.torch.Pairs` that
            returns their losses `[n]`, whose keyword-only arguments are its parameters;
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
            averaged over packs, which is biased: a pair weighs more, the fewer share
            its pack (0.5 to 5.6 on real data). It exists only to reproduce
            NeMo-Aligner.
        weight_field: carried or joined column of numbers of at least 0, the weight of
            each example: every sum is then weighted, and divided by the sum of the
            weights of the whole step, which :func:`count_step` counts, as no loader
            does.
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
        self.terms = make_terms(
            name, parameters, average_logps, reference, self._settings()
        )
        self.sft_weight, self.weight_field = sft_weight, weight_field
        self.sft_average = choice("sft_average", sft_average, get_args(SftAverage))
        self.pairs: PairChoice = choice("pairs", pairs, get_args(PairChoice))
        self.reduction = choice("reduction", reduction, get_args(Reduction))
        first, self._best = self.terms[0], Sequences(sft_average)
        self.rows: PairRows = self._best
        if first.variant is not sft:
            self.rows = first.variant.rows(pairs, first.parameters, first.averaged)
        self.reference = any(member.variant.reference for member in self.terms)
        self.scores = self.rows.scores
        self._reads_gap = any(member.reads("chosen_reward") for member in self.terms)
        choice("average_logps", average_logps, (True, False))
        check_weight("sft_weight", sft_weight)
        if not sft_weight + sum(m.weight for m in self.terms):
            raise ConfigError("the weights of a loss must not all be 0.")
        changed = reduction != "sum", bool(sft_weight)
        for setting, rule in zip(changed, self.rows.refused, strict=True):
            if setting and rule:
                where = f"loss {first.name!r}"
                raise ConfigError(sentence(where, rule, "sft_weight or a reduction"))
        if self.rows.summed and pairs != "best_vs_rest":
            rule, found = "it ranks all responses of an example", f"pairs={pairs!r}"
            raise ConfigError(sentence(repr(self), rule, found, "Leave pairs out"))
        if weight_field is not None and reduction != "sum":
            raise ConfigError(
                "weight_field weights the pairs of a sum: leave reduction out."
            )
        if sft_weight and reduction == "pack_mean" and sft_average == "token":
            raise ConfigError(
                "reduction 'pack_mean' has no token mean over a batch: set sft_average "
                "to "
                "'sequence_sum' or 'sequence_mean'."
            )

    def __repr__(self) -> str:
        return f"PreferenceLoss({' + '.join(map(str, self.terms))})"

    def check_data(self, dataset: Dataset) -> None:
        """Raises :class:`CompatibilityError` for a dataset that the loss has no use
        for.
        """
        manifest, where = (
            dataset.manifest,
            f"loss {self.terms[0].name!r} on {dataset.url}",
        )
        if manifest.kind == "sft" and self.rows.compares:
            rule = "an example must have responses to compare"
            rule = "an answer must have a score" if self.rows.alone else rule
            remedy = (
                "Use loss sft, or pack "
                f"{'scored answers' if self.rows.alone else 'pairs'}"
            )
            raise CompatibilityError(sentence(where, rule, "kind 'sft'", remedy))
        alone = manifest.totals.sequences == manifest.totals.examples
        if manifest.kind == "scored" and alone and not self.rows.alone:
            rule = "an example must have several responses"
            remedy = "Use kto or bco, or pack the responses to a prompt in one record"
            raise CompatibilityError(
                sentence(where, rule, "single answers, good or bad", remedy)
            )
        unit = self.rows.unit(manifest.kind)
        if not unit.startswith("pairs") or self.sft_weight:
            return
        counts = dataset.pack_index.counts
        if counts is not None and not counts[:, COUNTS.index(unit)].any():
            rule, remedy = (
                "some pairs must differ in score",
                "Leave it out, or pack other scores",
            )
            raise CompatibilityError(sentence(where, rule, "none that do", remedy))

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
            logps: `[S]`, log-probs of the policy in nats, from :func:`segment_logps`;
                for a loss of scores those of :func:`~packstore.torch.segment_scores`.
            batch: the batch.
            ref_logps: `[S]`, the same of the reference model; default: the batch's.
            divisor: divides the loss, for experts: the result of :func:`count_step`, or
                one number if there is no SFT term. Default: the count of the whole
                optimizer step, divided by the number of ranks if their gradients are
                averaged; without a loader's plan, the batch's own count.
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
        rows = self._select(sums, batch)
        total, losses = self._losses(rows)
        term = self._reduce(total, rows, batch)
        loss = divide(term, count)
        metrics = self.rows.metrics(rows)
        if len(losses) > 1:
            for member, values in zip(self.terms, losses, strict=True):
                metrics[f"loss/{member.name}"] = self._reduce(values, rows, batch)
        sft_sum = sft_count = None
        if self.sft_weight:
            best = self._best.select(sums, batch)
            sft_sum, sft_count = likelihood = self._reduce(
                sft(best.compared), best, batch
            )
            loss = loss + self.sft_weight * divide(likelihood, sft_divisor)
            metrics |= {"preference_loss": term, "sft_loss": likelihood}
        # Summed over the batches of a step and divided by its count, this is the step's
        # loss.
        whole = loss * (above_zero(term[1]) if count is None else count)
        metrics = {"loss": (whole, term[1]), **metrics}
        return LossOutput(loss, *term, sft_sum, sft_count, metrics)

    def per_example(
        self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns loss and implicit rewards of each example, without router losses.

        Both are means over the pairs of an example (the loss ``plackett_luce`` is of
        all its responses), NaN without any. The likelihood of a response is its mean
        over tokens, unless `sft_average` is ``sequence_sum``. Arguments and errors are
        those of a call; weights do not count.

        Returns:
            Losses `[E]`, and rewards `[E, 2]` of chosen and rejected; None for the loss
            ``sft``.
        """
        sums = SequenceSums.of(logps, batch, self._reference(batch, ref_logps))
        rows, best = self._select(sums, batch), self._best.select(sums, batch)
        losses, rewards = self.rows.per_example(rows, self._losses(rows)[0], batch)
        likelihood, _ = self._best.per_example(best, sft(best.compared), batch)
        return losses + self.sft_weight * likelihood, rewards

    def units(self, batch: PackedBatch) -> tuple[str, str | None]:
        """See :meth:`StepLoss.units`."""
        unit, sft_unit = self.rows.unit(batch.kind), self._best.unit(batch.kind)
        if self.reduction == "pack_mean":
            unit = sft_unit = "packs"
        return unit, sft_unit if self.sft_weight else None

    def _count(self, batch: PackedBatch, unit: str) -> Tensor:
        if unit == "examples":
            return batch.weights.sum()
        select = self._best.select if unit == "best_tokens" else self._select
        # Any numbers do in place of log-probs, as weights alone are summed.
        rows = select(
            SequenceSums.of(batch.rewards.to(batch.weights), batch, None), batch
        )
        return self._reduce(rows.weights, rows, batch)[1]

    def count_sides(self, batch: PackedBatch) -> Tensor:
        """Counts what a batch has to compare: good and bad answers, or both sides of
        pairs, `[2]`.

        Pairs without a gap of rewards do not count if the loss reads it.
        """
        # Any numbers do in place of log-probs.
        rows = self._select(
            SequenceSums.of(batch.rewards.to(batch.weights), batch, None), batch
        )
        weights = rows.weights
        if self._reads_gap and not self.rows.alone:
            weights = weights * (rows.pairs.dr != 0)
        return torch.stack([(weights * side).sum() for side in rows.sides])

    def _reference(self, batch: PackedBatch, ref_logps: Tensor | None) -> Tensor | None:
        check_class("argument batch", batch, PackedBatch, ORDER)
        if not self.reference:
            return None
        ref_logps = batch.ref_logps if ref_logps is None else ref_logps
        if ref_logps is None:
            raise ConfigError(
                f"loss {self.terms[0].name!r} compares with a reference model: pass "
                "ref_logps=…, the segment_logps of the reference model on the same "
                "batch."
            )
        return check_precision("ref_logps", ref_logps).detach()

    def _select(self, sums: SequenceSums, batch: PackedBatch) -> Rows:
        if batch.kind == "sft" and self.rows.compares:
            rule, remedy = (
                "an example must have judged responses",
                "Use PreferenceLoss('sft')",
            )
            where, found = f"loss {self.terms[0].name!r}", "a dataset of kind 'sft'"
            raise CompatibilityError(sentence(where, rule, found, remedy))
        return self.rows.select(sums, batch)

    def _losses(self, rows: Rows) -> tuple[Tensor, list[Tensor]]:
        """The weighted sum of the losses of all members, `[n]`, and theirs."""
        losses = [rows.share * member(rows.compared) for member in self.terms]
        parts = zip(self.terms, losses, strict=True)
        return torch.stack([member.weight * values for member, values in parts]).sum(
            0
        ), losses

    def _reduce(self, losses: Tensor, rows: Rows, batch: PackedBatch) -> SumAndCount:
        """Sum and count of the rows; or of packs, where each is the mean over
        its rows.
        """
        if self.reduction == "sum":
            return (losses * rows.weights).sum(), rows.count
        packs, zeros = batch.pack_ids[rows.example], losses.new_zeros(batch.num_packs)
        sums = zeros.index_add(0, packs, losses * rows.weights)
        counts = zeros.index_add(0, packs, rows.weights)
        return (sums / counts.clamp(min=1)).sum(), (counts > 0).to(losses.dtype).sum()


def tell_one_sided(loss_fn: PreferenceLoss, chosen: float, rejected: float) -> None:
    """Warns of a training that had nothing to compare; arguments are numbers of both
    sides.
    """
    if chosen and rejected:
        return
    rule, found = "pairs must differ in their rewards", "none that do"
    remedy = "Pack rewards that differ, or take a loss that does not read them"
    if loss_fn.rows.alone:
        rule = "some answers must be good, with a score above 0, and some bad"
        found = f"{chosen:,.0f} good and {rejected:,.0f} bad ones"
        remedy = "Take a threshold off the scores by SQL when packing (page Recipes)"
    logger.warning(sentence(f"data of {loss_fn!r}", rule, found, remedy))


class FirstStepCheck:
    """Compares policy and reference once, at the first batch of a training run.

    While the policy still equals its reference, each loss has its value at equal
    log-probs: ln 2 for ``dpo``. A mismatch is logged as a warning with the likely
    causes; training goes on. Not for a run that resumes from a checkpoint, where the
    two differ.

    Args:
        loss_fn: the loss; one without a reference model is not checked.
        tolerance: allowed mean difference of a sequence's log-probs, in nats.
    """

    def __init__(self, loss_fn: PreferenceLoss, *, tolerance: float = 0.1) -> None:
        self.loss_fn, self.tolerance = loss_fn, tolerance
        self._done = not loss_fn.reference

    @torch.no_grad()
    def __call__(
        self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None = None
    ) -> float | None:
        """Checks the first batch; later calls return at once.

        Returns:
            Mean absolute difference of `logps` `[S]` of the policy and `ref_logps`
            `[S]`, by default the batch's, in nats; None if nothing was compared.
        """
        ref_logps = batch.ref_logps if ref_logps is None else ref_logps
        if self._done or ref_logps is None:
            return None
        self._done = True
        ref_logps = ref_logps.to(logps)
        gaps = (logps - ref_logps).abs()
        mean = float(gaps.mean())
        if not mean <= self.tolerance:
            sides = (logps, ref_logps)
            outputs = [
                self.loss_fn(x, batch, ref_logps, divisor=UNDIVIDED) for x in sides
            ]
            loss, expected = (
                float(divide((out.loss_sum, out.count), None)) for out in outputs
            )
            rule = (
                "policy and reference must agree at first, and the loss be "
                f"{expected:.4g}"
            )
            found = (
                f"{loss:.4g}, sequences {mean:.2g} nats apart "
                f"({float(gaps.max()):.2g} at most)"
            )
            where = f"first step of {self.loss_fn!r}"
            logger.warning(sentence(where, rule, found, f"Likely causes: {CAUSES}"))
        return mean
