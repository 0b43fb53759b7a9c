"""Loads the same packs into torch with packstore and every peer, in one run.

    python benchmarks/loading.py --quick           # 500 packs, and the peers that are installed

All peers do not fit into one environment (mosaicml-streaming asks for numpy<2.2), and
two of them bring a torchvision that replaces a torch without CUDA; so two environments,
and --no-deps:

    python -m venv a && a/bin/pip install torch==2.13.0
    a/bin/pip install -e '.[torch]' datasets torchdata \\
        boto3 filelock lightning-utilities obstore requests tifffile
    a/bin/pip install --no-deps litdata
    python -m venv b && b/bin/pip install torch==2.13.0 'numpy<2.2' 'transformers<5' 'xxhash<4' \\
        'paramiko<4' azure-identity azure-storage-blob azure-storage-file-datalake boto3
        Brotli \\ catalogue google-cloud-storage matplotlib oci python-snappy tqdm zstd
    b/bin/pip install --no-deps mosaicml-streaming
    a/bin/python benchmarks/loading.py --python a/bin/python --python b/bin/python
    --work DIR

With ``--prepare`` it only writes the files (ten minutes), so that the run itself can be
made when the machine is idle.

About 20,000 packs of 4096 tokens are made out of real texts
(``peers_loading/texts.py``), packed by packstore, and written by every peer as its
documentation advises. Every reader gives batches of 8 packs in a shuffled order, in the
training process; every figure comes from a fresh process:

- packs/s, tokens/s: one epoch from the opened loader on, the best of `--passes`
  interleaved passes.
- CPU us: of the process and its threads, a pack; the lowest.
- first ms: from nothing but imports to the first batch; the lowest.
- peak MB: memory that no file backs, above that of a process that imported torch.
- resume: a fresh process loads the state that another one saved at 50 % and at 95 % of
  the epoch; time to its first batch, and whether the rest is exactly the rest. Peers
  without a state replay.
- flipped bit: whether a reader raises, or yields other values silently, after one bit of
  its largest file was flipped; of `--flips` trials.
- MB and write CPU s: of the files, and of writing them. What the folder `--work` has
  already is kept: remove a reader's folder and its .json to have it written again.

``packstore`` is `PackedDataLoader`, of whose batches ids and labels are asked for
(int64); ``packstore padded`` the same packs in torch's DataLoader with the peers'
collation: the same work as theirs. ``arrow`` has uncompressed Arrow files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from common import HERE, RESULTS, parser, provenance, save, show
from peers_loading import READERS
from peers_loading.runner import ChildError, Interpreter, Runner
from peers_loading.texts import write_examples

DATA = HERE.parents[1] / "shared" / "data"
COLUMNS = {
    "packs/s": ("samples_per_second", 1),
    "M tok/s": ("tokens_per_second", 1e-6),
    "CPU us": ("cpu_us", 1),
    "first ms": ("first_seconds", 1e3),
    "peak MB": ("memory", 1e-6),
    "resume ms": ("resume_seconds", 1e3),
    "exact": ("resume_exact", 1),
    "flipped bit": ("flips", 1),
    "MB": ("bytes", 1e-6),
    "write CPU s": ("write_cpu_seconds", 1),
}
"""Column of the table -> figure, and what it is multiplied by."""


class Benchmark:
    """One run; collects what it finds in `rows`."""

    def __init__(self, runner: Runner, readers: list[str]) -> None:
        self.run, self.readers = runner, readers
        self.rows: dict[str, dict[str, Any]] = {name: {} for name in readers}
        self.packs: dict[str, Any] = {}

    def attempt(self, mode: str, reader: str, **options: Any) -> dict[str, Any]:
        """A child's result; one that fails is reported and gives nothing."""
        print(mode, reader, flush=True)
        try:
            return self.run(mode, reader, **options)
        except ChildError as error:
            print(f"{mode} {reader}: {error}")
            self.rows.get(reader, {}).setdefault("errors", {})[mode] = str(error)
            return {}

    def prepare(self, packs: int, data: Path) -> None:
        """Writes the packs for every reader; what is already there is kept."""
        done, source = self.run.root / "source.json", self.run.root / "source"
        if not done.exists():
            source.mkdir(parents=True, exist_ok=True)
            figures = write_examples(data, source, packs)
            self.write("packstore")
            figures |= self.run("source", "packstore")
            done.write_text(json.dumps(figures), encoding="utf-8")
        self.packs = json.loads(done.read_text(encoding="utf-8"))
        for reader in self.readers:
            self.rows[reader] |= self.write(reader)

    def write(self, reader: str) -> dict[str, Any]:
        """Writes a reader's files unless they are there; CPU seconds and bytes."""
        marker = self.run.root / f"{READERS[reader].files}.json"
        if not marker.exists():
            result = self.attempt("write", reader)
            if not result:
                return {}
            keys = ("write_cpu_seconds", "bytes")
            marker.write_text(
                json.dumps({key: result[key] for key in keys}), encoding="utf-8"
            )
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
        row.setdefault("all_samples_per_second", []).append(
            round(found["samples_per_second"])
        )

    def resume(self, reader: str) -> None:
        """Saves in one process and continues in another."""
        row, plan = self.rows[reader], self.attempt("plan", reader)
        if not plan:
            return
        row |= {key: plan[key] for key in ("complete", "state_bytes")}
        if not plan["complete"]:
            print(f"{reader}: an epoch is not every pack once")
        found = [self.attempt("resume", reader, position=i) for i in range(2)]
        if all(found):
            for key in ("seconds", "exact", "lost", "repeated"):
                row[f"resume_{key}"] = [result[key] for result in found]

    def flip_bits(self, reader: str, trials: int) -> None:
        """Flips one bit of a reader's largest file, reads an epoch, and flips it back."""
        folder = self.run.root / READERS[reader].files
        files = (path for path in folder.rglob("*") if path.is_file())
        largest = max(files, key=lambda path: path.stat().st_size)
        # The same shares of all files, and not near their ends, where metadata lie.
        places = np.random.default_rng(0).uniform(0.05, 0.95, trials)
        outcomes: list[str] = []
        for place in places.tolist():
            offset = int(place * largest.stat().st_size)
            _flip_bit(largest, offset)
            try:
                is_intact = self.run("check", reader)["intact"]
                outcomes.append("unread" if is_intact else "silent")
            except ChildError as error:
                print(f"flipped bit {reader}: {error}")
                outcomes.append("raised")
            finally:
                _flip_bit(largest, offset)
        counts = Counter(outcomes).most_common()
        self.rows[reader]["flips"] = ", ".join(f"{n} {name}" for name, n in counts)

    def cells(self, reader: str) -> list[Any]:
        """The row of the table."""
        found = [self.rows[reader].get(key, "-") for key, _ in COLUMNS.values()]
        return [
            [y * scale for y in x]
            if isinstance(x, list)
            else x
            if isinstance(x, str)
            else x * scale
            for x, (_, scale) in zip(found, COLUMNS.values(), strict=True)
        ]


def _flip_bit(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def run(args: Any) -> dict[str, Any]:
    """Runs everything; returns the result as it is stored."""
    interpreters = [Interpreter.at(path) for path in args.python]
    runner = Runner(interpreters, args.work / "main", args.limit)
    readers = [name for name in READERS if not args.only or name in args.only]
    for name in [name for name in readers if not runner.interpreter(name)]:
        needed = ", ".join(READERS[name].packages)
        print(f"{name} left out: no interpreter has torch, {needed}")
        readers.remove(name)
    benchmark = Benchmark(runner, readers)
    before = provenance() | {"versions": [python.versions for python in interpreters]}
    benchmark.prepare(args.packs, args.data)
    if args.prepare:
        return {}
    for _ in range(args.passes):
        for name in readers:
            benchmark.read(name)
    for name in readers:
        if READERS[name].states:
            benchmark.resume(name)
            benchmark.flip_bits(name, args.flips)
    show(("reader", *COLUMNS), [(name, *benchmark.cells(name)) for name in readers])
    return {
        "environment": before,
        "settings": {key: getattr(args, key) for key in ("passes", "only")},
        "packs": {"main": benchmark.packs},
        "rows": benchmark.rows,
    }


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--quick", action="store_true", help="500 packs, one pass")
    command.add_argument(
        "--prepare", action="store_true", help="write the files, measure nothing"
    )
    command.add_argument(
        "--work", type=Path, help="folder of the files, kept; default: temporary"
    )
    command.add_argument("--data", type=Path, default=DATA, help="folder of real texts")
    command.add_argument(
        "--python", action="append", help="with peers; repeatable; default: this"
    )
    command.add_argument("--only", nargs="+", choices=READERS)
    command.add_argument("--packs", type=int, help="default: 20,000")
    command.add_argument("--passes", type=int, help="default: 3")
    command.add_argument("--flips", type=int, help="default: 3; quick: 1")
    command.add_argument(
        "--limit", type=float, default=300, help="seconds for one process at most"
    )
    command.add_argument(
        "--out", type=Path, help="default: benchmarks/results/loading.json"
    )
    args = command.parse_args()
    if args.prepare and not args.work:
        command.error("--prepare needs --work, where the files stay")
    args.python = args.python or [sys.executable]
    args.packs = args.packs or (500 if args.quick else 20_000)
    args.flips = args.flips or (1 if args.quick else 3)
    args.passes = args.passes or (1 if args.quick else 3)
    if args.out is None and not (args.quick or args.only or args.prepare):
        args.out = RESULTS / "loading.json"
    with tempfile.TemporaryDirectory(prefix="packstore-loading-") as temporary:
        args.work = args.work or Path(temporary)
        try:
            result = run(args)
        except ChildError as error:
            raise SystemExit(f"the packs could not be made: {error}") from error
    save(args.out, result)


if __name__ == "__main__":
    main()
