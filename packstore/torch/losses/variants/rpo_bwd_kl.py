"""Reward-aware preference optimisation, backward KL."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, bernoulli_kl, variant


@variant()
def rpo_bwd_kl(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``KL(Bern s(eta dr) || Bern s(b d))``.

    Its gradient is that of ``cdpo`` with a label smoothing of s(-eta dr) for each pair.

    Source: Adler et al. 2024 (Nemotron-4 340B), arXiv 2406.11704; Sun et al. 2025, arXiv
    2502.00203. NeMo-Aligner's `rpo_bwd_kl`, whose `gt_reward_scale` is `eta`.
    """
    return bernoulli_kl(eta * pairs.dr, beta * pairs.d)
