"""Packs JSON lines into a stored dataset: beside other ways.

    python benchmarks/etl.py                      # about 25 minutes on two idle cores
    python benchmarks/etl.py --memory             # 50k, 500k and 5M short pairs, under a limit

Pairs of real texts, about 4 kB each, as text and as chats of the same texts, with three tokenizers:
`qwen3` (byte-level BPE, its own chat template), `mistral_v1` (SentencePiece BPE, BOS) and
`t5_unigram` (Unigram, which only the reference engine takes: the smallest size alone takes
minutes, so only that). For each case:

- `packstore.pack` as users call it: wall and CPU seconds, share of the cores that is busy (CPU
  seconds over wall seconds and cores), peak memory, seconds until the first record is read;
- with qwen3, other ways to the same: a plain script with the same engine, which checks
  nothing (`peers_etl/plain_script.py`), `datasets` with TRL's packer (in one process and in two at
  the smallest size, the faster of them at the others and for chats), and, at the smallest size, the
  steps of NeMo-Aligner and packstore with the tokenizer library that both use. What their outputs
  lack is said in `peers_etl/trls.py` and `peers_etl/nemo.py`.

Each run is a process of its own; imports are timed apart, loading the tokenizer is included.
The compiled loops are cached before. Nothing is extrapolated. The load of the machine before each
run stands beside it: with more than a few tenths, compare CPU seconds only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_etl.texts import write_pairs
from provenance import provenance
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "etl.json"
OURS, REFERENCE = "packstore", "packstore-reference"
TRL, TRL_2, NEMO, PLAIN = "datasets+trl", "datasets+trl-2", "nemo-steps", "plain-script"
TOKENIZERS = {"qwen3": None, "mistral_v1": "plain", "t5_unigram": "plain"}
"""Name -> chat template where it has none."""

COMPARED, SLOW = "qwen3", ("t5_unigram",)
"""With this tokenizer the peers run; those are measured at the smallest size only."""

FORMS = ("text", "chat")
SIZES = (50_000, 200_000)
PACK_SIZE = 8192
SERIES = (50_000, 500_000, 5_000_000)
MARGIN = 1.3
"""Peaks of memory may lie so far apart; the limit of the larger runs is so much over the first."""

COLUMNS = ("contender", "wall s", "CPU s", "busy", "M tokens", "packs", "peak MB", "stages")

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Form and number of the pairs, and the tokenizer."""

    tokenizer: str
    form: str
    pairs: int

    @property
    def name(self) -> str:
        """Key in the results."""
        return f"{self.tokenizer} {self.form} {self.pairs}"

    def contenders(self, known: Row, first: int) -> Iterator[str]:
        """Names of the contenders, in order.

        Args:
            known: results so far.
            first: the smallest size.
        """
        yield OURS
        if self.tokenizer != COMPARED:
            return
        yield PLAIN
        if self.pairs == first and self.form == "text":
            yield from (REFERENCE, TRL, TRL_2, NEMO)
        elif self.form == "text" or self.pairs == first:
            texts = known.get(f"{COMPARED} text {first}", {}).get("rows", {})
            yield min((TRL, TRL_2), key=lambda n: texts.get(n, {}).get("seconds", 9e9))


def run(contender: str, args: argparse.Namespace, source: Path, case: Case, limit: int = 0) -> Row:
    """Runs one contender in its own process; measures its output, then removes it."""
    with (
        tempfile.TemporaryDirectory(dir=source.parent) as out,
        tempfile.TemporaryDirectory(dir=source.parent) as temporary,
    ):
        task = {
            "contender": contender, "source": str(source), "out": out,
            "tokenizer": str(args.shared / "tokenizers" / case.tokenizer),
            "template": TOKENIZERS[case.tokenizer], "pack_size": PACK_SIZE, "limit": limit or None,
        }  # fmt: skip
        # Arrow's own allocator reserves address space, which a limit would count.
        environment = {
            **os.environ, "TMPDIR": temporary, "ARROW_DEFAULT_MEMORY_POOL": "system",
            "HF_HOME": temporary, "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        before = os.getloadavg()[0]
        done = subprocess.run(
            [sys.executable, "-m", "peers_etl.child", json.dumps(task)],
            cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{case.name}: {contender} failed:\n{done.stderr[-3000:]}")
        row: Row = json.loads(done.stdout.splitlines()[-1])
        spill = [p.name for p in Path(temporary).glob("packstore-*")]
        return row | {"load_before": before, "left_behind": spill}


def compare(args: argparse.Namespace, scratch: Path, console: Console, results: Row) -> None:
    """Measures all cases, and leaves out what `results` has."""
    cases, source = results.setdefault("cases", {}), scratch / "pairs.jsonl"
    write_pairs(args.shared / "pairs", source, 10_000, "short")  # fewer load no compiled loops
    run(OURS, args, source, Case(COMPARED, "text", 10_000))  # these are cached from now on
    for pairs in args.pairs:
        for form in args.forms:
            write_pairs(args.shared / "pairs", source, pairs, "long", form)
            for tokenizer in args.tokenizers:
                if tokenizer in SLOW and pairs > args.pairs[0]:
                    continue
                case = Case(tokenizer, form, pairs)
                about = cases.setdefault(case.name, {"rows": {}})
                about["input_bytes"] = source.stat().st_size
                names = [n for n in case.contenders(cases, args.pairs[0]) if n in args.only]
                for name in names:
                    if name not in about["rows"]:
                        about["rows"][name] = run(name, args, source, case)
                save(args, results)
                show_case(case.name, about, console)


def save(args: argparse.Namespace, results: Row) -> None:
    """Writes what is known by now, so that an interrupted run can go on with ``--resume``."""
    packages = "numpy numba pyarrow tokenizers fastokens datasets trl transformers"
    results["environment"] = provenance(*packages.split())
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def memory(args: argparse.Namespace, scratch: Path, console: Console, results: Row) -> None:
    """Short pairs by the million: the later runs under a limit that comes from the first."""
    rows = results.setdefault("memory", {}).setdefault("rows", [])
    for number in args.series:
        if any(row["pairs"] == number for row in rows):
            continue
        source = scratch / f"short-{number}.jsonl"
        write_pairs(args.shared / "pairs", source, number, "short")
        limit = int(rows[0]["peak_data"] * MARGIN) if rows else 0
        row = run(OURS, args, source, Case(COMPARED, "text", number), limit)
        rows.append(
            row | {"pairs": number, "input_bytes": source.stat().st_size, "limit": limit or None}
        )
        source.unlink()
        console.print(
            f"{number:,} pairs: peak RSS {row['peak_rss'] >> 20} MB, anonymous "
            f"{row['peak_anonymous'] >> 20} MB, data {row['peak_data'] >> 20} MB of {limit >> 20}, "
            f"{row['seconds']:.0f} s, left behind: {row['left_behind'] or 'nothing'}"
        )
        for name in ("rss", "anonymous"):
            peaks = [row[f"peak_{name}"] for row in rows]
            results["memory"][f"{name}, largest over smallest"] = max(peaks) / min(peaks)
        results["memory"]["wanted"] = MARGIN
        save(args, results)


def show_case(name: str, case: Row, console: Console) -> None:
    """Prints the tables of a case."""
    table = Table(title=f"{name} pairs, {case['input_bytes'] / 1e6:,.0f} MB")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("contender", "stages") else "right")
    for contender, row in sorted(case["rows"].items(), key=lambda item: item[1]["seconds"]):
        busy = row["cpu_seconds"] / row["seconds"] / (os.cpu_count() or 1)
        table.add_row(
            contender, f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{busy:.0%}",
            f"{row['tokens'] / 1e6:.1f}", f"{row['packs']:,}", f"{row['peak_rss'] >> 20:,}",
            ", ".join(f"{stage} {s:.1f}" for stage, s in row["stages"].items()),
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=list(SIZES), help="ascending")
    parser.add_argument("--tokenizers", nargs="+", choices=TOKENIZERS, default=list(TOKENIZERS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    names = (OURS, PLAIN, REFERENCE, TRL, TRL_2, NEMO)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--series", type=int, nargs="+", default=list(SERIES))
    parser.add_argument("--memory", action="store_true", help="the memory series instead")
    parser.add_argument("--resume", action="store_true", help="leave out what is measured already")
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"))
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.shared = args.shared.resolve()
    console = Console(width=150)
    part = "memory" if args.memory else "cases"
    results: Row = {}
    if args.out.exists():
        results = json.loads(args.out.read_text(encoding="utf-8"))
        if not args.resume:
            results.pop(part, None)
    with tempfile.TemporaryDirectory(prefix="packstore-bench-", dir=args.scratch) as scratch:
        (memory if args.memory else compare)(args, Path(scratch), console, results)
    save(args, results)


if __name__ == "__main__":
    main()
