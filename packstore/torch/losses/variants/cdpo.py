"""Conservative DPO: labels are wrong with a known probability."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, between, variant


@variant()
def cdpo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """``-(1 - e) log s(b d) - e log s(-b d)``, e = `label_smoothing` in 0..0.5.

    Source: Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO". TRL
    1.16 ignores its label smoothing for the plain sigmoid loss.
    """
    e = between("cdpo", "label_smoothing", label_smoothing, 0, 0.5)
    x = beta * pairs.d
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)
