"""Reward-aware preference optimisation, forward KL."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, bernoulli_kl, variant


@variant()
def rpo_fwd_kl(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``KL(Bern s(b d) || Bern s(eta dr))``.

    Source: Adler et al. 2024 (Nemotron-4 340B), arXiv 2406.11704; Sun et al. 2025, arXiv
    2502.00203. NeMo-Aligner's `rpo_fwd_kl`, whose `gt_reward_scale` is `eta`.
    """
    return bernoulli_kl(beta * pairs.d, eta * pairs.dr)
