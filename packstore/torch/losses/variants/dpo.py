"""DPO, the sigmoid loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def dpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b d)``.

    Source: Rafailov et al. 2023, arXiv 2305.18290, equation 7.
    """
    return -logsigmoid(beta * pairs.d)
