"""Distillation from a stored teacher: the KL divergence over its k most probable ids.

p are the teacher's and q the student's probabilities of the same k ids, so neither sums
to 1. Sums of ``p log(p / q)`` alone are no divergence: the reverse one becomes negative
where the student moves mass away from the k ids. So the rest of the mass counts as one
more outcome, or both sides are renormalised. Tensors `[n, k]` have a row for each
supervised token of a batch, in the order of ``batch.target_index``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packstore.errors import ConfigError, display, quote, sentence
from packstore.format.arrays import TopK
from packstore.io.manifest.side_manifest import REF_TOP_K, token_type
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.losses.formulas import log1mexp
from packstore.torch.losses.pairs import require_wide_log_probs
from packstore.torch.losses.step_loss import Gradients, LossOutput, StepDivisor
from packstore.torch.losses.token_loss import Average, TokenLoss, example_means

logger = logging.getLogger("packstore")

Direction = Literal["forward", "reverse"]
Rest = Literal["outcome", "renormalize"]

WRITE_TOP_K = (
    "Write it by packstore ref-logps --top-k 16, and join it: side=[…] in Python, "
    "--side of train and evaluate, --eval-side for the evaluation data of train"
)


class DistillLoss(TokenLoss):
    """The KL divergence of teacher and student at each supervised token, in nats.

    With ``rest="outcome"``, the ids that the teacher does not name are one more
    outcome, of probability ``max(1 - sum p, 0)`` and ``max(1 - sum q, 0)``. The
    divergence is then at most that of the whole vocabulary, and equal to it if k is the
    vocabulary. Log-probs of 1 - sum are computed down to the resolution of their dtype.

    Args:
        column: column of the batch with the teacher's k most probable ids.
        direction: ``forward``: ``sum p log(p / q)``, of Hinton et al. 2015, arXiv
            1503.02531, up to a constant; the student covers all that the teacher may
            say. ``reverse``: ``sum q log(q / p)``, as of Gu et al. 2023 (MiniLLM),
            arXiv 2306.08543, but at the tokens of the dataset; the student
            avoids what the teacher would not say. Agarwal et al. 2023 (GKD), arXiv
            2306.13649, compare both.
        rest: the ids beyond the k: ``outcome``, one more outcome; or ``renormalize``,
            ignored, where both sides are divided by their sums over the k. The student
            then learns nothing about the mass of the k: the top k alone are a biased
            estimate of the teacher (Anshumann et al. 2025, arXiv 2503.16870).
        average: as of :class:`~packstore.torch.PolicyLoss`.
        router_aux_loss_coef, gradients: as of :class:`~packstore.torch.PreferenceLoss`.

    Raises:
        ConfigError: a value is none of these.
    """

    def __init__(
        self,
        column: str = REF_TOP_K,
        *,
        direction: Direction = "forward",
        rest: Rest = "outcome",
        average: Average = "token",
        router_aux_loss_coef: float | None = None,
        gradients: Gradients = "mean",
    ) -> None:
        super().__init__(average, router_aux_loss_coef, gradients)
        self.column = column
        self.direction: Direction = choice("direction", direction, get_args(Direction))
        self.rest: Rest = choice("rest", rest, get_args(Rest))

    def __repr__(self) -> str:
        return (
            f"DistillLoss({self.column!r}, direction={self.direction!r}, "
            f"rest={self.rest!r}, average={self.average!r})"
        )

    @property
    def head_settings(self) -> dict[str, Any]:
        """See :attr:`StepLoss.head_settings`."""
        return {"ids_of": self.column}

    def check_side(self, types: Mapping[str, str], url: str) -> None:
        """See :meth:`StepLoss.check_side`."""
        type_of_tokens = token_type(types.get(self.column, ""))
        if type_of_tokens is None or type_of_tokens.k is None:
            columns = [f"{name}: {type_name}" for name, type_name in types.items()]
            columns_of_data = f"{', '.join(columns) or 'none'} for {display(url)}"
            raise self._column_error(columns_of_data)
        reads_rest = self.direction == "reverse" and self.rest == "outcome"
        if reads_rest and type_of_tokens.dtype == "uint8":
            # A rest of 0.01 may be stored as 0, whose logarithm is then far too low.
            logger.warning(
                sentence(
                    where=f"column {quote(self.column)} of {display(url)}",
                    rule="direction 'reverse' with rest 'outcome' needs 16 bits, as it "
                    "takes the logarithm of the teacher's rest",
                    found="8 bits",
                    remedy="Take rest='renormalize', or write float16",
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
            logps: `[n, k]`, log-probs of the student in nats, of the teacher's ids:
                from ``packed_logps(model, batch, ids_of=column)``.
            batch: the batch, with the column of the teacher.
            ref_logps: ignored; callers of any loss may pass it.
            divisor: as of :class:`~packstore.torch.PreferenceLoss`.

        Raises:
            ConfigError: the batch has no such column, or `logps` another shape.
        """
        teacher = self._teacher_logps(batch, logps)
        losses = self._divergence(teacher, logps)
        with torch.no_grad():
            values = {
                "kl": losses,
                "teacher_mass": teacher.exp().sum(-1),
                "student_mass": logps.exp().sum(-1),
                "agreement": logps.argmax(-1) == 0,
            }
        return self._output(logps, batch, losses=losses, values=values, divisor=divisor)

    def per_example(
        self, logps: Tensor, batch: PackedBatch, ref_logps: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the mean divergence over the tokens of each example, `[E]`, and None
        for its rewards.

        Arguments and errors are those of a call; weights do not count.
        """
        teacher = self._teacher_logps(batch, logps)
        return example_means(self._divergence(teacher, logps), batch), None

    def _teacher_logps(self, batch: PackedBatch, logps: Tensor) -> Tensor:
        """Return the teacher's log-probs, `[n, k]`, like those of the student."""
        require_wide_log_probs("logps", logps)
        values = batch.token_columns.get(self.column)
        if not isinstance(values, TopK):
            columns = ", ".join(batch.token_columns) or "none"
            raise self._column_error(f"columns of tokens: {columns}")
        teacher: Tensor = values.logps
        if logps.shape != teacher.shape:
            raise ConfigError(
                sentence(
                    where="logps",
                    rule="must be the student's log-probs of the teacher's ids, "
                    f"{tuple(teacher.shape)}",
                    found=f"shape {tuple(logps.shape)}",
                    remedy=f"packed_logps(model, batch, ids_of={self.column!r}) "
                    "returns them",
                )
            )
        if self.rest == "renormalize" and teacher.shape[1] == 1:
            raise ConfigError(
                sentence(
                    where=f"column {quote(self.column)}",
                    rule="rest='renormalize' needs at least 2 ids for each token, as "
                    "one alone always has probability 1",
                    found="1",
                    remedy="Take rest='outcome'",
                )
            )
        return teacher.to(logps).detach()

    def _column_error(self, columns: str) -> ConfigError:
        """Return the error for data without a teacher; `columns` says what it has."""
        return ConfigError(
            sentence(
                where="loss distill",
                rule="it needs side data with a column "
                f"{quote(self.column)} of type token<topK,…>",
                found=columns,
                remedy=WRITE_TOP_K,
            )
        )

    def _divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the KL divergence at each token, `[n]`, from log-probs `[n, k]`."""
        complete = _with_rest if self.rest == "outcome" else _renormalized
        log_p = complete(teacher)
        log_q = complete(student)
        if self.direction == "forward":
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        return (log_q.exp() * (log_q - log_p)).sum(-1)


def _renormalized(logps: Tensor) -> Tensor:
    """Return log-probs `[n, k]` of probabilities that sum to 1."""
    return logps - logps.logsumexp(-1, keepdim=True)


def _with_rest(logps: Tensor) -> Tensor:
    """Return log-probs `[n, k + 1]`, the last one that of all ids beyond the k."""
    total = logps.logsumexp(-1, keepdim=True)
    # Rounded log-probs may sum to 1 or more. The rest is then the smallest number that
    # 1 - sum could be, and has no gradient.
    total = total.clamp(max=-torch.finfo(total.dtype).eps)
    return torch.cat([logps, log1mexp(total)], -1)
