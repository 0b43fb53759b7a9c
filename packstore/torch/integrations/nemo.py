"""Converts NeMo-Aligner's loss settings, and metrics to NeMo-Aligner's names.

Source: NVIDIA/NeMo-Aligner, ``nemo_aligner/models/nlp/gpt/megatron_gpt_dpo_model.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from packstore.errors import ConfigError, UnknownNameError, quote
from packstore.torch.losses.loss import PreferenceLoss

LOSS_NAMES: dict[str, tuple[str, str | None]] = {
    "dpo": ("dpo", "dpo_norm"),
    "ipo": ("ipo_sum", "ipo"),
    "rpo_sq": ("rpo_sq", None),
    "rpo_bwd_kl": ("rpo_bwd_kl", None),
    "rpo_fwd_kl": ("rpo_fwd_kl", None),
}
"""NeMo-Aligner's `preference_loss` -> our loss on sums, and our loss on means if there
is one.
"""

SETTINGS: dict[str, Any] = {
    "preference_loss": "dpo",
    "ref_policy_kl_penalty": None,
    "gt_reward_scale": 1.0,
    "preference_average_log_probs": False,
    "sft_average_log_probs": None,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.0,
}
"""Settings under ``model.dpo`` -> defaults; None: required, or that of the preference
loss.
"""

OF_MEMORY = ("log_prob_forward_micro_batch_size",)
"""Settings under ``model.dpo`` that do not affect the loss."""


def loss_from_nemo(
    settings: Mapping[str, Any], *, pack_mean: bool = False
) -> PreferenceLoss:
    """Converts NeMo-Aligner's settings to a loss in which every pair weighs the same.

    Args:
        settings: the settings under ``model.dpo``: `preference_loss` (``dpo``, ``ipo``,
            ``rpo_sq``, ``rpo_bwd_kl``, ``rpo_fwd_kl``), `ref_policy_kl_penalty` (our
            `beta`), `gt_reward_scale` (our `eta`), `preference_average_log_probs`
            (means over tokens, for any of the losses), `sft_average_log_probs`
            (default: that of the preference loss), `preference_loss_weight`,
            `sft_loss_weight`.
        pack_mean: weight pairs as NeMo-Aligner does, by the mean over the pairs of each
            pack; biased.

    Raises:
        UnknownNameError: NeMo-Aligner has no such setting or loss.
        ConfigError: a value is out of range, or the penalty is 0 (its default, with
            which preferences have no effect).
    """
    for name in settings:
        if name not in (*SETTINGS, *OF_MEMORY):
            raise UnknownNameError(
                f"NeMo-Aligner has no loss setting {quote(name)}; "
                f"it takes: {', '.join((*SETTINGS, *OF_MEMORY))}."
            )
    merged = {**SETTINGS, **settings}
    loss, beta = merged["preference_loss"], merged["ref_policy_kl_penalty"]
    if loss not in LOSS_NAMES:
        raise UnknownNameError(
            f"NeMo-Aligner has no preference_loss {quote(loss)}; "
            f"choose one of: {', '.join(LOSS_NAMES)}."
        )
    if not beta:
        raise ConfigError(
            "NeMo-Aligner's settings: ref_policy_kl_penalty must be above 0; "
            f"found {quote(beta)}. NeMo-Aligner's own configuration sets 0.2."
        )
    if merged["sft_average_log_probs"] is None:
        merged["sft_average_log_probs"] = merged["preference_average_log_probs"]
    for flag in ("preference_average_log_probs", "sft_average_log_probs"):
        if not isinstance(merged[flag], bool):
            raise ConfigError(
                f"NeMo-Aligner's {flag} must be true or false; found "
                f"{quote(merged[flag])}."
            )
    averaged = merged["preference_average_log_probs"]
    on_sums, on_means = LOSS_NAMES[loss]
    name = on_means if averaged and on_means else on_sums
    eta = {"eta": merged["gt_reward_scale"]} if loss.startswith("rpo") else {}
    return PreferenceLoss(
        {name: merged["preference_loss_weight"]},
        sft_weight=merged["sft_loss_weight"],
        sft_average="sequence_mean"
        if merged["sft_average_log_probs"]
        else "sequence_sum",
        average_logps=averaged and on_means is None,
        reduction="pack_mean" if pack_mean else "sum",
        beta=beta,
        **eta,
    )


def nemo_metrics(
    means: Mapping[str, float], loss_fn: PreferenceLoss, pairs: float | None = None
) -> dict[str, float]:
    """Converts metrics to the names and units of NeMo-Aligner, whose rewards omit beta.

    Args:
        means: the result of :meth:`Metrics.means`.
        loss_fn: the loss.
        pairs: number of pairs; makes `rewards_all_std` the sample standard deviation,
            as in NeMo-Aligner; default: the population standard deviation.

    Returns:
        ``loss``, ``preference_loss``, ``sft_loss``, ``acc``, ``rewards_chosen_mean``,
        ``rewards_rejected_mean``, ``rewards_all_mean``, ``rewards_all_std``. These are
        means over all pairs; NeMo-Aligner's are means of means over micro-batches.
    """
    beta = loss_fn.terms[0].parameters["beta"]
    # NeMo-Aligner logs the rewards that its loss compares: means over tokens, if it
    # averages.
    seen = "rewards_per_token" if loss_fn.terms[0].averaged else "rewards"
    chosen, rejected = means[f"{seen}/chosen"] / beta, means[f"{seen}/rejected"] / beta
    every = (chosen + rejected) / 2
    variance = max(means[f"{seen}/squares"] / beta**2 - every**2, 0.0)
    if pairs is not None:
        variance *= 2 * pairs / max(2 * pairs - 1, 1)
    preference = means.get("preference_loss", means["loss"])
    return {
        "loss": means["loss"],
        "preference_loss": preference / (loss_fn.terms[0].weight or 1.0),
        "sft_loss": means.get("sft_loss", 0.0),
        "acc": means[f"{seen}/accuracies"],
        "rewards_chosen_mean": chosen,
        "rewards_rejected_mean": rejected,
        "rewards_all_mean": every,
        "rewards_all_std": math.sqrt(variance),
    }
