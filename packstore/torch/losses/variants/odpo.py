"""DPO with an offset: the required margin grows with the reward gap."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, between, variant


@variant()
def odpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """``-log s(b d - alpha log dr)``; a pair without a reward gap (dr <= 0) has loss 0.

    Source: Amini et al. 2024, arXiv 2402.10571, with the logarithm as its f.
    """
    alpha = between("odpo", "alpha", alpha, 1e-6, 1e6)
    return -logsigmoid(beta * pairs.d - alpha * pairs.dr.clamp(min=0).log())
