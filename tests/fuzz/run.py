"""Feeds changed files to every parser, in child processes, and counts what becomes of them.

    nice -n 15 python tests/fuzz/run.py [--inputs 60000] [--targets manifest jsonl]

Writes benchmarks/results/fuzz.json. An input that crashes the process, hangs, or raises what is no
PackstoreError is saved under tests/fuzz/corpus, where the tests run it from then on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
from fuzz_targets import CORPUS, TARGETS, make_input  # noqa: E402

from packstore.errors import PackstoreError  # noqa: E402

HANG_S = 60
ROOM = 2 << 30
STATE = struct.Struct("<qqq")  # number that is being run, accepted, refused
KEPT = 3  # inputs of one kind and target that are kept


def child(name: str, first: int, last: int, state_path: str) -> None:
    """Runs inputs, telling in a mapped file which one it is at."""
    run = TARGETS[name].run
    size = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(state_path, "r+b") as file:
        state = mmap.mmap(file.fileno(), STATE.size)
    accepted = refused = 0
    for number in range(first, last):
        STATE.pack_into(state, 0, number, accepted, refused)
        data = make_input(name, number)
        try:
            run(data)
            accepted += 1
        except PackstoreError:
            refused += 1
        except BaseException as error:
            print(json.dumps([number, f"{type(error).__name__}: {error}"[:300]]), flush=True)
    STATE.pack_into(state, 0, last, accepted, refused)


def fuzz(name: str, inputs: int, folder: str) -> dict[str, Any]:
    """Runs the inputs of a target; returns the outcomes."""
    counts: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}
    begun, first, errors = time.monotonic(), 0, Path(folder, "err")
    while first < inputs:
        state_path, out = Path(folder, "state"), Path(folder, "out")
        state_path.write_bytes(STATE.pack(first, 0, 0))
        with open(out, "wb") as stdout, open(errors, "wb") as stderr:
            command = [sys.executable, __file__, "--child", name, str(first), str(inputs)]
            process = subprocess.Popen([*command, str(state_path)], stdout=stdout, stderr=stderr)
            at, since = -1, time.monotonic()
            hung = False
            while process.poll() is None:
                time.sleep(0.2)
                now, _, _ = STATE.unpack(state_path.read_bytes())
                if now != at:
                    at, since = now, time.monotonic()
                elif time.monotonic() - since > HANG_S:
                    hung = True
                    process.kill()
                    process.wait()
        at, accepted, refused = STATE.unpack(state_path.read_bytes())
        counts["accepted"] += accepted
        counts["refused"] += refused
        for line in out.read_text(encoding="utf-8").splitlines():
            number, what = json.loads(line)
            counts["unnamed"] += 1
            keep(name, number, "unnamed", what, examples)
        if at < inputs:
            kind = "hung" if hung else "crashed"
            counts[kind] += 1
            told = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            keep(name, at, kind, f"exit {process.returncode}: {' '.join(told)}"[:300], examples)
        first = at + 1
    seconds = round(time.monotonic() - begun, 1)
    return {"inputs": inputs, **dict(sorted(counts.items())), "seconds": seconds, **examples}


def keep(name: str, number: int, kind: str, what: str, examples: dict[str, list[str]]) -> None:
    print(f"  {name} {number} {kind}: {what}", flush=True)
    told = examples.setdefault(f"{kind}_examples", [])
    if what.partition(":")[0] + what[-20:] in {t.partition(":")[0] + t[-20:] for t in told}:
        return
    if len(told) < KEPT:
        told.append(what)
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kind}-{number}").write_bytes(make_input(name, number))


def feed(names: list[str], inputs: int) -> None:
    """A few inputs of each target and all that were kept of it, in this process; for the tests."""
    for name in names:
        made = (make_input(name, 10**9 + number) for number in range(inputs))
        kept = (path.read_bytes() for path in sorted(CORPUS.glob(f"{name}/*")))
        for data in itertools.chain(made, kept):
            try:
                TARGETS[name].run(data)
            except PackstoreError as error:
                assert "\n" not in str(error), error  # noqa: PT017
        print(name, flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--feed"]:
        feed(sys.argv[3:], int(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=60_000, help="for each target")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "fuzz.json"))
    args = parser.parse_args()
    import pyarrow

    out = Path(args.out)
    results = json.loads(out.read_text(encoding="utf-8"))["targets"] if out.exists() else {}
    for name in args.targets:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            results[name] = fuzz(name, args.inputs, folder)
        print(name, results[name], flush=True)
        total: Counter[str] = Counter()
        for found in results.values():
            total.update({k: v for k, v in found.items() if isinstance(v, int)})
        document = {
            "python": sys.version.split()[0],
            "pyarrow": pyarrow.__version__,
            "total": dict(total),
            "targets": results,
        }
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
