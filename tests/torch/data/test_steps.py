"""Optimizer steps: cut and dealt as plain loops do it, and counted beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_packs import LONGEST, MODES, MemoryPacks, N

from packstore.config import BatchConfig
from packstore.errors import ConfigError
from packstore.format import PackSizes
from packstore.torch import PackedDataLoader, PackedDataset

CONFIGS = st.builds(
    lambda mode, drop: {**mode, "drop_last": drop}, MODES, st.booleans()
)
ONE_LACKS = {
    "tokens_per_batch": 300,
    "gradient_accumulation_steps": 2,
    "balance": False,
    "drop_last": True,
}
"""In epoch 1 the last step lacks one batch; chance finds such sizes half the time."""


class Sizes:
    """A stream of `n` packs of which only the sizes are known, by their places; each is
    `row`.
    """

    kind, identity = "sft", {"dataset": "sizes"}
    datasets: tuple[Any, ...] = ()

    def __init__(self, n: int, at: Callable[[Any], PackSizes], row: Any = None) -> None:
        self.n, self.at, self.row = n, at, row
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None: ...

    def sizes(self, indices: Any) -> PackSizes:
        self.asked.append(len(indices))
        return self.at(indices)

    def sources(self, indices: Any) -> Any:
        return indices * 0

    def read(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        for indices in batches:
            yield [self.row] * len(indices)


def reference(
    tokens: list[int], examples: list[int], world: int, c: BatchConfig
) -> Any:
    """The steps, each a list of batches, each a list of places: pack after pack, in
    plain loops.
    """
    n = len(tokens)
    if c.drop_last and c.tokens_per_batch:
        n -= n % world

    def batch(start: int, stop: int) -> list[int]:
        """The longest run of whole rows from `start` that fits."""
        if c.tokens_per_batch is None:
            return list(range(start, min(start + world * c.width, stop)))
        loads, out = [0] * world, []
        while start < stop:
            row = list(range(start, min(start + world, stop)))
            for rank, place in enumerate(row):
                loads[rank] += tokens[place]
            if max(loads) > c.tokens_per_batch:
                break
            out += row
            start += len(row)
        return out

    def nearest(start: int, target: int) -> int:
        """The end of the run from `start` whose examples are nearest to the target."""
        pairs, best, distance = 0, n, np.inf
        for stop in range(start + 1, n + 1):
            pairs += examples[stop - 1]
            if abs(pairs - target) < distance:
                best, distance = stop, abs(pairs - target)
            if pairs >= target:
                break
        return best

    out, start, shortfall = [], 0, 0
    while start < n:
        step = []
        if c.examples_per_step is None:
            place = start
            while len(step) < c.gradient_accumulation_steps and place < n:
                step.append(batch(place, n))
                place = step[-1][-1] + 1
            whole = len(step) == c.gradient_accumulation_steps
            if c.tokens_per_batch is None:
                whole = (
                    sum(map(len, step))
                    == world * c.width * c.gradient_accumulation_steps
                )
        else:
            target = c.examples_per_step + shortfall
            stop = min(max(nearest(start, target), start + world), n)
            pairs = sum(examples[start:stop])
            whole = stop < n or pairs >= target
            shortfall = max(target - pairs, -(c.examples_per_step // 2))
            place = start
            while place < stop:
                step.append(batch(place, stop))
                place = step[-1][-1] + 1
        if c.drop_last and not whole:
            break
        out.append(step)
        start = step[-1][-1] + 1
    return out


@pytest.mark.parametrize(
    "mode",
    [
        {"packs_per_batch": 3, "gradient_accumulation_steps": 2},
        {"tokens_per_batch": 500, "gradient_accumulation_steps": 3, "drop_last": True},
        {"examples_per_step": 60, "tokens_per_batch": 500},
        {"examples_per_step": 30_000},  # more packs than are looked up at once
    ],
    ids=str,
)
def test_steps_of_many_packs(mode: dict[str, Any]) -> None:
    """Their sizes are looked up in windows, which must not show."""
    rng = np.random.default_rng(0)
    tokens, examples = rng.integers(1, LONGEST, 15_000), rng.integers(1, 10, 15_000)
    stream: Any = Sizes(
        15_000, lambda i: PackSizes(tokens[i], examples[i], tokens[i] ** 2)
    )
    plan = PackedDataset(stream).plan(world_size=3, **mode)
    steps = reference(tokens.tolist(), examples.tolist(), 3, BatchConfig.of(**mode))
    counts = [int(sum(examples[batch].sum() for batch in step)) for step in steps]
    assert (plan.steps, plan.batches) == (len(steps), sum(map(len, steps)))
    assert plan.examples_per_step == (
        min(counts),
        sum(counts) / len(counts),
        max(counts),
    )


@pytest.fixture(scope="module")
def memory(kit: SimpleNamespace) -> Any:
    return MemoryPacks.of_examples(kit.packed)


def test_balance_evens_out_the_squares(memory: Any) -> None:
    def spans(**order: Any) -> int:
        loads = np.zeros((N, 3), int)
        for rank in range(3):
            data = PackedDataset(memory, rank=rank, world_size=3)
            for batch in PackedDataLoader(
                data, packs_per_batch=2, gradient_accumulation_steps=2, **order
            ):
                loads[batch.step.index, rank] += int(
                    batch.cu_seqlens.diff().square().sum()
                )
        return int(np.ptp(loads, axis=1).sum())

    assert spans(balance=True) < 0.3 * spans()


@given(CONFIGS, st.integers(1, 4), st.integers(0, 1000))
@example(ONE_LACKS, 1, 1)
@settings(max_examples=50, deadline=None)
def test_steps_are_those_of_plain_loops_and_of_the_plan(
    memory: Any, mode: Any, world: int, epoch: int
) -> None:
    """Each pack once, all ranks as many batches, none over its tokens."""
    data = PackedDataset(memory, rank=0, world_size=1)
    data.set_epoch(epoch)
    plan, packs = data.plan(world_size=world, **mode), list(data)
    ids = [pack.example_ids.tolist() for pack in packs]
    tokens, examples = [len(p.input_ids) for p in packs], [len(own) for own in ids]
    steps = reference(tokens, examples, world, BatchConfig.of(**mode))
    expected = [
        [[i for place in batch for i in ids[place]] for batch in step] for step in steps
    ]
    found: list[list[list[int]]] = [[[] for _ in step] for step in steps]
    fillers = 0
    for rank in range(world):
        loader = PackedDataLoader(
            PackedDataset(memory, rank=rank, world_size=world), **mode
        )
        loader.set_epoch(epoch)
        assert len(loader) == plan.batches
        batches = list(loader)
        assert len(batches) == plan.batches
        for batch in batches:
            info = batch.step
            found[info.index][info.batch] += batch.example_ids[
                batch.weights > 0
            ].tolist()
            fillers += len(set(batch.pack_ids[batch.weights == 0].tolist()))
            assert info.last == (info.batch == info.batches - 1)
            assert info.examples == sum(map(len, expected[info.index]))
            assert batch.num_tokens <= mode.get("tokens_per_batch", np.inf)
    assert plan == loader.plan()
    if mode["balance"]:  # a pack may go to any batch of its step
        found, expected = (
            [[[*chain(*step)]] for step in steps] for steps in (found, expected)
        )
    assert [[*map(sorted, step)] for step in found] == [
        [*map(sorted, step)] for step in expected
    ]
    counts = [sum(map(len, step)) for step in expected] or [0]
    assert (plan.steps, plan.filler_packs) == (len(steps), fillers)
    assert plan.examples == sum(counts) == sum(examples) - plan.dropped_examples
    assert plan.packs + plan.dropped_packs == N
    assert plan.examples_per_step == (
        min(counts),
        sum(counts) / len(counts),
        max(counts),
    )
    assert plan.dropped_packs == 0 or mode["drop_last"]


def test_a_plan_of_more_epochs_leaves_the_dataset_where_it_is(memory: Any) -> None:
    data = PackedDataset(memory)
    data.set_epoch(1)
    first = [p.example_ids[0] for p in data]
    plans = [data.plan(examples_per_step=20, world_size=2)]
    both = data.plan(examples_per_step=20, world_size=2, epochs=2)
    assert [p.example_ids[0] for p in data] == first
    data.set_epoch(2)
    plans.append(data.plan(examples_per_step=20, world_size=2))
    for name in ("epochs", "steps", "batches", "packs", "examples", "filler_packs"):
        assert getattr(both, name) == sum(getattr(plan, name) for plan in plans)


@pytest.mark.parametrize(
    "mode",
    [
        {"packs_per_batch": 4, "gradient_accumulation_steps": 4, "balance": True},
        {"examples_per_step": 512, "packs_per_batch": 4},
    ],
    ids=str,
)
def test_planning_a_hundred_million_packs_begins_at_once(
    memory: Any, mode: Any
) -> None:
    stream: Any = Sizes(
        10**8,
        lambda i: PackSizes(4000 + i % 97, 5 + i % 5, 10**6 + i),
        memory.rows[0],
    )
    loader = PackedDataLoader(PackedDataset(stream, rank=5, world_size=8), **mode)
    if "gradient_accumulation_steps" in mode:
        assert len(loader) == -(-(10**8) // (8 * 4))
    loader.load_state_dict({**loader.state_dict(), "next": 57_000_001})
    for batch in loader:
        if batch.step.index == 2:
            break
    assert sum(stream.asked) <= 8192


def test_a_pack_longer_than_the_budget_is_refused_at_once(memory: Any) -> None:
    data = PackedDataset(memory, rank=0, world_size=2)
    data.set_epoch(0)
    longest = int(memory.pack_sizes.tokens.max())
    where = int(np.flatnonzero(memory.pack_sizes.tokens[memory.order] == longest)[0])
    mentioned = f"tokens_per_batch={longest - 1}.*pack {where} "
    with pytest.raises(ConfigError, match=mentioned):
        PackedDataLoader(data, tokens_per_batch=longest - 1)
    with pytest.raises(ConfigError, match=mentioned):
        data.plan(tokens_per_batch=longest - 1)
    PackedDataLoader(data, tokens_per_batch=longest)
