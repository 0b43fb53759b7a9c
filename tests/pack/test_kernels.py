"""The set of small integers beside a plain one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.pack import kernels
from packstore.pack.kernels import add, at_least, at_most, new_set, remove


@settings(deadline=None, max_examples=150)
@given(data=st.data(), limit=st.sampled_from([0, 1, 62, 63, 64, 4095, 4096, 9000, 300_000]))
def test_it_is_a_sorted_set(data: st.DataObject, limit: int) -> None:
    bits, plain = new_set(limit), set()
    number = st.integers(0, limit)
    for put, i in data.draw(st.lists(st.tuples(st.booleans(), number), max_size=40)):
        if put:
            add(bits, i)
            plain.add(i)
        else:
            remove(bits, i)
            plain.discard(i)
    near = {j for i in plain for j in (i - 1, i, i + 1) if 0 <= j <= limit}
    for i in {0, limit, data.draw(number), *near}:
        assert at_least(bits, i) == min((m for m in plain if m >= i), default=-1)
        assert at_most(bits, i) == max((m for m in plain if m <= i), default=-1)


def test_without_a_place_for_the_cache_it_compiles_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    njit = kernels.njit

    def no_cache(**options: bool) -> object:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(kernels, "njit", no_cache)

    @kernels.jit
    def double(x: int) -> int:
        return 2 * x

    assert double(21) == 42
