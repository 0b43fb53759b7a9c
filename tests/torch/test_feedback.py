"""Kinds of feedback on sequences as losses, by one table: in any packs what each alone gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradients import scores_alone, take_gradients, tokens_alone
from ranks import launch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from packstore.testing import random_examples
from packstore.torch import (
    PackedPolicy,
    PreferenceLoss,
    count_step,
    pack_in_memory,
    use_packed_attention,
)

RNG = np.random.default_rng(0)
EXAMPLES = replace(
    random_examples(7, seed=5, kind="scored"), columns={"trust": RNG.uniform(0, 2, 7)}
)
EXAMPLES.reward[:] = RNG.integers(-1, 3, len(EXAMPLES.reward))  # some equal, never compared
SEQUENCES = list(pairwise(EXAMPLES.example_offsets.tolist()))
REFERENCE = torch.from_numpy(RNG.normal(-15, 3, len(EXAMPLES.reward)))
SIZES = (110, 200, 10_000)
"""Tokens of a pack: many, a few and one batch."""


def better(e: int) -> list[tuple[int, int]]:
    """All pairs of an example's sequences, the one of higher reward first."""
    rewards = EXAMPLES.reward
    pairs = [(a, b) if rewards[a] > rewards[b] else (b, a) for a, b in combinations(range(*e), 2)]
    return [(a, b) for a, b in pairs if rewards[a] > rewards[b]]


def unpaired(values: list[Tensor]) -> Tensor:
    """KTO: the mean of an example's answers, over examples."""
    x = 0.1 * (torch.stack([v.sum() for v in values]) - REFERENCE - 0.7)
    good = torch.from_numpy(EXAMPLES.reward > 0)
    losses = torch.where(good, torch.sigmoid(-x), 1.5 * torch.sigmoid(x))
    return torch.stack([losses[a:b].mean() for a, b in SEQUENCES]).mean()


def reward(scores: list[Tensor]) -> Tensor:
    """Bradley-Terry with margin and centering, over pairs."""
    pairs = [pair for e in SEQUENCES for pair in better(e)]
    gaps = [
        scores[a] - scores[b] - 0.4 * float(EXAMPLES.reward[a] - EXAMPLES.reward[b])
        for a, b in pairs
    ]
    sums = torch.stack([scores[a] + scores[b] for a, b in pairs])
    return -torch.sigmoid(torch.stack(gaps)).log().mean() + 0.05 * (sums**2).mean()


def ranking(scores: list[Tensor]) -> Tensor:
    """Plackett-Luce: the log-likelihood of each example's ranking, over examples."""
    total = torch.zeros((), dtype=torch.float64)
    for e in SEQUENCES:
        for a in range(*e):
            if lower := [b for c, b in better(e) if c == a]:
                total = (
                    total
                    - scores[a]
                    + torch.stack([scores[a], *[scores[b] for b in lower]]).logsumexp(0)
                )
    return total / len(SEQUENCES)


def margins(values: list[Tensor]) -> list[list[Tensor]]:
    """Of each example, the log-ratios of its best answer against each worse one."""
    gains = torch.stack([v.sum() for v in values]) - REFERENCE
    best = [max(range(*e), key=lambda s: float(EXAMPLES.reward[s])) for e in SEQUENCES]
    rest = [
        [b for b in range(*e) if EXAMPLES.reward[b] < EXAMPLES.reward[best[i]]]
        for i, e in enumerate(SEQUENCES)
    ]
    return [[gains[a] - gains[b] for b in few] for a, few in zip(best, rest, strict=True)]


def weights(values: list[Tensor]) -> Tensor:
    """DPO, pairs weighted by a column: over the sum of weights."""
    trust = EXAMPLES.columns["trust"]
    terms = [(w, d) for w, few in zip(trust, margins(values), strict=True) for d in few]
    losses = torch.stack([-w * torch.sigmoid(0.1 * d).log() for w, d in terms])
    return losses.sum() / sum(w for w, _ in terms)


def mix(values: list[Tensor]) -> Tensor:
    """0.8 DPO and 0.2 hinge over pairs, and the likelihood of the best over its tokens."""
    d = torch.stack([d for few in margins(values) for d in few])
    losses = -0.8 * torch.sigmoid(0.1 * d).log() + 0.2 * (1 - 0.1 * d).clamp(min=0)
    best = [max(range(*e), key=lambda s: float(EXAMPLES.reward[s])) for e in SEQUENCES]
    return losses.mean() - 0.3 * torch.cat([values[s] for s in best]).mean()


@dataclass
class Row:
    """A kind of feedback: the loss, and the same written out for sequences alone."""

    unpacked: Callable[..., Tensor]
    loss: PreferenceLoss
    head: str = "logits"


TABLE = {
    "unpaired": Row(unpaired, PreferenceLoss("kto", baseline=0.7, undesirable_weight=1.5)),
    "reward": Row(
        reward, PreferenceLoss("bradley_terry", pairs="all", margin=0.4, center=0.05), "score"
    ),
    "ranking": Row(ranking, PreferenceLoss("plackett_luce"), "score"),
    "weights": Row(weights, PreferenceLoss("dpo", weight_field="trust")),
    "mix": Row(mix, PreferenceLoss({"dpo": 0.8, "hinge": 0.2}, sft_weight=0.3)),
}
CELLS = list(product(("concat", "shared_prefix"), SIZES))
Step = tuple[Tensor, dict[str, Tensor], int]
"""Loss and gradients of a step, and its number of batches."""


def on_rank(task: dict[str, Any]) -> dict[tuple[str, str, int], Step]:
    """The step of each row in each layout and size of packs, on one of the ranks."""
    found = {}
    for name, row in TABLE.items():
        model = use_packed_attention(task[row.head])
        run: Any = PackedPolicy(model)
        run = DistributedDataParallel(run) if dist.is_initialized() else run
        for layout, size in CELLS:
            batches = pack_in_memory(EXAMPLES, size, layout, kind="scored")  # type: ignore[arg-type]
            step = batches[0].step
            assert step is not None
            assert step.ranks == (dist.get_world_size() if dist.is_initialized() else 1)
            divisor = None
            if name == "weights":  # no loader counts them
                divisor = count_step(batches, row.loss).averaged(step.ranks)
            total = torch.zeros((), dtype=torch.float64)
            for batch in batches:
                ids = batch.example_ids.tolist()
                here = REFERENCE[[s for e in ids for s in range(*SEQUENCES[e])]]
                assert batch.step is not None
                waits = batch.step.last or step.ranks == 1
                with nullcontext() if waits else run.no_sync():
                    out = row.loss(run(batch), batch, here, divisor=divisor)
                    out.loss.backward()
                total += out.loss.detach() / step.ranks
            found[name, layout, size] = total, take_gradients(model), len(batches)
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_sequences_alone(
    kit: SimpleNamespace, tmp_path: Path, world: int
) -> None:
    """Both layouts, three sizes of packs, some batches a step, 1 and 2 ranks, in float64."""
    models = {head: kit.tiny_model(head=head) for head in ("logits", "score")}
    expected = {}
    for name, row in TABLE.items():
        model = models[row.head]
        values = list((tokens_alone if row.head == "logits" else scores_alone)(model, EXAMPLES))
        loss = row.unpacked(values)
        loss.backward()  # type: ignore[no-untyped-call]
        expected[name] = loss.detach(), take_gradients(model)
    ranks = launch(__file__, models, world, tmp_path) if world > 1 else [on_rank(models)]
    for name, (loss, gradients) in expected.items():
        worst, numbers = 0.0, set()
        for cell in CELLS:
            steps = [found[name, *cell] for found in ranks]
            gaps = [abs(sum(total for total, *_ in steps) - loss)]
            gaps += [(steps[0][1][n] - g).abs().max() for n, g in gradients.items()]
            worst = max(worst, *map(float, gaps))
            numbers.add(steps[0][2])
        assert worst < 1e-9, name
        assert all(gradient.abs().max() > 1e-7 for gradient in gradients.values())
        assert min(numbers) == 1 < max(numbers)
