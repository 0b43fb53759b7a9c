"""f-DPO with the forward KL divergence."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, bounded_exp, variant


@variant()
def fdpo_forward_kl(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))`` with f'(u) = 1 - e^-u, exponents cut at 80.

    Source: Wang et al. 2023, arXiv 2309.16240, table 1.
    """
    return -logsigmoid(beta * (bounded_exp(-pairs.v) - bounded_exp(-pairs.u)))
