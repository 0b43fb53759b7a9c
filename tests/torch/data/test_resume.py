"""Resuming: at every place, with other ranks, workers and settings, nothing is lost or repeated."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_packs import MemoryPacks
from ranks import launch
from torch.utils.data import DataLoader

from packstore.io.dataset.dataset import Dataset
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset


def forks(test: Any) -> Any:
    """A test with worker processes, maybe more than there are cores."""
    for message in (
        "This process .* is multi-thr",
        "This DataLoader will cr",
        ".set_vital. is depr",
    ):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return test


N = 23
LANES = 12
MODES: list[dict[str, Any]] = [
    {"packs_per_batch": 1, "tail": "pad"},
    {"packs_per_batch": 2, "accumulation": 2, "tail": "uneven"},
    {"packs_per_batch": 1, "accumulation": 3, "tail": "pad", "balance": True},
    {"packs_per_batch": 2, "accumulation": 3, "mode": "eval", "largest_first": True},
    {"tokens_per_batch": 150, "accumulation": 2, "tail": "pad"},
    {"examples_per_step": 25, "tail": "pad", "largest_first": True},
    {"examples_per_step": 30, "tokens_per_batch": 150, "balance": True, "mode": "eval"},
]
"""All of which give every pack once."""


@pytest.fixture(scope="module")
def memory(kit: SimpleNamespace) -> Any:
    return synthetic(kit, N)


def synthetic(kit: SimpleNamespace, packs: int) -> Any:
    """Packs of 1 to 5 examples."""
    sizes = np.random.default_rng(packs).integers(1, 6, packs)
    examples = random_examples(int(sizes.sum()), kind="sft", edges=False)
    stream = MemoryPacks(kit.packed(examples, sizes, "concat"))
    assert stream.pack_sizes.tokens.max() <= 150
    return stream


def loaders(stream: Any, world: int, **mode: Any) -> list[PackedDataLoader]:
    return [
        PackedDataLoader(PackedDataset(stream, rank=r, world_size=world), **mode)
        for r in range(world)
    ]


def told(batch: Any) -> Any:
    """The values of a batch that must be equal when it comes again."""
    return batch.example_ids.tolist(), batch.weights.tolist(), batch.step


def real(batches: Any) -> list[int]:
    """Ids of the examples that count."""
    return [i for ids, weights, _ in batches for i, w in zip(ids, weights, strict=True) if w]


def epoch(ranks: list[PackedDataLoader], state: Any = None) -> tuple[list[Any], list[Any]]:
    """Batches of each rank, and the state before each batch and at the end, alike on all ranks."""
    batches, states = [], []
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        length = len(loader)
        batches.append([])
        saved = [loader.state_dict()]
        for batch in loader:
            batches[-1].append(told(batch))
            saved.append(loader.state_dict())
        assert len(batches[-1]) == length
        states.append([*saved[:-1], loader.state_dict()] if length else saved)
    longest = max(states, key=len)
    for saved in states:
        assert saved[:-1] == longest[: len(saved) - 1]
    return batches, longest


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_at_every_batch_with_the_same_settings(memory: Any, mode: Any, world: int) -> None:
    ranks = loaders(memory, world, **mode)
    whole, states = epoch(ranks)
    for k, state in enumerate(states):
        assert len(json.dumps(state)) < 250
        rest, _ = epoch(ranks, state)
        assert rest == [batches[k:] for batches in whole]
    assert epoch(ranks)[0] == whole  # the iteration after a resumed one is whole


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("mode", "other"), list(itertools.product(MODES, MODES[1:6])), ids=str)
def test_at_every_batch_with_other_settings(memory: Any, mode: Any, other: Any, world: int) -> None:
    """Resumed with one more or fewer ranks and other settings, left in its middle, and again."""
    every = sorted(memory.packs.example_ids.tolist())
    whole, states = epoch(loaders(memory, world, **mode))
    second = loaders(memory, world % 4 + 1, **other)
    third = loaders(memory, (world + 1) % 4 + 1, **mode)
    for k, state in enumerate(states):
        before = [i for batches in whole for i in real(batches[:k])]
        rest, more = epoch(second, state)
        assert sorted(before + [i for batches in rest for i in real(batches)]) == every
        j = len(more) // 2
        before += [i for batches in rest for i in real(batches[:j])]
        rest, _ = epoch(third, more[j])
        assert sorted(before + [i for batches in rest for i in real(batches)]) == every


def test_the_sequence_is_that_of_any_other_ranks(memory: Any) -> None:
    """If the packs of a step are as many, whatever the ranks, all steps are the same."""
    pairs: list[tuple[int, dict[str, int]]] = [
        (1, {"packs_per_batch": 4}),
        (2, {"packs_per_batch": 2}),
        (2, {"packs_per_batch": 1, "accumulation": 2}),
        (4, {"packs_per_batch": 1}),
    ]

    def steps(world: int, mode: Any, state: Any) -> tuple[list[set[int]], list[Any]]:
        batches, states = epoch(loaders(memory, world, **mode, tail="pad"), state)
        out: dict[int, set[int]] = {}
        for batch in itertools.chain(*batches):
            out.setdefault(batch[2].index, set()).update(real([batch]))
        each = mode.get("accumulation", 1)
        return list(out.values()), [*states[: each * len(out) : each], states[-1]]

    whole, states = steps(*pairs[0], None)
    for world, mode in pairs:
        for k, state in enumerate(states):
            rest, others = steps(world, mode, state)
            assert rest == whole[k:]
            assert [s["next"] for s in others] == [s["next"] for s in states[k:]]


def test_random_places_of_a_large_dataset(kit: SimpleNamespace) -> None:
    many = synthetic(kit, 3000)
    every = sorted(many.packs.example_ids.tolist())
    rng = np.random.default_rng(0)
    for _ in range(6):
        seen: list[int] = []
        state = None
        for leg in range(4):
            world = int(rng.integers(1, 5))
            mode = MODES[rng.integers(len(MODES))]
            states = []
            steps = int(rng.integers(1, 200)) if leg < 3 else 10**9
            for loader in loaders(many, world, **mode):
                if state is not None:
                    loader.load_state_dict(state)
                batches = [told(batch) for batch in itertools.islice(loader, steps)]
                seen += real(batches)
                states.append(loader.state_dict())
            assert all(s == states[0] for s in states)
            state = states[0]
        assert sorted(seen) == every
        assert state["next"] == 3000


def test_past_the_end(memory: Any) -> None:
    (loader,) = loaders(memory, 1, packs_per_batch=2, accumulation=2)
    whole, _ = epoch([loader])
    end = loader.state_dict()
    assert (end["next"], end["step"]) == (N, N // 4)
    for mode in MODES:
        ranks = loaders(memory, 2, **mode)
        assert epoch(ranks, end)[0] == [[], []]
        for rank in ranks:
            rank.set_epoch(1)
        assert sorted(i for b in epoch(ranks)[0] for i in real(b)) == sorted(
            memory.packs.example_ids.tolist()
        )
    memory.set_epoch(0)
    loader.load_state_dict(end)
    assert list(loader) == []
    assert [told(b) for b in loader] == whole[0]


@pytest.fixture(scope="module")
def stored(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Packs of 1 to 5 examples in several row groups and shards."""
    url = str(tmp_path_factory.mktemp("data") / "ds")
    data: Dataset = kit.write(url, synthetic(kit, N).packs, "sft")
    assert len(data.row_groups) > 8
    return data


def dataset(stored: Dataset, rank: int = 0, world: int = 1) -> PackedDataset:
    return PackedDataset(stored, seed=1, lanes=LANES, rank=rank, world_size=world)


def take(rank: tuple[int, int], stored: Dataset, state: Any, k: int | None, **settings: Any) -> Any:
    """`k` batches, or all, of one rank, and the state after them."""
    loader = PackedDataLoader(dataset(stored, *rank), **settings)
    if state is not None:
        loader.load_state_dict(state)
    batches = [told(batch) for batch in itertools.islice(loader, k)]
    return batches, json.loads(json.dumps(loader.state_dict()))


@forks
@pytest.mark.parametrize("mode", [MODES[1], MODES[2], MODES[6]], ids=str)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_change_nothing_on_resume(stored: Dataset, workers: int, mode: Any) -> None:
    """The state does not know of workers: same sequence with more, fewer or none."""
    for rank in (0, 1):
        whole, _ = take((rank, 2), stored, None, None, **mode)
        for k in (1, len(whole) // 2):
            first, state = take((rank, 2), stored, None, k, num_workers=workers, **mode)
            assert first == whole[:k]
            for others in {0, 1, 3} - {workers}:
                rest, _ = take((rank, 2), stored, state, None, num_workers=others, **mode)
                assert rest == whole[k:]


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_ranks_change_together(stored: Dataset, workers: int) -> None:
    every = sorted(i for packs in stored.iter_packs() for i in packs.example_ids.tolist())
    for k, (before, after) in enumerate([(1, 3), (2, 3), (3, 2), (4, 1), (3, 4)], start=1):
        seen, states = [], []
        for rank in range(before):
            batches, state = take((rank, before), stored, None, k, num_workers=workers, **MODES[2])
            seen += real(batches)
            states.append(state)
        assert all(state == states[0] for state in states)
        for rank in range(after):
            rest, _ = take((rank, after), stored, states[0], None, num_workers=1, **MODES[5])
            seen += real(rest)
        assert sorted(seen) == every


@forks
@pytest.mark.parametrize("given", [False, True])
def test_workers_that_live_on(stored: Dataset, given: bool) -> None:
    """A persistent loader sees new epochs and states, also one inside a balanced step."""
    mode: dict[str, Any] = {"accumulation": 4, "balance": True, "tail": "pad"}
    plain = PackedDataLoader(dataset(stored, 0, 2), **mode)
    lasting = PackedDataLoader(
        dataset(stored, 0, 2), num_workers=2, persistent_workers=True, prefetch=1, **mode
    )
    other = PackedDataLoader(dataset(stored, 0, 3), **mode)
    next(iter(other))
    for epoch_number in (0, 1, 1, 0):
        for loader in (plain, lasting):
            loader.set_epoch(epoch_number)
        assert [told(b) for b in lasting] == [told(b) for b in plain]
    state = other.state_dict()
    if not given:
        next(iter(plain))
        state = plain.state_dict()
    assert state["batches"] == 1
    for loader in (plain, lasting):
        loader.load_state_dict(state)
    resumed = [told(b) for b in plain]
    assert [told(b) for b in lasting] == resumed
    again = [told(b) for b in plain]
    assert [told(b) for b in lasting] == again
    assert len(again) > len(resumed)


def ids(packs: Any) -> list[list[int]]:
    return [p.example_ids.tolist() for p in packs]


@forks
@pytest.mark.parametrize("persistent", [False, True])
def test_a_plain_torch_loader_with_workers(stored: Dataset, persistent: bool) -> None:
    """Epochs and positions reach the workers of torch's loader, each position once."""
    data, plain = dataset(stored, 1, 2), dataset(stored, 1, 2)
    loader = DataLoader(data, None, num_workers=3, persistent_workers=persistent)
    assert ids(loader) == ids(plain)
    for step in (5, 8):
        for each in (data, plain):
            each.set_epoch(step)
        assert ids(loader) == ids(plain) == ids(loader)
        state = {**plain.state_dict(), "next": 2 * step}
        for each in (data, plain):
            each.load_state_dict(state)
        assert len(data) == len(plain) == len(range(2 * step + 1, N, 2))
        rest = ids(plain)
        assert ids(loader) == rest
        assert ids(loader) == ids(plain)
        assert len(ids(plain)) == len(data) > len(rest)


@forks
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_stateful_data_loader(stored: Dataset, workers: int, persistent: bool) -> None:
    """Its state is taken in the workers; with it, the same packs follow in the same order."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata")
    if persistent and not workers:
        pytest.skip("no workers to live on")

    def make() -> Any:
        return torchdata.StatefulDataLoader(
            dataset(stored, 1, 2), None, num_workers=workers, persistent_workers=persistent
        )

    whole = ids(make())
    for k in (0, 1, 4, 5, len(whole) - 1, len(whole)):
        loader = make()
        packs = iter(loader)
        taken = ids(itertools.islice(packs, k))
        state = loader.state_dict()
        del packs
        loader = make()
        loader.load_state_dict(state)
        packs = iter(loader)
        taken += ids(itertools.islice(packs, 2))
        state = loader.state_dict()  # and a second time
        del packs
        loader = make()
        loader.load_state_dict(state)
        # Once it has seen the end, its next iteration is the next epoch.
        assert ids(loader) == (whole[k + 2 :] if k + 2 <= len(whole) else whole)
        assert taken == whole[: k + 2]
        assert ids(loader) == whole


def on_rank(task: dict[str, Any]) -> list[Any]:
    """One of several real ranks: resumes at each state, gives k batches, says where it is then."""
    warnings.simplefilter("ignore")  # of forks beside gloo's threads
    data = PackedDataset(task["url"], seed=1, lanes=LANES)
    loader = PackedDataLoader(data, num_workers=task["workers"], **task["mode"])
    out = []
    for state, k in task["legs"]:
        loader.set_epoch(0)
        loader.load_state_dict(state)
        length = len(loader)
        batches = [told(batch) for batch in itertools.islice(loader, k)]
        assert k is not None or len(batches) == length
        out.append((batches, loader.state_dict()))
    return out


@pytest.mark.slow
def test_real_ranks(stored: Dataset, tmp_path: Path) -> None:
    """Processes that gloo connects: saved at every batch, resumed on fewer of them, and on more."""
    every = sorted(i for packs in stored.iter_packs() for i in packs.example_ids.tolist())
    start = PackedDataset(stored, seed=1, lanes=LANES).state_dict()
    task = {"url": stored.url, "workers": 1, "mode": MODES[2]}
    places = range(9)
    first = launch(__file__, task | {"legs": [(start, k) for k in places]}, 3, tmp_path)
    states = [state for _, state in first[0]]
    for rank in first:
        assert [state for _, state in rank] == states
    legs = [(state, None) for state in states]
    second = launch(__file__, task | {"legs": legs, "workers": 0}, 2, tmp_path)
    for k in places:
        seen = [i for rank in first for i in real(rank[k][0])]
        assert sorted(seen + [i for rank in second for i in real(rank[k][0])]) == every
        assert len({len(rank[k][0]) for rank in second}) == 1
        for rank in range(4):
            seen += real(take((rank, 4), stored, states[k], None, **MODES[6])[0])
        assert sorted(seen) == every
