"""The loop of `docs/frameworks.md` on two ranks: killed and resumed, it ends
the same.
"""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import launch

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
CHANGED = {
    'dist.init_process_group("gloo")': "",  # the ranks of tests are connected
    "64, 100, 3": "8, 2, 3",
    "lr=1e-6": "lr=1e-3",
    "optimizer.zero_grad()": "after_step(epoch, batch.step.index)",
}


def loop() -> str:
    """The code of the page, with small numbers."""
    section = PAGE.read_text(encoding="utf-8").partition("## A loop of your own")[2]
    (code, *_) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    for old, new in CHANGED.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return str(code)


def on_rank(task: tuple[str, str, bool]) -> Any:
    """One rank; the first is killed inside the second epoch, if it is to be."""
    code, folder, kill = task
    warnings.simplefilter("ignore")
    os.chdir(folder)
    names: dict[str, Any] = {}

    def after_step(epoch: int, step: int) -> None:
        if kill and (epoch, step) == (1, 2) and not names["rank"]:
            os.kill(os.getpid(), signal.SIGKILL)
        names["optimizer"].zero_grad()

    names["after_step"] = after_step
    exec(code, names)
    return names["model"].state_dict(), names["means"]


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    run = kit.short_run(tmp_path)
    for name in ("prefs-8k", "held-out-8k"):
        (tmp_path / name).symlink_to(run["train_dataset"])
    (tmp_path / "my-sft-model").symlink_to(run["model"])
    whole = launch(__file__, (loop(), str(tmp_path), False), 2, tmp_path)
    (tmp_path / "saved.pt").unlink()
    assert launch(__file__, (loop(), str(tmp_path), True), 2, tmp_path) == []
    assert (tmp_path / "saved.pt").is_file()
    again = launch(__file__, (loop(), str(tmp_path), False), 2, tmp_path)
    for (weights, means), (others, other_means) in zip(whole, again, strict=True):
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert means == other_means
    assert whole[0][1]["rewards/accuracies"] > 0.5
