"""NCA on pairs: a noise-contrastive loss that keeps the chosen likelihood from falling."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def nca_pair(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b u) - log s(-b u) / 2 - log s(-b v) / 2``.

    Source: Chen et al. 2024, arXiv 2402.05369.
    """
    u, v = beta * pairs.u, beta * pairs.v
    return -logsigmoid(u) - 0.5 * (logsigmoid(-u) + logsigmoid(-v))
