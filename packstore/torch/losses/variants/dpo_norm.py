"""DPO on log-probs averaged over tokens."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.torch.losses.pairs import Pairs, variant


@variant(averaged=True)
def dpo_norm(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (u / n_w - v / n_l))``.

    Source: Lambert et al. 2024 (Tulu 3), arXiv 2411.15124, section on preference tuning. Also
    NeMo-Aligner's `preference_average_log_probs` and TRL's `sigmoid_norm`.
    """
    return -logsigmoid(beta * pairs.per_token().d)
