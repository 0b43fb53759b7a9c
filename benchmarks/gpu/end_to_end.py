"""``packstore train`` and reference log-probs from stored packs.

Training runs in processes of their own, which are killed before they would write a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from gpu.session import Figures, Session
from gpu.sizes import make_model

FIRST = 5
"""Records that are left out: kernels are chosen and compiled there."""

WAYS: dict[str, dict[str, Any]] = {
    "full": {"dtype": "bfloat16", "ref_logps": True},
    "full_online": {"dtype": "bfloat16"},
    "autocast": {"dtype": "float32"},
    "lora": {"dtype": "bfloat16", "lora": {"rank": 16}, "learning_rate": 1e-4},
}


def training(session: Session, data: Path, scratch: Path) -> None:
    """Reference log-probs, then training with all weights, autocast and LoRA."""
    sizes = session.sizes
    name = next(iter(sizes.models))
    model = scratch / name
    written = partial(saved_model, session, *sizes.models[name], model)
    session.case("model written", lambda: {"bytes": _size(written())}, seconds=30)
    for profile in sizes.pairs:
        dataset, side = data / f"{profile}-shared_prefix", scratch / f"ref-{profile}"
        session.case(f"ref-logps/{profile}", partial(_ref_logps, session, model, dataset, side))
    for way, own in WAYS.items():
        settings = settings_of(session, model, data / "hh-shared_prefix", sizes.steps + 1) | own
        if own.get("ref_logps"):
            settings["ref_logps"] = str(scratch / "ref-hh")
        settings["output_dir"] = str(scratch / f"run-{way}")
        seconds = 45 if sizes.cuda else 3
        session.case(f"train/{way}", partial(_rates, session, settings), seconds)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


def saved_model(session: Session, family: str, config: dict[str, Any], folder: Path) -> Path:
    """Writes a random model; returns its folder."""
    if not folder.exists():
        make_model(family, config, session.sizes).save_pretrained(folder)
    return folder


def settings_of(session: Session, model: Path, dataset: Path, steps: int) -> dict[str, Any]:
    """Settings of ``train`` that all runs share."""
    sizes = session.sizes
    return {
        "model": str(model),
        "train_dataset": str(dataset),
        "dtype": "bfloat16",
        "examples_per_step": sizes.pairs_per_step,
        "packs_per_batch": 2,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "logging_steps": 1,
    }


def run_process(
    settings: dict[str, Any], kill_at: int | None = None, exact: bool = False
) -> Figures:
    """Trains in a process; returns its records and its peak of memory.

    Args:
        settings: settings of ``train``.
        kill_at: the process is killed with SIGKILL after the record of this step.
        exact: use deterministic algorithms.
    """
    task = json.dumps({"settings": settings, "kill_at": kill_at, "exact": exact})
    script = str(Path(__file__).with_name("run_training.py"))
    done = subprocess.run(
        [sys.executable, script, task],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if exact else {}),
    )
    expected = 0 if kill_at is None else -signal.SIGKILL
    if done.returncode != expected:
        raise RuntimeError(f"train ended with {done.returncode}: {done.stderr[-600:]}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def _rates(session: Session, settings: dict[str, Any]) -> Figures:
    """Rates of a run that is killed before it saves; right if it hardly waits for data."""
    found = run_process(settings, kill_at=settings["max_steps"] - 1)
    steady = found["records"][FIRST if session.sizes.cuda else 1 :]
    names = ("examples_per_second", "tokens_per_second", "fill", "data_wait")
    middle = {name: statistics.median(r[name] for r in steady) for name in names}
    quick = {"right": middle["data_wait"] < 0.01} if session.sizes.cuda else {}
    return {**quick, **middle, "peak_gib": found["peak_gib"], "records": len(steady)}


def _ref_logps(session: Session, model: Path, dataset: Path, side: Path) -> Figures:
    import packstore
    from packstore.torch import write_ref_logps
    from packstore.torch.models.load import load_model

    packs = packstore.open(str(dataset))
    loaded = load_model(model, dtype="bfloat16").to(session.sizes.device)
    started = time.perf_counter()
    write_ref_logps(loaded, packs, str(side))
    seconds = time.perf_counter() - started
    tokens = packs.manifest.totals.tokens
    return {"tokens_per_second": tokens / seconds, "tokens": tokens}
