"""BCO on pairs: a binary classifier of chosen and rejected."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def bco_pair(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b u) - log s(-b v)``.

    Omits the paper's running mean of rewards, which would couple batches. TRL and Liger omit it
    too; LLaMA-Factory and ms-swift subtract it.

    Source: Jung et al. 2024, arXiv 2404.04656.
    """
    return -logsigmoid(beta * pairs.u) - logsigmoid(-beta * pairs.v)
