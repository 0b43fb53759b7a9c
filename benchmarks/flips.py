"""Flips every bit of every file of small datasets, and reads the files.

    python benchmarks/flips.py [--step 1] [--out benchmarks/results/flips.json]

Row groups, footers, the pack index, the manifest, side data and their manifest, of four kinds of
shards. Counted are flips that raise a named error, flips that give the same values (there are bytes
between the buffers of an Arrow file that mean nothing; `verify` finds them), and what must not be:
other values without an error, and errors that are none of packstore's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
from flips import flip, regions  # noqa: E402

import packstore  # noqa: E402
from packstore.io.dataset.dataset import Dataset  # noqa: E402
from packstore.io.side.side import SideWriter  # noqa: E402

PROFILES: dict[str, dict[str, Any]] = {
    "parquet": {},
    "spans": {"labels": "spans"},
    "uncompressed": {"compression": "none"},
    "arrow": {"format": "arrow"},
}


def make(url: str, **settings: Any) -> tuple[Dataset, str]:
    """A dataset of three row groups with carried columns, and side data."""
    records = [
        {"prompt": [5, 6, 7], "chosen": [8, 10 + i], "rejected": [9] * (1 + i % 7), "tag": f"é{i}"}
        for i in range(20)
    ]
    how: dict[str, Any] = {"pack_size": 64, "row_group_tokens": 128, "num_workers": 0}
    data = packstore.pack(records, url, carry=("tag:string",), **how, **settings)
    with SideWriter(f"{url}-side", data, {"x": "int64", "ref_logps": "list<float32>"}) as side:
        for packs in data.iter_packs():
            ids, counts = packs.example_ids, packs.num_responses
            logps = np.linspace(-9, -1, int(counts.sum()), dtype=np.float32)
            side.write(ids, {"x": ids, "ref_logps": logps}, counts)
    return data, f"{url}-side"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=int, default=1, help="flip every so many bits")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, report, wrong = time.monotonic(), dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        for name, settings in PROFILES.items():
            data, side = make(f"{folder}/{name}", **settings)
            found: dict[str, Counter[str]] = {}
            for region in regions(data, side):
                counts, told = flip(region, args.step)
                found.setdefault(region.name, Counter()).update(counts)
                wrong += told
            report[name] = {region: dict(counts) for region, counts in found.items()}
            print(name, json.dumps(report[name]), flush=True)
    total = Counter[str]()
    for regions_of in report.values():
        for counts in regions_of.values():
            total.update(counts)
    seconds = round(time.monotonic() - began, 1)
    document = {**report, "total": dict(total), "seconds": seconds, "wrong": wrong}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"total": dict(total), "seconds": seconds, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
