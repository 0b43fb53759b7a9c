"""Losses of sequences, by one table: in any packs, on one rank or two, what each alone
gives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
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

SIZES = (110, 200, 10_000)
"""Tokens of a pack: many, a few and one batch."""


class Data:
    """Examples of a kind; and of each sequence its rank and the log-prob of a
    reference.
    """

    def __init__(self, kind: str, number: int) -> None:
        rng = np.random.default_rng(0)
        examples = random_examples(number, seed=5, kind=kind)
        self.examples = replace(examples, columns={"trust": rng.uniform(0, 2, number)})
        self.sequences = list(pairwise(examples.example_offsets.tolist()))
        self.reference = torch.from_numpy(rng.normal(-15, 3, examples.num_sequences))
        self.rank = (
            np.arange(examples.num_sequences)[::-1] % 2
        )  # of a pair, the first is better
        if kind == "scored":  # some equal, never compared
            self.rank = examples.reward
            self.rank[:] = rng.integers(-1, 3, examples.num_sequences)

    def couples(self, pairs: str = "best_vs_rest") -> list[tuple[int, int]]:
        """Sequences that are compared, the better one first."""
        found: list[tuple[int, int]] = []
        for e in self.sequences:
            order = sorted(range(*e), key=lambda s: -self.rank[s])
            if pairs == "best_vs_rest":
                found += [(order[0], s) for s in order[1:]]
            else:
                found += combinations(order, 2) if pairs == "all" else pairwise(order)
        return [(a, b) for a, b in found if self.rank[a] > self.rank[b]]


DATA = {
    kind: Data(kind, n) for kind, n in (("scored", 7), ("preference", 10), ("sft", 30))
}
Values = list[Tensor]
"""Log-probs of the tokens of each sequence, or its score."""


def gains(values: Values, data: Data) -> Tensor:
    return torch.stack([v.sum() for v in values]) - data.reference


def margins(values: Values, data: Data, pairs: str = "best_vs_rest") -> Tensor:
    gain = gains(values, data)
    return torch.stack([gain[a] - gain[b] for a, b in data.couples(pairs)])


def dpo(values: Values, data: Data, pairs: str = "best_vs_rest") -> Tensor:
    return -torch.sigmoid(0.1 * margins(values, data, pairs)).log().mean()


def likelihood(values: Values, data: Data, average: str = "token") -> Tensor:
    """Of the best sequence of each example."""
    best = [values[max(range(*e), key=lambda s: data.rank[s])] for e in data.sequences]
    if average == "token":
        return -torch.cat(best).mean()
    return -torch.stack(
        [x.sum() if average == "sequence_sum" else x.mean() for x in best]
    ).mean()


def both(values: Values, data: Data, average: str) -> Tensor:
    return dpo(values, data) + 0.3 * likelihood(values, data, average)


def unpaired(values: Values, data: Data) -> Tensor:
    """KTO: the mean of an example's answers, over examples."""
    x = 0.1 * (gains(values, data) - 0.7)
    good = torch.from_numpy(data.rank > 0)
    losses = torch.where(good, torch.sigmoid(-x), 1.5 * torch.sigmoid(x))
    return torch.stack([losses[a:b].mean() for a, b in data.sequences]).mean()


def reward(scores: Values, data: Data) -> Tensor:
    """Bradley-Terry with margin and centering, over pairs."""
    pairs = data.couples("all")
    gaps = [
        scores[a] - scores[b] - 0.4 * float(data.rank[a] - data.rank[b])
        for a, b in pairs
    ]
    sums = torch.stack([scores[a] + scores[b] for a, b in pairs])
    return -torch.sigmoid(torch.stack(gaps)).log().mean() + 0.05 * (sums**2).mean()


def ranking(scores: Values, data: Data) -> Tensor:
    """Plackett-Luce: the log-likelihood of each example's ranking, over examples."""
    pairs, total = data.couples("all"), torch.zeros((), dtype=torch.float64)
    for a in {a for a, _ in pairs}:
        against = torch.stack([scores[a], *(scores[b] for c, b in pairs if c == a)])
        total = total + against.logsumexp(0) - scores[a]
    return total / len(data.sequences)


def weights(values: Values, data: Data) -> Tensor:
    """DPO, pairs weighted by a column: over the sum of weights."""
    trust = np.repeat(data.examples.columns["trust"], data.examples.num_responses)
    w = torch.from_numpy(np.array([trust[a] for a, _ in data.couples()]))
    return -(w * torch.sigmoid(0.1 * margins(values, data)).log()).sum() / w.sum()


def mix(values: Values, data: Data) -> Tensor:
    """0.8 DPO and 0.2 hinge over pairs, and the likelihood of the best over its
    tokens.
    """
    hinge = (1 - 0.1 * margins(values, data)).clamp(min=0).mean()
    return 0.8 * dpo(values, data) + 0.2 * hinge + 0.3 * likelihood(values, data)


@dataclass
class Row:
    """A loss, and the same written out for sequences alone."""

    kind: str
    unpacked: Callable[[Values, Data], Tensor]
    loss: PreferenceLoss
    head: str = "logits"


KTO = PreferenceLoss("kto", baseline=0.7, undesirable_weight=1.5)
TABLE = {
    **{
        f"pairs and {name}": Row(
            "preference",
            partial(both, average=name),
            PreferenceLoss("dpo", sft_weight=0.3, sft_average=name),
        )
        for name in ("token", "sequence_sum", "sequence_mean")
    },
    "answers of pairs": Row("preference", unpaired, KTO),
    "sft": Row("sft", likelihood, PreferenceLoss("sft")),
    "sft of means": Row(
        "sft",
        partial(likelihood, average="sequence_mean"),
        PreferenceLoss("sft", sft_average="sequence_mean"),
    ),
    **{
        name: Row("scored", partial(dpo, pairs=name), PreferenceLoss("dpo", pairs=name))
        for name in ("all", "adjacent")
    },
    "unpaired": Row("scored", unpaired, KTO),
    "reward": Row(
        "scored",
        reward,
        PreferenceLoss("bradley_terry", pairs="all", margin=0.4, center=0.05),
        "score",
    ),
    "ranking": Row("scored", ranking, PreferenceLoss("plackett_luce"), "score"),
    "weights": Row("scored", weights, PreferenceLoss("dpo", weight_field="trust")),
    "mix": Row(
        "scored", mix, PreferenceLoss({"dpo": 0.8, "hinge": 0.2}, sft_weight=0.3)
    ),
}
CELLS = list(product(("concat", "shared_prefix"), SIZES))
Step = tuple[Tensor, dict[str, Tensor], int]
"""Loss and gradients of a step, and its number of batches."""


def on_rank(task: dict[str, Any]) -> dict[tuple[str, str, int], Step]:
    """The step of each row in each layout and size of packs, on one of the ranks."""
    found = {}
    for name, row in TABLE.items():
        model, data = use_packed_attention(task[row.head]), DATA[row.kind]
        run: Any = PackedPolicy(model)
        run = DistributedDataParallel(run) if dist.is_initialized() else run
        for layout, size in task["cells"]:
            batches = pack_in_memory(data.examples, size, layout, kind=row.kind)  # type: ignore[arg-type]
            step = batches[0].step
            assert step is not None
            assert step.ranks == (dist.get_world_size() if dist.is_initialized() else 1)
            divisor = None
            if name == "weights":  # no loader counts them
                divisor = count_step(batches, row.loss).averaged(step.ranks)
            total = torch.zeros((), dtype=torch.float64)
            for batch in batches:
                examples = [data.sequences[e] for e in batch.example_ids.tolist()]
                ref_logps = data.reference[[s for e in examples for s in range(*e)]]
                assert batch.step is not None
                waits = batch.step.last or step.ranks == 1
                with nullcontext() if waits else run.no_sync():
                    out = row.loss(run(batch), batch, ref_logps, divisor=divisor)
                    out.loss.backward()
                total += out.loss.detach() / step.ranks
            found[name, layout, size] = total, take_gradients(model), len(batches)
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_sequences_alone(
    kit: SimpleNamespace, tmp_path: Path, world: int
) -> None:
    """Both layouts, three sizes of packs, some batches a step, 1 and 2 ranks, in
    float64.
    """
    cells = CELLS[::2] if world == 1 else CELLS
    models = {head: kit.tiny_model(head=head) for head in ("logits", "score")}
    expected = {}
    for name, row in TABLE.items():
        model, data = models[row.head], DATA[row.kind]
        alone = tokens_alone if row.head == "logits" else scores_alone
        loss = row.unpacked(list(alone(model, data.examples)), data)
        loss.backward()  # type: ignore[no-untyped-call]
        expected[name] = loss.detach(), take_gradients(model)
    task = {**models, "cells": cells}
    ranks = launch(__file__, task, world, tmp_path) if world > 1 else [on_rank(task)]
    for name, (loss, gradients) in expected.items():
        worst, numbers = 0.0, set()
        for cell in cells:
            steps = [found[name, *cell] for found in ranks]
            gaps = [abs(sum(total for total, *_ in steps) - loss)]
            gaps += [(steps[0][1][n] - g).abs().max() for n, g in gradients.items()]
            worst = max(worst, *map(float, gaps))
            numbers.add(steps[0][2])
        assert worst < 1e-9, name
        assert all(gradient.abs().max() > 1e-7 for gradient in gradients.values())
        assert min(numbers) == 1 < max(numbers)
