"""CPO: DPO with a uniform reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, variant


@variant(reference=False)
def cpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (log pi_w - log pi_l))``; add the paper's likelihood term with `sft_weight`.

    Source: Xu et al. 2024, arXiv 2401.08417.
    """
    return -logsigmoid(beta * (pairs.chosen - pairs.rejected))
