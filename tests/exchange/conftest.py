"""Datasets of given records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packstore

PACK_SIZE = 300


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., packstore.Dataset]:
    """Packs records in their order."""
    made = iter(range(1000))

    def run(records: list[dict[str, Any]], **settings: Any) -> packstore.Dataset:
        plain: dict[str, Any] = {"pack_size": PACK_SIZE, "row_group_tokens": PACK_SIZE}
        plain |= {"strategy": "sequential", "shuffle": False, "num_workers": 0, "max_drop_rate": 1}
        return packstore.pack(records, tmp_path / f"dataset{next(made)}", **{**plain, **settings})

    return run
