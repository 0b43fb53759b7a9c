"""Names of other libraries: those of NeMo-Aligner mean what it computes, others say
what to use.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.errors import ConfigError, UnknownNameError
from packstore.testing import random_examples
from packstore.torch import (
    Metrics,
    PackedBatch,
    PreferenceLoss,
    collate,
    loss_from_nemo,
    nemo_metrics,
)
from packstore.torch import segment_token_counts as token_counts

SIZES = [1, 3, 2]


def made(kit: SimpleNamespace) -> tuple[PackedBatch, Tensor, Tensor]:
    batch = collate(
        kit.packed(random_examples(6, seed=8), SIZES, "concat"), "preference"
    )
    generator = torch.Generator().manual_seed(0)
    logps, ref = -5 - torch.randn(
        2, batch.num_segments, generator=generator, dtype=torch.float64
    )
    return batch, logps, ref


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Between distributions of two outcomes, `[2, n]` each."""
    return (log_p.exp() * (log_p - log_q)).sum(0)


def nemo(
    settings: dict[str, Any], batch: PackedBatch, logps: Tensor, ref: Tensor
) -> Tensor:
    """Its loss of each pair, `[n]`, restated from what its model file computes."""
    averaged = settings.get("preference_average_log_probs", False)
    counts = token_counts(batch)
    seen = (logps - ref) / (counts if averaged else 1)
    delta = seen[0::2] - seen[1::2]
    beta, eta = settings["ref_policy_kl_penalty"], settings.get("gt_reward_scale", 1.0)
    rewards = batch.rewards.double()
    gap = eta * (rewards[0::2] - rewards[1::2])
    policy = torch.stack([logsigmoid(beta * delta), logsigmoid(-beta * delta)])
    truth = torch.stack([logsigmoid(gap), logsigmoid(-gap)])
    loss = {
        "dpo": -policy[0],
        "ipo": (delta - 1 / (2 * beta)) ** 2,
        "rpo_sq": (beta * delta - gap) ** 2,
        "rpo_bwd_kl": kl(truth, policy),
        "rpo_fwd_kl": kl(policy, truth),
    }[settings.get("preference_loss", "dpo")]
    sft_averaged = settings.get("sft_average_log_probs", averaged)
    sft = -(logps / (counts if sft_averaged else 1))[0::2]
    weights = (
        settings.get("preference_loss_weight", 1),
        settings.get("sft_loss_weight", 0),
    )
    return weights[0] * loss + weights[1] * sft


@pytest.mark.parametrize("loss", ["dpo", "ipo", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"preference_average_log_probs": True},
        {"preference_average_log_probs": True, "sft_loss_weight": 0.3},
        {
            "sft_average_log_probs": True,
            "sft_loss_weight": 0.3,
            "preference_loss_weight": 0.5,
        },
        {"gt_reward_scale": 2.5, "sft_loss_weight": 1, "preference_loss_weight": 0},
        {"log_prob_forward_micro_batch_size": 4, "gt_reward_scale": 0.3},
    ],
)
def test_settings(kit: SimpleNamespace, loss: str, others: dict[str, Any]) -> None:
    batch, logps, ref = made(kit)
    settings = {"preference_loss": loss, "ref_policy_kl_penalty": 0.2, **others}
    one_by_one = nemo(settings, batch, logps, ref)
    fair = loss_from_nemo(settings)(logps, batch, ref).loss
    torch.testing.assert_close(fair, one_by_one.mean(), rtol=0, atol=1e-10)
    packs = torch.stack([pack.mean() for pack in one_by_one.split(SIZES)])
    parity = loss_from_nemo(settings, pack_mean=True)(logps, batch, ref).loss
    torch.testing.assert_close(parity, packs.mean(), rtol=0, atol=1e-10)
    assert abs(parity - fair) > 1e-4


def test_metrics(kit: SimpleNamespace) -> None:
    batch, logps, ref = made(kit)
    settings = {"ref_policy_kl_penalty": 0.2, "preference_loss_weight": 0.5}
    loss_fn = loss_from_nemo({**settings, "sft_loss_weight": 0.3})
    metrics = Metrics()
    metrics.add(loss_fn(logps, batch, ref).metrics)
    found = nemo_metrics(metrics.means(), loss_fn, pairs=6)
    rewards = logps - ref
    chosen, rejected = rewards[0::2], rewards[1::2]
    preference = -logsigmoid(0.2 * (chosen - rejected)).mean()
    sft = -logps[0::2].mean()
    expected = {
        "loss": 0.5 * preference + 0.3 * sft,
        "preference_loss": preference,
        "sft_loss": sft,
        "acc": (chosen > rejected).double().mean(),
        "rewards_chosen_mean": chosen.mean(),
        "rewards_rejected_mean": rejected.mean(),
        "rewards_all_mean": rewards.mean(),
        "rewards_all_std": rewards.std(),
    }
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), abs=1e-12), name


@pytest.mark.parametrize(
    ("settings", "mentioned"),
    [
        ({"beta": 0.1}, "'beta'"),
        ({"preference_loss": "simpo"}, "'simpo'"),
        ({}, "ref_policy_kl_penalty"),
        ({"ref_policy_kl_penalty": 0.0}, "ref_policy_kl_penalty"),
        ({"ref_policy_kl_penalty": -1}, "beta"),
        (
            {"ref_policy_kl_penalty": 1, "preference_average_log_probs": "yes"},
            "preference_average_log_probs",
        ),
        ({"ref_policy_kl_penalty": 1, "preference_loss_weight": 0}, "weight"),
    ],
)
def test_refusals(settings: dict[str, Any], mentioned: str) -> None:
    with pytest.raises(ConfigError, match=mentioned) as caught:
        loss_from_nemo(settings)
    assert isinstance(caught.value, UnknownNameError) == (
        "NeMo-Aligner has no" in str(caught.value)
    )


def test_the_page_of_losses_has_every_loss() -> None:
    """With its defaults; losses that are omitted and names of other libraries say what
    to do.
    """
    page = (
        Path(__file__)
        .parents[3]
        .joinpath("docs", "losses.md")
        .read_text(encoding="utf-8")
    )
    rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines()]
    table = {
        row[0].strip("`"): row[1:] for row in rows if len(row) == 4 and "`" in row[0]
    }
    with pytest.raises(UnknownNameError, match=", ".join(table)):
        PreferenceLoss("?")
    for name, cells in table.items():
        (member,) = PreferenceLoss(name).terms
        for parameter, default in member.parameters.items():
            usual = {"beta": 0.1, "desirable_weight": 1, "undesirable_weight": 1}
            if usual.get(parameter) != default:
                assert f"{parameter} {default:g}" in cells[1], (name, parameter)
        assert (
            bool(re.search(r"\b[uvd]\b", cells[0])) == PreferenceLoss(name).reference
        ), name
    omitted = re.findall(
        r"`([a-z_]+)`", page.partition("**Omitted on purpose.**")[2].split("\n\n")[0]
    )
    assert len(omitted) == 5
    for name in omitted:
        with pytest.raises(UnknownNameError, match=f"'{name}'"):
            PreferenceLoss(name)
    for name, here in (("sigmoid", "dpo"), ("nll", "sft"), ("rebel", "rpo_sq")):
        with pytest.raises(UnknownNameError, match=f"'{name}'.*'{here}'"):
            PreferenceLoss(name)
