"""The recipe of kept rollouts: a run that is killed and resumed ends as an undisturbed
one.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import packstore
from packstore.io.side.side import open_side

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollouts.py"

RUNS = """
import json, os, runpy, signal, sys, time
from pathlib import Path
example, folder, steps, moments = json.loads(sys.argv[1])
train = runpy.run_path(example)["main"]
def run(moment):
    acts = 0
    def count(event, args):
        nonlocal acts
        if event == "open":
            writes = args[2] & (os.O_WRONLY | os.O_RDWR)
            path = args[0] if writes else None
        else:
            is_act = event in ("os.rename", "os.link", "os.remove", "os.mkdir")
            path = args[0] if is_act else None
        if isinstance(path, str) and path.startswith(folder):
            acts += 1
            if acts == moment:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    train(Path(folder), steps)
    print("acts", acts, flush=True)
    os._exit(0)
for moment in moments:
    # A copy of a process that has imported everything starts at once.
    child = os.fork()
    if child == 0:
        run(moment)
    if 0 < moment < 1:  # a fraction of a second, not an act
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    print("end", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs the recipe once for each moment: it is killed in its n-th act on the disk, or
after a fraction of a second; 0: never.
"""


def run_recipe(folder: Path, steps: int, moments: list[float]) -> tuple[int, list[int]]:
    """Returns the acts of the last run, and how each run ended: -9 if killed."""
    arguments = json.dumps([str(EXAMPLE), str(folder), steps, moments])
    done = subprocess.run(
        [sys.executable, "-c", RUNS, arguments],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    words = [line.split() for line in done.stdout.splitlines()]
    ends = [int(number) for name, number, *_ in words if name == "end"]
    acts = [int(number) for name, number, *_ in words if name == "acts"]
    assert ends[-1] == 0
    return acts[-1], ends


def stored_values(folder: Path) -> dict[str, pa.Table]:
    """Returns the values of each part, by its lineage."""
    return {
        part.name: pa.Table.from_batches(open_side(str(part)).iter_batches())
        for part in (folder / "rollouts-values").iterdir()
    }


def assert_equal_states(first: Any, second: Any) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert_equal_states(value, second[name])
    else:
        assert first == second


def assert_equal_runs(first: Path, second: Path) -> None:
    """Compares packs, values, weights and the optimizer's state to the bit."""
    datasets = [packstore.open(folder / "rollouts") for folder in (first, second)]
    assert datasets[0].version == datasets[1].version
    assert datasets[0].manifest.fingerprint == datasets[1].manifest.fingerprint
    assert all(dataset.verify().ok for dataset in datasets)

    assert stored_values(first) == stored_values(second)
    states = [torch.load(folder / "checkpoint.pt") for folder in (first, second)]
    assert_equal_states(*states)


def test_a_run_resumes_at_its_checkpoint(tmp_path: Path) -> None:
    """Also if the dataset is a version ahead of it, as after a kill in between."""
    num_threads = torch.get_num_threads()
    train = runpy.run_path(str(EXAMPLE))["main"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole, 3)
    train(resumed, 1)
    checkpoint = resumed / "checkpoint.pt"
    old_state = checkpoint.read_bytes()
    train(resumed, 2)
    checkpoint.write_bytes(old_state)
    train(resumed, 3)
    torch.set_num_threads(num_threads)
    assert_equal_runs(whole, resumed)


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_replays_to_the_bit(tmp_path: Path) -> None:
    steps, kills = 8, 10
    acts, _ = run_recipe(tmp_path / "whole", steps, [0])
    random = np.random.default_rng(0)
    acts_of_two_steps = 2 * acts // steps
    moments = random.integers(2, acts_of_two_steps, kills - 1).tolist()
    # Once at a moment that is no act, most likely while it samples or trains.
    moments.insert(1, 0.2)
    _, ends = run_recipe(tmp_path / "killed", steps, [*moments, 0])
    assert ends.count(-9) == kills
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")
