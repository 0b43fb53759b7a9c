"""The loader: every pack once, in one order for all machines, from any position."""

from __future__ import annotations

import logging
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import packstore
from packstore import Dataset
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    DatasetNotFoundError,
    UnsupportedFormatError,
)
from packstore.format import Examples
from packstore.pack.fill import fill
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset

N = 23
LANES = 4


@pytest.fixture(scope="module")
def stored(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """23 packs of two pairs in several row groups and shards; example ids are 2 * pack,
    + 1.
    """
    packs = kit.packed(random_examples(2 * N), [2] * N, "shared_prefix")
    data: Dataset = kit.write(
        str(tmp_path_factory.mktemp("data") / "ds"),
        packs,
        "preference",
        "shared_prefix",
    )
    assert len(data.row_groups) > LANES
    assert len(data.manifest.shards) > 1
    return data


def make(
    stored: Dataset, rank: int = 0, world_size: int = 1, **settings: Any
) -> PackedDataset:
    return PackedDataset(
        stored,
        rank=rank,
        world_size=world_size,
        **{"lanes": LANES, "seed": 1, **settings},
    )


def packs_of(batch: Any) -> list[int]:
    assert (batch.example_ids[1::2] == batch.example_ids[::2] + 1).all()
    return (batch.example_ids[::2] // 2).tolist()  # type: ignore[no-any-return]


def epoch_of(loader: PackedDataLoader) -> list[list[int]]:
    expected = len(loader)
    batches = [packs_of(batch) for batch in loader]
    assert len(batches) == expected
    return batches


def the_order(stored: Dataset, epoch: int = 0, **settings: Any) -> list[int]:
    """The packs of an epoch as one rank reads them."""
    data = make(stored, **settings)
    data.set_epoch(epoch)
    assert len(data) == N
    return [packs_of(packs)[0] for packs in data]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_iterators_are_independent(stored: Dataset, mixed: bool, batched: bool) -> None:
    """Of one object, interleaved, in other epochs: each yields a whole epoch."""

    def opened() -> Any:
        data = make(stored)
        data = PackedDataset.mix({data: 1.0}, rank=0, world_size=1) if mixed else data
        return PackedDataLoader(data, examples_per_step=6) if batched else data

    orders = []
    for epoch in (0, 1):
        one = opened()
        one.set_epoch(epoch)
        orders.append([packs_of(x) for x in one])
    many = opened()
    i, j = iter(many), iter(many)
    first = [packs_of(next(i)) for _ in range(3)]
    assert [packs_of(x) for x in j] == orders[0]
    many.set_epoch(1)
    k = iter(many)
    assert packs_of(next(k)) == orders[1][0]
    assert first + [packs_of(x) for x in i] == orders[0]
    assert [packs_of(x) for x in k] == orders[1][1:]
    again = opened()
    assert [
        packs_of(a)
        for a, b in zip(again, again, strict=True)
        if packs_of(a) == packs_of(b)
    ] == (orders[0])


@pytest.mark.parametrize("moved", ["epoch", "state", "nothing"])
@pytest.mark.parametrize(
    "form",
    [
        *("dataset", "mix", "batches", "steps"),
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in ("workers", "lasting")
        ),
    ],
)
def test_an_older_iterator_does_not_move_the_position(
    stored: Dataset, form: str, moved: str
) -> None:
    """What a resume gives is what the newest iterator had left, whoever else still
    runs.
    """

    def opened() -> Any:
        data = make(stored)
        if form == "mix":
            data = PackedDataset.mix({data: 1.0}, rank=0, world_size=1)
        how = {"steps": {"examples_per_step": 6}, "workers": {"num_workers": 2}}
        how["lasting"] = {"num_workers": 2, "persistent_workers": True}
        return (
            data
            if form in ("dataset", "mix")
            else PackedDataLoader(data, **how.get(form, {}))
        )

    data = opened()
    old = iter(data)
    for _ in range(3):
        next(old)
    if moved == "epoch":
        data.set_epoch(1)
    elif moved == "state":
        data.load_state_dict(data.state_dict())
    if form != "lasting":  # workers that live on serve one iterator at a time
        before = data.state_dict()
        if moved != "nothing":
            next(old)
            assert data.state_dict() == before
    new = iter(data)
    for _ in range(2):
        next(new)
    if form != "lasting":
        next(old)
    state = data.state_dict()
    left = [packs_of(x) for x in new]
    again = opened()
    again.load_state_dict(state)
    assert [packs_of(x) for x in again] == left


@pytest.mark.parametrize("workers", [0, 2])
def test_two_loaders_of_torch_share_a_dataset(stored: Dataset, workers: int) -> None:
    data = make(stored)
    one, other = (DataLoader(data, None, num_workers=workers) for _ in range(2))
    pairs = [(packs_of(a), packs_of(b)) for a, b in zip(one, other, strict=True)]
    assert [a for a, _ in pairs] == [b for _, b in pairs]
    assert sorted(pack for a, _ in pairs for pack in a) == list(range(N))


def test_workers_whose_sockets_would_have_no_room_are_refused(
    stored: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's workers wait for ever where TMPDIR is long."""
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        PackedDataLoader(make(stored), num_workers=1)
    assert len(list(PackedDataLoader(make(stored)))) == N


def test_a_framework_that_knows_samplers_moves_the_epoch(stored: Dataset) -> None:
    """Lightning's fit calls set_epoch on the `sampler` of a loader, and on nothing
    else.
    """
    loader = PackedDataLoader(make(stored))
    orders = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        orders.append([packs_of(batch) for batch in loader])
    assert len({str(order) for order in orders}) == 3
    assert all(
        sorted(p for b in order for p in b) == list(range(N)) for order in orders
    )


def test_the_order_depends_on_seed_and_epoch(stored: Dataset) -> None:
    """Every pack once; the order itself is pinned where it is computed."""
    orders = [the_order(stored), the_order(stored, 1), the_order(stored, seed=2)]
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    data = make(stored)
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        assert [packs_of(packs)[0] for packs in data] == orders[epoch]
    assert the_order(stored, shuffle=False) == list(range(N))
    unset, zero = (PackedDataset(stored.url, **seed) for seed in ({}, {"seed": 0}))
    assert [packs_of(packs) for packs in unset] == [packs_of(packs) for packs in zero]


def test_batches_hold_what_was_stored(kit: SimpleNamespace, stored: Dataset) -> None:
    examples = random_examples(2 * N)
    for batch in PackedDataLoader(make(stored), packs_per_batch=2):
        assert batch.kind == "preference"
        assert batch.num_packs <= 2
        logical = (
            batch.input_ids
            if batch.kv_index is None
            else batch.input_ids[batch.kv_index]
        )
        expected = examples.take(batch.example_ids.numpy())
        assert logical.tolist() == expected.input_ids.tolist()
        assert batch.rewards.tolist() == expected.reward.tolist()


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("world_size", "packs_per_batch"), [(1, 3), (2, 1), (3, 3), (4, 1)]
)
def test_ranks_share_one_sequence(
    stored: Dataset, world_size: int, packs_per_batch: int, drop_last: bool
) -> None:
    stride, order, seen = world_size * packs_per_batch, the_order(stored), []
    for rank in range(world_size):
        data = make(stored, rank, world_size)
        loader = PackedDataLoader(
            data, packs_per_batch=packs_per_batch, drop_last=drop_last
        )
        for g, batch in enumerate(loader):
            for j, pack in enumerate(packs_of(batch)):
                index = g * stride + j * world_size + rank
                seen.append(index)
                assert pack == order[index] if index < N else pack in order
                assert batch.weights[2 * j] == (index < N)
    padded = (
        N // stride * stride + min(N % stride, 1) * world_size
    )  # at least one for each rank
    end = N // stride * stride if drop_last else max(N, padded)
    assert sorted(seen) == list(range(end))


def test_epochs(stored: Dataset) -> None:
    loader = PackedDataLoader(make(stored))
    first = epoch_of(loader)
    assert epoch_of(loader) == first
    finished = loader.state_dict()
    loader.set_epoch(1)
    assert epoch_of(loader) != first
    resumed = PackedDataLoader(make(stored))
    resumed.load_state_dict(finished)
    resumed.set_epoch(0)
    assert len(resumed) == 0
    assert epoch_of(resumed) == []
    middle = iter(loader)
    next(middle)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.data.epoch == 1
    assert len(resumed) == N - 1
    resumed.set_epoch(1)
    assert len(resumed) == N - 1
    resumed.set_epoch(2)
    assert len(resumed) == N


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 2}, "version"),
        ({"dataset": "0" * 64}, "dataset"),
        ({"seed": 2}, "seed"),
        ({"lanes": 64}, "lanes"),
        ({"shuffle": False}, "shuffle"),
        ({"next": N + 1}, "next"),
        ({"step": -1}, "step"),
        ({"batches": 1, "cut": {"packs": 1}}, "cut"),
        ({"given": "x"}, "given"),
        ({"given": "80"}, "given"),
        ({"seed": ...}, "seed"),
    ],
)
def test_a_state_that_does_not_belong_is_refused(
    stored: Dataset, change: dict[str, Any], field: str
) -> None:
    loader = PackedDataLoader(make(stored))
    state = {k: v for k, v in {**loader.state_dict(), **change}.items() if v is not ...}
    with pytest.raises(CompatibilityError, match=f"loader state: {field}"):
        loader.load_state_dict(state)


def test_the_global_random_state_is_left_alone(stored: Dataset) -> None:
    before = torch.get_rng_state()
    epoch_of(PackedDataLoader(make(stored)))
    assert torch.equal(torch.get_rng_state(), before)


def test_rank_of_the_launcher(stored: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    early = PackedDataset(stored)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        PackedDataset(stored)
    monkeypatch.setenv("RANK", "1")
    for each in (
        early,
        PackedDataLoader(early),
    ):  # else every rank would train on all packs
        with pytest.raises(ConfigError, match="rank 1 of 2"):
            iter(each)
    assert len(list(make(stored))) == N
    data = PackedDataset(stored.url, seed=1, lanes=LANES)
    assert (data.rank, data.world_size) == (1, 2)
    assert [packs_of(p)[0] for p in data] == the_order(stored)[1::2]


STEPS_OF_FOUR = "46 examples in 12 steps of 3.8 on average, 2 to 4 (examples_per_step="


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"packs_per_batch": 2}, []),
        ({"examples_per_step": 4}, [f"{STEPS_OF_FOUR}4)"]),
        (
            {"examples_per_step": 2},
            [f"{STEPS_OF_FOUR}2)", "about examples_per_step=2 exam"],
        ),
        (
            {"gradient_accumulation_steps": 5, "drop_last": True},
            ["drop_last leaves out 6 of 46 examples"],
        ),
    ],
    ids=str,
)
def test_what_steps_hold_and_leave_out_is_said_once_on_one_rank(
    stored: Dataset,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    says: list[str],
) -> None:
    caplog.set_level(logging.INFO, "packstore")
    for rank in (1, 0):
        loader = PackedDataLoader(make(stored, rank, 2), **settings)
        assert not caplog.records
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            list(loader)
    for record, said in zip(caplog.records, says, strict=True):
        assert said in record.message


def test_the_advised_pack_size_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of packs for 4 ranks; and where none would, none is advised."""
    caplog.set_level("WARNING", "packstore")
    lengths = np.random.default_rng(0).integers(2, 30, 1000).tolist()
    records = [
        {"prompt": [5] * n, "chosen": [6] * n, "rejected": [7] * n} for n in lengths
    ]

    def warning(pack_size: int, examples_per_step: int) -> str:
        url = tmp_path / f"{pack_size}-{examples_per_step}"
        data = PackedDataset(
            packstore.pack(records, url, pack_size=pack_size), rank=0, world_size=4
        )
        caplog.clear()
        next(iter(PackedDataLoader(data, examples_per_step=examples_per_step)))
        return caplog.text

    advised = re.search(
        r"as each rank \(of 4\).* Pack with pack_size=(\d+) at", warning(2048, 64)
    )
    assert advised
    assert not warning(int(advised[1]), 64)
    assert "examples_per_step=" in warning(2048, 1)


def test_an_estimate_has_the_steps_of_a_loader(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(2, 30, 1000).tolist()
    records = [
        {"prompt": [5] * n, "chosen": [6] * n, "rejected": [7] * n} for n in lengths
    ]
    settings = {"pack_size": 1024, "layout": "concat"}
    data = packstore.pack(records, tmp_path / "packed", **settings)
    for batching in (
        {"gradient_accumulation_steps": 3},
        {"packs_per_batch": 2},
        {"examples_per_step": 40},
    ):
        (choice,) = packstore.estimate(records, **settings, **batching).choices
        plan = PackedDataset(data).plan(world_size=1, **batching)
        assert choice.steps == pytest.approx(plan.steps, rel=0.02)


def test_an_estimate_has_the_steps_of_a_training_by_default(tmp_path: Path) -> None:
    records = [{"prompt": [5], "chosen": [6] * 9, "rejected": [7] * 9}] * 1000
    (choice,) = packstore.estimate(records, pack_size=128, layout="concat").choices
    assert choice.steps == pytest.approx(1000 / 64, rel=0.1)
    (choice,) = packstore.estimate(
        records, pack_size=128, layout="concat", packs_per_batch=1
    ).choices
    assert choice.steps == choice.packs


def test_refusals(stored: Dataset, tmp_path: Any) -> None:
    with pytest.raises(DatasetNotFoundError):
        PackedDataset(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="world_size"):
        PackedDataset(stored, rank=0)
    with pytest.raises(ConfigError, match="rank"):
        make(stored, 2, 2)
    with pytest.raises(ConfigError, match="PackedDataLoader"):
        next(iter(DataLoader(PackedDataLoader(make(stored)), None)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="state"):
        PackedDataLoader(make(stored)).load_state_dict([])  # type: ignore[arg-type]
    for settings, mentioned in (
        ({"packs_per_batch": 0}, "packs_per_batch"),
        ({"num_workers": -1}, "num_workers"),
        ({"drop_last": "keep"}, "drop_last"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"packs": 2}, "'packs'"),
        ({"packs_per_batch": 1, "tokens_per_batch": 99}, "tokens_per_batch"),
        (
            {"examples_per_step": 9, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps",
        ),
        ({"tokens_per_batch": 20}, "tokens_per_batch=20"),
    ):
        with pytest.raises(ConfigError, match=mentioned):
            PackedDataLoader(make(stored), **settings)  # type: ignore[arg-type]


def test_packs_of_too_many_keys_are_refused(
    kit: SimpleNamespace, stored: Dataset, tmp_path: Path
) -> None:
    """Before anything is read: keys take memory."""
    most_keys = stored.manifest.statistics.most_keys
    assert len(make(stored, max_keys=most_keys)) == N
    with pytest.raises(UnsupportedFormatError, match=f"max_keys={most_keys}"):
        make(stored, max_keys=most_keys - 1)
    with pytest.raises(ConfigError, match="max_keys"):
        PackedDataset(make(stored).stream, max_keys=most_keys)

    # One prompt of 300 tokens, and 40 answers of one.
    prompt = np.arange(300) % kit.VOCAB
    ids = np.concatenate([[*prompt, i] for i in range(40)]).astype(np.int32)
    rows = Examples(
        input_ids=ids,
        supervised=np.arange(len(ids)) % 301 == 300,
        sequence_offsets=np.arange(0, len(ids) + 1, 301),
        example_offsets=np.arange(41),
        reward=np.zeros(40, np.float32),
        example_ids=np.arange(40),
    )
    packs = fill(rows, np.array([0, 40]), "shared_prefix", share="pack")
    shared = kit.write(str(tmp_path / "shared"), packs, "sft", "shared_prefix")
    assert shared.manifest.statistics.most_keys == 40 * 301
    with pytest.raises(UnsupportedFormatError, match="max_keys"):
        PackedDataset(shared)
    (batch,) = PackedDataLoader(PackedDataset(shared, max_keys=40 * 301))
    assert len(batch.kv_index) == 40 * 301


@pytest.fixture(scope="module")
def varied(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """96 packs of one to three pairs, in turn."""
    packs = kit.packed(random_examples(192), [1, 2, 3] * 32, "concat")
    data: Dataset = kit.write(str(tmp_path_factory.mktemp("data") / "ds"), packs)
    return data


def first_ids(data: Any) -> list[int]:
    return [int(packs.example_ids[0]) for packs in data]


def test_stratified_order(varied: Dataset) -> None:
    """Every pack once; a position of another order is refused."""
    plain, spread = PackedDataset(varied), PackedDataset(varied, shuffle="stratified")
    assert sorted(first_ids(spread)) == sorted(first_ids(plain))
    assert first_ids(spread) != first_ids(plain)
    for a, b in ((plain, spread), (spread, plain)):
        with pytest.raises(CompatibilityError, match="shuffle"):
            b.load_state_dict(a.state_dict())
    with pytest.raises(ConfigError, match="shuffle"):
        PackedDataset(varied, shuffle="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "context",
    [
        "fork",
        pytest.param("forkserver", marks=pytest.mark.slow),  # of Python 3.14
        pytest.param("spawn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
def test_workers_read_after_this_process_has_read(
    varied: Dataset, context: str
) -> None:
    """Whatever is open here, with threads in the middle of reading, the workers begin
    afresh.
    """
    data = PackedDataset(varied, lanes=4)
    expected = first_ids(data)
    half_read = iter(PackedDataset(varied, lanes=4))
    next(half_read)
    next(half_read)
    loader: Any = DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context=context
    )
    assert sorted(first_ids(loader)) == sorted(expected)
    assert len(list(half_read)) == 94
