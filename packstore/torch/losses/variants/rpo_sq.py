"""Reward-aware preference optimisation, squared distance."""

from __future__ import annotations

from torch import Tensor

from packstore.torch.losses.pairs import Pairs, variant


@variant()
def rpo_sq(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``(b d - eta dr)^2``: regresses the implicit margin on the reward gap.

    Source: Adler et al. 2024 (Nemotron-4 340B), arXiv 2406.11704; Sun et al. 2025, arXiv
    2502.00203. NeMo-Aligner's `rpo_sq`, whose `gt_reward_scale` is `eta`.
    """
    return (beta * pairs.d - eta * pairs.dr) ** 2
