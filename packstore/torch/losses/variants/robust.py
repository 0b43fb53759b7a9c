"""Robust DPO: the conservative loss, made unbiased under label noise."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, between, variant


@variant()
def robust(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """``[-(1 - e) log s(b d) + e log s(-b d)] / (1 - 2 e)``, e = `label_smoothing` in 0..0.49.

    Source: Chowdhury et al. 2024, arXiv 2403.00409.
    """
    e = between("robust", "label_smoothing", label_smoothing, 0, 0.49)
    x = beta * pairs.d
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)
