from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packstore.errors import ConfigError
from packstore.io.order import PackOrder

groups = st.lists(st.integers(1, 40), max_size=30).map(lambda g: np.array(g, np.int64))


def sequence(order: PackOrder) -> list[tuple[int, int]]:
    rows = order.locate(np.arange(len(order)))
    return list(zip(*(r.tolist() for r in rows), strict=True))


def file_order(group_rows: np.ndarray) -> list[tuple[int, int]]:
    return [(g, r) for g, n in enumerate(group_rows.tolist()) for r in range(n)]


@given(groups, st.integers(0, 5), st.integers(0, 5), st.integers(1, 100))
def test_every_pack_exactly_once(group_rows, seed, epoch, lanes):
    order = PackOrder(group_rows, seed=seed, epoch=epoch, lanes=lanes)
    assert len(order) == group_rows.sum()
    assert sorted(sequence(order)) == file_order(group_rows)


@given(groups, st.integers(1, 100), st.data())
def test_seeking_gives_what_reading_from_the_start_gives(group_rows, lanes, data):
    order = PackOrder(group_rows, lanes=lanes)
    every = sequence(order)
    some = data.draw(st.permutations(range(len(order))))[:7]
    found = PackOrder(group_rows, lanes=lanes).locate(np.array(some, np.int64))
    assert list(zip(*(f.tolist() for f in found), strict=True)) == [every[i] for i in some]


@given(groups, st.integers(1, 9))
def test_ranks_share_one_sequence(group_rows, ranks):
    order = PackOrder(group_rows, seed=1)
    every = sequence(order)
    for rank in range(ranks):
        mine = order.locate(np.arange(rank, len(order), ranks))
        assert list(zip(*(m.tolist() for m in mine), strict=True)) == every[rank::ranks]


@given(groups)
def test_unshuffled_is_file_order(group_rows):
    assert sequence(PackOrder(group_rows, shuffle=False)) == file_order(group_rows)


def test_seed_and_epoch_matter():
    rows = np.full(50, 8, np.int64)
    orders = [
        tuple(sequence(PackOrder(rows, seed=s, epoch=e))) for s, e in ((0, 0), (0, 1), (1, 0))
    ]
    assert len(set(orders)) == 3


def test_rows_move_inside_their_group():
    found = sequence(PackOrder(np.array([100], np.int64), lanes=1))
    assert found != sorted(found)


def test_a_lane_reads_its_groups_one_after_another():
    order = PackOrder(np.full(64, 16, np.int64), lanes=8)
    for lane in range(8):
        visited, _ = order.locate(np.arange(lane, len(order), 8))
        assert np.count_nonzero(np.diff(visited)) == len(set(visited.tolist())) - 1 == 7


def test_the_order_is_fixed_for_good():
    """A saved position must mean the same in every later release."""
    order = PackOrder(np.array([3, 1, 4, 2], np.int64), seed=7, epoch=2, lanes=3)
    expected = [0, 3, 2, 0, 3, 2, 0, 2, 2, 1], [1, 1, 1, 2, 0, 2, 0, 3, 0, 0]
    assert sequence(order) == list(zip(*expected, strict=True))


def test_no_packs():
    order = PackOrder(np.empty(0, np.int64))
    assert len(order) == 0
    assert sequence(order) == []


def test_out_of_range():
    order = PackOrder(np.array([3], np.int64))
    for index in (-1, 3):
        with pytest.raises(IndexError, match=r"0\.\.2"):
            order.locate(np.array([index]))
    with pytest.raises(ConfigError, match="at least 1"):
        PackOrder(np.array([3], np.int64), lanes=0)
