"""Every strategy of the registry: what must hold for all, and what each promises."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.errors import MissingExtraError
from packstore.format import seeds
from packstore.format.arrays import Int32, Int64
from packstore.pack.algorithms import STRATEGIES, VERSIONS
from packstore.pack.algorithms.pool import SPAN
from packstore.pack.bounds import lower_bound
from packstore.pack.plan import plan
from packstore.pack.statistics import design_effect, intraclass_correlation

ALL = pytest.mark.parametrize("name", STRATEGIES.names())


def run(name: str, lengths: list[int] | Int32, capacity: int, seed: int = 0) -> tuple[Int32, Int64]:
    return STRATEGIES.load(name)(np.asarray(lengths, np.int32), capacity, seed)


def check(lengths: list[int] | Int32, capacity: int, order: Int32, offsets: Int64) -> None:
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
    """Lengths of many shapes: wide, narrow, few distinct ones, long ones."""
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


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in lengths:
        for pack in packs:
            if sum(pack) + length <= capacity:
                pack.append(length)
                break
        else:
            packs.append([length])
    return packs


def best_fit(lengths: list[int], capacity: int) -> int:
    room: list[int] = []
    for length in lengths:
        fitting = [r for r in room if r >= length]
        if fitting:
            room.remove(min(fitting))
            room.append(min(fitting) - length)
        else:
            room.append(capacity - length)
    return len(room)


@ALL
@settings(deadline=None, max_examples=60)
@given(case=cases(), seed=st.integers(0, 3))
def test_every_example_is_in_one_pack_that_is_not_too_full(
    name: str, case: tuple[list[int], int], seed: int
) -> None:
    lengths, capacity = case
    order, offsets = run(name, lengths, capacity, seed)
    check(lengths, capacity, order, offsets)
    assert lower_bound(np.asarray(lengths, np.int32), capacity) <= len(offsets) - 1


@ALL
@pytest.mark.parametrize("seed", range(12))
def test_larger_cases(name: str, seed: int) -> None:
    lengths, capacity = random_case(seed)
    check(lengths, capacity, *run(name, lengths, capacity, seed))


@ALL
def test_the_seed_decides(name: str) -> None:
    lengths = pairs(600, 0.8, 20_000)
    order, offsets = run(name, lengths, 4096, 7)
    for a, b in zip((order, offsets), run(name, lengths, 4096, 7), strict=True):
        np.testing.assert_array_equal(a, b)
    same = np.array_equal(order, run(name, lengths, 4096, 8)[0])
    assert same == (name in {"auto", "pool", "sequential", "none"})


PLANS = {
    "pool-1": "b19281a022ed2d3b",
    "best_fit_decreasing-1": "00eed47b6aafec7b",
    "exact_fill-2": "72f73c549176d510",
    "first_fit_decreasing-1": "8b5dec1d43fcf0eb",
    "first_fit_shuffle-1": "30320aa0099afdc8",
    "sequential-1": "fdc3aa8c4d87a4e7",
    "none-1": "4e14930933844d1f",
}


@pytest.mark.parametrize("algorithm", PLANS)
def test_a_version_of_an_algorithm_makes_the_same_plans_for_ever(algorithm: str) -> None:
    """Else its number in ``VERSIONS`` must grow, and the changelog (*Format*) say so."""
    name, version = algorithm.rsplit("-", 1)
    assert VERSIONS.get(name, 1) == int(version)
    digest = hashlib.sha256()
    for seed in range(40):
        for array in run(name, *random_case(seed), seed):
            digest.update(array.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == PLANS[algorithm]


@ALL
@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_only_full_examples(name: str, n: int) -> None:
    order, offsets = run(name, [50] * n, 50)
    check([50] * n, 50, order, offsets)
    assert len(offsets) == n + 1


@ALL
@pytest.mark.parametrize("n", [1, 49, 50, 51, 1000])
def test_only_examples_of_one_token(name: str, n: int) -> None:
    order, offsets = run(name, [1] * n, 50)
    check([1] * n, 50, order, offsets)
    assert len(offsets) - 1 == (n if name == "none" else -(-n // 50))


@pytest.mark.parametrize("seed", range(24))
def test_first_fit_decreasing_makes_the_packs_of_its_definition(seed: int) -> None:
    lengths, capacity = random_case(seed)
    order, offsets = run("first_fit_decreasing", lengths, capacity)
    ours = [p.tolist() for p in np.split(lengths[order], offsets[1:-1])]
    assert ours == first_fit(sorted(lengths.tolist(), reverse=True), capacity)


@pytest.mark.parametrize("seed", range(24))
def test_first_fit_shuffle_makes_the_packs_of_its_definition(seed: int) -> None:
    lengths, capacity = random_case(seed)
    order, offsets = run("first_fit_shuffle", lengths, capacity, seed)
    ours = [p.tolist() for p in np.split(lengths[order], offsets[1:-1])]
    shuffled = lengths[seeds.permutation(len(lengths), seed, "first_fit_shuffle")]
    assert ours == first_fit(shuffled.tolist(), capacity)


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_decreasing_makes_as_many_packs_as_its_definition(seed: int) -> None:
    lengths, capacity = random_case(seed)
    _, offsets = run("best_fit_decreasing", lengths, capacity)
    assert len(offsets) - 1 == best_fit(sorted(lengths.tolist(), reverse=True), capacity)


def test_sequential_keeps_the_order_and_starts_a_pack_where_the_next_does_not_fit() -> None:
    order, offsets = run("sequential", [3, 3, 4, 1, 9, 10, 1], 10)
    np.testing.assert_array_equal(order, np.arange(7))
    np.testing.assert_array_equal(offsets, [0, 3, 5, 6, 7])


@pytest.mark.parametrize("name", ["best_fit_decreasing", "exact_fill", "first_fit_decreasing"])
def test_equal_lengths_are_spread_over_the_input(name: str) -> None:
    """A sorted input (neighbours alike) must not give packs of neighbours."""
    n = 6000
    order, _ = run(name, [25] * n, 50)
    distance = np.abs(np.diff(order.reshape(-1, 2)))
    assert (distance > 10).mean() > 0.99


@pytest.mark.parametrize(("median", "sigma"), [(600, 0.8), (1300, 0.4)], ids=["dpo", "dpolong"])
def test_the_pool_is_tight_and_random_and_moves_nothing_far(median: float, sigma: float) -> None:
    lengths = pairs(median, sigma)
    made = plan(lengths, pack_size=4096, strategy="pool", shuffle=False)
    assert made.fill_rate >= 0.9995
    by_pack = np.log(made.lengths[made.order])
    icc = intraclass_correlation(by_pack, made.offsets)
    assert icc is not None
    assert -0.15 <= icc <= 0.10
    effect = design_effect(by_pack, made.offsets, 64)
    assert effect is not None
    assert effect <= 1.2
    order, _ = run("pool", lengths, 4096)
    assert np.abs(order - np.arange(len(order))).max() <= 4 * 8192


def test_exact_fill_is_tighter_than_best_fit_where_a_pack_holds_three() -> None:
    lengths = pairs(1300, 0.4)
    packs = {n: len(run(n, lengths, 4096)[1]) for n in ("exact_fill", "best_fit_decreasing")}
    assert packs["exact_fill"] < packs["best_fit_decreasing"]


@pytest.mark.parametrize(("median", "sigma"), [(600, 0.8), (1300, 0.4)], ids=["dpo", "dpolong"])
@pytest.mark.parametrize("name", ["pool", "auto", "best_fit_decreasing", "exact_fill"])
def test_many_partitions_need_hardly_more_packs_than_one(
    name: str, median: float, sigma: float
) -> None:
    number, n = (16, 250_000) if name == "auto" else (64, 1_000_000)
    lengths = pairs(median, sigma, n)
    one, *parts = (
        len(run(name, part, 4096)[1]) - 1 for part in (lengths, *np.array_split(lengths, number))
    )
    assert sum(parts) <= 1.001 * one


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


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", STRATEGIES.names())
def test_many_examples(name: str, seed: int) -> None:
    """More than the pool has slots, of lengths among which long ones pile up."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(SPAN, 4 * SPAN))
    mixed = np.where(rng.random(n) < 0.7, rng.normal(250, 80, n), rng.normal(2600, 490, n))
    lengths = np.clip(mixed, 1, 4096).astype(np.int32)
    check(lengths, 4096, *run(name, lengths, 4096, seed))


@pytest.mark.parametrize(
    ("low", "high"), [(0.26, 0.48), (0.24, 0.36)], ids=["narrow", "nearly uniform"]
)
def test_column_generation_is_near_the_optimum_where_others_waste(low: float, high: float) -> None:
    lengths = np.random.default_rng(0).uniform(low * 4096, high * 4096, 100_000).astype(np.int32)
    packs = {n: len(run(n, lengths, 4096)[1]) - 1 for n in ("column_generation", "exact_fill")}
    assert packs["column_generation"] < 0.999 * packs["exact_fill"]
    order, offsets = run("column_generation", lengths, 4096)
    check(lengths, 4096, order, offsets)


@pytest.mark.parametrize("seed", range(8))
def test_column_generation_never_makes_more_packs_than_exact_fill(seed: int) -> None:
    lengths, capacity = random_case(seed)
    tight, exact = (len(run(n, lengths, capacity)[1]) for n in ("column_generation", "exact_fill"))
    assert tight <= exact


LENGTHS = {
    "pairs": (lambda rng: rng.lognormal(np.log(600), 0.8, 50_000), "pool"),
    "half over half": (lambda rng: rng.integers(1, 4097, 50_000), "exact_fill"),
    "narrow": (lambda rng: rng.uniform(1065, 1966, 50_000), "column_generation"),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_auto_takes_what_suits_the_lengths(case: str) -> None:
    draw, expected = LENGTHS[case]
    lengths = np.clip(draw(np.random.default_rng(0)), 1, 4096).astype(np.int32)
    found = plan(lengths, pack_size=4096, strategy="auto")
    assert (found.strategy, found.chosen) == ("auto", expected)
    assert found.statistics()["chosen"] == expected
    assert (
        found.num_packs <= plan(lengths, pack_size=4096, strategy="first_fit_decreasing").num_packs
    )


def test_auto_without_the_solver_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    lengths = np.random.default_rng(0).uniform(1065, 1966, 5000).astype(np.int32)
    found = plan(lengths, pack_size=4096, strategy="auto")
    assert found.chosen in ("pool", "exact_fill")
    assert "pip install 'packstore[lp]'" in caplog.text
    with pytest.raises(MissingExtraError, match="highspy"):
        run("column_generation", lengths, 4096)
