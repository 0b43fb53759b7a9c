"""Runs `packstore train` of a model of about 1.2 billion parameters on a GPU, with a resume.

    python benchmarks/train_gpu.py                      # one CUDA GPU, torch 2.11 or newer
    python benchmarks/train_gpu.py --data lengths.txt   # tokens of prompt, chosen, rejected a line
    python benchmarks/train_gpu.py --cpu-dry-run --out /tmp/dry.json    # every path, tiny

A random Llama (vocabulary 128256) in bfloat16 learns from pairs of an hh-like distribution (see
``attention_gpu.py``), packed in layout shared_prefix, each way in processes of its own:

- `full`: all weights, against precomputed reference log-probs;
- `full_online`: the same with a second model beside the policy;
- `lora`: an adapter of rank 16 over the frozen model, which is the reference.

Recorded are pairs and tokens a second (the median of the records after the first two), the share of
the time that is spent waiting for data, and the peak of memory of the process. Then the run is
killed with SIGKILL between two checkpoints and goes on; its losses are compared with those of the
undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_kernels import DRY, GPU, Setting, lengths

RESULTS = Path(__file__).parent / "results" / "train_gpu.json"
WAYS: dict[str, dict[str, Any]] = {
    "full": {"ref_logps": "ref"},
    "full_online": {},
    "lora": {"lora_rank": 16, "learning_rate": 1e-4},
}
FIRST = 2
"""Records that are left out: kernels are chosen and compiled there."""


def prepare(setting: Setting, folder: Path, data: str | None, steps: int) -> dict[str, Any]:
    """Model, dataset and reference log-probs; settings of all runs."""
    import packstore
    from packstore.torch.models.load import load_model
    from packstore.torch.reference.reference import write_ref_logps

    pairs = 64 if setting.cuda else 8
    rows = lengths(pairs * (steps + 2), 1024 if setting.cuda else 30, data)
    vocab = setting.model["vocab_size"]
    rng = np.random.default_rng(0)
    names = ("prompt", "chosen", "rejected")
    records = (
        {name: rng.integers(0, vocab, n).tolist() for name, n in zip(names, row, strict=True)}
        for row in rows.tolist()
    )
    dataset = packstore.pack(
        records,
        str(folder / "data"),
        pack_size=setting.pack_size,
        layout="shared_prefix",
        identical_sides="keep",
    )
    make_model(setting).save_pretrained(folder / "model")
    model = load_model(folder / "model", dtype="bfloat16").to(setting.device)
    write_ref_logps(model, dataset, str(folder / "ref"))
    return {
        "model": str(folder / "model"),
        "dataset": dataset.url,
        "dtype": "bfloat16",
        "gradient_checkpointing": setting.cuda,
        "examples_per_step": pairs,
        "tokens_per_batch": 2 * setting.pack_size,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "log_every": 1,
        "save_every": steps // 2,
        "cpu": not setting.cuda,
    }


def make_model(setting: Setting) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**setting.model, tie_word_embeddings=True)
    return LlamaForCausalLM(config).to(setting.dtype)


def run(settings: dict[str, Any], kill_at: int | None = None) -> dict[str, Any]:
    """A run in a process of its own: its records and peak of memory; or its exit code."""
    task = json.dumps({"settings": settings, "kill_at": kill_at})
    done = subprocess.run(
        [sys.executable, __file__, "--child", task], capture_output=True, text=True, check=False
    )
    if kill_at is not None:
        assert done.returncode == -signal.SIGKILL, done.stderr
        return {}
    assert done.returncode == 0, done.stderr
    lines = Path(settings["output"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [r for r in map(json.loads, lines) if "loss" in r]
    return {"records": records, **json.loads(done.stdout.splitlines()[-1])}


def child(task: dict[str, Any]) -> None:
    """One run, killed after a step if asked for."""
    from packstore.torch.training.sinks import JsonLines
    from packstore.torch.training.train import train

    write = JsonLines.write

    def write_or_die(self: JsonLines, record: Any) -> None:
        write(self, record)
        if record["step"] == task["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    JsonLines.write = write_or_die  # type: ignore[method-assign]
    train(**task["settings"])
    cuda = torch.cuda.is_available() and not task["settings"]["cpu"]
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    print(json.dumps({"peak_mib": peak}))


def measured(way: dict[str, Any], base: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Rates and memory of an undisturbed run, and what a killed one that goes on makes of it."""
    own = {k: str(folder / v) if k == "ref_logps" else v for k, v in way.items()}
    settings = {**base, **own}
    whole = run({**settings, "output": str(folder / "whole")})
    killed = {**settings, "output": str(folder / "killed")}
    run(killed, kill_at=settings["save_every"] + 1)
    again = run(killed)
    losses = [[r["loss"] for r in found["records"]] for found in (whole, again)]
    for name in ("whole", "killed"):
        shutil.rmtree(folder / name)
    steady = whole["records"][FIRST:]
    middle = {
        name: statistics.median(r[name] for r in steady)
        for name in ("pairs_per_second", "tokens_per_second", "fill", "data_wait")
    }
    return {
        **middle,
        "peak_mib": whole["peak_mib"],
        "peak_mib_resumed": again["peak_mib"],
        "losses": losses[0],
        "resumed_differs_by": float(np.abs(np.subtract(*losses)).max()),
    }


def about(args: argparse.Namespace, setting: Setting, base: dict[str, Any]) -> dict[str, Any]:
    """Machine, versions and settings."""
    import transformers

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    folders = ("model", "dataset")
    return {
        "device": torch.cuda.get_device_name() if setting.cuda else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "model": setting.model,
        "settings": {k: v for k, v in base.items() if k not in folders},
        "data": args.data or "synthetic, see the script",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu-dry-run", action="store_true", help="every path, tiny, on CPU")
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--data", help="text file: tokens of prompt, chosen, rejected")
    parser.add_argument("--out", help=f"default: {RESULTS.name} in benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    setting = DRY if args.cpu_dry_run else GPU
    if setting.cuda and not torch.cuda.is_available():
        sys.exit("train_gpu.py needs a CUDA GPU; --cpu-dry-run tries the script without one.")
    steps = 4 if args.cpu_dry_run else args.steps
    out = Path(args.out) if args.out else RESULTS
    with tempfile.TemporaryDirectory() as scratch:
        base = prepare(setting, Path(scratch), args.data, steps)
        results: dict[str, Any] = {**about(args, setting, base), "ways": {}}
        for name in args.ways:
            results["ways"][name] = measured(WAYS[name], base, Path(scratch))
            out.write_text(json.dumps(results, indent=1) + "\n")  # outlives a crash
            print(name, json.dumps(results["ways"][name]), flush=True)


if __name__ == "__main__":
    main()
