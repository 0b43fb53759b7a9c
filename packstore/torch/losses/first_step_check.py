"""Checks the first step: an untrained policy equals its reference, and so must the log-probs."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from packstore.errors import sentence
from packstore.torch.batch.collate import PackedBatch
from packstore.torch.losses.divisor import own_divisor
from packstore.torch.losses.loss import PreferenceLoss

logger = logging.getLogger(__name__)

CAUSES = (
    "reference log-probs that were made with another dtype of the output head (bf16 logits are off "
    "by about 0.3 nats a sequence), with dropout on in either model, from another template or "
    "tokenizer, by another attention (or without packing), with a LoRA adapter active, or of "
    "another checkpoint"
)


class FirstStepCheck:
    """Compares policy and reference once, at the first batch of a training run.

    While the policy still equals its reference, each loss has its value at equal log-probs: ln 2
    for ``dpo``. A mismatch is logged as a warning with the likely causes; training goes on. Not for
    a run that resumes from a checkpoint, where the two differ.

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

        Args:
            logps: `[S]`, log-probs of the policy in nats.
            batch: the batch.
            ref_logps: `[S]`, log-probs of the reference model; default: the batch's.

        Returns:
            Mean absolute difference of a sequence's log-probs in nats; None if nothing was
            compared.
        """
        ref_logps = batch.ref_logps if ref_logps is None else ref_logps
        if self._done or ref_logps is None:
            return None
        self._done = True
        ref_logps = ref_logps.to(logps)
        gaps = (logps - ref_logps).abs()
        mean = float(gaps.mean())
        if not mean <= self.tolerance:
            divisor = own_divisor(batch, self.loss_fn)
            both = (self.loss_fn(x, batch, ref_logps, divisor=divisor) for x in (logps, ref_logps))
            loss, expected = (float(x.loss_sum / x.count.clamp(min=1)) for x in both)
            logger.warning(
                sentence(
                    f"first step of {self.loss_fn!r}",
                    f"policy and reference must agree at first, and the loss be {expected:.4g}",
                    f"{loss:.4g}, sequences {mean:.2g} nats apart "
                    f"({float(gaps.max()):.2g} at most)",
                    f"Likely causes: {CAUSES}",
                )
            )
        return mean
