"""Packs JSON lines into a stored dataset: beside other ways.

    python benchmarks/etl.py                      # about 20 minutes on two idle cores
    python benchmarks/etl.py --memory             # 50k, 500k and 5M short pairs, under a limit

Pairs of real texts, about 4 kB each, as text and as chats of the same texts, with the
tokenizer `qwen3` (byte-level BPE, its own chat template). For each case:

- `packstore.pack` as users call it: wall and CPU seconds, share of the cores that is
  busy (CPU seconds over wall seconds and cores), peak memory, seconds of each stage;
- other ways to the same: a plain script with the same engine, which checks nothing
  (`peers_etl/plain_script.py`), `datasets` with TRL's packer (in one process and in two
  at the smallest size, the faster of them at the others and for chats), and, at the
  smallest size, the steps of NeMo-Aligner and packstore with the tokenizer library that
  both use. What their outputs lack is said in `peers_etl/trls.py` and
  `peers_etl/nemo.py`.

Each run is a process of its own; imports are timed apart, loading the tokenizer is
included. The compiled loops are cached before. Nothing is extrapolated. The load of the
machine before each run stands beside it: with more than a few tenths, compare CPU
seconds only.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, parser, provenance, save, show
from peers_etl.child import CONTENDERS, in_process
from peers_etl.texts import write_pairs

OURS, REFERENCE, TRL, TRL_2, NEMO, PLAIN = CONTENDERS
TOKENIZER = "qwen3"
FORMS = ("text", "chat")
SIZES = (50_000, 200_000)
SERIES = (50_000, 500_000, 5_000_000)
MARGIN = 1.3
"""Peaks of memory may lie so far apart; the limit of the larger runs is so much over
the first.
"""

COLUMNS = (
    "contender",
    "wall s",
    "CPU s",
    "busy",
    "M tokens",
    "packs",
    "peak MB",
    "stages",
)
PACKAGES = (
    "numba",
    "pyarrow",
    "tokenizers",
    "fastokens",
    "datasets",
    "trl",
    "transformers",
)

Row = dict[str, Any]


def contenders(known: Row, form: str, is_first: bool, first: str) -> Iterator[str]:
    """Names of the contenders of a case, in order.

    Args:
        known: cases so far.
        form: of the pairs.
        is_first: whether it is of the smallest size.
        first: name of the case of text of the smallest size.
    """
    yield from (OURS, PLAIN)
    if is_first and form == "text":
        yield from (REFERENCE, TRL, TRL_2, NEMO)
    elif is_first or form == "text":
        texts = known.get(first, {}).get("rows", {})
        yield min((TRL, TRL_2), key=lambda n: texts.get(n, {}).get("seconds", 9e9))


def run(contender: str, shared: Path, source: Path, limit: int | None = None) -> Row:
    """Runs one contender in its own process; measures its output, then removes it."""
    with (
        tempfile.TemporaryDirectory(dir=source.parent) as out,
        tempfile.TemporaryDirectory(dir=source.parent) as temporary,
    ):
        task = {
            "contender": contender,
            "source": str(source),
            "out": out,
            "limit": limit,
        }
        task["tokenizer"] = str(shared / "tokenizers" / TOKENIZER)
        # Arrow's own allocator reserves address space, which a limit would count.
        environment = {
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "PYTHONWARNINGS": "ignore",
        }
        before = os.getloadavg()[0]
        row = in_process(task, **environment, TMPDIR=temporary, HF_HOME=temporary)
        spill = [p.name for p in Path(temporary).glob("packstore-*")]
        return row | {"load_before": before, "left_behind": spill}


def compare(args: Any, scratch: Path, results: Row) -> None:
    """Measures all cases, and leaves out what `results` has."""
    cases, source = results.setdefault("cases", {}), scratch / "pairs.jsonl"
    write_pairs(
        args.shared / "pairs", source, 10_000, "short"
    )  # fewer load no compiled loops
    run(OURS, args.shared, source)  # these are cached from now on
    first = f"{TOKENIZER} text {args.pairs[0]}"
    for pairs, form in itertools.product(args.pairs, FORMS):
        write_pairs(args.shared / "pairs", source, pairs, "long", form)
        name = f"{TOKENIZER} {form} {pairs}"
        case = cases.setdefault(name, {"rows": {}})
        case["input_bytes"] = source.stat().st_size
        for contender in contenders(cases, form, pairs == args.pairs[0], first):
            if contender in args.only and contender not in case["rows"]:
                case["rows"][contender] = run(contender, args.shared, source)
        save(args.out, results)  # an interrupted run can go on with --resume
        show_case(name, case)


def memory(args: Any, scratch: Path, results: Row) -> None:
    """Short pairs by the million: the later runs under a limit that comes from the
    first.
    """
    found = results.setdefault("memory", {})
    rows, source = found.setdefault("rows", []), scratch / "pairs.jsonl"
    for number in args.series:
        if any(row["pairs"] == number for row in rows):
            continue
        write_pairs(args.shared / "pairs", source, number, "short")
        limit = int(rows[0]["peak_data"] * MARGIN) if rows else None
        row = run(OURS, args.shared, source, limit)
        row |= {"pairs": number, "input_bytes": source.stat().st_size, "limit": limit}
        rows.append(row)
        for name in ("rss", "anonymous"):
            peaks = [row[f"peak_{name}"] for row in rows]
            found[f"{name}, largest over smallest"] = max(peaks) / min(peaks)
        found["wanted"] = MARGIN
        save(args.out, results)
    sizes = ("peak_rss", "peak_anonymous", "peak_data")
    columns = ("pairs", *sizes, "limit", "seconds", "left_behind")
    show(columns, [[row[name] for name in columns] for row in rows])


def show_case(name: str, case: Row) -> None:
    """Prints the table of a case."""
    rows = []
    for contender, row in sorted(
        case["rows"].items(), key=lambda item: item[1]["seconds"]
    ):
        busy = row["cpu_seconds"] / row["seconds"] / (os.cpu_count() or 1)
        stages = ", ".join(f"{stage} {s:.1f}" for stage, s in row["stages"].items())
        sizes = (row["tokens"] / 1e6, row["packs"], row["peak_rss"] >> 20)
        rows.append(
            (
                contender,
                row["seconds"],
                row["cpu_seconds"],
                f"{busy:.0%}",
                *sizes,
                stages,
            )
        )
    show(COLUMNS, rows, f"{name} pairs, {case['input_bytes'] / 1e6:,.0f} MB")


def main() -> None:
    command = parser(__doc__)
    command.add_argument(
        "--pairs", type=int, nargs="+", default=list(SIZES), help="ascending"
    )
    command.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS)
    )
    command.add_argument("--series", type=int, nargs="+", default=list(SERIES))
    command.add_argument(
        "--memory", action="store_true", help="the memory series instead"
    )
    command.add_argument(
        "--resume", action="store_true", help="leave out what is measured already"
    )
    command.add_argument("--shared", type=Path, default=Path("../shared/data"))
    command.add_argument("--scratch", type=Path, help="folder for temporary files")
    command.add_argument("--out", type=Path, default=RESULTS / "etl.json")
    args = command.parse_args()
    args.shared = args.shared.resolve()
    results: Row = (
        json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    )
    if not args.resume:
        results.pop("memory" if args.memory else "cases", None)
    results["environment"] = provenance("numpy", *PACKAGES)
    with tempfile.TemporaryDirectory(
        prefix="packstore-bench-", dir=args.scratch
    ) as scratch:
        (memory if args.memory else compare)(args, Path(scratch), results)
    save(args.out, results)


if __name__ == "__main__":
    main()
