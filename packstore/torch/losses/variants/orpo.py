"""ORPO: likelihood of the chosen response plus the log odds ratio, without a reference model."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, variant


@variant(reference=False, averaged=True)
def orpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-m_w - b log s(log odds_w - log odds_l)``, m the mean log-probs, odds = p / (1 - p).

    The first term is the paper's likelihood loss, with weight 1 and averaged over the tokens of its
    sequence. p = 1 (infinite odds) is clamped to 1 - eps of the dtype.

    Source: Hong et al. 2024, arXiv 2403.07691, equations 6 and 7; its lambda is `beta`.
    """
    mean = pairs.per_token()
    odds_ratio = _log_odds(mean.chosen) - _log_odds(mean.rejected)
    return -mean.chosen - beta * logsigmoid(odds_ratio)


def _log_odds(logp: Tensor) -> Tensor:
    x = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    # Each form of log(1 - e^x) is accurate on one side of -ln 2.
    log1mexp = torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))
    return x - log1mexp
