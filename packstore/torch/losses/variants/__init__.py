"""Losses on preference pairs: one file each, with one pure function of :class:`Pairs`.

In the formulas: u, v log-ratios of policy and reference on the chosen and the rejected response
(sums over tokens), d = u - v, n_w and n_l their numbers of tokens, dr the gap between their
ground-truth rewards, s the sigmoid, b beta. Losses that couple the pairs of a batch are omitted
(:data:`LEFT_OUT`), as they would depend on the packing. All losses are in ``docs/losses.md``.
"""

from __future__ import annotations

from packstore.registry import Registry
from packstore.torch.losses.pairs import Variant

_HERE = "packstore.torch.losses.variants"
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

_COUPLES = "it couples the pairs of a batch, so it would depend on which pairs share a pack"
_TOKENS = "it needs more of each token than its log-prob summed over the sequence"

LEFT_OUT: dict[str, str] = {
    "aot": f"{_COUPLES} (it sorts their log-ratios)",
    "aot_unpaired": f"{_COUPLES} (it sorts their log-ratios)",
    "bco": f"{_COUPLES} (it subtracts a running mean of rewards); 'bco_pair' does not",
    "kto": f"{_COUPLES} (its baseline is the KL of mismatched pairs)",
    "beta_dpo": f"{_COUPLES} (its beta follows the margins of the batch)",
    "ld_dpo": _TOKENS,
    "wpo": _TOKENS,
}
"""Omitted losses -> reason, for error messages."""

OTHER_NAMES: dict[str, str] = {
    "sigmoid": "'dpo' ('cdpo' with label smoothing)",
    "sigmoid_norm": "'dpo_norm'",
    "dpo_avg": "'dpo_norm'",
    "rdpo": "'robust'",
    "ipo_mean": "'ipo'",
    "rebel": "'rpo_sq', which is it up to a factor",
    "forward_kl": "'fdpo_forward_kl'",
    "js_divergence": "'fdpo_js'",
    "alpha_divergence": "'fdpo_alpha'",
    "mpo": "a mix: {'dpo': 0.8, 'bco_pair': 0.2} with sft_weight=1",
    "nll": "'sft', or sft_weight beside another loss",
}
"""Other libraries' names of losses -> names here, for error messages."""
