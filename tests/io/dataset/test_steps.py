"""Where steps end that are to hold a number of examples."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.io.dataset import cut_by_examples

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=80)


def cut(
    sizes: list[int], requested: int, ranks: int, shortfall: int = 0
) -> list[tuple[int, int]]:
    return list(cut_by_examples(np.array(sizes), requested, ranks, shortfall))


def sums(sizes: list[int], steps: list[tuple[int, int]]) -> list[int]:
    """Examples of each step."""
    edges = [0, *(end for end, _ in steps)]
    return [sum(sizes[a:b]) for a, b in pairwise(edges)]


@given(SIZES, st.integers(1, 100), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_the_mean_is_the_request(sizes: list[int], requested: int, ranks: int) -> None:
    """Up to any step, half a pack off at most, where the packs of all ranks hold no
    more.
    """
    largest_row = max(sum(sizes[i : i + ranks]) for i in range(len(sizes)))
    requested = max(requested, largest_row)
    *whole_steps, _ = np.cumsum(sums(sizes, cut(sizes, requested, ranks)))
    for number, total in enumerate(whole_steps, start=1):
        assert abs(total - number * requested) <= max(sizes) / 2


@given(SIZES, st.integers(1, 100), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_any_packs_are_cut_into_steps(
    sizes: list[int], requested: int, ranks: int
) -> None:
    """Each pack once, one for each rank; steps are never fewer than the requested size
    makes.
    """
    steps = cut(sizes, requested, ranks)
    ends = [end for end, _ in steps]
    assert ends[-1] == len(sizes)
    assert all(stop - start >= ranks for start, stop in pairwise([0, *ends[:-1]]))
    for number, total in enumerate(np.cumsum(sums(sizes, steps))[:-1], start=1):
        assert total >= (number - 1) * requested


@given(SIZES, st.integers(1, 100), st.integers(1, 4), st.data())
@settings(max_examples=300, deadline=None)
def test_steps_go_on_from_any_of_them(
    sizes: list[int], requested: int, ranks: int, data: st.DataObject
) -> None:
    """From its end and shortfall the rest follows; the packs beyond a window do not
    matter.
    """
    steps = cut(sizes, requested, ranks)
    end, shortfall = data.draw(st.sampled_from(steps))
    remaining = cut(sizes[end:], requested, ranks, shortfall)
    assert [(end + stop, short) for stop, short in remaining] == [
        s for s in steps if s[0] > end
    ]

    window = data.draw(st.integers(1, len(sizes)))
    part = np.array(sizes[:window])
    first_steps = list(cut_by_examples(part, requested, ranks, is_end=False))
    assert first_steps == steps[: len(first_steps)]


@pytest.mark.parametrize(
    ("sizes", "requested", "ranks", "expected"),
    [
        ([5] * 8, 8, 1, [10, 5, 10, 5, 10]),
        ([4] * 6, 8, 1, [8, 8, 8]),
        ([3, 10, 3], 6, 1, [3, 10, 3]),
        (
            [9] * 4 + [1] * 12,
            4,
            1,
            [9, 9, 9, 9, 2, 4, 4, 2],
        ),  # an excess that is not saved up
        ([4] * 8, 4, 2, [8, 8, 8, 8]),
    ],
)
def test_examples(
    sizes: list[int], requested: int, ranks: int, expected: list[int]
) -> None:
    assert sums(sizes, cut(sizes, requested, ranks)) == expected
