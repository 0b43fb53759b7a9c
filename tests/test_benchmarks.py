"""``benchmarks/loading.py`` on a few packs: what it calls exact is, and it notices when not."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PACKS = 40
OURS = ("packstore", "packstore-compact", "packstore-arrow")
READERS = (*OURS, "pyarrow-parquet", "memmap")


@pytest.fixture(scope="module")
def child() -> ModuleType:
    """The function that the benchmark runs in its processes."""
    return module("peers_loading.child")


def module(name: str) -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def root(child: ModuleType, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of packs, with the files of `READERS`."""
    root = tmp_path_factory.mktemp("loading")
    (root / "source").mkdir()
    (root / "scratch").mkdir()
    module("peers_loading.texts").write_examples(shared_data, root / "source", PACKS)
    measured(child, root, "write", "packstore")
    assert measured(child, root, "source", "packstore")["packs"] == pytest.approx(PACKS, abs=2)
    for reader in READERS[1:]:
        assert measured(child, root, "write", reader)["bytes"] > 0
    return root


def measured(child: ModuleType, root: Path, mode: str, reader: str, **more: Any) -> dict[str, Any]:
    """The result of a mode, in this process."""
    task = child.Task(mode, reader, str(root), str(root / "scratch"), out="", **more)
    return dict(child.MODES[mode](child.READERS[reader].load(), task))


@pytest.mark.parametrize("reader", READERS)
def test_every_pack_once_and_resuming_is_exact(child: ModuleType, root: Path, reader: str) -> None:
    assert measured(child, root, "read", reader)["samples"] == len(child.Source(root / "source"))
    assert measured(child, root, "plan", reader)["complete"]
    for position in range(len(child.POSITIONS)):
        found = measured(child, root, "resume", reader, position=position)
        assert (found["exact"], found["lost"], found["repeated"]) == (True, 0, 0)


def test_padded_batches_hold_the_same_packs(child: ModuleType, root: Path) -> None:
    packs = len(child.Source(root / "source"))
    assert measured(child, root, "read", "packstore-compact padded")["samples"] == packs


def test_resuming_at_a_wrong_place_is_noticed(
    child: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(child, root, "plan", "memmap")
    monkeypatch.setattr(
        "peers_loading.base.Permuted.load_state_dict", lambda self, state: None, raising=True
    )
    found = measured(child, root, "resume", "memmap", position=0)
    assert not found["exact"]
    assert found["repeated"] > 0


def test_a_wrong_value_is_noticed(child: ModuleType, root: Path) -> None:
    labels = np.load(root / "memmap" / "labels.npy", mmap_mode="r+")
    labels[1234] += 1
    assert not measured(child, root, "plan", "memmap")["complete"]
    labels[1234] -= 1
    assert measured(child, root, "plan", "memmap")["complete"]


@pytest.mark.parametrize("reader", [*OURS, "memmap"])
def test_flipped_bits(child: ModuleType, root: Path, reader: str) -> None:
    outcomes = measured(child, root, "damage", reader, trials=3)["outcomes"]
    assert outcomes == ({"silent": 3} if reader == "memmap" else {"raised": 3})


def test_goals_of_made_up_figures() -> None:
    goals = module("peers_loading.goals").goals
    rows = {
        "packstore": {"samples_per_second": 100.0, "cpu_us": 33.0, "resume_seconds": [0.01, 0.05]},
        "mds": {"samples_per_second": 25.0},
        "hf-streaming": {"samples_per_second": 10.0},
    }
    passes = [{"litdata": 10.0, "packstore": x} for x in (1.0, 9.0, 20.0)]
    met = {goal.what: goal.met for goal in goals(rows, passes)}
    assert met["packstore: packs/s over hf-streaming"]
    assert met["packstore: packs/s over mds"] is False
    assert met["packstore: packs/s over webdataset"] is None
    assert met["packstore: packs/s over litdata, median of 3 pairs"]
    assert met["packstore: CPU us a pack"]
    assert met["packstore: resume at 50 %, ms"]
    assert met["packstore: resume at 95 %, ms"] is False


@pytest.mark.slow
def test_the_script(shared_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "loading.py"), "--quick", "--packs", str(PACKS)]
    only = ["--only", "packstore-arrow", "--work", str(tmp_path), "--out", str(out)]
    done = subprocess.run([*command, *only], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["rows"]["packstore-arrow"]["resume_exact"] == [True, True]
    assert {"environment", "settings", "packs", "rows", "pairs", "goals"} <= result.keys()
