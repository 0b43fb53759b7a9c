"""Every strategy of the registry: what must hold for all, and what each promises."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore import plan
from packstore.format import Int32, Int64, seeds
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.algorithms.pool import SPAN

ALL = pytest.mark.parametrize("name", STRATEGIES)


def run(
    name: str, lengths: list[int] | Int32, capacity: int, seed: int = 0
) -> tuple[Int32, Int64]:
    return STRATEGIES.load(name)(np.asarray(lengths, np.int32), capacity, seed)


def check(
    lengths: list[int] | Int32, capacity: int, order: Int32, offsets: Int64
) -> None:
    """A partition into packs that are neither empty nor too full."""
    lengths = np.asarray(lengths, np.int64)
    assert (order.dtype, offsets.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(np.sort(order), np.arange(len(lengths)))
    assert offsets[0] == 0
    assert offsets[-1] == len(lengths)
    assert (np.diff(offsets) > 0).all()
    if len(lengths):
        assert np.add.reduceat(lengths[order], offsets[:-1]).max() <= capacity


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths of many shapes: wide, narrow, few distinct ones, equal ones, full
    ones.
    """
    capacity = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 100, 4095, 4096, 5000]))
    low = draw(st.integers(1, capacity))
    high = draw(st.integers(low, capacity))
    return draw(st.lists(st.integers(low, high), max_size=150)), capacity


def random_case(seed: int) -> tuple[Int32, int]:
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([7, 64, 100, 1000, 4096, 40_000]))
    n = int(rng.integers(1, 1500))
    shape = seed % 4
    if shape == 0:
        lengths = rng.integers(1, capacity + 1, n)
    elif shape == 1:
        lengths = rng.lognormal(np.log(capacity / 4), 0.7, n)
    elif shape == 2:
        lengths = rng.choice(rng.integers(1, capacity + 1, 4), n)
    else:
        lengths = rng.uniform(0.2 * capacity, 0.5 * capacity, n)
    return np.clip(lengths, 1, capacity).astype(np.int32), capacity


def pairs(median: float, sigma: float, n: int = 100_000) -> Int32:
    """Lengths as preference pairs have them, packs of 4096."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, n)
    return np.clip(np.rint(lengths), 1, 4096).astype(np.int32)


def plain_packs(
    name: str, lengths: list[int], capacity: int, seed: int
) -> list[list[int]]:
    """The definition of a strategy: the lengths in each pack."""
    if name == "first_fit_decreasing":
        lengths = sorted(lengths, reverse=True)
    if name == "first_fit_shuffle":
        lengths = [lengths[i] for i in seeds.permutation(len(lengths), seed, name)]
    packs: list[list[int]] = []
    for length in lengths:
        tried = {"sequential": packs[-1:], "none": []}.get(name, packs)
        fitting = (pack for pack in tried if sum(pack) + length <= capacity)
        if (pack := next(fitting, None)) is None:
            packs.append(pack := [])
        pack.append(length)
    return packs


@ALL
@settings(deadline=None, max_examples=80)
@given(case=cases(), seed=st.integers(0, 3))
def test_every_example_is_in_one_pack_and_packs_are_those_of_the_definition(
    name: str, case: tuple[list[int], int], seed: int
) -> None:
    lengths, capacity = case
    order, offsets = run(name, lengths, capacity, seed)
    check(lengths, capacity, order, offsets)
    if name != "pool" and lengths:
        packs = np.split(np.array(lengths)[order], offsets[1:-1])
        assert [p.tolist() for p in packs] == plain_packs(name, lengths, capacity, seed)


PLANS = {
    "pool": "b19281a022ed2d3b",
    "first_fit_decreasing": "8b5dec1d43fcf0eb",
    "first_fit_shuffle": "30320aa0099afdc8",
    "sequential": "fdc3aa8c4d87a4e7",
    "none": "4e14930933844d1f",
}


@ALL
@pytest.mark.parametrize("min_rows", [0, 1 << 40], ids=["compiled", "in Python"])
def test_a_strategy_makes_the_same_plans_for_ever(
    name: str, min_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the changelog (*Format*) must say so."""
    monkeypatch.setattr("packstore.pack.jit.MIN_ROWS", min_rows)
    digest = hashlib.sha256()
    for seed in range(40):
        lengths, capacity = random_case(seed)
        order, offsets = run(name, lengths, capacity, seed)
        check(lengths, capacity, order, offsets)
        for array in (order, offsets):
            digest.update(array.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == PLANS[name]


def test_equal_lengths_are_spread_over_the_input() -> None:
    """A sorted input (neighbours alike) must not give packs of neighbours."""
    order, _ = run("first_fit_decreasing", [25] * 6000, 50)
    distance = np.abs(np.diff(order.reshape(-1, 2)))
    assert (distance > 10).mean() > 0.99


@pytest.mark.parametrize(
    ("median", "sigma"), [(600, 0.8), (1300, 0.4)], ids=["dpo", "dpolong"]
)
def test_the_pool_is_tight_moves_nothing_far_and_does_not_sort(
    median: float, sigma: float
) -> None:
    lengths = pairs(median, sigma)
    made = plan(lengths, pack_size=4096, shuffle=False)
    assert made.fill_rate >= 0.9995
    assert np.abs(made.order - np.arange(len(lengths))).max() <= SPAN
    logs = np.log(lengths)
    steps = made.offsets[::64][
        :-20
    ]  # of 64 packs each; those at the end of the input are sorted
    totals = np.diff(np.append(0, np.cumsum(logs[made.order]))[steps])
    by_chance = logs.var() * len(totals) / steps[-1]
    assert (
        0.7 < (totals / np.diff(steps)).var() / by_chance < 1.3
    )  # sorted: more than 100
    parts = [plan(part, pack_size=4096) for part in np.array_split(lengths, 8)]
    assert sum(part.num_packs for part in parts) <= 1.002 * made.num_packs


def test_the_look_ahead_stays_bounded_while_old_examples_wait() -> None:
    """Each pack takes one of the first 8000, and many of those behind them."""
    lengths = np.array([4000] * 8000 + [1] * 200_000, np.int32)
    check(lengths, 4096, *run("pool", lengths, 4096))


@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("beyond", range(-3, 4))
@pytest.mark.parametrize("last", [[10, 11], [11, 10], [10, 11, 12, 3], [60, 1, 30, 2]])
def test_the_pool_runs_empty_where_its_slots_begin_anew(
    last: list[int], beyond: int, laps: int
) -> None:
    lengths = [100] * (laps * SPAN + beyond - 2) + last
    check(lengths, 100, *run("pool", lengths, 100))
