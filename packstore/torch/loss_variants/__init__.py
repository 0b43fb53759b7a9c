"""Losses on preference pairs: one file each, with one pure function of :class:`Pairs`.

In the formulas: u, v log-ratios of policy and reference on the chosen and the rejected response
(sums over tokens), d = u - v, n_w and n_l their numbers of tokens, dr the gap between their
ground-truth rewards, s the sigmoid, b beta. Losses that couple the pairs of a batch (aot, kto, bco
with its running mean) are left out on purpose: they would depend on the packing.
"""

from __future__ import annotations

from packstore.registry import Registry
from packstore.torch.pairs import Variant

_HERE = "packstore.torch.loss_variants"
_NAMES = (
    "dpo",
    "dpo_norm",
    "cdpo",
    "robust",
    "ipo",
    "ipo_sum",
    "rpo_sq",
    "rpo_bwd_kl",
    "rpo_fwd_kl",
    "hinge",
    "simpo",
    "orpo",
    "cpo",
    "apo_zero",
    "apo_down",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "discopop",
    "odpo",
    "fdpo_forward_kl",
    "fdpo_js",
    "fdpo_alpha",
    "sft",
)

LOSSES: Registry[Variant] = Registry("loss", {name: f"{_HERE}.{name}:{name}" for name in _NAMES})
