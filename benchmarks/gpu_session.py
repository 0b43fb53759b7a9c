"""All that is to be measured on one CUDA GPU, in three stages of at most nine minutes each.

    python benchmarks/gpu_session.py --prepare gpu-files     # before, on a machine with network
    python benchmarks/gpu_session.py --stage 0 --data gpu-files/data --out gpu-results
    python benchmarks/gpu_session.py --cpu-dry-run --stage 0 1 2 --out /tmp/dry
    python benchmarks/gpu_session.py --counted               # what is expected, without a GPU

0. What decides: the kernels that `auto` takes and the head against float32 and float64, packed
   against padded models; then pairs a second of models of the shapes of Llama-3.2-1B and
   Qwen3-0.6B, beside padding-free and padded batches, each with TRL's fused head, and with logits;
   heads beside their peers; a profile; compiled layers; a run that is killed and resumed.
1. Other backends, heads and settings; a CUDA graph; ``packstore train``, reference log-probs.
2. Longer prompts and responses, larger batches, compiled layers; tiles; attention by length.

Each case prints its verdict and is written to ``stage<N>.json`` when it ends; none begins when the
budget is short. One that raises, hangs or kills the process is recorded, and the rest goes on. What
was expected (``gpu/predictions.py``) is printed beside it. ``--prepare`` fetches the wheels that a
bare machine lacks, packs the data, and prints the command for that machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "benchmarks")) if p not in sys.path]

NO_GPU = "gpu_session.py needs a CUDA GPU; --cpu-dry-run tries the script without one."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", type=int, nargs="+", choices=(0, 1, 2), default=[0])
    parser.add_argument("--budget", type=float, help="seconds of each stage; default: its own")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument("--data", type=Path, help="DIR/data of --prepare; made if it is missing")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="fetch wheels, pack data")
    parser.add_argument("--cpu-dry-run", action="store_true", help="every path, tiny, on CPU")
    parser.add_argument("--counted", action="store_true", help="print what is expected, and end")
    parser.add_argument(
        "--only", default="", help="regular expression of the names of cases to run"
    )
    args = parser.parse_args()

    # Processes are forked below, which a driver that was asked before does not survive.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch
    from gpu.sizes import DRY, GPU

    sizes = DRY if args.cpu_dry_run else GPU
    if args.counted:
        from gpu.predictions import show

        show()
        return
    if args.prepare:
        from gpu.prepare import prepare

        prepare(args.prepare, sizes)
        return
    if not sizes.cuda:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        sys.exit(NO_GPU)
    sys.exit(0 if run(args, sizes) else 1)


def run(args: argparse.Namespace, sizes: object) -> bool:
    """Runs the stages; returns False if a case is wrong or failed."""
    import transformers
    from gpu.session import Session, supervise
    from gpu.stages import BUDGETS, stage

    for family, _ in sizes.models.values():  # imported once, before the processes part
        getattr(transformers, f"{family}ForCausalLM")
    right = True
    with tempfile.TemporaryDirectory() as scratch:
        data = args.data or Path(scratch, "data")
        if not data.exists():
            from gpu.prepare import write_data

            write_data(data, sizes)
        for number in args.stage:
            session = partial(Session, number, args.out, sizes, args.only)
            (args.out / f"stage{number}.json").unlink(missing_ok=True)
            kept = Path(scratch, f"stage{number}")
            kept.mkdir()
            supervise(stage(number, sizes, data, kept), session, args.budget or BUDGETS[number])
            right &= session(0).table()
    return right


if __name__ == "__main__":
    main()
