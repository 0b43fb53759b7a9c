"""Resuming: at every place, with other ranks, workers and settings, nothing is lost or
repeated.
"""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_packs import MODES, MemoryPacks, N
from torch.utils.data import DataLoader

from packstore import Dataset
from packstore.torch import PackedDataLoader, PackedDataset

pytestmark = [  # of worker processes, maybe more than there are cores
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "This process .* is multi-thr",
        "This DataLoader will cr",
        ".set_vital. is depr",
    )
]

LANES = 12
BALANCED: dict[str, Any] = {"gradient_accumulation_steps": 4, "balance": True}


@pytest.fixture(scope="module")
def memory(kit: SimpleNamespace) -> Any:
    return MemoryPacks.of_examples(kit.packed)


def told(batch: Any) -> Any:
    """The values of a batch that must be equal when it comes again."""
    return batch.example_ids.tolist(), batch.weights.tolist(), batch.step


def real(batches: Any) -> list[int]:
    """Ids of the examples that count."""
    return [
        i for ids, weights, _ in batches for i, w in zip(ids, weights, strict=True) if w
    ]


def take(
    source: Any, world: int, mode: Any, state: Any, k: int | None, **workers: Any
) -> tuple[list[Any], Any]:
    """The next `k` batches, or all, of each of `world` ranks, and the state
    after them.
    """
    batches, states = [], []
    for rank in range(world):
        data = PackedDataset(source, seed=1, lanes=LANES, rank=rank, world_size=world)
        loader = PackedDataLoader(data, **mode, **workers)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        length = len(loader)
        batches.append([told(batch) for batch in itertools.islice(loader, k)])
        assert (
            len(batches[-1]) == length
            if k is None
            else len(batches[-1]) == min(k, length)
        )
        states.append(loader.state_dict())
    assert all(each == states[0] for each in states)
    return batches, states[0]


@given(
    st.lists(
        st.tuples(st.integers(1, 4), MODES, st.integers(0, 12)), min_size=1, max_size=4
    )
)
@example(
    legs=[(2, BALANCED, 1), (3, {"packs_per_batch": 1}, 0)]
)  # inside a balanced step
@settings(max_examples=30, deadline=None)
def test_any_cut_continued_on_any_ranks_is_the_whole(
    memory: Any, legs: list[tuple[int, Any, int]]
) -> None:
    """Each leg of a run has ranks and settings of its own, and stops in the middle of
    anything.
    """
    seen, state = [], None
    for number, (world, mode, k) in enumerate(legs):
        last = number == len(legs) - 1
        batches, after = take(memory, world, mode, state, None if last else k)
        assert len({len(of_rank) for of_rank in batches}) == 1
        assert len(json.dumps(after)) < 300
        # With the same settings, the same batches follow as without the interruption.
        whole, _ = take(memory, world, mode, state, None)
        assert batches == [of_rank[: len(batches[0])] for of_rank in whole]
        rest, _ = take(memory, world, mode, after, None)
        assert rest == [of_rank[len(batches[0]) :] for of_rank in whole]
        if whole[0]:
            assert whole[0][0][2].index == (state["step"] if state else 0)
        seen += [i for of_rank in batches for i in real(of_rank)]
        state = after
    assert sorted(seen) == sorted(memory.packs.example_ids.tolist())
    assert state["next"] == N


@given(st.integers(0, 5), st.sampled_from([(1, 4, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1)]))
@settings(max_examples=20, deadline=None)
def test_a_step_holds_the_same_packs_on_any_ranks(
    memory: Any, k: int, ranks: Any
) -> None:
    """If the packs of a step are as many, whatever the ranks; also after a cut."""

    def steps(world: int, width: int, accumulation: int, state: Any) -> list[list[int]]:
        mode = {"packs_per_batch": width, "gradient_accumulation_steps": accumulation}
        out: dict[int, list[int]] = {}
        for batch in itertools.chain(*take(memory, world, mode, state, None)[0]):
            out.setdefault(batch[2].index, []).extend(real([batch]))
        return [sorted(ids) for ids in out.values()]

    whole = steps(1, 4, 1, None)
    _, state = take(memory, 1, {"packs_per_batch": 4}, None, k)
    assert steps(*ranks, state) == whole[k:]


def test_past_the_end(memory: Any) -> None:
    _, end = take(memory, 1, {"packs_per_batch": 4, "drop_last": True}, None, None)
    assert (end["next"], end["step"]) == (N, N // 4)
    for mode in (BALANCED, {"examples_per_step": 9}):
        assert take(memory, 2, mode, end, None)[0] == [[], []]
    loader = PackedDataLoader(PackedDataset(memory, rank=0, world_size=1))
    loader.load_state_dict(end)
    assert list(loader) == []
    assert len(list(loader)) == N  # the iteration after it is whole


@pytest.fixture(scope="module")
def stored(
    kit: SimpleNamespace, memory: Any, tmp_path_factory: pytest.TempPathFactory
) -> Dataset:
    """The same packs in several row groups and shards."""
    url = str(tmp_path_factory.mktemp("data") / "ds")
    data: Dataset = kit.write(url, memory.packs, "sft")
    assert len(data.row_groups) > 8
    return data


def test_workers_and_ranks_change_together(stored: Dataset) -> None:
    """A state does not know of workers: the same batches follow with more, fewer or
    none.
    """
    every = sorted(
        i for packs in stored.iter_packs() for i in packs.example_ids.tolist()
    )
    whole, _ = take(stored, 2, BALANCED, None, None)
    for k, workers, others in ((3, 2, 0), (5, 0, 3)):
        first, state = take(stored, 2, BALANCED, None, k, num_workers=workers)
        rest, _ = take(stored, 2, BALANCED, state, None, num_workers=others)
        assert [a + b for a, b in zip(first, rest, strict=True)] == whole
        more, _ = take(stored, 3, {"examples_per_step": 25}, state, None, num_workers=1)
        assert sorted(i for part in (*first, *more) for i in real(part)) == every


@pytest.mark.slow
def test_workers_that_live_on(stored: Dataset) -> None:
    """A persistent loader sees new epochs and states, also one inside a
    balanced step.
    """

    def make(world: int = 2, **workers: Any) -> PackedDataLoader:
        data = PackedDataset(stored, seed=1, lanes=LANES, rank=0, world_size=world)
        return PackedDataLoader(data, **BALANCED, **workers)

    plain, other = make(), make(3)
    lasting = make(num_workers=2, persistent_workers=True, prefetch_factor=1)
    for epoch in (0, 1, 1, 0):
        for loader in (plain, lasting):
            loader.set_epoch(epoch)
        assert [told(b) for b in lasting] == [told(b) for b in plain]
    next(iter(other))
    next(iter(plain))
    for state in (plain.state_dict(), other.state_dict()):
        assert state["batches"] == 1
        for loader in (plain, lasting):
            loader.load_state_dict(state)
        resumed = [told(b) for b in plain]
        assert [told(b) for b in lasting] == resumed
        assert len([told(b) for b in lasting]) > len(resumed)


def ids(packs: Any) -> list[list[int]]:
    return [p.example_ids.tolist() for p in packs]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_plain_torch_loader_with_workers(stored: Dataset, persistent: bool) -> None:
    """Epochs and positions reach the workers of torch's loader, each position once."""
    data, plain = (PackedDataset(stored, rank=1, world_size=2) for _ in range(2))
    loader = DataLoader(data, None, num_workers=3, persistent_workers=persistent)
    assert ids(loader) == ids(plain)
    for each in (data, plain):
        each.set_epoch(5)
    assert ids(loader) == ids(plain) == ids(loader)
    for each in (data, plain):
        each.load_state_dict({**plain.state_dict(), "next": 16})
    assert len(data) == len(plain) == len(range(17, N, 2))
    rest = ids(plain)
    assert ids(loader) == rest
    assert ids(loader) == ids(plain)
    assert len(ids(plain)) == len(data) > len(rest)


@pytest.mark.parametrize(
    ("workers", "persistent"),
    [(0, False), pytest.param(2, False, marks=pytest.mark.slow), (2, True)],
)
def test_stateful_data_loader(stored: Dataset, workers: int, persistent: bool) -> None:
    """Its state is taken in the workers; with it, the same packs follow in the same
    order.
    """
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata")

    def make() -> Any:
        return torchdata.StatefulDataLoader(
            PackedDataset(stored, rank=1, world_size=2),
            None,
            num_workers=workers,
            persistent_workers=persistent,
        )

    def resumed(state: Any) -> Any:
        loader = make()
        loader.load_state_dict(state)
        return loader

    whole = ids(make())
    for k in (5, len(whole)) if workers else (0, 5, len(whole)):
        loader = make()
        packs = iter(loader)
        taken = ids(itertools.islice(packs, k))
        loader = resumed(loader.state_dict())
        packs = iter(loader)
        taken += ids(itertools.islice(packs, 2))
        loader = resumed(loader.state_dict())  # and a second time
        # Once it has seen the end, its next iteration is the next epoch.
        assert ids(loader) == (whole[k + 2 :] if k + 2 <= len(whole) else whole)
        assert taken == whole[: k + 2]
        assert ids(loader) == whole
