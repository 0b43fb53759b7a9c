"""Times a dataset that grows by many small appends, and what folds them into one job.

    python benchmarks/appends.py                     # 1,000 appends of 10 pairs; minutes

Each version has a whole manifest and a whole index, of all shards before it. So an
append costs bytes in proportion to the versions before it, and many appends to their
square. Each append takes the dataset that the one before it returned. Beside them: the
same pairs in ten appends, and the folding of all versions by packing the dataset again,
and by `concat` and `clean`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, parser, provenance, save, show

import packstore

Record = dict[str, list[int]]

WINDOW = 200
"""Appends over which times are averaged."""


def make_pairs(count: int, first: int) -> list[Record]:
    """Return pairs of about 100 token ids, no two alike."""
    records = []
    for number in range(first, first + count):
        random = np.random.default_rng(number)
        sides = {"prompt": 40, "chosen": 30, "rejected": 30}
        records.append(
            {side: random.integers(5, 30_000, n).tolist() for side, n in sides.items()}
        )
    return records


def size_of(folder: Path) -> int:
    """Return the bytes of all files of a dataset."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def grow(place: Path, appends: int, pairs: int) -> dict[str, Any]:
    """Append `appends` times `pairs` pairs; return milliseconds per append, and
    bytes.

    `tenth` and `last` are medians of the ten appends around the tenth and at the end.
    """
    dataset = packstore.pack(make_pairs(pairs, first=0), str(place), pack_size=2048)
    milliseconds = []
    for number in range(1, appends + 1):
        records = make_pairs(pairs, first=number * pairs)
        start = time.perf_counter()
        dataset = packstore.append(dataset, records)
        milliseconds.append(1000 * (time.perf_counter() - start))
    windows = range(0, appends, WINDOW)
    return {
        "appends": appends,
        "pairs": pairs,
        "milliseconds": [float(np.mean(milliseconds[n : n + WINDOW])) for n in windows],
        "tenth": float(np.median(milliseconds[4:14])),
        "last": float(np.median(milliseconds[-10:])),
        "seconds": sum(milliseconds) / 1000,
        "bytes": size_of(place),
        "shards": len(packstore.open(str(place)).manifest.shards),
        "open_milliseconds": time_to_open(place),
    }


def time_to_open(place: Path) -> float:
    """Return the milliseconds to open a dataset."""
    start = time.perf_counter()
    packstore.open(str(place))
    return 1000 * (time.perf_counter() - start)


def fold(grown: Path, work: Path) -> list[dict[str, Any]]:
    """Fold all versions into one, in each way; return the seconds and the bytes
    afterwards.
    """
    rows = []
    start = time.perf_counter()
    packed = packstore.pack(str(grown), str(work / "packed"), pack_size=2048)
    seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "bytes": size_of(work / "packed")}
    rows.append(
        {"way": "pack the dataset", "shards": len(packed.manifest.shards), **figures}
    )

    start = time.perf_counter()
    joined = packstore.concat([str(grown)], str(work / "joined"))
    seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "bytes": size_of(work / "joined")}
    rows.append({"way": "concat", "shards": len(joined.manifest.shards), **figures})

    start = time.perf_counter()
    packstore.clean(
        str(grown), keep_versions=1, older_than=0, no_writers=True, delete=True
    )
    seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "bytes": size_of(grown)}
    shards = len(packstore.open(str(grown)).manifest.shards)
    rows.append({"way": "clean, keeping one version", "shards": shards, **figures})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--appends", type=int, default=1000)
    options.add_argument("--pairs", type=int, default=10, help="of each append")
    options.add_argument("--out", default=RESULTS / "appends.json")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        many = grow(work / "many", args.appends, args.pairs)
        few = grow(work / "few", 10, args.pairs * args.appends // 10)
        folded = fold(work / "many", work)
    environment = provenance("numpy", "pyarrow", "msgspec")
    save(args.out, {"environment": environment, "grown": [many, few], "folded": folded})
    columns = ("appends", "pairs", "seconds", "bytes", "shards", "open_milliseconds")
    for row in (many, few):
        print(row["appends"], "appends, milliseconds each:", row["milliseconds"])
        print("the tenth:", row["tenth"], "the last:", row["last"])
    show(columns, ([row[name] for name in columns] for row in (many, few)), "growing")
    show(folded[0], (row.values() for row in folded), "folding")


if __name__ == "__main__":
    main()
