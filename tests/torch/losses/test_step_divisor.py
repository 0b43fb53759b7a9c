"""The divisor of a step: counted by every stream, on every rank, for every loss."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packstore import Dataset
from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    PreferenceLoss,
    StepDivisor,
    count_step,
)

SIZES = (
    3,
    1,
    2,
    1,
    1,
    2,
    1,
    2,
    1,
)  # examples of each pack: uneven over batches and ranks
REFERENCES = {
    e: [-20.0 + e % 7, -18.5, -21.0 - e % 3, -19.0, -17.0, -23.0] for e in range(99)
}
"""Of each example, the log-probs of a reference model on its sequences."""
MEANS = {"sft_average": "sequence_mean"}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("preference", {}),
    "sft term by token": ("preference", {"sft_weight": 0.4}),
    "sft term by sequence": (
        "preference",
        {"sft_weight": 0.4, "sft_average": "sequence_sum"},
    ),
    "sft term of means": ("preference", {"sft_weight": 0.4, **MEANS}),
    "sft": ("sft", {"name": "sft"}),
    "sft of means": ("sft", {"name": "sft", **MEANS}),
    "best": ("scored", {"pairs": "best_vs_rest", "sft_weight": 0.4}),
    "all": ("scored", {"pairs": "all"}),
    "adjacent": ("scored", {"pairs": "adjacent"}),
    "single answers": ("scored", {"name": "kto"}),
    "answers of pairs": ("preference", {"name": "kto"}),
    "mean of packs": ("preference", {"reduction": "pack_mean", **MEANS}),
    "means and sft term": (
        "preference",
        {"reduction": "pack_mean", "sft_weight": 0.4, **MEANS},
    ),
    "scores": ("scored", {"name": "bradley_terry", "pairs": "all"}),
    "rankings": ("scored", {"name": "plackett_luce"}),
}


def loss_of(name: str) -> PreferenceLoss:
    return PreferenceLoss(**LOSSES[name][1])


def stored(
    kit: SimpleNamespace, folder: Path, kind: str, layout: str = "shared_prefix"
) -> Dataset:
    examples = random_examples(sum(SIZES), seed=11, kind=kind)
    if kind == "scored":  # some of equal reward, which are never compared
        examples.reward[:] = np.random.default_rng(0).integers(
            0, 3, len(examples.reward)
        )
    packs = kit.packed(examples, list(SIZES), layout)
    data: Dataset = kit.write(str(folder / kind), packs, kind, layout)
    return data


def with_reference(batch: PackedBatch) -> Tensor:
    counts = batch.num_responses.tolist()
    pairs = zip(batch.example_ids.tolist(), counts, strict=True)
    return torch.tensor(
        [v for e, n in pairs for v in REFERENCES[e][:n]], dtype=torch.float64
    )


@pytest.mark.parametrize("name", LOSSES)
def test_every_stream_counts(kit: SimpleNamespace, tmp_path: Path, name: str) -> None:
    """Counts of a step, in each of its batches, are the sums over these batches."""
    kind, loss_fn = LOSSES[name][0], loss_of(name)
    data = stored(kit, tmp_path, kind)
    other = stored(kit, tmp_path / "concat", kind, "concat")
    for packs in (PackedDataset(data), PackedDataset.mix({data: 1, other: 1})):
        step, several = [], 0
        for batch in PackedDataLoader(packs, gradient_accumulation_steps=3):
            step.append(batch)
            if batch.step.last:
                parts = [loss_fn.count(one) for one in step]
                sums = sum(p.count for p in parts), sum(p.sft_count or 0 for p in parts)
                counts = [count_step([one], loss_fn) for one in step]
                assert {(d.count, d.sft_count or 0) for d in counts} == {sums}
                several += len(step) > 1
                step = []
        assert several


def test_divisors(kit: SimpleNamespace, tmp_path: Path) -> None:
    loss_fn = loss_of("dpo")
    first, second, *_ = PackedDataLoader(
        PackedDataset(stored(kit, tmp_path, "preference"))
    )
    n, ref_logps = first.num_examples, with_reference(first)
    assert count_step([first], loss_fn).averaged(4) == StepDivisor(n / 4, None, n / 4)
    with pytest.raises(ConfigError, match="count_step"):
        count_step([first, second], loss_fn)
    for divisor in (10, StepDivisor(10)):
        with pytest.raises(ConfigError, match=r"divisor: .*SFT"):
            loss_of("sft term by token")(ref_logps, first, ref_logps, divisor=divisor)


def test_divisors_may_be_tensors_on_a_device(kit: SimpleNamespace) -> None:
    """Their values are not read, as a CUDA graph has none when it is captured."""
    loss_fn = loss_of("sft term by token")
    batch = kit.row(4)
    logps = torch.linspace(-20, -10, batch.num_segments).requires_grad_()
    numbers = StepDivisor(7, 30, 5)
    tensors = StepDivisor(
        *(torch.tensor(float(x), dtype=torch.float64) for x in (7, 30, 5))
    )
    losses = [
        loss_fn(logps, batch, logps, divisor=divisor.averaged(2).without_zeros()).loss
        for divisor in (numbers, tensors)
    ]
    assert torch.equal(*losses)
    assert losses[1].dtype == torch.float32

    zeros = StepDivisor(*torch.tensor([0, 3, 0])).without_zeros()
    assert [int(x) for x in (zeros.count, zeros.sft_count, zeros.examples)] == [1, 3, 1]
    on_meta = StepDivisor(*torch.ones(3, device="meta")).averaged(2).without_zeros()
    moved = logps.detach().to("meta")
    loss = loss_fn(moved, batch.to("meta"), moved, divisor=on_meta).loss
    assert loss.is_meta


def test_a_rank_without_batches(
    kit: SimpleNamespace, request: pytest.FixtureRequest
) -> None:
    """It joins the sum over ranks with zeros, from the device that the group talks
    from.
    """
    loss_fn, nothing = loss_of("sft term by token"), StepDivisor(1, 1, 1)
    assert (
        count_step([], loss_fn, device=torch.device("meta")) == nothing
    )  # there is no group
    request.getfixturevalue("one_rank")
    assert count_step([], loss_fn) == nothing
    for batches in ([], [kit.row()]):
        with pytest.raises(NotImplementedError, match=r"(?i)meta"):
            count_step(batches, loss_fn, device=torch.device("meta"))


def test_who_sums_gradients_says_so(kit: SimpleNamespace, tmp_path: Path) -> None:
    """The losses of all ranks add up to that of the step; or, averaged, to as many
    times it.
    """
    data = stored(kit, tmp_path, "preference")
    sums = {}
    for gradients in ("sum", "mean"):
        loss_fn = PreferenceLoss("dpo", sft_weight=0.4, gradients=gradients)
        for world in (1, 2):
            total = 0.0
            for rank in range(world):
                shared = PackedDataset(data, rank=rank, world_size=world)
                for batch in PackedDataLoader(shared, examples_per_step=sum(SIZES)):
                    out = loss_fn(
                        with_reference(batch) - 1, batch, with_reference(batch)
                    )
                    total += float(out.loss)
            sums[gradients, world] = total
    assert sums["sum", 1] == sums["mean", 1] == pytest.approx(sums["sum", 2], abs=1e-12)
    assert sums["mean", 2] == pytest.approx(2 * sums["sum", 2], abs=1e-12)
    with pytest.raises(ConfigError, match="gradients"):
        PreferenceLoss("dpo", gradients="max")  # type: ignore[arg-type]


def test_a_step_that_nobody_counted(kit: SimpleNamespace, tmp_path: Path) -> None:
    """Of a dataset of an earlier release: the whole step, or a refusal."""
    data = stored(kit, tmp_path, "preference")
    data = Dataset(data.location, replace(data.manifest, pack_index=None), data.version)
    loss_fn = loss_of("sft term by token")
    step = list(
        itertools.islice(
            PackedDataLoader(PackedDataset(data), gradient_accumulation_steps=4), 4
        )
    )
    logps = with_reference(step[0])
    with pytest.raises(ConfigError, match="count_step"):
        loss_fn(logps, step[0], logps)
    for some in (step[:1], step[:3], [step[0]] * 4):
        with pytest.raises(ConfigError, match="count_step"):
            count_step(some, loss_fn)
    divisor = count_step(step, loss_fn)
    assert divisor.sft_count == sum(
        float(loss_fn.count(b).sft_count or 0) for b in step
    )
    loss_fn(logps, step[0], logps, divisor=divisor)
    assert loss_of("dpo")(logps, step[0], logps).loss  # pairs are always known
    alone = next(iter(PackedDataLoader(PackedDataset(data))))
    loss_fn(with_reference(alone), alone, with_reference(alone))  # the whole step
