"""Parameters of tests whose full amount is run by `make test-all` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return all values as parameters, slow but for those in `fast`."""
    return [
        value if value in fast else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]


def slow_pairs(values: Collection[Any]) -> list[Any]:
    """Return all ordered pairs as parameters; only a cycle through all is fast.

    In the cycle every value comes first once, and second once.
    """
    names = list(values)
    pairs = []
    for i, first in enumerate(names):
        for j, second in enumerate(names):
            is_fast = j == (i + 1) % len(names)
            marks = [] if is_fast else [pytest.mark.slow]
            pairs.append(pytest.param(first, second, marks=marks))
    return pairs


def slow_products(rows: Collection[Any], columns: Collection[Any]) -> list[Any]:
    """Return the product as parameters; one column for each row is fast, in turns."""
    names = list(columns)
    products = []
    for i, row in enumerate(rows):
        for j, column in enumerate(names):
            marks = [] if j == i % len(names) else [pytest.mark.slow]
            products.append(pytest.param(row, column, marks=marks))
    return products
