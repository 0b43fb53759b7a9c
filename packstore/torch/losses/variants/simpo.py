"""SimPO: no reference model, log-probs averaged over tokens, a target margin."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, variant


@variant(reference=False, averaged=True)
def simpo(pairs: Pairs, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """``-log s(b (log pi_w / n_w - log pi_l / n_l) - gamma)``.

    Source: Meng et al. 2024, arXiv 2405.14734, equation 6. Without a likelihood term unless
    `sft_weight` is set; Liger's class adds one by default.
    """
    mean = pairs.per_token()
    return -logsigmoid(beta * (mean.chosen - mean.rejected) - gamma)
