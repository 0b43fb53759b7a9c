"""Divisors of steps: what each batch adds, and which loaders know it without counting."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedLoss,
    PreferenceLoss,
    StepDivisor,
    collate,
    count_step,
)
from packstore.torch.batch.batch import StepInfo

SIZES = (3, 1, 2)


@pytest.fixture
def step(kit: SimpleNamespace) -> list[PackedBatch]:
    """Batches of one pack each."""
    examples = random_examples(max(SIZES), seed=5)
    packs = [kit.packed(examples.take(np.arange(size)), [size], "shared_prefix") for size in SIZES]
    batches = [collate(pack, "preference") for pack in packs]
    return [b.replace(ref_logps=torch.zeros(b.num_segments)) for b in batches]


def loss_of(**settings: Any) -> PreferenceLoss:
    return PreferenceLoss("dpo", beta=0.3, **settings)


def planned(batches: list[PackedBatch], examples: int, index: int = 0) -> Iterator[PackedBatch]:
    for i, batch in enumerate(batches):
        yield batch.replace(step=StepInfo(index, i, len(batches), examples))


def test_a_planned_step_is_known_from_one_batch(step: list[PackedBatch]) -> None:
    step = list(planned(step, 77))
    assert count_step(step[:1], loss_of()) == StepDivisor(77, None, 77)
    assert count_step(step, loss_of()).averaged(7) == StepDivisor(11, None, 11)
    assert count_step([], loss_of()) == StepDivisor(1, None, 1)
    by_sequence = loss_of(sft_weight=0.3, sft_average="sequence_mean")
    assert count_step(step[:1], by_sequence) == StepDivisor(77, 77, 77)
    by_token = count_step(step, loss_of(sft_weight=0.3))
    assert by_token.count == sum(SIZES)  # counted
    assert count_step(step, loss_of(reduction="pack_mean")).count == len(SIZES)
    with pytest.raises(ConfigError, match=r"of one optimizer step; found steps \[0, 1\]"):
        count_step([step[0], next(planned(step, 5, index=1))], loss_of())


def test_refusals(step: list[PackedBatch]) -> None:
    batch = step[0]
    logps = torch.zeros(batch.num_segments)
    for divisor in (10, StepDivisor(10)):
        with pytest.raises(ConfigError, match="the SFT term"):
            loss_of(sft_weight=1.0)(logps, batch, divisor=divisor)
    with pytest.raises(ConfigError, match="which is all that it counts; found a mean over tokens"):
        PackedLoss(loss_of(sft_weight=1.0))
