"""Checks the first step: an untrained policy equals its reference, and so must the log-probs."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from packstore.errors import sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.step_loss import UNDIVIDED, divide

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

        Returns:
            Mean absolute difference of `logps` `[S]` of the policy and `ref_logps` `[S]`, by
            default the batch's, in nats; None if nothing was compared.
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
            outputs = [self.loss_fn(x, batch, ref_logps, divisor=UNDIVIDED) for x in sides]
            loss, expected = (float(divide((out.loss_sum, out.count), None)) for out in outputs)
            rule = f"policy and reference must agree at first, and the loss be {expected:.4g}"
            found = f"{loss:.4g}, sequences {mean:.2g} nats apart ({float(gaps.max()):.2g} at most)"
            where = f"first step of {self.loss_fn!r}"
            logger.warning(sentence(where, rule, found, f"Likely causes: {CAUSES}"))
        return mean
