"""Loads the same packs into torch with packstore and every peer, in one run.

    python benchmarks/loading.py --quick           # 500 packs, and the peers that are installed

All peers do not fit into one environment (mosaicml-streaming asks for numpy<2.2), and two of them
bring a torchvision that replaces a torch without CUDA; so two environments, and --no-deps:

    python -m venv a && a/bin/pip install torch==2.13.0
    a/bin/pip install -e '.[torch]' datasets torchdata \\
        boto3 filelock lightning-utilities obstore requests tifffile
    a/bin/pip install --no-deps litdata
    python -m venv b && b/bin/pip install torch==2.13.0 'numpy<2.2' 'transformers<5' 'xxhash<4' \\
        'paramiko<4' azure-identity azure-storage-blob azure-storage-file-datalake boto3 Brotli \\
        catalogue google-cloud-storage matplotlib oci python-snappy tqdm zstd
    b/bin/pip install --no-deps mosaicml-streaming
    a/bin/python benchmarks/loading.py --python a/bin/python --python b/bin/python --work DIR

With ``--prepare`` it only writes the files (ten minutes), so that the run itself can be made when
the machine is idle.

About 20,000 packs of 4096 tokens are made out of real texts (``peers_loading/texts.py``), packed by
packstore, and written by every peer as its documentation advises. Every reader gives batches of
8 packs in a shuffled order, in the training process; every figure comes from a fresh process:

- packs/s, tokens/s: one epoch from the opened loader on, the best of `--passes` interleaved
  passes.
- CPU us: of the process and its threads, a pack; the lowest.
- first ms: from nothing but imports to the first batch; the lowest.
- peak MB: memory that no file backs, above that of a process that imported torch.
- resume: a fresh process loads the state that another one saved at 50 % and at 95 % of the epoch;
  time to its first batch, and whether the rest is exactly the rest. Peers without a state replay.
- MB and write CPU s: of the files, and of writing them. What the folder `--work` has already is
  kept: remove a reader's folder and its .json to have it written again.

``packstore`` is
`PackedDataLoader`, of whose batches ids and labels are asked for (int64); ``packstore padded`` the
same packs in torch's DataLoader with the peers' collation: the same work as theirs. ``arrow`` has
uncompressed Arrow files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers_loading import READERS
from peers_loading.report import show
from peers_loading.runner import ChildError, Interpreter, Runner
from peers_loading.texts import write_examples
from common import provenance
from rich.console import Console

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "loading.json"
DATA = HERE.parents[1] / "shared" / "data"
MAIN = "main"


class Benchmark:
    """One run; collects what it finds in `rows`."""

    def __init__(self, runner: Runner, readers: list[str], console: Console) -> None:
        self.run, self.readers, self.console = runner, readers, console
        self.rows: dict[str, dict[str, Any]] = {name: {} for name in readers}
        self.packs: dict[str, Any] = {}

    def attempt(self, mode: str, reader: str, **options: Any) -> dict[str, Any]:
        """A child's result; one that fails is reported and gives nothing."""
        self.console.print(f"[dim]{mode} {reader}")
        try:
            return self.run(mode, reader, MAIN, **options)
        except ChildError as error:
            self.console.print(f"[yellow]{mode} {reader}: {error}")
            self.rows.get(reader, {}).setdefault("errors", {})[mode] = str(error)
            return {}

    def prepare(self, packs: int, data: Path) -> None:
        """Writes the packs for every reader; what is already there is kept."""
        root = self.run.work / MAIN
        done = root / "source.json"
        if not done.exists():
            (root / "source").mkdir(parents=True, exist_ok=True)
            figures = write_examples(data, root / "source", packs)
            self.write("packstore")
            figures |= self.run("source", "packstore", MAIN)
            done.write_text(json.dumps(figures))
        self.packs = json.loads(done.read_text(encoding="utf-8"))
        for reader in self.readers:
            self.rows[reader] |= self.write(reader)

    def write(self, reader: str) -> dict[str, Any]:
        """Writes a reader's files unless they are there; CPU seconds and bytes."""
        marker = self.run.work / MAIN / f"{READERS[reader].files}.json"
        if not marker.exists():
            result = self.attempt("write", reader)
            if not result:
                return {}
            keys = ("write_cpu_seconds", "bytes")
            marker.write_text(json.dumps({key: result[key] for key in keys}))
        return dict(json.loads(marker.read_text(encoding="utf-8")))

    def read(self, reader: str) -> None:
        """Reads one epoch; keeps the best figures."""
        row, found = self.rows[reader], self.attempt("read", reader)
        if not found:
            return
        tokens = self.packs["tokens"] / self.packs["packs"]
        found["tokens_per_second"] = tokens * found["samples_per_second"]
        found["memory"] = found["peak_memory"] - found["torch_memory"]
        for key in ("samples_per_second", "tokens_per_second"):
            row[key] = max(found[key], row.get(key, 0))
        for key in ("cpu_us", "first_seconds", "memory"):
            row[key] = min(found[key], row.get(key, found[key]))
        row.setdefault("all_samples_per_second", []).append(round(found["samples_per_second"]))

    def resume(self, reader: str) -> None:
        """Saves in one process and continues in another."""
        row, plan = self.rows[reader], self.attempt("plan", reader)
        if not plan:
            return
        row |= {key: plan[key] for key in ("complete", "state_bytes")}
        if not plan["complete"]:
            self.console.print(f"[yellow]{reader}: an epoch is not every pack once")
        found = [self.attempt("resume", reader, position=i) for i in range(2)]
        if not all(found):
            return
        for key in ("seconds", "exact", "lost", "repeated"):
            row[f"resume_{key}"] = [result[key] for result in found]


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs everything; returns the result as it is stored."""
    runner = Runner([Interpreter.at(path) for path in args.python], args.work, args.limit)
    readers = [name for name in READERS if not args.only or name in args.only]
    for name in readers:
        if not runner.interpreter(name):
            needed = ", ".join(READERS[name].packages)
            console.print(f"[yellow]{name} left out: no interpreter has torch, {needed}")
    readers = [name for name in readers if runner.interpreter(name)]
    benchmark = Benchmark(runner, readers, console)
    before = provenance() | {"versions": [python.versions for python in runner.interpreters]}
    benchmark.prepare(args.packs, args.data)
    if args.prepare:
        return {}
    for _ in range(args.passes):
        for name in readers:
            benchmark.read(name)
    for name in readers:
        if READERS[name].states:
            benchmark.resume(name)
    show(benchmark.rows, console)
    return {
        "environment": before,
        "settings": {key: getattr(args, key) for key in ("passes", "only")},
        "packs": {MAIN: benchmark.packs},
        "rows": benchmark.rows,
    }


def arguments() -> argparse.Namespace:
    """The command line; ``--quick`` changes the defaults of the sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="500 packs, one pass")
    quick = parser.parse_known_args()[0].quick if "-h" not in sys.argv else False
    parser.add_argument(
        "--prepare", action="store_true", help="write the files of all readers, measure nothing"
    )
    parser.add_argument("--work", type=Path, help="folder of the files, kept; default: temporary")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of real texts")
    parser.add_argument(
        "--python", action="append", help="an interpreter with peers (repeatable); default: this"
    )
    parser.add_argument(
        "--only", type=lambda x: x.split(","), help=f"of {','.join(READERS)}", metavar="A,B"
    )
    parser.add_argument("--packs", type=int, default=500 if quick else 20_000)
    parser.add_argument("--passes", type=int, default=1 if quick else 3)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one process at most")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/loading.json")
    args = parser.parse_args()
    args.python = args.python or [sys.executable]
    if args.prepare and not args.work:
        parser.error("--prepare needs --work, where the files stay")
    if args.out is None and not (quick or args.only or args.prepare):
        args.out = RESULTS
    return args


def main() -> None:
    """The script."""
    args, console = arguments(), Console(width=160)
    with tempfile.TemporaryDirectory(prefix="packstore-loading-") as temporary:
        args.work = args.work or Path(temporary)
        try:
            result = run(args, console)
        except ChildError as error:
            raise SystemExit(f"the packs could not be made: {error}") from error
    if args.out is not None:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {args.out}")


if __name__ == "__main__":
    main()
