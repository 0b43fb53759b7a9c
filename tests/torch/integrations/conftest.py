"""Trainers of other libraries leave their settings in Accelerate, which one process
shares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_accelerate() -> Iterator[None]:
    """Forgets them after each test: a later training could not choose its precision."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state()
