"""All that is to be measured on one CUDA GPU: one call of nine minutes, and one of
three.

    python benchmarks/gpu_session.py --prepare       # before: wheels, data; prints both calls
    python benchmarks/gpu_session.py --data gpu-files/data --end $(($(date +%s) + 515))
    python benchmarks/gpu_session.py --cpu-dry-run --out /tmp/dry
    python benchmarks/gpu_session.py --counted       # what is expected, without a GPU

Parts in the order of their value (``gpu/plan.py``). The first call has ``packstore
train`` beside TRL's trainer; kernels, head and packed models against float32; attention
by length profile; pairs a second of three models with compiled layers, beside
padding-free batches and CUDA graphs. The second has routes of the head, a profile, and a run
that is killed and resumed. Other models, lengths and settings follow if there is time.

Each case prints its verdict and is written to ``results.json`` when it ends, in
``--out`` and in ``$OUT``; none begins after ``--end``. One that raises, hangs or kills
its process is recorded, and the rest goes on. What was expected is printed beside it
(``gpu/predictions.py``; on an H200, ``results/gpu_predictions.json``). Nothing is
deleted: another call runs the cases that were skipped or not reached, ``--again`` also
others.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "benchmarks")) if p not in sys.path]
os.environ["PYTHONPATH"] = (
    f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # of children
)

NO_GPU = "gpu_session.py needs a CUDA GPU; --cpu-dry-run tries the script without one."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--end", type=float, default=time.time() + 515, help="seconds since 1970"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="folder of results"
    )
    parser.add_argument(
        "--data", type=Path, help="packed by --prepare; made if it is missing"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="fetch wheels, pack data"
    )
    parser.add_argument(
        "--cpu-dry-run", action="store_true", help="every path, tiny, on CPU"
    )
    parser.add_argument(
        "--counted",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print what is expected, and end; FILE: also write it, as JSON",
    )
    parser.add_argument(
        "--only", default="", help="regular expression of names of cases to run"
    )
    parser.add_argument(
        "--again", nargs="+", default=[], help="verdicts of cases that run again"
    )
    args = parser.parse_args()

    # Processes are forked below, which a driver that was asked before does not survive.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch
    from gpu.sizes import DRY, GPU

    sizes = DRY if args.cpu_dry_run else GPU
    if args.counted:
        from gpu.counted import show

        show(args.counted)
        return
    if args.prepare:
        from gpu.prepare import prepare

        prepare(sizes)
        return
    if not sizes.cuda:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        sys.exit(NO_GPU)
    sys.exit(0 if run(args, sizes) else 1)


def run(args: argparse.Namespace, sizes: object) -> bool:
    """Runs the plan; returns False if a case is wrong or failed."""
    import transformers
    from gpu.plan import plan
    from gpu.session import Session, supervise

    for family, _ in sizes.models.values():  # imported once, before the processes part
        getattr(transformers, f"{family}ForCausalLM")
    session = partial(Session, args.out, sizes, args.only)
    session(0).forget(["skipped", *args.again])
    with tempfile.TemporaryDirectory() as scratch:
        data = args.data or Path(scratch, "data")
        if not data.exists():
            from gpu.prepare import write_data

            write_data(data, sizes)
        supervise(plan(sizes, data, Path(scratch)), session, args.end)
    return session(0).table()


if __name__ == "__main__":
    main()
