"""Supervised fine-tuning on the chosen (or only) response."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, variant


@variant(reference=False)
def sft(pairs: Pairs) -> Tensor:
    """``-log pi_w``: the negative log-likelihood, summed over the supervised tokens.

    `sft_average` of :class:`~packstore.torch.PreferenceLoss` sets the divisor.
    """
    return -pairs.chosen
