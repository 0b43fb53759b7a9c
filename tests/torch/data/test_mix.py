"""Mixes: shares at every prefix, whole passes, one sequence for any ranks, and what is
refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore import Dataset
from packstore.errors import CompatibilityError, ConfigError
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset, SideWriter
from packstore.torch.data import MixOrder

ALL: Any = {"stopping_strategy": "all_exhausted"}
ALONE = {"rank": 0, "world_size": 1}


def rates_of(weights: list[float]) -> np.ndarray:
    return np.array(weights) / np.sum(weights)


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7),
    st.sampled_from([1, 8]),
    st.integers(0, 20000),
)
@settings(max_examples=40, deadline=None)
def test_each_source_has_its_share_of_every_prefix(
    weights: list[float], turns: int, far: int
) -> None:
    rates, n = rates_of(weights), 3000
    sources, numbers = MixOrder(rates, turns).locate(np.arange(n))
    of_source = sources[:, None] == np.arange(len(rates))
    shares = np.arange(1, n + 1)[:, None] * rates
    off = np.abs(of_source.cumsum(0) - shares).max()
    assert off < (1 + len(rates) / 2) * (1 if turns == 1 else 2)
    for source in range(len(rates)):
        mine = numbers[sources == source]
        assert len({*mine.tolist()}) == len(mine)
        if turns == 1:
            assert mine.tolist() == list(range(len(mine)))
    assert (numbers % turns == np.arange(n) % turns).all()  # separate lanes for 8 ranks
    at = np.arange(far, far + 50)  # without what is before
    whole = MixOrder(rates, turns).locate(np.arange(far + 50))
    for part, of_all in zip(MixOrder(rates, turns).locate(at), whole, strict=True):
        assert part.tolist() == of_all[far:].tolist()


@given(
    st.lists(
        st.tuples(st.floats(0.05, 20), st.integers(1, 60)), min_size=1, max_size=5
    ),
    st.sampled_from([1, 8]),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_ends_when_the_first_source_repeats_or_all_came(
    parts: list[tuple[float, int]], turns: int
) -> None:
    lengths = np.array([length + turns for _, length in parts])
    order = MixOrder(rates_of([weight for weight, _ in parts]), turns)
    for strategy in ("first_exhausted", "all_exhausted"):
        n = order.length(lengths, strategy)
        sources, numbers = order.locate(np.arange(n + 1))
        repeats = numbers >= lengths[sources]
        if strategy == "first_exhausted":
            assert not repeats[:n].any()
            assert repeats[n]
        else:
            fresh = {*zip(sources[:n].tolist(), numbers[:n].tolist(), strict=True)}
            every = {(s, i) for s, length in enumerate(lengths) for i in range(length)}
            assert every <= fresh
            assert (int(sources[n - 1]), int(numbers[n - 1])) in every


def test_the_order_is_fixed_for_good() -> None:
    """A saved position must mean the same in every later release."""
    order = MixOrder(rates_of([3, 2, 1]), 8)
    assert "".join(map(str, order.locate(np.arange(24))[0])) == FIRST
    digest = hashlib.sha256()
    for turns in (1, 8):
        for array in MixOrder(rates_of([5, 3.5, 0.01, 1, 1]), turns).locate(
            np.arange(20000)
        ):
            digest.update(array.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == DIGEST


FIRST = "000102101120100120100102"
DIGEST = "4396da92db814791"


@pytest.fixture(scope="module")
def stored(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> list[Dataset]:
    """Two datasets, of both layouts, with two and with four examples a pack."""
    folder = tmp_path_factory.mktemp("mix")
    made = []
    for layout, n, each in (("concat", 23, 2), ("shared_prefix", 9, 4)):
        packs = kit.packed(random_examples(n * each, seed=n), [each] * n, layout)
        made.append(kit.write(str(folder / layout), packs, "preference", layout))
    return made


def loaded(
    stored: list[Dataset], rank: int = 0, world_size: int = 1
) -> PackedDataLoader:
    weights = {stored[0]: 2, stored[1]: 1}
    data = PackedDataset.mix(weights, **ALL, seed=3, rank=rank, world_size=world_size)
    return PackedDataLoader(data)


def names(batch: Any) -> list[tuple[int, int]]:
    """(source, example id) of each example: unique in a mix, while ids alone
    are not.
    """
    pairs = zip(
        batch.sources.tolist(), batch.example_ids.tolist(), batch.weights, strict=True
    )
    return [(source, example) for source, example, weight in pairs if weight]


def test_weights_count_examples_and_batches_name_their_source(
    stored: list[Dataset],
) -> None:
    whole = [name for batch in loaded(stored) for name in names(batch)]
    first = sum(source == 0 for source, _ in whole)
    ids = [example for source, example in whole if source == 0]
    once, again = ids[:46], ids[46:]
    assert set(once) == set(range(46))
    assert len(again) > 10
    assert again != once[: len(again)]  # a further pass has another order
    assert abs(first - 2 / 3 * len(whole)) <= 4
    assert set(whole) == {(0, i) for i in range(46)} | {(1, i) for i in range(36)}
    tokens = {
        (s, int(i)): len(p.input_ids)
        for s, data in enumerate(stored)
        for packs in data.iter_packs()
        for p in map(packs.row, range(len(packs)))
        for i in p.example_ids
    }
    for batch in loaded(stored):
        assert {tokens[name] for name in names(batch)} == {batch.num_tokens}


def test_ranks_and_resuming_share_one_sequence(stored: list[Dataset]) -> None:
    whole = [names(batch) for batch in loaded(stored)]
    for ranks in (2, 3):
        parts = [[names(b) for b in loaded(stored, r, ranks)] for r in range(ranks)]
        assert [parts[i % ranks][i // ranks] for i in range(len(whole))] == whole
    for k in (1, len(whole) // 2, len(whole) - 1):
        loader = loaded(stored)
        batches = iter(loader)
        for _ in range(k):
            next(batches)
        state = json.dumps(loader.state_dict())
        assert len(state) < 150
        resumed = loaded(stored)
        resumed.load_state_dict(json.loads(state))
        assert [names(batch) for batch in resumed] == whole[k:]


def test_a_state_of_another_mix_is_refused(stored: list[Dataset]) -> None:
    state, (a, b) = loaded(stored).state_dict(), stored
    others: list[tuple[dict[Any, float], dict[str, Any]]] = [
        ({a: 2, b: 2}, {**ALL, "seed": 3}),
        ({b: 1, a: 2}, {**ALL, "seed": 3}),
        ({a: 2, b: 1}, {**ALL, "seed": 4}),
        ({a: 2, b: 1}, {"stopping_strategy": "first_exhausted", "seed": 3}),
    ]
    for weights, how in others:
        with pytest.raises(CompatibilityError, match="mix"):
            PackedDataset.mix(weights, **how).load_state_dict(state)


def test_a_source_with_options_of_its_own(
    stored: list[Dataset], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Side data belongs to one source; the dataset that is mixed stays in its own
    epoch.
    """
    caplog.set_level(logging.INFO, "packstore")
    with SideWriter(str(tmp_path / "side"), stored[0], {"score": "float64"}) as writer:
        writer.write(np.arange(46), {"score": np.arange(46) / 4})
    first = PackedDataset(stored[0], shuffle=False, side=[tmp_path / "side"], **ALONE)
    own = [p.example_ids.tolist() for p in first]
    mixed = PackedDataset.mix({first: 1, str(stored[1].url): 1}, **ALL, **ALONE)
    assert f"packs from the {len(stored[1])} of {stored[1].url}" in caplog.text
    assert "left out where these meet: score" in caplog.text
    mixed.set_epoch(1)
    seen = [p for p in mixed if "score" in p.columns]
    for packs in seen:
        assert packs.columns["score"].tolist() == (packs.example_ids / 4).tolist()
    assert [p.example_ids.tolist() for p in seen][:23] == own
    assert [p.example_ids.tolist() for p in first] == own


def test_refusals(stored: list[Dataset], kit: SimpleNamespace, tmp_path: Path) -> None:
    a, b = stored
    for weight in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigError, match="weights"):
            PackedDataset.mix({a: 1, b: weight})
    with pytest.raises(ConfigError, match="weights"):
        PackedDataset.mix(stored)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights"):
        PackedDataset.mix({})
    with pytest.raises(
        ConfigError,
        match="stopping_strategy",
    ):
        PackedDataset.mix({a: 1}, stopping_strategy="last")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 of 2"):
        PackedDataset.mix({PackedDataset(a, rank=1, world_size=2): 1})
    with pytest.raises(ConfigError, match="side"):
        PackedDataset(PackedDataset.mix({a: 1}).stream, side=["side"])
    with pytest.raises(ConfigError, match="source 0"):
        PackedDataset.mix({PackedDataset.mix({a: 1}): 1})
    packs = kit.packed(random_examples(4, kind="sft"), [2, 2], "concat")
    sft = kit.write(str(tmp_path / "sft"), packs, "sft")
    with pytest.raises(CompatibilityError, match="kind"):
        PackedDataset.mix({a: 1, sft: 1})
