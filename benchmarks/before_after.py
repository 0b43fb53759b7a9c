"""Compares packing, planning and loading of several commits, in turns on one machine.

    python benchmarks/before_after.py pairs.jsonl TOKENIZER b5deae5 HEAD --out before_after.json

Each commit runs from a worktree of its own, in fresh processes, with the installed packages of this
environment. `pairs.jsonl` holds plain pairs. Figures are CPU seconds (workers included), the best
of all rounds:

    etl            `packstore.pack` of all pairs, one worker
    plan           `packstore.plan` of 1,000,000 lengths
    parquet spans  an epoch of packs of 4,096 tokens, us a pack: ids and labels of every batch
    parquet plain  the same with stored labels, packs of 8,192 tokens
    arrow          the same from Arrow, packs of 4,096 tokens
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATASETS = {
    "parquet spans": {"pack_size": 4096, "labels": "spans"},
    "parquet plain": {"pack_size": 8192, "labels": "plain"},
    "arrow": {"pack_size": 4096, "format": "arrow"},
}


def cpu() -> float:
    """CPU seconds of this process and its children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def measure(pairs: str, tokenizer: str, folder: Path) -> dict[str, float]:
    """One round, with the packstore that is on the path."""
    import numpy as np

    import packstore
    from packstore.torch import PackedDataLoader, PackedDataset

    found = {}
    for name, settings in DATASETS.items():
        if not (folder / name).exists():
            packstore.pack(pairs, str(folder / name), tokenizer, num_workers=1, **settings)
    began = cpu()
    packstore.pack(
        pairs, str(folder / "etl"), tokenizer, pack_size=8192, num_workers=1, overwrite=True,
        fresh=True,
    )  # fmt: skip
    found["etl"] = cpu() - began
    lengths = np.random.default_rng(0).integers(20, 2000, 10**6).astype(np.int32)
    packstore.plan(lengths[:1000], pack_size=8192)
    began = time.process_time()
    packstore.plan(lengths, pack_size=8192)
    found["plan"] = time.process_time() - began
    for name in DATASETS:
        best = float("inf")
        for _ in range(3):
            packs, began = 0, time.process_time()
            for batch in PackedDataLoader(PackedDataset(str(folder / name)), packs_per_batch=8):
                _ = batch.input_ids, batch.labels
                packs += batch.num_packs
            best = min(best, (time.process_time() - began) / packs * 1e6)
        found[name] = best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs")
    parser.add_argument("tokenizer")
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(measure(args.pairs, args.tokenizer, args.folder)))
        return
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root)]
    commits = [
        subprocess.run(
            [*git, "rev-parse", "--short=12", name], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        for name in args.commits
    ]
    best: dict[str, dict[str, float]] = {commit: {} for commit in commits}
    with tempfile.TemporaryDirectory(prefix="before-after-") as name:
        for commit in commits:
            subprocess.run([*git, "worktree", "add", "-q", "--detach", f"{name}/{commit}", commit],
                           check=True)  # fmt: skip
        try:
            for _ in range(args.rounds):
                for commit in commits:
                    data = Path(name, f"data-{commit}")
                    data.mkdir(exist_ok=True)
                    told = subprocess.run(
                        [sys.executable, "-P", __file__, args.pairs, args.tokenizer, commit,
                         "--folder", str(data)],
                        env={**os.environ, "PYTHONPATH": f"{name}/{commit}"},
                        check=True, stdout=subprocess.PIPE, text=True,
                    )  # fmt: skip
                    for what, value in json.loads(told.stdout.splitlines()[-1]).items():
                        before = best[commit].get(what, value)
                        best[commit][what] = round(min(value, before), 3)
        finally:
            for commit in commits:
                subprocess.run([*git, "worktree", "remove", "--force", f"{name}/{commit}"],
                               check=False)  # fmt: skip
    first = best[commits[0]]
    report = {
        "pairs": Path(args.pairs).read_bytes().count(b"\n"),
        "tokenizer": Path(args.tokenizer).name,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "best": best,
        "ratio_to_first": {
            commit: {what: round(value / first[what], 2) for what, value in figures.items()}
            for commit, figures in best.items()
        },
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
