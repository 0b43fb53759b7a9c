"""examples/grpo.py: the reward rises."""

from __future__ import annotations

import runpy
from pathlib import Path
from statistics import mean

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo.py"


@pytest.mark.slow
def test_the_reward_rises() -> None:
    pytest.importorskip("transformers", reason="transformers is in the extra train")
    curve = runpy.run_path(str(EXAMPLE))["train"](30)
    assert mean(curve[:3]) < 0.2
    assert mean(curve[-3:]) > 0.4
