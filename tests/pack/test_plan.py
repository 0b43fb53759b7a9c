"""The plan: checks of its input, order of packs, bounds, and what it reports."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from packstore.config import PackConfig, PlanConfig
from packstore.errors import ConfigError, InputError, UnknownNameError
from packstore.format.arrays import Int32
from packstore.pack.bounds import fekete_schepers, lower_bound, martello_toth
from packstore.pack.order import ORDERS, STEP
from packstore.pack.plan import plan
from packstore.pack.statistics import design_effect, intraclass_correlation, same_decile


def lognormal(n: int = 30_000) -> Int32:
    lengths = np.random.default_rng(1).lognormal(np.log(600), 0.8, n)
    return np.clip(lengths, 1, 4096).astype(np.int32)


def test_defaults_come_from_the_config() -> None:
    made, default = plan([5, 6]), PlanConfig()
    assert made.pack_size == default.pack_size
    assert (made.strategy, made.seed, made.pack_order) == ("pool", default.seed, "shuffled")
    config = PackConfig(pack_size=100, strategy="none", seed=3, pack_order="plain")
    made = plan([5, 6], config=config, seed=4)
    assert (made.pack_size, made.strategy, made.pack_order, made.seed) == (100, "none", "plain", 4)


@pytest.mark.parametrize("kind", [list, tuple, np.uint16, np.int64, "readonly", "strided"])
def test_any_array_of_whole_numbers_will_do(kind: object) -> None:
    values = [5, 3, 8, 1]
    if kind == "strided":
        lengths = np.array([5, 0, 3, 0, 8, 0, 1, 0], np.int32)[::2]
    elif kind == "readonly":
        lengths = np.array(values, np.int32)
        lengths.flags.writeable = False
    elif kind in (list, tuple):
        lengths = kind(values)  # type: ignore[operator]
    else:
        lengths = np.array(values, kind)  # type: ignore[call-overload]
    made = plan(lengths, pack_size=10)
    np.testing.assert_array_equal(made.lengths, values)
    assert made.tokens == 17


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([3, 0], "lengths[1]: each example must have 1 to 10 tokens (pack_size); found 0. Drop"),
        ([3, -4], "lengths[1]: each example must have 1 to 10 tokens (pack_size); found -4. Drop"),
        ([3, 4, 11], "lengths[2]: each example must have 1 to 10 tokens (pack_size); found 11."),
        (np.array([2**40]), "found 1099511627776."),
        ([1.0, 2.0], "lengths: they must be a list of whole numbers; found 1 dimensions of float"),
        ([[1], [2]], "found 2 dimensions of int64."),
        (3, "found 0 dimensions of int64."),
        ([True], "found 1 dimensions of bool."),
    ],
)
def test_what_is_no_length_gets_a_sentence(lengths: object, text: str) -> None:
    with pytest.raises(InputError) as error:
        plan(lengths, pack_size=10)  # type: ignore[arg-type]
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_without_meaning() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown strategy 'pol'.*Did you mean 'pool'"):
        plan([1], strategy="pol")
    with pytest.raises(ConfigError, match="pack_order must be one of"):
        plan([1], pack_order="random")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pack_size must be at least 2; found 1"):
        plan([1], pack_size=1)
    with pytest.raises(ConfigError, match="pack_size must be at most 16777216"):
        plan([1], pack_size=10**9)


@pytest.mark.parametrize("order", ORDERS)
def test_no_examples_no_packs(order: str) -> None:
    made = plan([], pack_order=order)  # type: ignore[arg-type]
    assert (made.num_packs, made.num_examples, made.tokens, made.lower_bound) == (0, 0, 0, 0)
    assert made.fill_rate == 0
    assert json.loads(json.dumps(made.statistics()))["num_packs"] == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 40, 5000])
def test_the_order_of_packs_changes_no_pack(order: str, n: int) -> None:
    lengths = lognormal(n)
    plain = plan(lengths, pack_size=4096, pack_order="plain")
    made = plan(lengths, pack_size=4096, pack_order=order)  # type: ignore[arg-type]
    packs = [tuple(p) for p in np.split(made.order, made.offsets[1:-1])]
    before = [tuple(p) for p in np.split(plain.order, plain.offsets[1:-1])]
    assert sorted(packs) == sorted(before)
    assert (packs == before) == (order == "plain" or len(packs) == 1)
    again = plan(lengths, pack_size=4096, pack_order=order, seed=1)  # type: ignore[arg-type]
    assert np.array_equal(again.order, made.order) == (n == 1)


def test_stratified_steps_have_nearly_the_same_number_of_examples() -> None:
    spread = {}
    for order in ORDERS:
        made = plan(
            lognormal(),
            pack_size=4096,
            strategy="best_fit_decreasing",
            pack_order=order,  # type: ignore[arg-type]
        )
        number = np.diff(made.offsets[::STEP])
        spread[order] = number.std() / number.mean()
        if order == "stratified":
            effect = made.statistics()["randomness"]["design_effect"]
            assert effect <= 1.1
    assert 5 * spread["stratified"] < spread["shuffled"] < spread["plain"]


def test_a_stratified_step_has_one_pack_of_each_stratum() -> None:
    rng = np.random.default_rng(0)
    examples, squares = rng.integers(1, 9, 640), rng.permutation(640)
    order = ORDERS["stratified"](examples, squares, 0)
    stratum = np.empty(640, np.int64)
    stratum[np.lexsort((squares, examples))] = np.arange(640) // 10
    steps = stratum[order].reshape(10, STEP)
    np.testing.assert_array_equal(np.sort(steps, axis=1), np.tile(np.arange(STEP), (10, 1)))
    assert len(np.unique(steps, axis=0)) == 10


def test_statistics_are_those_of_the_packs() -> None:
    made = plan([4, 4, 2, 9, 5], pack_size=10, strategy="sequential", pack_order="plain",
                shuffle=False)  # fmt: skip
    found = json.loads(json.dumps(made.statistics()))
    assert found.pop("randomness")["design_effect"] is None
    assert found == {
        "strategy": "sequential",
        "chosen": "sequential",
        "algorithm": "sequential-1",
        "seed": 0,
        "shuffle": False,
        "pack_order": "plain",
        "pack_size": 10,
        "pad_to_multiple": 1,
        "num_packs": 3,
        "num_examples": 5,
        "tokens": 24,
        "aligned_tokens": 24,
        "fill_rate": 24 / 30,
        "aligned_fill_rate": 24 / 30,
        "lower_bound": 3,
        "gap": 0,
        "examples_per_pack": {"min": 1, "mean": 5 / 3, "max": 3},
        "megatron_bridge": {
            "max_samples_per_bin": 3,
            "dataset_max_seqlen": 9,
            "packing_factor": 1.67,
            "packing_efficiency": 80.0,
            "pack_size": 10,
            "min_packed_seqlen": 5,
        },
    }
    np.testing.assert_array_equal(made.pack_tokens, [10, 9, 5])


def test_intraclass_correlation_of_known_groups() -> None:
    offsets = np.array([0, 2, 4, 6])
    assert intraclass_correlation(np.array([1.0, 1, 5, 5, 9, 9]), offsets) == pytest.approx(1)
    assert intraclass_correlation(np.array([1.0, 9, 9, 1, 1, 9]), offsets) == pytest.approx(-1)
    # By hand: mean squares 8/3 between and 2 within, groups of 2.
    value = intraclass_correlation(np.array([1.0, 3, 3, 5, 3, 5]), offsets)
    assert value == pytest.approx((8 / 3 - 2) / (8 / 3 + 2))
    assert intraclass_correlation(np.ones(6), offsets) is None
    assert intraclass_correlation(np.arange(3.0), np.arange(4)) is None


def test_same_decile_counts_pairs() -> None:
    lengths = np.arange(1, 21, dtype=np.int32)  # two lengths in each decile
    assert same_decile(lengths, np.arange(0, 21, 2)) == 1
    assert same_decile(lengths, np.array([0, 20])) == pytest.approx(20 / (20 * 19))
    assert same_decile(lengths, np.arange(21)) is None


def test_design_effect_of_sorted_and_shuffled_packs() -> None:
    values = np.random.default_rng(0).normal(size=64_000)
    offsets = np.arange(0, 64_001, 5)
    assert design_effect(values, offsets, 64) == pytest.approx(1, abs=0.25)
    sorted_effect = design_effect(np.sort(values), offsets, 64)
    assert sorted_effect is not None
    assert sorted_effect > 100


def fewest_packs(lengths: tuple[int, ...], capacity: int) -> int:
    """By trying everything."""

    def fits(left: tuple[int, ...], rooms: tuple[int, ...]) -> bool:
        if not left:
            return True
        return any(
            fits(left[1:], (*rooms[:i], room - left[0], *rooms[i + 1 :]))
            for i, room in enumerate(rooms)
            if room >= left[0] and room not in rooms[:i]
        )

    return next(p for p in itertools.count(0) if fits(lengths, (capacity,) * p))


def test_no_bound_is_over_the_best_possible() -> None:
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(300):
        capacity = int(rng.integers(2, 30))
        lengths = rng.integers(1, capacity + 1, rng.integers(1, 8))
        best = fewest_packs(tuple(sorted(lengths.tolist(), reverse=True)), capacity)
        bound = lower_bound(lengths.astype(np.int32), capacity)
        assert -(-int(lengths.sum()) // capacity) <= bound <= best
        reached += bound == best
    assert reached > 280


def test_bounds_of_known_cases() -> None:
    def counts(*lengths: int) -> np.ndarray:
        return np.bincount(lengths, minlength=101)

    assert martello_toth(counts(*[51] * 10), 100) == 10
    assert martello_toth(counts(*[60] * 4, *[41] * 4), 100) == 6
    assert fekete_schepers(counts(*[34] * 9), 100) == 5
    assert fekete_schepers(counts(*[26] * 9), 100) == 3
