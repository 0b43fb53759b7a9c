"""DiscoPOP: the log-ratio modulated loss, found by search."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, between, variant


@variant()
def discopop(pairs: Pairs, *, beta: float = 0.1, tau: float = 0.05) -> Tensor:
    """``-(1 - w) log s(x) + w e^-x`` with x = b d and w = s(x / tau), tau in 1e-3..1.

    Source: Lu et al. 2024, arXiv 2406.08414, "log ratio modulated loss".
    """
    tau = between("discopop", "tau", tau, 1e-3, 1)
    x = beta * pairs.d
    # w e^-x as one exponential: for very negative x the factors would be 0 and infinity.
    return -(-x / tau).sigmoid() * logsigmoid(x) + (logsigmoid(x / tau) - x).exp()
