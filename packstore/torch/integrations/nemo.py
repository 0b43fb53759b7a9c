"""Loss settings and metric names of NeMo-Aligner.

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
"""NeMo-Aligner's `preference_loss` -> packstore's loss on sums over tokens, and on
means over tokens; None: no loss of its own, so that `average_logps` is set.
"""

DEFAULTS: dict[str, Any] = {
    "preference_loss": "dpo",
    "ref_policy_kl_penalty": None,
    "gt_reward_scale": 1.0,
    "preference_average_log_probs": False,
    "sft_average_log_probs": None,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.0,
}
"""Setting under ``model.dpo`` -> default. Of the two that are None, the penalty must be
given, and `sft_average_log_probs` follows `preference_average_log_probs`.
"""

MEMORY_SETTINGS = ("log_prob_forward_micro_batch_size",)
"""Settings under ``model.dpo`` that do not affect the loss."""


def loss_from_nemo(
    settings: Mapping[str, Any], *, pack_mean: bool = False
) -> PreferenceLoss:
    """Convert NeMo-Aligner's settings to a loss that weighs every pair the same.

    Args:
        settings: the settings under ``model.dpo``: `preference_loss` (``dpo``, ``ipo``,
            ``rpo_sq``, ``rpo_bwd_kl``, ``rpo_fwd_kl``), `ref_policy_kl_penalty`
            (packstore's `beta`), `gt_reward_scale` (`eta`),
            `preference_average_log_probs`
            (means over tokens, for any loss), `sft_average_log_probs` (default:
            `preference_average_log_probs`), `preference_loss_weight`,
            `sft_loss_weight`.
        pack_mean: weight pairs as NeMo-Aligner does, by the mean over the pairs of each
            pack; biased.

    Raises:
        UnknownNameError: NeMo-Aligner has no such setting or loss.
        ConfigError: a value is out of range, or the penalty is 0 (its default, with
            which preferences have no effect).
    """
    _check_names(settings)
    merged = {**DEFAULTS, **settings}
    if merged["sft_average_log_probs"] is None:
        merged["sft_average_log_probs"] = merged["preference_average_log_probs"]
    _check_values(merged)

    nemo_name = merged["preference_loss"]
    averages_logps = merged["preference_average_log_probs"]
    name_on_sums, name_on_means = LOSS_NAMES[nemo_name]
    name = name_on_sums
    if averages_logps and name_on_means is not None:
        name = name_on_means
        averages_logps = False  # the formula of this loss has the means

    parameters = {"beta": merged["ref_policy_kl_penalty"]}
    if nemo_name.startswith("rpo"):
        parameters["eta"] = merged["gt_reward_scale"]
    averages_sft = merged["sft_average_log_probs"]
    return PreferenceLoss(
        {name: merged["preference_loss_weight"]},
        sft_weight=merged["sft_loss_weight"],
        sft_average="sequence_mean" if averages_sft else "sequence_sum",
        average_logps=averages_logps,
        reduction="pack_mean" if pack_mean else "sum",
        **parameters,
    )


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise UnknownNameError for a setting that NeMo-Aligner does not have."""
    names = [*DEFAULTS, *MEMORY_SETTINGS]
    for name in settings:
        if name not in names:
            raise UnknownNameError(
                f"NeMo-Aligner has no loss setting {quote(name)}; "
                f"it takes: {', '.join(names)}."
            )


def _check_values(settings: Mapping[str, Any]) -> None:
    """Raise for an unknown loss, or a value out of range."""
    nemo_name = settings["preference_loss"]
    if nemo_name not in LOSS_NAMES:
        raise UnknownNameError(
            f"NeMo-Aligner has no preference_loss {quote(nemo_name)}; "
            f"choose one of: {', '.join(LOSS_NAMES)}."
        )
    penalty = settings["ref_policy_kl_penalty"]
    if not penalty:
        raise ConfigError(
            "NeMo-Aligner's settings: ref_policy_kl_penalty must be above 0; "
            f"found {quote(penalty)}. NeMo-Aligner's own configuration sets 0.2."
        )
    for name in ("preference_average_log_probs", "sft_average_log_probs"):
        if not isinstance(settings[name], bool):
            raise ConfigError(
                f"NeMo-Aligner's {name} must be true or false; found "
                f"{quote(settings[name])}."
            )


def nemo_metrics(
    means: Mapping[str, float], loss_fn: PreferenceLoss, pairs: float | None = None
) -> dict[str, float]:
    """Convert metrics to the names and units of NeMo-Aligner: its rewards omit beta.

    Args:
        means: the result of :meth:`Metrics.means`.
        loss_fn: the loss.
        pairs: number of pairs, for the sample standard deviation as NeMo-Aligner has
            it in `rewards_all_std`; default: the population standard deviation.

    Returns:
        ``loss``, ``preference_loss``, ``sft_loss``, ``acc``, ``rewards_chosen_mean``,
        ``rewards_rejected_mean``, ``rewards_all_mean``, ``rewards_all_std``. These are
        means over all pairs; NeMo-Aligner's are means of means over micro-batches.
    """
    term = loss_fn.terms[0]
    beta = term.parameters["beta"]
    # NeMo-Aligner logs the rewards that its loss compares: means over tokens, if it
    # averages.
    rewards = "rewards_per_token" if term.averaged else "rewards"
    chosen = means[f"{rewards}/chosen"] / beta
    rejected = means[f"{rewards}/rejected"] / beta
    mean = (chosen + rejected) / 2

    variance = means[f"{rewards}/squares"] / beta**2 - mean**2
    variance = max(variance, 0.0)  # rounding may make it negative
    if pairs is not None:
        num_rewards = 2 * pairs
        variance *= num_rewards / max(num_rewards - 1, 1)

    preference_loss = means.get("preference_loss", means["loss"])
    return {
        "loss": means["loss"],
        "preference_loss": preference_loss / (term.weight or 1.0),
        "sft_loss": means.get("sft_loss", 0.0),
        "acc": means[f"{rewards}/accuracies"],
        "rewards_chosen_mean": chosen,
        "rewards_rejected_mean": rejected,
        "rewards_all_mean": mean,
        "rewards_all_std": math.sqrt(variance),
    }
