"""``packstore train`` from stored packs, beside TRL's own trainer.

Training runs in processes of their own, which are killed before they would write a
checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.rounds import expected_training
from gpu.session import AbsentError, Figures, Session
from gpu.sizes import lengths, make_model

TRL_STEPS = 4
"""Steps of TRL's trainer, two of which are timed: it took 4.8 s a step on an H200."""

FIRST = 5
"""Steps that are left out: kernels are chosen and compiled there."""

WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "graphs": {"dtype": "bfloat16", "cuda_graphs": True},
    "own precision": {},  # weights in float32, layers in bfloat16
    "ref-logps": {"dtype": "bfloat16", "ref_logps": True},
    "lora": {"dtype": "bfloat16", "peft_config": {"r": 16}, "learning_rate": 1e-4},
}
"""Settings of ``train``; without stored log-probs the reference is computed in the
step.
"""


def training(session: Session, data: Path, scratch: Path, ways: Iterable[str]) -> None:
    """Train the first model on pairs like hh, by TRL's trainer and by ``train`` with
    settings.
    """
    for way in ways:
        case = partial(_trl, session, scratch) if way == "trl" else None
        case = case or partial(_train, session, data, scratch, way)
        session.case(f"train/{way}", case, 45 if session.sizes.cuda else 3)


def saved_model(
    session: Session, family: str, config: dict[str, Any], folder: Path
) -> Path:
    """Write a random model, unless it is there; return its folder."""
    if not folder.exists():
        make_model(family, config, session.sizes).save_pretrained(folder)
    return folder


def settings_of(
    session: Session, model: Path, dataset: Path, steps: int
) -> dict[str, Any]:
    """Return the settings of ``train`` that all runs share."""
    return {
        "model": str(model),
        "train_dataset": str(dataset),
        "examples_per_step": session.sizes.pairs_per_step,
        "packs_per_batch": 2,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "logging_steps": 1,
    }


def run_process(task: dict[str, Any]) -> Figures:
    """Train in a process; return its records, the times of its steps and its peak of
    memory.

    Args:
        task: for packstore `settings` of ``train``, `kill_at`, the step after whose
            record the process is killed, and `exact`, for deterministic algorithms; or
            arguments of ``trl``.
    """
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("run_training.py")),
            json.dumps(task),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if task.get("exact") else {}),
    )
    if done.returncode != (-signal.SIGKILL if task.get("kill_at") else 0):
        for kind in (torch.OutOfMemoryError, ModuleNotFoundError):
            if f"{kind.__name__}: " in done.stderr:
                raise kind(done.stderr.splitlines()[-1])
        raise RuntimeError(
            f"the training ended with {done.returncode}: {done.stderr[-600:]}"
        )
    results: Figures = json.loads(done.stdout.splitlines()[-1])
    return results


def _model(session: Session, scratch: Path) -> Path:
    name, (family, config) = next(iter(session.sizes.models.items()))
    return saved_model(session, family, config, scratch / name)


def _rates(session: Session, results: Figures, first: int = FIRST) -> Figures:
    """Return pairs a second after the first steps, by one clock for all trainers."""
    first = first if session.sizes.cuda else 1
    seconds = results["times"][-1] - results["times"][first - 1]
    pairs = [
        r.get("examples", session.sizes.pairs_per_step)
        for r in results["records"][first:]
    ]
    return {"pairs_per_second": sum(pairs) / seconds, "peak_gib": results["peak_gib"]}


def _trl(session: Session, scratch: Path) -> Figures:
    """TRL's trainer on pairs of the same lengths, for fewer steps: it compiles
    nothing.
    """
    step = session.sizes.pairs_per_step
    pairs = lengths(
        "hh", min(session.sizes.steps, TRL_STEPS) * step, session.sizes.longest["hh"]
    ).tolist()
    task = {"model": str(_model(session, scratch)), "output_dir": str(scratch / "trl")}
    return _rates(session, run_process({**task, "pairs": pairs, "step": step}), first=2)


def _train(session: Session, data: Path, scratch: Path, way: str) -> Figures:
    """Return the rates of a run that is killed before it saves; right if it hardly
    waits for data.
    """
    if WAYS[way].get("cuda_graphs") and not session.sizes.cuda:
        raise AbsentError("CUDA graphs need a GPU")
    settings = settings_of(
        session, _model(session, scratch), data, session.sizes.steps + 1
    )
    settings |= WAYS[way] | {"output_dir": str(scratch / f"run-{way}")}
    figures: Figures = {}
    if settings.get("ref_logps"):
        settings["ref_logps"] = str(scratch / "ref")
        figures["reference_tokens_per_second"] = _ref_logps(session, settings)
    results = run_process({"settings": settings, "kill_at": session.sizes.steps})
    steady = results["records"][FIRST if session.sizes.cuda else 1 :]
    middle = {
        name: statistics.median(r[name] for r in steady)
        for name in ("fill", "data_wait")
    }
    quick = {"right": middle["data_wait"] < 0.01} if session.sizes.cuda else {}
    if rate := expected_training(session.sizes, session.ceilings).get(way):
        figures["expected"] = {"pairs_per_second": rate}
    return {**quick, **_rates(session, results), **middle, **figures}


def _ref_logps(session: Session, settings: dict[str, Any]) -> float:
    """Write reference log-probs; return tokens a second."""
    import packstore
    from packstore.torch import write_ref_logps
    from packstore.torch.models.load import load_model

    packs = packstore.open(settings["train_dataset"])
    loaded = load_model(settings["model"], dtype="bfloat16").to(session.sizes.device)
    started = time.perf_counter()
    write_ref_logps(loaded, packs, settings["ref_logps"])
    return packs.manifest.totals.tokens / (time.perf_counter() - started)
