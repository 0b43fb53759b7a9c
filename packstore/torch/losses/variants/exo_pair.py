"""EXO on pairs: the reverse KL between policy and smoothed preference."""

from __future__ import annotations

import math

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, bernoulli_kl_to, between, variant


@variant()
def exo_pair(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """``KL(Bern s(b d) || Bern(1 - e))``, e = `label_smoothing` in 1e-12..0.5.

    Source: Ji et al. 2024, arXiv 2402.00856.
    """
    e = between("exo_pair", "label_smoothing", label_smoothing, 1e-12, 0.5)
    return bernoulli_kl_to(beta * pairs.d, math.log1p(-e), math.log(e))
