"""IPO on summed log-probs."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def ipo_sum(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``(d - 1 / (2 b))^2``; the paper's tau is `beta`.

    Source: Azar et al. 2023, arXiv 2310.12036, equation 17. On sums as in the paper, NeMo-Aligner
    and OpenRLHF; TRL averages over tokens, see ``ipo``.
    """
    return (pairs.d - 1 / (2 * beta)) ** 2
