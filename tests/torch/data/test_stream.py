"""Stored packs as a stream: orders, what is worked out when, and what travels to workers."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from packstore.errors import CompatibilityError, ConfigError
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.order import PackOrder
from packstore.testing import random_examples
from packstore.torch import PackedDataset
from packstore.torch.data.stream import StoredPacks

N = 96


@pytest.fixture(scope="module")
def stored(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Packs of one to three pairs, in turn."""
    packs = kit.packed(random_examples(2 * N), [1, 2, 3] * (N // 3), "concat")
    data: Dataset = kit.write(str(tmp_path_factory.mktemp("data") / "ds"), packs)
    return data


def ids(data: Any) -> list[int]:
    return [int(packs.example_ids[0]) for packs in data]


def test_stratified_order_holds_every_pack_once_and_spreads_them(stored: Dataset) -> None:
    plain = PackedDataset(stored, lanes=4)
    spread = PackedDataset(stored, lanes=4, shuffle="stratified")
    assert sorted(ids(spread)) == sorted(ids(plain))
    strata = np.array([1, 2, 3] * (N // 3))
    assert stored.pack_index.examples.tolist() == strata.tolist()
    order = PackOrder(stored.group_rows, lanes=4, strata=strata)
    groups, rows = order.locate(np.arange(N))
    packs = stored.group_offsets[groups] + rows
    firsts = np.cumsum(strata) - strata
    assert ids(spread) == firsts[packs].tolist() != ids(plain)


def test_a_position_of_another_order_is_refused(stored: Dataset) -> None:
    plain, spread = PackedDataset(stored), PackedDataset(stored, shuffle="stratified")
    for a, b in ((plain, spread), (spread, plain)):
        state = json.loads(json.dumps(a.state_dict()))
        a.load_state_dict(state)
        with pytest.raises(CompatibilityError, match="shuffle must be"):
            b.load_state_dict(state)
    with pytest.raises(ConfigError, match="True, False or 'stratified'; found 'no'"):
        PackedDataset(stored, shuffle="no")  # type: ignore[arg-type]


def test_the_order_is_made_when_it_is_wanted(stored: Dataset) -> None:
    stream = StoredPacks(stored)
    for epoch in range(3):
        stream.set_epoch(epoch)
        assert len(stream) == N
    assert stream._made is None
    stream.sizes(np.arange(3))
    made = stream._made
    stream.set_epoch(2)
    assert stream._made is made is not None
    assert pickle.loads(pickle.dumps(stream))._made is None


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_read_after_this_process_has_read(stored: Dataset, context: str) -> None:
    """Whatever is open here, with threads in the middle of reading, the workers begin afresh."""
    data = PackedDataset(stored, lanes=4)
    expected = ids(data)
    half_read = iter(PackedDataset(stored, lanes=4))
    next(half_read)
    next(half_read)
    loader: Any = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert sorted(ids(loader)) == sorted(expected)
    assert len(list(half_read)) == N - 2
