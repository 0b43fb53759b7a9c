"""Stage 4: ``packstore train`` and reference log-probs from stored packs.

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
from itertools import islice
from pathlib import Path
from typing import Any

import torch

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


def stage(session: Session, data: Path, scratch: Path) -> None:
    """Reference log-probs, a bare step, then training with all weights, autocast and LoRA."""
    sizes = session.sizes
    name = next(iter(sizes.models))
    family, config = sizes.models[name]
    model = scratch / name
    session.case("model written", lambda: _write(session, family, config, model), seconds=30)
    for profile in sizes.profiles:
        side = scratch / f"ref-{profile}"
        dataset = data / f"{profile}-shared_prefix"
        session.case(
            f"ref-logps/{profile}", lambda d=dataset, s=side: _ref_logps(session, model, d, s)
        )
    dataset = data / "hh-shared_prefix"
    session.case("bare step", lambda: _bare(session, model, dataset), seconds=20)
    for way, own in WAYS.items():
        settings = settings_of(session, model, dataset, sizes.steps) | own
        if own.get("ref_logps"):
            settings["ref_logps"] = str(scratch / "ref-hh")
        output = str(scratch / f"run-{way}")
        session.case(
            f"train/{way}",
            lambda s={**settings, "output": output}, w=way: _rates(session, s, w),
            seconds=45 if sizes.cuda else 3,
        )
    session.case(
        "one checkpoint", lambda: _checkpoint(session, model, dataset, scratch), seconds=60
    )


def _write(session: Session, family: str, config: dict[str, Any], folder: Path) -> Figures:
    started = time.perf_counter()
    saved_model(session, family, config, folder)
    return {"seconds_to_write": time.perf_counter() - started}


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
        "dataset": str(dataset),
        "dtype": "bfloat16",
        "examples_per_step": sizes.pairs_per_step,
        "packs_per_batch": 2,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "log_every": 1,
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
    lines = Path(settings["output"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [r for r in map(json.loads, lines) if "loss" in r]
    return {"records": records, **json.loads(done.stdout.splitlines()[-1])}


def killed(settings: dict[str, Any], step: int, exact: bool = False) -> Figures:
    """Trains until the record of `step`, and kills the process there."""
    return run_process(settings, kill_at=step, exact=exact)


def _rates(session: Session, settings: dict[str, Any], way: str) -> Figures:
    """Rates of a run that is killed before it saves."""
    found = killed({**settings, "max_steps": settings["max_steps"] + 1}, settings["max_steps"])
    steady = found["records"][FIRST if session.sizes.cuda else 1 :]
    names = ("pairs_per_second", "tokens_per_second", "fill", "data_wait")
    middle = {name: statistics.median(r[name] for r in steady) for name in names}
    bare = session.cases.get("bare step", {}).get("pairs_per_second")
    figures = {**middle, "peak_gib": found["peak_gib"], "records": len(steady)}
    if bare:
        figures["time_over_bare"] = bare / middle["pairs_per_second"]
    if session.sizes.cuda:
        slow = way == "full" and figures.get("time_over_bare", 0) > 1.1
        figures["right"] = middle["data_wait"] < 0.01 and not slow
    return figures


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


def _bare(session: Session, model: Path, dataset: Path) -> Figures:
    """A loop without a trainer on the batches that ``train/full`` has, all on the device before."""
    from packstore.torch import PackedDataLoader, PackedDataset, PreferenceLoss
    from packstore.torch.logprobs.head import PackedPolicy
    from packstore.torch.models.load import load_model

    sizes = session.sizes
    loaded = load_model(model, dtype="bfloat16", trainable=True).to(sizes.device).train()
    loader = PackedDataLoader(
        PackedDataset(str(dataset)),
        examples_per_step=sizes.pairs_per_step,
        packs_per_batch=2,
    )
    batches = [batch.to(sizes.device) for batch in islice(loader, 24 if sizes.cuda else 2)]
    policy, loss_fn = PackedPolicy(loaded), PreferenceLoss("dpo")
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-9, fused=sizes.cuda)

    def epoch() -> int:
        pairs = 0
        for batch in batches:
            logps = policy(batch)
            loss_fn(logps, batch, torch.zeros_like(logps)).loss.backward()
            if batch.step.last:
                optimizer.step()
                optimizer.zero_grad()
            pairs += batch.num_examples
        if sizes.cuda:
            torch.cuda.synchronize()
        return pairs

    epoch()
    started = time.perf_counter()
    pairs = epoch()
    seconds = time.perf_counter() - started
    return {"pairs_per_second": pairs / seconds, "batches": len(batches)}


def _checkpoint(session: Session, model: Path, dataset: Path, scratch: Path) -> Figures:
    """Seconds of a run of two steps with its checkpoint and final model."""
    settings = settings_of(session, model, dataset, 2) | {"output": str(scratch / "saved")}
    started = time.perf_counter()
    run_process(settings)
    size = sum(f.stat().st_size for f in (scratch / "saved").rglob("*") if f.is_file())
    return {"seconds_of_the_run": time.perf_counter() - started, "gib_written": size / 2**30}
