"""The plan: checks of its input, order of packs, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from children import run_python

from packstore import plan
from packstore.config import PlanConfig
from packstore.errors import ConfigError, InputError, UnknownNameError


@pytest.mark.parametrize(
    ("lengths", "mentioned"),
    [
        ([3, 0], r"lengths\[1\]"),
        ([3, -4], r"lengths\[1\]"),
        ([3, 4, 11], r"lengths\[2\]"),
        (np.array([2**40]), r"lengths\[0\]"),
        ([1.0, 2.0], "lengths"),
        ([[1], [2]], "lengths"),
        (3, "lengths"),
        ([True], "lengths"),
    ],
)
def test_what_is_no_length_gets_a_sentence(lengths: object, mentioned: str) -> None:
    with pytest.raises(InputError, match=mentioned) as error:
        plan(lengths, pack_size=10)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_settings_without_meaning() -> None:
    with pytest.raises(UnknownNameError, match="'pool'"):
        plan([1], strategy="pol")
    with pytest.raises(ConfigError, match="pack_size"):
        plan([1], pack_size=10**9)


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_examples_no_packs(shuffle: bool) -> None:
    made = plan([], shuffle=shuffle)
    assert (made.num_packs, made.num_examples, made.tokens, made.fill_rate) == (
        0,
        0,
        0,
        0,
    )
    assert json.loads(json.dumps(made.statistics()))["num_packs"] == 0


@pytest.mark.parametrize("strategy", ["pool", "sequential"])
def test_shuffle_draws_examples_and_packs_and_else_both_keep_their_order(
    strategy: str,
) -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 5000)
    kept = plan(lengths, pack_size=4096, strategy=strategy, shuffle=False)
    assert np.abs(kept.order - np.arange(5000)).mean() < 200
    drawn = plan(lengths, pack_size=4096, strategy=strategy)
    assert np.abs(drawn.order - np.arange(5000)).mean() > 1000
    for made in (kept, drawn):
        np.testing.assert_array_equal(np.sort(made.order), np.arange(5000))
        tokens = [
            lengths[pack].sum() for pack in np.split(made.order, made.offsets[1:-1])
        ]
        np.testing.assert_array_equal(made.pack_tokens, tokens)
    assert not np.array_equal(drawn.order, plan(lengths, pack_size=4096, seed=1).order)


def test_statistics_are_those_of_the_packs() -> None:
    made = plan([4, 4, 2, 9, 5], pack_size=10, strategy="sequential", shuffle=False)
    expected = {
        "strategy": "sequential",
        "seed": 0,
        "shuffle": False,
        "pack_size": 10,
        "pad_to_multiple": 1,
        "num_packs": 3,
        "num_examples": 5,
        "tokens": 24,
        "aligned_tokens": 24,
        "fill_rate": 24 / 30,
        "aligned_fill_rate": 24 / 30,
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
    assert json.loads(json.dumps(made.statistics())) == expected
    np.testing.assert_array_equal(made.pack_tokens, [10, 9, 5])
    how = {"pack_size": 16, "strategy": "sequential", "shuffle": False}
    padded = plan([4, 4, 2, 9, 5], config=PlanConfig(pad_to_multiple=4, **how))
    assert (padded.tokens, padded.aligned_tokens, padded.aligned_fill_rate) == (
        24,
        32,
        32 / 48,
    )
    np.testing.assert_array_equal(padded.pack_tokens, [12, 12, 8])
    assert padded.statistics()["megatron_bridge"]["min_packed_seqlen"] == 8


@pytest.mark.parametrize("cache", ["writable", "unwritable"])
def test_many_lengths_are_planned_compiled_and_with_any_cache(
    cache: str, tmp_path: Path
) -> None:
    """As in a container with a read-only file system, where numba finds no folder."""
    find_no_folder = (
        "from numba.core import caching\ncaching.CacheImpl._locator_classes = []\n"
    )
    code = (
        f"{find_no_folder if cache == 'unwritable' else ''}"
        "import sys, packstore\n"
        "plan = packstore.plan([5] * 20_000, pack_size=100)\n"
        "print(plan.num_packs, 'numba' in sys.modules)"
    )
    done = run_python("-c", code, env={"NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.stdout.split() == ["1000", "True"], done.stderr
    assert any(tmp_path.iterdir()) is (cache == "writable")
