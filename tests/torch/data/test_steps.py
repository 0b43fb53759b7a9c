"""Optimizer steps: cut and dealt as a plain reference does, and counted beforehand."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_packs import MemoryPacks

import packstore.torch.data.steps as steps_module
from packstore.config import BatchConfig
from packstore.errors import ConfigError, UnknownNameError
from packstore.format.arrays import PackSizes
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset
from packstore.torch.data.position import Position, Unseen
from packstore.torch.data.ranks import assign_ranks, fillers, spread
from packstore.torch.data.steps import StepCutter

N = 41
LONGEST = 200
SHORT = 120
MODES: list[dict[str, Any]] = [
    {},
    {"packs_per_batch": 2},
    {"packs_per_batch": 2, "accumulation": 3},
    {"tokens_per_batch": LONGEST},
    {"tokens_per_batch": SHORT},
    {"tokens_per_batch": 2 * LONGEST, "accumulation": 2},
    {"examples_per_step": 11},
    {"examples_per_step": 30, "packs_per_batch": 2},
    {"examples_per_step": 40, "tokens_per_batch": LONGEST},
]
TAILS = ["drop", "pad", "repeat", "uneven"]
ORDERS = [{}, {"balance": True}, {"largest_first": True}, {"balance": True, "largest_first": True}]


@pytest.fixture(scope="module")
def memory(kit: SimpleNamespace) -> Any:
    sizes = np.random.default_rng(0).integers(1, 8, N)
    packs = kit.packed(random_examples(int(sizes.sum()), kind="sft"), sizes, "concat")
    stream = MemoryPacks(packs)
    assert stream.pack_sizes.tokens.max() <= SHORT
    return stream


@pytest.fixture(params=[5, 4096])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "WINDOW", request.param)


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

    def batch(start: int, stop: int) -> list[int]:
        """The longest run of whole rows from `start` that fits."""
        if c.tokens_per_batch is None:
            return list(range(start, min(start + world * c.width, stop)))
        loads, out = [0] * world, []
        while start < stop:
            row = list(range(start, min(start + world, stop)))
            for rank, place in enumerate(row):
                loads[rank] += tokens[place % n]
            if max(loads) > c.tokens_per_batch:
                break
            out += row
            start += len(row)
        return out

    out, start = [], 0
    endless = 10**9 if c.at_end == "repeat" else n
    limit = n
    if c.at_end == "drop" and c.tokens_per_batch:
        limit = endless = n - n % world
    while start < limit:
        step = []
        if c.examples_per_step is None:
            place = start
            while len(step) < c.accumulation and place < endless:
                step.append(batch(place, endless))
                place = step[-1][-1] + 1
            whole = len(step) == c.accumulation
            if c.tokens_per_batch is None:
                whole = sum(map(len, step)) == world * c.width * c.accumulation
        else:
            stop, pairs = start, 0
            while stop < endless and (
                stop < start + world or pairs + examples[stop % n] <= c.examples_per_step
            ):
                pairs += examples[stop % n]
                stop += 1
            whole = stop < limit or pairs >= c.examples_per_step
            place = start
            while place < stop:
                step.append(batch(place, stop))
                place = step[-1][-1] + 1
        if c.at_end == "drop" and not whole:
            break
        out.append(step)
        start = step[-1][-1] + 1
    return out


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_steps_are_those_of_plain_loops(mode: Any, tail: Any, world: int) -> None:
    rng = np.random.default_rng(world)
    config = BatchConfig.of(**mode, tail=tail)
    for n in (*range(1, 14), 60):
        tokens = rng.integers(1, SHORT + 1, n).tolist()
        examples = rng.integers(1, 9, n).tolist()
        stream: Any = Sizes(tokens, examples)
        steps = list(StepCutter(stream, Unseen(n, Position()), config, world))
        found = [[list(range(a, b)) for a, b in itertools.pairwise(s.edges)] for s in steps]
        assert found == reference(tokens, examples, world, config)
        for step in steps:
            places = [p % n for p in range(step.start, step.stop)]
            assert step.examples == sum(examples[p] for p in places)
            assert step.sizes.tokens.tolist() == [tokens[p] for p in places]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_is_dealt_out_once(
    memory: Any, mode: Any, tail: Any, order: Any, world: int
) -> None:
    config = BatchConfig.of(**mode, tail=tail, **order)
    for step in StepCutter(memory, Unseen(N, Position()), config, world):
        shares = [assign_ranks(step, rank, world, config) for rank in range(world)]
        filled = sum(f for share in shares for _, f in share)
        assert filled == fillers(step, world, config)
        own = [[batch[: len(batch) - f].tolist() for batch, f in share] for share in shares]
        places = sorted(p for batches in own for batch in batches for p in batch)
        assert places == list(range(step.start, step.stop))
        again = [p for s in shares for batch, f in s for p in batch[len(batch) - f :]]
        assert set(again) <= set(places)
        if tail != "uneven":
            assert {len(share) for share in shares} == {len(step.edges) - 1}
        sizes = [len(batch) for share in shares for batch, _ in share]
        assert min(sizes) >= 1
        if not {"tokens_per_batch", "examples_per_step"} & set(mode) and tail in ("drop", "repeat"):
            assert set(sizes) == {config.width}
        loads = np.zeros((len(step.edges) - 1, world))
        for rank, share in enumerate(shares):
            for g, (batch, f) in enumerate(share):
                tokens = step.sizes.tokens[batch[: len(batch) - f] - step.start]
                loads[g, rank] = tokens.sum()
        assert loads.max() <= mode.get("tokens_per_batch", np.inf)
        if order.get("largest_first") and tail != "uneven":
            most = loads.max(1)
            assert (np.diff(most) <= 0).all()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_spread_is_largest_first_to_the_least_loaded(work: list[int], ranks: int) -> None:
    parts = spread(np.array(work), ranks)
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(work)))
    in_turn = [len(range(r, len(work), ranks)) for r in range(ranks)]
    assert sorted((len(p) for p in parts), reverse=True) == in_turn
    loads, counts = [0] * ranks, [0] * ranks
    extra = len(work) % ranks
    for item in sorted(range(len(work)), key=lambda i: -work[i]):
        room = [r for r in range(ranks) if counts[r] < len(work) // ranks + (extra > 0)]
        rank = min(room, key=lambda r: (loads[r], r))
        extra -= counts[rank] == len(work) // ranks
        assert item in parts[rank].tolist()
        loads[rank] += work[item]
        counts[rank] += 1


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


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
@pytest.mark.parametrize("tail", [*TAILS, "eval"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_plan_and_the_length_are_what_comes(
    memory: Any, mode: Any, tail: str, order: Any, world: int
) -> None:
    how = {"mode": "eval"} if tail == "eval" else {"tail": tail}
    keywords = {**mode, **order, **how}
    ranks, seen, weight0 = [], [], []
    for rank in range(world):
        loader = PackedDataLoader(PackedDataset(memory, rank=rank, world_size=world), **keywords)
        length = len(loader)
        batches = list(loader)
        assert len(batches) == length
        ranks.append(batches)
        for batch in batches:
            seen += batch.example_ids[batch.weights > 0].tolist()
            weight0 += batch.example_ids[batch.weights == 0].tolist()
            assert batch.step.last == (batch.step.batch == batch.step.batches - 1)
    plan = PackedDataset(memory).plan(world_size=world, **keywords)
    assert plan == loader.plan()
    assert plan.batches >= max(map(len, ranks))
    assert plan.batches == len(ranks[0]) or (tail == "uneven" and order)
    every = memory.packs.example_ids.tolist()
    assert plan.padded_examples == len(weight0)
    assert plan.examples == len(seen)
    assert plan.repeated_examples == len(seen) - len(set(seen))
    assert plan.dropped_examples == len(every) - len(set(seen))
    assert plan.packs + plan.dropped_packs - plan.repeated_packs == N
    assert plan.padded_packs == sum(
        len(set(b.pack_ids[b.weights == 0].tolist())) for batches in ranks for b in batches
    )
    of_step: dict[int, int] = {}
    promised = {}
    for batch in itertools.chain(*ranks):
        at = batch.step
        of_step[at.index] = of_step.get(at.index, 0) + int(batch.weights.sum())
        assert promised.setdefault(at.index, at.examples) == at.examples
    assert of_step == promised
    assert sorted(of_step) == list(range(plan.steps))
    counts = list(of_step.values())
    assert plan.examples_per_step == (min(counts), sum(counts) / len(counts), max(counts))
    if tail in ("eval", "pad", "uneven"):
        assert sorted(seen) == sorted(every)
    if tail == "repeat":
        assert set(seen) == set(every)
    if tail != "uneven":
        assert len({len(batches) for batches in ranks}) == 1


def test_a_plan_of_more_epochs_leaves_the_dataset_where_it_is(memory: Any) -> None:
    data = PackedDataset(memory)
    data.set_epoch(1)
    first = [p.example_ids[0] for p in data]
    plans = [data.plan(examples_per_step=20, world_size=2)]
    both = data.plan(examples_per_step=20, world_size=2, epochs=2)
    assert [p.example_ids[0] for p in data] == first
    data.set_epoch(2)
    plans.append(data.plan(examples_per_step=20, world_size=2))
    assert both.steps == plans[0].steps + plans[1].steps
    assert both.batches == plans[0].batches + plans[1].batches
    assert both.examples == plans[0].examples + plans[1].examples


def test_a_step_holds_the_same_packs_for_any_ranks(memory: Any) -> None:
    def steps(world: int, **mode: Any) -> list[list[int]]:
        out: dict[int, list[int]] = {}
        for rank in range(world):
            for batch in PackedDataLoader(
                PackedDataset(memory, rank=rank, world_size=world), **mode
            ):
                out.setdefault(batch.step.index, []).extend(batch.example_ids.tolist())
        return [sorted(ids) for ids in out.values()]

    whole = steps(1, packs_per_batch=8)
    assert whole == steps(2, packs_per_batch=4) == steps(4, packs_per_batch=1, accumulation=2)
    assert whole == steps(2, packs_per_batch=2, accumulation=2, balance=True, largest_first=True)
    assert steps(1, examples_per_step=30, tail="uneven") == steps(
        4, examples_per_step=30, tail="uneven"
    )


def test_sources_come_with_the_batch(memory: Any) -> None:
    for batch in PackedDataLoader(PackedDataset(memory), packs_per_batch=3, tail="pad"):
        packs = (
            np.searchsorted(memory.packs.example_offsets, batch.example_ids.numpy(), "right") - 1
        )
        assert batch.sources.tolist() == (packs % 3).tolist()


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
        {"packs_per_batch": 4},
        {"packs_per_batch": 4, "accumulation": 4, "balance": True},
        {"tokens_per_batch": 16384},
        {"examples_per_step": 512, "tokens_per_batch": 8192},
    ],
    ids=str,
)
def test_planning_a_hundred_million_packs_begins_at_once(mode: Any) -> None:
    stream: Any = Huge()
    config = BatchConfig.of(**mode)
    unseen = Unseen(len(stream), Position(next=57_000_001))
    cutter = StepCutter(stream, unseen, config, 8)
    for step in itertools.islice(cutter, 3):
        assign_ranks(step, 5, 8, config)
    assert stream.asked <= 8192
    if cutter.fixed:
        data = PackedDataset(stream, rank=5, world_size=8)
        assert (
            len(PackedDataLoader(data, **mode, tail="repeat"))
            == -(-(10**8) // (8 * 4 * config.accumulation)) * config.accumulation
        )
        assert stream.asked <= 8192


def test_a_pack_longer_than_the_budget_is_refused_at_once(memory: Any) -> None:
    longest = int(memory.pack_sizes.tokens.max())
    where = int(np.flatnonzero(memory.pack_sizes.tokens[memory.order] == longest)[0])
    message = f"must fit tokens_per_batch={longest - 1}; found {longest} tokens in pack {where} of"
    data = PackedDataset(memory, rank=0, world_size=2)
    with pytest.raises(ConfigError, match=message):
        PackedDataLoader(data, tokens_per_batch=longest - 1)
    with pytest.raises(ConfigError, match=message):
        data.plan(tokens_per_batch=longest - 1)
    PackedDataLoader(data, tokens_per_batch=longest)


def test_settings() -> None:
    with pytest.raises(UnknownNameError, match=r"'pack_per_batch'.*mean 'packs_per_batch'"):
        BatchConfig.of(pack_per_batch=2)
    with pytest.raises(ConfigError, match="accumulation must be at least 1; found 0"):
        BatchConfig.of(accumulation=0)
    assert BatchConfig.of().changed() == {}
    config = BatchConfig.of(packs_per_batch=2, tail="pad", balance=True)
    assert BatchConfig.of(**json.loads(json.dumps(config.changed()))) == config


@given(
    n=st.integers(1, 30),
    out=st.sets(st.integers(0, 29)),
    taken=st.lists(st.integers(0, 29), max_size=9),
)
@settings(max_examples=300, deadline=None)
def test_what_is_to_come(n: int, out: set[int], taken: list[int]) -> None:
    given = sorted(p for p in out if p < n)
    left = [p for p in range(n) if p not in given]
    first = left[0] if left else n
    position = Position(first, 3, np.array([p for p in given if p > first], np.int64))
    again = Position.from_state(json.loads(json.dumps(position.to_state())), n)
    assert (again.next, again.step, again.given.tolist()) == (first, 3, position.given.tolist())
    unseen = Unseen(n, again)
    assert len(unseen) == len(left)
    assert unseen[np.arange(len(left) + n)].tolist() == left + list(range(n))
    for place in range(len(left) + 3):
        assert (
            Unseen(n, unseen.after(place, 4))[np.arange(len(left[place:]))].tolist() == left[place:]
        )
    places = np.array(taken, np.int64)
    rest = [p for i, p in enumerate(left) if i not in taken]
    after = unseen.without(places, 3)
    assert Unseen(n, after)[np.arange(len(rest))].tolist() == rest
    assert len(Unseen(n, after)) == len(rest)


@pytest.mark.parametrize("how", [{"mode": "eval"}, {"tail": "pad"}], ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("world", [1, 3])
def test_nothing_is_computed_but_packs_and_one_for_a_rank_without(
    memory: Any, how: Any, order: Any, world: int
) -> None:
    """Batches that are larger than what is left of the epoch."""
    loaders = [
        PackedDataLoader(
            PackedDataset(memory, rank=rank, world_size=world), packs_per_batch=64, **how, **order
        )
        for rank in range(world)
    ]
    batches = [batch for loader in loaders for batch in loader]
    assert len(batches) == world
    assert sum(batch.num_packs for batch in batches) == N
    assert all(batch.weights.min() > 0 for batch in batches)
    config = BatchConfig.of(packs_per_batch=3, **how, **order)
    for step in StepCutter(memory, Unseen(N, Position()), config, 5):
        short = sum(max(5 - (b - a), 0) for a, b in itertools.pairwise(step.edges))
        assert fillers(step, 5, config) == short
