"""Measures what commands cost before they work: imports, tokenizer, compiled loops.

    python benchmarks/start_up.py 72444a6 HEAD --data ../shared/data

Each command runs in fresh processes of each commit, from a worktree of its own, in turns, with warm
caches: CPU seconds and seconds of the best of `--rounds` runs. `pack` packs 100 pairs with each
tokenizer; `padded_262k` is Qwen3's with made-up entries, up to the size of Gemma 3's: 262,000, of
which 6,300 are added tokens. `parts` are the CPU seconds of parts of a start, alone.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "start_up.json"
PAIRS = 100
VOCABULARY, ADDED = 255_700, 6_300

PARTS = {
    "python": "pass",
    "import packstore": "import packstore",
    "numpy, pyarrow, numba": "import numpy, pyarrow.parquet, numba",
    "compiled loops": "import packstore.etl.pipeline\n#\n"
    "from packstore.etl.warm_up import warm_up\nfrom packstore.config import PackConfig\n"
    "warm_up(PackConfig())",
    "reference loads": "import sys, tokenizers\n#\ntokenizers.Tokenizer.from_file(sys.argv[1])",
    "fastokens loads": "import sys, fastokens\ntext = open(sys.argv[1]).read()\n#\n"
    "fastokens.Tokenizer.from_json_str(text)",
}
"""Name -> code; what stands after ``#`` is measured, or all of it with the interpreter."""


def pad(source: Path, path: Path) -> None:
    """Writes a tokenizer with more entries: joined pairs of its tokens, and unused added tokens."""
    made = json.loads(source.read_text(encoding="utf-8"))
    names, merges = made["model"]["vocab"], made["model"]["merges"]
    short, rng = [name for name in names if 2 <= len(name) <= 8], random.Random(0)
    while len(names) < VOCABULARY:
        a, b = rng.choices(short, k=2)
        if a + b not in names:
            names[a + b] = len(names)
            merges.append([a, b])
    plain = {**made["added_tokens"][0], "special": False}
    made["added_tokens"] += [{**plain, "content": f"<unused{i}>"} for i in range(ADDED)]
    for number, token in enumerate(made["added_tokens"], len(names)):
        token["id"] = number
    path.write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")


def run(command: list[str], checkout: str) -> tuple[float, float]:
    """CPU seconds and seconds of a process that must succeed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, cwd=checkout,
        env={**os.environ, "PYTHONPATH": checkout},
    )  # fmt: skip
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, took


def part(code: str, tokenizer: Path) -> float:
    """CPU seconds of a part of a start, in a process of its own."""
    before, mark, after = code.partition("\n#\n")
    if not mark:
        return run(["-c", code], str(ROOT))[0]
    timed = f"import time\n{before}\nbegan = time.process_time()\n{after}\n"
    timed += "print(time.process_time() - began)"
    done = subprocess.run(
        [sys.executable, "-c", timed, str(tokenizer)], check=True, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return float(done.stdout)


def commands(tokenizers: dict[str, Path], pairs: Path) -> dict[str, list[str]]:
    """Name -> arguments of Python; ``{}`` is the folder of the commit's datasets."""
    found = {
        "import packstore": ["-c", "import packstore"],
        "packstore --help": ["-m", "packstore", "--help"],
    }
    for name, path in tokenizers.items():
        found[f"packstore pack, {name}"] = [
            "-m", "packstore", "pack", str(pairs), f"{{}}/{name}", "--tokenizer", str(path),
            "--overwrite", "--fresh",
        ]  # fmt: skip
    for name in ("inspect", "show"):
        found[f"packstore {name}, qwen3"] = ["-m", "packstore", name, "{}/qwen3"]
    return found


def main() -> None:
    """Writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs="*", default=["HEAD"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    commits = [
        subprocess.run(
            [*git, "rev-parse", "--short=12", name], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        for name in args.commits
    ]
    data = args.data.resolve()
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        pairs, padded = Path(folder, "pairs.jsonl"), Path(folder, "padded.json")
        with gzip.open(data / "pairs" / "hh_harmless.jsonl.gz", "rt", encoding="utf-8") as lines:
            pairs.write_text("".join(itertools.islice(lines, PAIRS)), encoding="utf-8")
        pad(data / "tokenizers" / "qwen3" / "tokenizer.json", padded)
        tokenizers = {
            "small_bpe": data / "tokenizers" / "small_bpe" / "tokenizer.json",
            "mistral_v1": data / "tokenizers" / "mistral_v1" / "tokenizer.json",
            "qwen3": data / "tokenizers" / "qwen3",
            "padded_262k": padded,
        }
        best: dict[str, dict[str, tuple[float, float]]] = {}
        parts: dict[str, float] = {}
        try:
            for commit in commits:
                subprocess.run([*git, "worktree", "add", "-q", "--detach", f"{folder}/{commit}",
                                commit], check=True)  # fmt: skip
            for number, commit in itertools.product(range(args.rounds + 1), commits):
                for name, command in commands(tokenizers, pairs).items():
                    made = [word.format(f"{folder}/data-{commit}") for word in command]
                    found = run(made, f"{folder}/{commit}")
                    if number:  # the first run compiles loops
                        own = best.setdefault(name, {})
                        known = own.get(commit, found)
                        own[commit] = min(known[0], found[0]), min(known[1], found[1])
            for (name, code), _ in itertools.product(PARTS.items(), range(args.rounds)):
                for which in ("qwen3", "padded_262k") if "argv" in code else ("",):
                    path = tokenizers.get(which, Path())
                    path = path / "tokenizer.json" if path.is_dir() else path
                    title = f"{name}, {which}" if which else name
                    parts[title] = min(parts.get(title, 9e9), part(code, path))
        finally:
            for commit in commits:
                subprocess.run([*git, "worktree", "remove", "--force", f"{folder}/{commit}"],
                               check=False)  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, of_commit in best.items():
        row: dict[str, Any] = {"command": name}
        for commit, (cpu, wall) in of_commit.items():
            row[commit] = {"cpu_s": round(cpu, 3), "wall_s": round(wall, 3)}
        rows.append(row)
        print(json.dumps(row))
    report = {
        "rounds": args.rounds,
        "pairs": PAIRS,
        "commits": commits,
        "commands": rows,
        "parts_cpu_s": {name: round(seconds, 3) for name, seconds in parts.items()},
        "machine": {
            "cpu": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg(),
            "python": platform.python_version(),
        },
        "versions": {n: version(n) for n in ("tokenizers", "fastokens", "numba", "pyarrow")},
    }  # fmt: skip
    print(json.dumps(report["parts_cpu_s"], indent=1))
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
