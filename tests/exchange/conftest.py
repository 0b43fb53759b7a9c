"""Datasets of given records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packstore

PLAIN: dict[str, Any] = {
    "pack_size": 300,
    "row_group_tokens": 300,
    "strategy": "sequential",
}
PLAIN |= {"shuffle": False, "num_workers": 0, "max_drop_rate": 1}


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., packstore.Dataset]:
    """Packs records in their order."""
    numbers = iter(range(1000))

    def run(records: list[dict[str, Any]], **settings: Any) -> packstore.Dataset:
        return packstore.pack(
            records, tmp_path / f"dataset{next(numbers)}", **PLAIN | settings
        )

    return run
