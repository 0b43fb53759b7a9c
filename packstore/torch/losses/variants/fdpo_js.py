"""f-DPO with the Jensen-Shannon divergence."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def fdpo_js(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))`` with f'(u) = ln 2 + log s(u).

    Source: Wang et al. 2023, arXiv 2309.16240, table 1.
    """
    return -logsigmoid(beta * (logsigmoid(pairs.u) - logsigmoid(pairs.v)))
