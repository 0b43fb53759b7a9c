"""Optimizer steps: cut and dealt as plain loops do it, and counted beforehand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_packs import MemoryPacks

from packstore.config import BatchConfig
from packstore.errors import ConfigError
from packstore.format import PackSizes
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset
from packstore.torch.data.position import Position, Unseen
from packstore.torch.data.steps import StepCutter, assign_ranks

N = 41
LONGEST = 200

BATCHES = st.one_of(
    st.fixed_dictionaries({"packs_per_batch": st.integers(1, 5)}),
    st.fixed_dictionaries({"tokens_per_batch": st.integers(LONGEST, 4 * LONGEST)}),
)
STEPS = st.one_of(
    st.fixed_dictionaries({"accumulation": st.integers(1, 4)}),
    st.fixed_dictionaries({"examples_per_step": st.integers(5, 60)}),
)
CONFIGS = st.builds(
    lambda batches, steps, balance, tail: {**batches, **steps, "balance": balance, "tail": tail},
    BATCHES,
    STEPS,
    st.booleans(),
    st.sampled_from(["pad", "drop"]),
)

ONE_LACKS: dict[str, Any] = {"tokens_per_batch": LONGEST, "accumulation": 2, "tail": "drop"}
"""Of three packs, each a batch, the last step lacks one; chance finds such sizes half the time."""


class Sizes:
    """A stream of which only the sizes are known."""

    def __init__(self, tokens: list[int], examples: list[int]) -> None:
        t, e = np.array(tokens, np.int64), np.array(examples, np.int64)
        self.all = PackSizes(t, e, t**2)

    def __len__(self) -> int:
        return len(self.all)

    def sizes(self, indices: Any) -> PackSizes:
        return self.all.take(indices)


def reference(tokens: list[int], examples: list[int], world: int, c: BatchConfig) -> Any:
    """The steps, each a list of batches, each a list of places: pack after pack, in plain loops."""
    n = len(tokens)
    if c.tail == "drop" and c.tokens_per_batch:
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

    out, start = [], 0
    while start < n:
        step = []
        if c.examples_per_step is None:
            place = start
            while len(step) < c.accumulation and place < n:
                step.append(batch(place, n))
                place = step[-1][-1] + 1
            whole = len(step) == c.accumulation
            if c.tokens_per_batch is None:
                whole = sum(map(len, step)) == world * c.width * c.accumulation
        else:
            stop, pairs = start, 0
            while stop < n and (
                stop < start + world or pairs + examples[stop] <= c.examples_per_step
            ):
                pairs += examples[stop]
                stop += 1
            whole = stop < n or pairs >= c.examples_per_step
            place = start
            while place < stop:
                step.append(batch(place, stop))
                place = step[-1][-1] + 1
        if c.tail == "drop" and not whole:
            break
        out.append(step)
        start = step[-1][-1] + 1
    return out


def cut_as_in_plain_loops(
    tokens: list[int], examples: list[int], mode: dict[str, Any], world: int
) -> list[Any]:
    """The steps, after the comparison."""
    config, stream = BatchConfig.of(**mode), Sizes(tokens, examples)
    cutter = StepCutter(stream, Unseen(len(tokens), Position()), config, world)  # type: ignore[arg-type]
    steps = list(cutter)
    cuts = [[list(range(a, b)) for a, b in itertools.pairwise(step.edges)] for step in steps]
    assert cuts == reference(tokens, examples, world, config)
    return steps


@pytest.mark.parametrize(
    "mode",
    [
        {"packs_per_batch": 3, "accumulation": 2},
        {"tokens_per_batch": 500, "accumulation": 3, "tail": "drop"},
        {"examples_per_step": 60, "tokens_per_batch": 500},
        {"examples_per_step": 30_000},  # more packs than are looked up at once
    ],
    ids=str,
)
def test_steps_of_many_packs(mode: dict[str, Any]) -> None:
    """Their sizes are looked up in windows, which must not show."""
    rng = np.random.default_rng(0)
    tokens, examples = rng.integers(1, LONGEST, 15_000), rng.integers(1, 10, 15_000)
    assert cut_as_in_plain_loops(tokens.tolist(), examples.tolist(), mode, 3)


@given(
    st.lists(st.tuples(st.integers(1, LONGEST), st.integers(1, 9)), min_size=1, max_size=60),
    CONFIGS,
    st.integers(1, 4),
)
@example([(LONGEST, 1)] * 3, ONE_LACKS, 1)
@settings(max_examples=200, deadline=None)
def test_steps_and_ranks(sizes: list[tuple[int, int]], mode: dict[str, Any], world: int) -> None:
    """Cut as in plain loops; each pack to one rank, all ranks as many batches, none over its
    tokens."""
    tokens, examples = [list(column) for column in zip(*sizes, strict=True)]
    config, steps = BatchConfig.of(**mode), cut_as_in_plain_loops(tokens, examples, mode, world)
    for step in steps:
        assert step.examples == sum(examples[step.start : step.stop])
        shares = [assign_ranks(step, rank, world, config) for rank in range(world)]
        own = [p for share in shares for batch, f in share for p in batch[: len(batch) - f]]
        assert sorted(own) == list(range(step.start, step.stop))
        fillers = [p for share in shares for batch, f in share for p in batch[len(batch) - f :]]
        assert {*fillers} <= {*own}
        assert len(fillers) == sum(
            max(world - (b - a), 0) for a, b in itertools.pairwise(step.edges)
        )
        assert {len(share) for share in shares} == {len(step.edges) - 1}
        for batch, _ in itertools.chain(*shares):
            assert len(batch)
            assert sum(tokens[p] for p in batch) <= mode.get("tokens_per_batch", np.inf)


@pytest.fixture(scope="module")
def memory(kit: SimpleNamespace) -> Any:
    sizes = np.random.default_rng(0).integers(1, 8, N)
    packs = kit.packed(random_examples(int(sizes.sum()), kind="sft"), sizes, "concat")
    stream = MemoryPacks(packs)
    assert stream.pack_sizes.tokens.max() <= LONGEST
    return stream


def test_balance_evens_out_the_squares(memory: Any) -> None:
    def spans(**order: Any) -> Any:
        config = BatchConfig.of(packs_per_batch=2, accumulation=2, **order)
        for step in StepCutter(memory, Unseen(N, Position()), config, 3):
            loads = [
                sum(
                    int(step.sizes.squares[b - step.start].sum())
                    for b, _ in assign_ranks(step, r, 3, config)
                )
                for r in range(3)
            ]
            yield max(loads) - min(loads)

    assert sum(spans(balance=True)) < 0.3 * sum(spans())


@given(CONFIGS, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_plan_and_the_length_are_what_comes(memory: Any, mode: Any, world: int) -> None:
    ranks, seen, fillers = [], [], 0
    for rank in range(world):
        loader = PackedDataLoader(PackedDataset(memory, rank=rank, world_size=world), **mode)
        length = len(loader)
        ranks.append(list(loader))
        assert len(ranks[-1]) == length
        for batch in ranks[-1]:
            seen += batch.example_ids[batch.weights > 0].tolist()
            fillers += len(set(batch.pack_ids[batch.weights == 0].tolist()))
            assert batch.step.last == (batch.step.batch == batch.step.batches - 1)
    plan = PackedDataset(memory).plan(world_size=world, **mode)
    assert plan == loader.plan()
    assert {plan.batches} == {len(batches) for batches in ranks}
    assert plan.examples == len(seen) == len(set(seen))
    assert plan.dropped_examples == len(memory.packs.example_ids) - len(seen)
    assert plan.packs + plan.dropped_packs == N
    assert plan.padded_packs == fillers
    of_step: dict[int, int] = {}
    promised = {}
    for batch in itertools.chain(*ranks):
        step = batch.step
        of_step[step.index] = of_step.get(step.index, 0) + int(batch.weights.sum())
        assert promised.setdefault(step.index, step.examples) == step.examples
    assert of_step == promised
    assert sorted(of_step) == list(range(plan.steps))
    counts = list(of_step.values()) or [0]
    assert plan.examples_per_step == (min(counts), sum(counts) / len(counts), max(counts))
    if mode["tail"] == "pad":
        assert sorted(seen) == sorted(memory.packs.example_ids.tolist())


def test_a_plan_of_more_epochs_leaves_the_dataset_where_it_is(memory: Any) -> None:
    data = PackedDataset(memory)
    data.set_epoch(1)
    first = [p.example_ids[0] for p in data]
    plans = [data.plan(examples_per_step=20, world_size=2)]
    both = data.plan(examples_per_step=20, world_size=2, epochs=2)
    assert [p.example_ids[0] for p in data] == first
    data.set_epoch(2)
    plans.append(data.plan(examples_per_step=20, world_size=2))
    for name in ("epochs", "steps", "batches", "packs", "examples", "padded_packs"):
        assert getattr(both, name) == sum(getattr(plan, name) for plan in plans)


class Huge:
    """A hundred million packs that are nowhere."""

    kind, identity, asked = "sft", {"dataset": "huge"}, 0
    datasets: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return 10**8

    def set_epoch(self, epoch: int) -> None: ...

    def sizes(self, indices: Any) -> PackSizes:
        self.asked += len(indices)
        return PackSizes(4000 + indices % 97, 5 + indices % 5, 10**6 + indices)


@pytest.mark.parametrize(
    "mode",
    [
        {"packs_per_batch": 4, "accumulation": 4, "balance": True},
        {"tokens_per_batch": 16384},
        {"examples_per_step": 512, "tokens_per_batch": 8192},
    ],
    ids=str,
)
def test_planning_a_hundred_million_packs_begins_at_once(mode: Any) -> None:
    stream: Any = Huge()
    config = BatchConfig.of(**mode)
    cutter = StepCutter(stream, Unseen(len(stream), Position(next=57_000_001)), config, 8)
    for step in itertools.islice(cutter, 3):
        assign_ranks(step, 5, 8, config)
    if cutter.fixed:
        loader = PackedDataLoader(PackedDataset(stream, rank=5, world_size=8), **mode)
        assert len(loader) == -(-(10**8) // (8 * 4))
    assert stream.asked <= 8192


def test_a_pack_longer_than_the_budget_is_refused_at_once(memory: Any) -> None:
    data = PackedDataset(memory, rank=0, world_size=2)
    data.set_epoch(0)
    longest = int(memory.pack_sizes.tokens.max())
    where = int(np.flatnonzero(memory.pack_sizes.tokens[memory.order] == longest)[0])
    message = f"must fit tokens_per_batch={longest - 1}; found {longest} tokens in pack {where} of"
    with pytest.raises(ConfigError, match=message):
        PackedDataLoader(data, tokens_per_batch=longest - 1)
    with pytest.raises(ConfigError, match=message):
        data.plan(tokens_per_batch=longest - 1)
    PackedDataLoader(data, tokens_per_batch=longest)
