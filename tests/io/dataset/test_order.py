from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packstore.errors import ConfigError
from packstore.format import keys, mixed, permutation
from packstore.io.dataset import PackOrder, permuted

groups = st.lists(st.integers(1, 40), max_size=30).map(lambda g: np.array(g, np.int64))


def sequence(order: PackOrder) -> list[tuple[int, int]]:
    rows = order.locate(np.arange(len(order)))
    return list(zip(*(r.tolist() for r in rows), strict=True))


def file_order(group_rows: np.ndarray) -> list[tuple[int, int]]:
    return [(g, r) for g, n in enumerate(group_rows.tolist()) for r in range(n)]


@given(
    groups,
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 100),
    st.booleans(),
    st.data(),
)
def test_every_pack_exactly_once_and_wherever_one_begins(
    group_rows, seed, epoch, lanes, stratified, data
):
    """Strata change the packs within a row group, but not the row groups."""
    n = int(group_rows.sum())
    how, strata = {"seed": seed, "epoch": epoch, "lanes": lanes}, None
    if stratified:
        strata = np.array(
            data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), np.int64
        )
    order = PackOrder(group_rows, **how, strata=strata)
    assert len(order) == n
    every = sequence(order)
    assert sorted(every) == file_order(group_rows)
    assert [g for g, _ in every] == [
        g for g, _ in sequence(PackOrder(group_rows, **how))
    ]
    some = data.draw(st.permutations(range(n)))[:7]
    found = PackOrder(group_rows, **how, strata=strata).locate(np.array(some, np.int64))
    assert list(zip(*(f.tolist() for f in found), strict=True)) == [
        every[i] for i in some
    ]


@given(groups)
def test_unshuffled_is_file_order(group_rows):
    assert sequence(PackOrder(group_rows, shuffle=False)) == file_order(group_rows)


def test_a_lane_reads_its_groups_one_after_another():
    order = PackOrder(np.full(64, 16, np.int64), lanes=8)
    for lane in range(8):
        visited, _ = order.locate(np.arange(lane, len(order), 8))
        assert np.count_nonzero(np.diff(visited)) == len(set(visited.tolist())) - 1 == 7


def test_the_order_is_fixed_for_good():
    """A saved position must mean the same in every later release."""
    rows = np.array([3, 1, 4, 2], np.int64)
    order = PackOrder(rows, seed=7, epoch=2, lanes=3)
    expected = [0, 3, 2, 0, 3, 2, 0, 2, 2, 1], [0, 0, 3, 2, 1, 1, 1, 0, 2, 0]
    assert sequence(order) == list(zip(*expected, strict=True))
    order = PackOrder(rows, seed=7, epoch=2, lanes=3, strata=np.arange(10) % 4)
    expected = [0, 3, 2, 0, 3, 2, 0, 2, 2, 1], [0, 1, 1, 2, 0, 0, 1, 2, 3, 0]
    assert sequence(order) == list(zip(*expected, strict=True))
    assert permutation(6, 3, "test").tolist() == np.argsort(keys(6, 3, "test")).tolist()


def test_a_batch_is_mixed_as_by_a_full_shuffle():
    """Figure 2.7 of the loading facts, at a tenth of its size: topics lie sorted in the
    files.
    """
    topics, packs, batch = 20, 20_480, 64
    rows = np.full(packs // 32, 32)
    topic = np.arange(packs) * topics // packs

    def distance(order: np.ndarray) -> float:
        found = topic[order].reshape(-1, batch)
        counts = (found[..., None] == np.arange(topics)).sum(1)
        return float(np.abs(counts / batch - 1 / topics).sum(1).mean())

    rng = np.random.default_rng(0)
    perfect = np.mean([distance(rng.permutation(packs)) for _ in range(4)])
    for lanes, limit in ((64, 1.05), (128, 1.05)):
        found = []
        for epoch in range(4):
            group, row = PackOrder(rows, epoch=epoch, lanes=lanes).locate(
                np.arange(packs)
            )
            found.append(distance(group * 32 + row))
        assert np.mean(found) <= limit * perfect
    group, row = PackOrder(rows, lanes=8).locate(np.arange(packs))
    assert distance(group * 32 + row) > 1.5 * perfect  # the measure can tell


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 32])
def test_a_keyed_permutation_is_uniform(size):
    """Each value goes to each place, and each pair of neighbours apart, about equally
    often.
    """
    trials = 4000
    every = mixed(np.arange(trials, dtype=np.uint64))
    values = np.tile(np.arange(size), (trials, 1))
    keys_of = np.repeat(every, size).reshape(trials, size)
    found = permuted(values.ravel(), np.full(trials * size, size), keys_of.ravel())
    places = found.reshape(trials, size)
    expected = trials / size
    for value in range(size):
        counts = np.bincount(places[:, value], minlength=size)
        chi = ((counts - expected) ** 2 / expected).sum()
        assert chi < size - 1 + 6 * np.sqrt(2 * size)
    apart = np.bincount((places[:, 1] - places[:, 0]) % size, minlength=size)
    expected = trials / (size - 1)
    assert apart[0] == 0
    chi = ((apart[1:] - expected) ** 2 / expected).sum()
    assert chi < size + 6 * np.sqrt(2 * size)


def test_out_of_range():
    order = PackOrder(np.array([3], np.int64))
    for index in (-1, 3):
        with pytest.raises(IndexError, match="2"):
            order.locate(np.array([index]))
    with pytest.raises(ConfigError, match="lanes"):
        PackOrder(np.array([3], np.int64), lanes=0)
    with pytest.raises(ConfigError, match="strata"):
        PackOrder(np.array([3], np.int64), strata=np.zeros(2, np.int64))


def test_all_ranks_together_read_little_more_than_the_dataset() -> None:
    order = PackOrder(np.full(640, 16), lanes=64)
    groups = [order.locate(np.arange(rank, len(order), 8))[0] for rank in range(8)]
    assert sum(len(np.unique(some)) for some in groups) <= 1.1 * 640
