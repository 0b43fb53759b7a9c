"""A loop that says nothing of divisors gives the gradient of unpacked training, for every loss."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradients import alone, take_gradients
from ranks import launch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from packstore import Dataset
from packstore.errors import ConfigError
from packstore.format.arrays import Examples
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    PackedPolicy,
    PreferenceLoss,
    StepDivisor,
    count_step,
    use_packed_attention,
)

BETA, WEIGHT = 0.3, 0.4
SIZES = (3, 1, 2, 1, 1, 2, 1, 2, 1)  # examples of each pack: uneven over batches and ranks
STEPS = {
    "two batches": {"accumulation": 2, "tail": "pad"},
    "so many pairs": {"examples_per_step": 6, "tail": "pad"},
}
REFERENCES = {e: [-20.0 + e % 7, -18.5, -21.0 - e % 3, -19.0, -17.0, -23.0] for e in range(99)}
"""Of each example, the log-probs of a reference model on its sequences."""
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("preference", {}),
    "sft term by token": ("preference", {"sft_weight": WEIGHT}),
    "sft term by sequence": ("preference", {"sft_weight": WEIGHT, "sft_average": "sequence_sum"}),
    "sft term of means": ("preference", {"sft_weight": WEIGHT, "sft_average": "sequence_mean"}),
    "sft": ("sft", {}),
    "sft of means": ("sft", {"sft_average": "sequence_mean"}),
    "best": ("scored", {"pairs": "best_vs_rest", "sft_weight": WEIGHT}),
    "all": ("scored", {"pairs": "all"}),
    "adjacent": ("scored", {"pairs": "adjacent"}),
    "single answers": ("scored", {"name": "kto", "baseline": 0.7, "undesirable_weight": 1.5}),
    "answers of pairs": ("preference", {"name": "kto", "baseline": 0.7, "undesirable_weight": 1.5}),
}

PACK_MEANS: dict[str, tuple[str, dict[str, Any]]] = {
    name: ("preference", {"reduction": "pack_mean", "sft_average": "sequence_mean", **more})
    for name, more in (("mean of packs", {}), ("means and sft term", {"sft_weight": WEIGHT}))
}

SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "scores": ("scored", {"name": "bradley_terry", "pairs": "all"}),
    "rankings": ("scored", {"name": "plackett_luce"}),
}


def loss_of(name: str) -> PreferenceLoss:
    kind, settings = {**LOSSES, **PACK_MEANS, **SCORES}[name]
    if kind == "sft":
        return PreferenceLoss("sft", **settings)
    beta = {} if name in SCORES else {"beta": BETA}
    return PreferenceLoss(**{"name": "dpo", **beta, **settings})


def examples_of(kind: str) -> Examples:
    examples = random_examples(sum(SIZES), seed=11, kind=kind)
    if kind == "scored":  # some of equal reward, which are never compared
        examples.reward[:] = np.random.default_rng(0).integers(0, 3, len(examples.reward))
    return examples


def stored(kit: SimpleNamespace, folder: Path, kind: str, layout: str = "shared_prefix") -> Dataset:
    packs = kit.packed(examples_of(kind), list(SIZES), layout)
    data: Dataset = kit.write(str(folder / kind), packs, kind, layout)
    return data


def unpacked(model: Any, examples: Examples, chosen: list[int], name: str) -> dict[str, Tensor]:
    """The gradient of one step with every sequence fed alone, and the loss written out."""
    kind, settings = LOSSES[name]
    margins, best_logps, best_tokens, judged = [], [], [], []
    for e in sorted(chosen):
        own = examples.take(np.array([e]))
        logps, tokens = zip(*alone(model, own), strict=True)
        order = list(range(len(logps)))
        if kind == "scored":
            order.sort(key=lambda i: -float(own.reward[i]))
        couples = {
            "best_vs_rest": [(order[0], i) for i in order[1:]],
            "all": list(itertools.combinations(order, 2)),
            "adjacent": list(itertools.pairwise(order)),
        }[settings.get("pairs", "best_vs_rest")]
        gains = torch.stack(logps) - torch.tensor(REFERENCES[e][: len(logps)])
        good = [i == 0 if kind == "preference" else own.reward[i] > 0 for i in range(len(logps))]
        means = [
            torch.sigmoid(BETA * (0.7 - gain))
            if is_good
            else 1.5 * torch.sigmoid(BETA * (gain - 0.7))
            for gain, is_good in zip(gains, good, strict=True)
        ]
        judged.append(torch.stack(means).mean())
        margins += [
            gains[a] - gains[b]
            for a, b in couples
            if kind == "preference" or own.reward[a] > own.reward[b]
        ]
        best_logps.append(logps[order[0]])
        best_tokens.append(tokens[order[0]])
    nll = -torch.stack(best_logps)
    loss = {
        "token": nll.sum() / sum(best_tokens),
        "sequence_sum": nll.mean(),
        "sequence_mean": (nll / torch.tensor(best_tokens)).mean(),
    }[settings.get("sft_average", "token")]
    if "name" in settings:
        loss = torch.stack(judged).mean()
    elif kind != "sft":
        preference = -torch.sigmoid(BETA * torch.stack(margins)).log().mean()
        loss = preference + settings.get("sft_weight", 0.0) * loss
    model.zero_grad()
    loss.backward()
    return take_gradients(model)


def with_reference(batch: PackedBatch) -> Tensor:
    counts = batch.num_responses.tolist()
    pairs = zip(batch.example_ids.tolist(), counts, strict=True)
    return torch.tensor([v for e, n in pairs for v in REFERENCES[e][:n]], dtype=torch.float64)


def run_loop(model: Any, policy: Any, loader: Any, loss_fn: PreferenceLoss) -> Any:
    """The loop of the quickstart: of each step its examples on this rank, and its gradient."""
    ids: list[int] = []
    for batch in loader:
        last = batch.step.last
        with nullcontext() if last or not hasattr(policy, "no_sync") else policy.no_sync():
            loss_fn(policy(batch), batch, ref_logps=with_reference(batch)).loss.backward()
        ids += batch.example_ids[batch.weights > 0].tolist()
        if last:
            yield ids, take_gradients(model)
            ids = []


def on_rank(task: dict[str, Any]) -> dict[tuple[str, str], list[Any]]:
    """Every loss on one of the ranks; on several, under DDP."""
    model = use_packed_attention(task["model"])
    policy: Any = PackedPolicy(model)
    policy = DistributedDataParallel(policy) if dist.is_initialized() else policy
    found: dict[tuple[str, str], list[Any]] = {}
    for name, (kind, _) in LOSSES.items():
        for steps, batching in STEPS.items():
            loader = PackedDataLoader(PackedDataset(task["urls"][kind]), **batching)
            found[name, steps] = list(run_loop(model, policy, loader, loss_fn=loss_of(name)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_loop_takes_the_steps_of_unpacked_training(
    kit: SimpleNamespace, tmp_path: Path, world: int
) -> None:
    urls = {kind: stored(kit, tmp_path, kind).url for kind in ("preference", "sft", "scored")}
    task = {"model": kit.tiny_model(), "urls": urls}
    ranks = launch(__file__, task, world, tmp_path) if world > 1 else [on_rank(task)]
    plain = kit.tiny_model()
    plain.set_attn_implementation("sdpa")
    for name, steps in ranks[0]:
        taken = list(zip(*(of_rank[name, steps] for of_rank in ranks), strict=True))
        assert len(taken) > 1
        for step in taken:
            chosen = [example for ids, _ in step for example in ids]
            expected = unpacked(plain, examples_of(LOSSES[name][0]), chosen, name)
            for _, gradients in step:
                for weight, gradient in expected.items():
                    gap = (gradient - gradients[weight]).abs().max()
                    assert gap < 1e-9 < 1e-6 < gradient.abs().max(), (name, steps, weight)


def uncounted(data: Dataset) -> Dataset:
    """The dataset as one without an index, whose sizes are read from the shards."""
    return Dataset(data.location, replace(data.manifest, pack_index=None), data.version)


@pytest.mark.parametrize("name", [*LOSSES, *PACK_MEANS, *SCORES])
def test_every_stream_counts(kit: SimpleNamespace, tmp_path: Path, name: str) -> None:
    """Counts of a step, in each of its batches, are the sums over these batches."""
    kind, loss_fn = {**LOSSES, **PACK_MEANS, **SCORES}[name][0], loss_of(name)
    data = stored(kit, tmp_path, kind)
    other = stored(kit, tmp_path / "concat", kind, "concat")
    for packs in (PackedDataset(data), PackedDataset.mix({data: 1, other: 1})):
        step, several = [], 0
        for batch in PackedDataLoader(packs, accumulation=3):
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
    first, second, *_ = PackedDataLoader(PackedDataset(stored(kit, tmp_path, "preference")))
    n, ref_logps = first.num_examples, with_reference(first)
    assert count_step([first], loss_fn).averaged(4) == StepDivisor(n / 4, None, n / 4)
    with pytest.raises(ConfigError, match=r"of one optimizer step; found steps \[0, 1\]"):
        count_step([first, second], loss_fn)
    for divisor in (10, StepDivisor(10)):
        with pytest.raises(ConfigError, match="the SFT term needs a count of its own; found none"):
            loss_of("sft term by token")(ref_logps, first, ref_logps, divisor=divisor)


def test_a_rank_without_batches(kit: SimpleNamespace, request: pytest.FixtureRequest) -> None:
    """It joins the sum over ranks with zeros, from the device that the group talks from."""
    loss_fn, nothing = loss_of("sft term by token"), StepDivisor(1, 1, 1)
    assert count_step([], loss_fn, device=torch.device("meta")) == nothing  # there is no group
    request.getfixturevalue("one_rank")
    assert count_step([], loss_fn) == nothing
    for batches in ([], [kit.row()]):
        with pytest.raises(NotImplementedError, match=r"(?i)meta"):
            count_step(batches, loss_fn, device=torch.device("meta"))


def test_who_sums_gradients_says_so(kit: SimpleNamespace, tmp_path: Path) -> None:
    """The losses of all ranks add up to that of the step; or, averaged, to as many times it."""
    data = stored(kit, tmp_path, "preference")
    sums = {}
    for gradients in ("sum", "mean"):
        loss_fn = PreferenceLoss("dpo", sft_weight=WEIGHT, gradients=gradients)
        for world in (1, 2):
            total = 0.0
            for rank in range(world):
                shared = PackedDataset(data, rank=rank, world_size=world)
                for batch in PackedDataLoader(shared, examples_per_step=sum(SIZES)):
                    out = loss_fn(with_reference(batch) - 1, batch, with_reference(batch))
                    total += float(out.loss)
            sums[gradients, world] = total
    assert sums["sum", 1] == sums["mean", 1] == pytest.approx(sums["sum", 2], abs=1e-12)
    assert sums["mean", 2] == pytest.approx(2 * sums["sum", 2], abs=1e-12)
    with pytest.raises(ConfigError, match="gradients must be one of: mean, sum"):
        PreferenceLoss("dpo", gradients="max")  # type: ignore[arg-type]


def test_a_step_that_nobody_counted(kit: SimpleNamespace, tmp_path: Path) -> None:
    """Of a dataset of an earlier release: the whole step, or a refusal."""
    data = uncounted(stored(kit, tmp_path, "preference"))
    loss_fn = loss_of("sft term by token")
    step = list(itertools.islice(PackedDataLoader(PackedDataset(data), accumulation=4), 4))
    logps = with_reference(step[0])
    with pytest.raises(ConfigError, match=r"a step of 4 batches on 1 ranks that nobody counted"):
        loss_fn(logps, step[0], logps)
    for some in (step[:1], step[:3], [step[0]] * 4):
        with pytest.raises(ConfigError, match="must get all 4 batches of the step"):
            count_step(some, loss_fn)
    divisor = count_step(step, loss_fn)
    assert divisor.sft_count == sum(float(loss_fn.count(b).sft_count or 0) for b in step)
    loss_fn(logps, step[0], logps, divisor=divisor)
    assert loss_of("dpo")(logps, step[0], logps).loss  # pairs are always known
    alone = next(iter(PackedDataLoader(PackedDataset(data))))
    loss_fn(with_reference(alone), alone, with_reference(alone))  # the whole step
