"""PreferenceLoss on batches: sums, counts, divisors, the SFT term, scored pairs,
metrics.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import packstore
from packstore.errors import CompatibilityError, ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    FirstStepCheck,
    PackedBatch,
    PreferenceLoss,
    collate,
    segment_token_counts,
)
from packstore.torch.batch import StepInfo


def make(
    kit: SimpleNamespace, sizes: list[int], kind: str = "preference", fillers: int = 0
) -> tuple[PackedBatch, Tensor, Tensor]:
    examples = random_examples(sum(sizes), seed=8, kind=kind)
    batch = collate(kit.packed(examples, sizes, "concat"), kind, fillers=fillers)
    generator = torch.Generator().manual_seed(0)
    logps, ref = -5 - torch.randn(
        2, batch.num_segments, generator=generator, dtype=torch.float64
    )
    return batch, logps.requires_grad_(), ref


def test_sum_count_and_divisor(kit: SimpleNamespace) -> None:
    batch, logps, ref = make(kit, [1, 3])
    d = (logps - ref)[0::2] - (logps - ref)[1::2]
    losses = -torch.sigmoid(0.1 * d).log()
    out = PreferenceLoss("dpo")(logps, batch, ref)
    torch.testing.assert_close(out.loss_sum, losses.sum())
    assert out.count == 4
    torch.testing.assert_close(out.loss, losses.mean())
    torch.testing.assert_close(
        PreferenceLoss("dpo")(logps, batch, ref, divisor=10).loss, losses.sum() / 10
    )


@pytest.mark.parametrize("reduction", ["sum", "pack_mean"])
def test_fillers_count_nowhere(kit: SimpleNamespace, reduction: Any) -> None:
    batch, logps, ref = make(kit, [1, 3, 2], fillers=1)
    examples = random_examples(6, seed=8).take(np.arange(4))
    real = collate(kit.packed(examples, [1, 3], "concat"), "preference")
    how = {"sft_weight": 0.3, "sft_average": "sequence_mean"}
    loss_fn = PreferenceLoss("dpo", reduction=reduction, **how)
    found, expected = loss_fn(logps, batch, ref), loss_fn(logps[:8], real, ref[:8])
    torch.testing.assert_close(found.loss, expected.loss)
    for name, values in found.metrics.items():
        torch.testing.assert_close(values, expected.metrics[name])


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "simpo"])
def test_metrics(kit: SimpleNamespace, name: str) -> None:
    """Rewards are sums, as under TRL's names; what a loss on means sees has names of
    its own.
    """
    batch, logps, ref = make(kit, [2, 3])
    ref[:2] = logps.detach()[:2]  # a pair that the policy does not tell apart
    loss_fn = PreferenceLoss(name, beta=0.3)
    out = loss_fn(logps, batch, ref)
    gains = (logps - (ref if loss_fn.reference else 0)).detach()
    seen = {"rewards": gains}
    if name != "dpo":
        seen["rewards_per_token"] = gains / segment_token_counts(batch)
    expected = {
        "logps/chosen": logps[0::2],
        "logps/rejected": logps[1::2],
        "loss": out.loss * 5,
    }
    for prefix, values in seen.items():
        u, v = 0.3 * values[0::2], 0.3 * values[1::2]
        expected[f"{prefix}/chosen"] = u
        expected[f"{prefix}/rejected"] = v
        expected[f"{prefix}/margins"] = u - v
        expected[f"{prefix}/accuracies"] = (u > v).double()
        expected[f"{prefix}/squares"] = (u**2 + v**2) / 2
    assert set(out.metrics) == set(expected)
    for metric, values in expected.items():
        total, count = out.metrics[metric]
        torch.testing.assert_close(total, values.sum().detach())
        assert count == 5
        assert not total.requires_grad
    _, rewards = loss_fn.per_example(logps, batch, ref)
    torch.testing.assert_close(rewards.detach(), 0.3 * gains.view(-1, 2))


def test_a_mix(kit: SimpleNamespace) -> None:
    batch, logps, ref = make(kit, [1, 3])
    mix = PreferenceLoss({"dpo": 0.8, "bco_pair": 0.2}, beta=0.3, sft_weight=1.0)
    found = mix(logps, batch, ref)
    parts = [
        PreferenceLoss(name, beta=0.3)(logps, batch, ref)
        for name in ("dpo", "bco_pair")
    ]
    sft = PreferenceLoss("sft")(logps, batch)
    torch.testing.assert_close(
        found.loss, 0.8 * parts[0].loss + 0.2 * parts[1].loss + sft.loss
    )
    assert found.count == 4
    for name, part in zip(("dpo", "bco_pair"), parts, strict=True):
        torch.testing.assert_close(
            found.metrics[f"loss/{name}"], (part.loss_sum, part.count)
        )
    torch.testing.assert_close(found.metrics["sft_loss"], (sft.loss_sum, sft.count))
    torch.testing.assert_close(found.metrics["preference_loss"][0], found.loss_sum)
    torch.testing.assert_close(found.metrics["loss"][0] / 4, found.loss)
    half = PreferenceLoss({"sft": 0.5})(logps, batch)
    torch.testing.assert_close(
        (half.loss, half.loss_sum), (sft.loss / 2, sft.loss_sum / 2)
    )


@pytest.mark.parametrize("name", ["dpo", "bradley_terry", "plackett_luce"])
def test_losses_of_examples_are_means_over_their_pairs(
    kit: SimpleNamespace, name: str
) -> None:
    """But for the likelihood of a ranking, which is one of the example."""
    batch, logps, ref = make(kit, [2, 4], "scored")
    batch.rewards[: int(batch.num_responses[0])] = (
        0  # no two responses of it differ in reward
    )
    ranking = name == "plackett_luce"
    loss_fn = PreferenceLoss(name, **({} if ranking else {"pairs": "all"}))
    losses, rewards = loss_fn.per_example(logps, batch, ref)
    assert losses.isnan().tolist() == [True] + 5 * [False]
    assert rewards is not None
    assert rewards[1:].isfinite().all()
    for weights, loss in zip(torch.eye(len(losses)), losses, strict=True):
        alone = loss_fn(logps, batch.replace(weights=weights), ref)
        if loss.isnan():
            assert (alone.count, alone.loss) == (ranking, 0)
        else:
            torch.testing.assert_close(loss, alone.loss)
    assert (loss_fn(logps, batch, ref).count > len(losses)) == (not ranking)


SINGLE = ["kto", "bco", "apo_zero_unpaired"]


@pytest.mark.parametrize("name", SINGLE)
def test_single_answers(kit: SimpleNamespace, name: str) -> None:
    """Each example weighs the same; metrics tell good answers from bad ones."""
    batch, logps, ref = make(kit, [2, 4, 1], "scored", fillers=1)
    batch.rewards.copy_(torch.arange(len(batch.rewards)) % 3 - 1.0)
    z = 0.0 if name == "apo_zero_unpaired" else float((logps - ref).detach().max()) / 2
    loss_fn = PreferenceLoss(
        name, desirable_weight=2.0, **({"baseline": z} if z else {})
    )
    out = loss_fn(logps, batch, ref)
    assert out.count == 6
    losses, rewards = loss_fn.per_example(logps, batch, ref)
    torch.testing.assert_close(out.loss, losses[:6].mean())
    ends = batch.num_responses.cumsum(0)[:6].tolist()
    gains, good = 0.1 * (logps - ref)[: ends[-1]], batch.rewards[: ends[-1]] > 0
    shares = (1 / batch.num_responses.double()).repeat_interleave(batch.num_responses)[
        : ends[-1]
    ]
    for side, here in (("chosen", good), ("rejected", ~good)):
        expected = (gains * shares)[here].sum(), shares[here].sum()
        torch.testing.assert_close(out.metrics[f"rewards/{side}"], expected)
    right = ((gains > 0.1 * z) == good).double()
    torch.testing.assert_close(
        out.metrics["rewards/accuracies"][0], (right * shares).sum()
    )
    first = slice(0, ends[0])
    if good[first].any():
        torch.testing.assert_close(rewards[0, 0], gains[first][good[first]].mean())
    assert rewards[:6, 0].isnan().tolist() == [
        not good[a:b].any() for a, b in zip([0, *ends], ends, strict=False)
    ]


@pytest.mark.parametrize("name", SINGLE)
def test_answers_of_pairs_are_good_and_bad_in_turn(
    kit: SimpleNamespace, name: str
) -> None:
    """Whatever their rewards: each good one is learned, and each bad one unlearned."""
    batch, logps, ref = make(kit, [3, 2, 4], "preference")
    batch.rewards.neg_()
    logps = logps.detach().requires_grad_()
    PreferenceLoss(name)(logps, batch, ref).loss.backward()
    assert logps.grad is not None
    is_learned = (logps.grad < 0).tolist()
    assert is_learned == [True, False] * 9


def test_a_baseline_may_be_a_tensor_that_the_loop_updates(kit: SimpleNamespace) -> None:
    batch, logps, ref = make(kit, [3])
    baseline = torch.tensor(0.0, dtype=torch.float64)
    loss_fn = PreferenceLoss("kto", baseline=baseline)
    before = loss_fn(logps, batch, ref).loss
    baseline.fill_(0.5)
    torch.testing.assert_close(
        loss_fn(logps, batch, ref).loss,
        PreferenceLoss("kto", baseline=0.5)(logps, batch, ref).loss,
    )
    assert loss_fn(logps, batch, ref).loss != before


@pytest.mark.parametrize("name", ["dpo", "sft", *SINGLE])
def test_data_of_single_answers_is_for_losses_of_single_answers(
    name: str, tmp_path: Path
) -> None:
    records = [
        {"prompt": [1], "response": [2, i], "label": i % 2 == 0} for i in range(1, 9)
    ]
    dataset = packstore.pack(records, tmp_path / "out", pack_size=64)
    if name in SINGLE:
        PreferenceLoss(name).check_data(dataset)
        return
    # More responses would not help the loss sft, which compares none.
    remedy = "--ignore" if name == "sft" else "responses"
    with pytest.raises(CompatibilityError, match=remedy):
        PreferenceLoss(name).check_data(dataset)
    if name == "sft":
        learned = packstore.pack(
            records, tmp_path / "sft", pack_size=64, kind="sft", ignore=["label"]
        )
        PreferenceLoss(name).check_data(learned)


def test_scores_without_any_gap_gives_zero(kit: SimpleNamespace) -> None:
    batch, logps, ref = make(kit, [3], "scored")
    loss_fn = PreferenceLoss("dpo")
    assert loss_fn(logps, batch, ref).count > 0
    out = loss_fn(logps, batch.replace(rewards=torch.zeros_like(batch.rewards)), ref)
    out.loss.backward()
    assert out.loss == out.count == 0
    assert not logps.grad.any()


def test_reference(kit: SimpleNamespace) -> None:
    batch, logps, ref = make(kit, [2, 3])
    with pytest.raises(ConfigError, match=r"'dpo' .*ref_logps"):
        PreferenceLoss("dpo")(logps, batch)
    PreferenceLoss("simpo")(logps, batch)
    ref.requires_grad_()
    PreferenceLoss("dpo")(logps, batch, ref).loss.backward()
    assert ref.grad is None
    stored = collate(
        kit.packed(random_examples(5, seed=8), [2, 3], "concat"),
        "preference",
        ref_logps=ref.detach().float().numpy(),
    )
    torch.testing.assert_close(
        PreferenceLoss("dpo")(logps, stored).loss,
        PreferenceLoss("dpo")(logps, batch, ref.float()).loss,
    )


def test_refusals(kit: SimpleNamespace) -> None:
    batch, logps, ref = make(kit, [2, 3])
    with pytest.raises(ConfigError, match=r"^logps: "):
        PreferenceLoss("dpo")(logps[:9], batch, ref)
    with pytest.raises(ConfigError, match=r"^ref_logps: "):
        PreferenceLoss("dpo")(logps, batch, ref[:, None])
    single, logps, ref = make(kit, [2, 3], "sft")
    with pytest.raises(CompatibilityError, match="kind 'sft'"):
        PreferenceLoss("dpo")(logps, single, ref)


@pytest.mark.parametrize("name", ["dpo", "ipo", "exo_pair", "odpo"])
def test_the_first_step(
    kit: SimpleNamespace, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    batch, logps, ref = make(kit, [2, 3])
    loss_fn = PreferenceLoss(name)
    assert FirstStepCheck(PreferenceLoss("simpo"))(logps, batch, ref) is None
    assert FirstStepCheck(loss_fn)(ref + 0.05, batch, ref) == pytest.approx(0.05)
    assert not caplog.records
    guard = FirstStepCheck(loss_fn)
    assert guard(logps, batch) is None  # nothing to compare with yet
    assert guard(logps, batch, ref) == pytest.approx(
        float((logps - ref).abs().mean().detach())
    )
    assert guard(logps, batch, ref) is None
    (record,) = caplog.records
    for words in (
        "dtype of the output head",
        "dropout",
        "template",
        "attention",
        "LoRA",
    ):
        assert words in record.getMessage()
    number = float(re.findall(r"the loss be ([-\d.e]+);", record.getMessage())[0])
    assert number == pytest.approx(float(loss_fn(ref, batch, ref).loss), rel=1e-3)


def weighted(batch: PackedBatch, values: list[float]) -> PackedBatch:
    return batch.replace(columns={"w": torch.tensor(values, dtype=torch.float64)})


@pytest.mark.parametrize("name", ["dpo", "kto", "sft"])
def test_a_column_of_weights(kit: SimpleNamespace, name: str) -> None:
    """Sum of weights times losses over the sum of weights, which may be below 1."""
    batch, logps, ref = make(kit, [1, 3])
    weights = [0.5, 0.0, 0.125, 0.25]
    how = {"sft_average": "sequence_sum"} if name == "sft" else {}
    losses, _ = PreferenceLoss(name, **how).per_example(logps, batch, ref)
    loss_fn = PreferenceLoss(name, weight_field="w", **how)
    out = loss_fn(logps, weighted(batch, weights), ref)
    w = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(out.loss, (losses * w).sum() / w.sum())
    torch.testing.assert_close(out.count, w.sum())
    halves = [loss_fn(logps, weighted(batch, x), ref, divisor=0.875).loss
              for x in ([0.5, 0.0, 0, 0], [0, 0, 0.125, 0.25])]  # fmt: skip
    torch.testing.assert_close(sum(halves), out.loss)
    assert loss_fn(logps, weighted(batch, [0.0] * 4), ref).loss == 0
    step = StepInfo(index=0, batch=0, batches=2, examples=4)
    with pytest.raises(ConfigError, match="count_step"):
        loss_fn(logps, weighted(batch, weights).replace(step=step), ref)


@pytest.mark.parametrize(
    ("values", "name", "error"),
    [
        (
            [1, -0.5, 1, 1],
            "w",
            r"column 'w', example \d+",
        ),
        ([1, math.nan, 1, 1], "w", "column 'w'"),
        ([1, 1, 1, 1], "v", "weight_field: .*'v'"),
    ],
)
def test_weights_that_may_not_be(
    kit: SimpleNamespace, values: Any, name: str, error: str
) -> None:
    batch, logps, ref = make(kit, [1, 3])
    with pytest.raises(ConfigError, match=error):
        PreferenceLoss("dpo", weight_field=name)(logps, weighted(batch, values), ref)
