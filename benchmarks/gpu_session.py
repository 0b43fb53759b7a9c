"""All that is to be measured on one CUDA GPU, in four stages of at most nine minutes each.

    python benchmarks/gpu_session.py --prepare gpu-files     # before, on a machine with network
    python benchmarks/gpu_session.py --stage 1 --data gpu-files/data --out gpu-results
    python benchmarks/gpu_session.py --cpu-dry-run --stage 1 2 3 4 --out /tmp/dry

1. Right: every attention backend, layout, head size and window against float32; the head against
   float64; packed equals padded on random Llama, Qwen3 and Gemma2; isolation; host waits; a CUDA
   graph; a training run that is killed and resumed.
2. Fast: pairs a second of random models of the shapes of Llama-3.2-1B and Qwen3-0.6B, beside padded
   batches and padding-free ones with logits; eager and compiled layers.
3. Parts: a profile by kernel; the head beside its peers; attention by segment length; the gather.
4. End to end: ``packstore train`` with all weights, with autocast and LoRA; reference log-probs;
   the share of the time that waits for data.

Each case prints its verdict and is written to ``stage<N>.json`` when it ends; no case begins when
the budget is short. A case that raises, hangs or kills the process is recorded, and the rest goes
on. Figures that were predicted are printed beside the measured ones (``gpu/predictions.py``).
``--prepare`` fetches the wheels that a bare machine lacks, packs the data, and prints the command
for that machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "benchmarks")) if p not in sys.path]

STAGES = (1, 2, 3, 4)
NO_GPU = "gpu_session.py needs a CUDA GPU; --cpu-dry-run tries the script without one."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", type=int, nargs="+", choices=STAGES, default=[1])
    parser.add_argument("--budget", type=float, default=520, help="seconds of each stage")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument("--data", type=Path, help="DIR/data of --prepare; made if it is missing")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="fetch wheels, pack data")
    parser.add_argument("--no-wheels", action="store_true", help="with --prepare: only the data")
    parser.add_argument("--cpu-dry-run", action="store_true", help="every path, tiny, on CPU")
    parser.add_argument("--only", help="regular expression: run the cases whose names contain it")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    from gpu.sizes import DRY, GPU

    sizes = DRY if args.cpu_dry_run else GPU
    if args.prepare:
        from gpu.prepare import prepare

        prepare(args.prepare, sizes, wheels=not args.no_wheels)
        return
    if args.child:
        run(args.stage[0], args, sizes)
        return

    import torch

    if sizes.cuda and not torch.cuda.is_available():
        sys.exit(NO_GPU)
    sys.exit(supervised(args, sizes))


def supervised(args: argparse.Namespace, sizes: object) -> int:
    """Runs the stages, each in processes of its own."""
    from gpu.session import supervise

    worst = 0
    with tempfile.TemporaryDirectory() as scratch:
        data = args.data or Path(scratch, "data")
        if not data.exists():
            from gpu.prepare import write_data

            write_data(data, sizes)
        for stage in args.stage:
            path = args.out / f"stage{stage}.json"
            path.unlink(missing_ok=True)
            command = [sys.executable, __file__, "--child", "--stage", str(stage)]
            command += ["--budget", str(args.budget), "--out", str(args.out), "--data", str(data)]
            kept = Path(scratch, f"stage{stage}")  # for a process that goes on with the stage
            kept.mkdir()
            command += ["--scratch", str(kept)]
            command += ["--cpu-dry-run"] if args.cpu_dry_run else []
            command += ["--only", args.only] if args.only else []
            worst = max(worst, supervise(command, path, args.budget))
    return worst


def run(stage: int, args: argparse.Namespace, sizes: object) -> None:
    """Runs one stage in this process; exits with 1 if a case is wrong or failed."""
    import importlib
    import inspect

    import torch
    from gpu.session import Session

    if not sizes.cuda:
        torch.set_num_threads(1)
    names = {1: "right", 2: "fast", 3: "parts", 4: "end_to_end"}
    module = importlib.import_module(f"gpu.{names[stage]}")
    session = Session(stage, args.out, args.budget, sizes, args.only)
    given = (session, args.data, args.scratch)
    module.stage(*given[: len(inspect.signature(module.stage).parameters)])
    session.table()
    bad = [c for c in session.cases.values() if c["verdict"] in ("WRONG", "FAILED", "unfinished")]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
