"""IPO on log-probs averaged over tokens."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, variant


@variant(averaged=True)
def ipo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``(u / n_w - v / n_l - 1 / (2 b))^2``; the paper's tau is `beta`.

    Source: Azar et al. 2023, arXiv 2310.12036, equation 17. Averaged as in TRL and LLaMA-Factory;
    NeMo-Aligner and OpenRLHF use the sums, see ``ipo_sum``.
    """
    return (pairs.per_token().d - 1 / (2 * beta)) ** 2
