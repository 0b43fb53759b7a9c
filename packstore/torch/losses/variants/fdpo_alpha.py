"""f-DPO with an alpha divergence."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, between, bounded_exp, variant


@variant()
def fdpo_alpha(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.5) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))`` with f'(u) = (e^((a-1) u) - 1) / (a - 1), exponents cut at 80.

    Source: Wang et al. 2023, arXiv 2309.16240, table 1, whose alpha is 1 - a; a = `alpha` in
    0..0.999, as in TRL.
    """
    power = between("fdpo_alpha", "alpha", alpha, 0, 0.999) - 1
    return -logsigmoid(beta * (bounded_exp(power * pairs.u) - bounded_exp(power * pairs.v)) / power)
