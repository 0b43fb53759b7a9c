"""Times a dataset that grows by many small appends, and what folds them into one job.

    python benchmarks/appends.py                     # 1,000 appends of 10 pairs; minutes

Each version has a whole manifest and a whole index, of all shards before it. So an
append costs bytes in proportion to the versions before it, and many appends to their
square. Each append takes the dataset that the one before it returned. After some of
them, the dataset is opened, and the loader reads a first batch. Beside them: the same
pairs in ten appends, and the folding of all versions by packing the dataset again, and
by `concat` and `clean`. Requests are counted on a server of S3 on this machine.

Seconds of the processor (`cpu`) are less disturbed by other work than those of a clock.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import numpy as np
from common import RESULTS, parser, provenance, save, show
from fault_proxy import Faults, faulty
from server_kinds import BUCKET
from stores import Store, serving

import packstore
import packstore.torch as pt

Record = dict[str, list[int]]

WINDOW = 200
"""Appends over which times are averaged."""

STAGES = (10, 100, 300, 1000)
"""Numbers of appends after which the dataset is read."""

STAGES_ON_S3 = (1, 10, 100)
"""The same, for the number of requests."""


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
    read_first_batch(str(place))  # loads torch
    milliseconds = []
    cpu_milliseconds = []
    stages = []
    for number in range(1, appends + 1):
        records = make_pairs(pairs, first=number * pairs)
        start = time.perf_counter()
        cpu_start = time.process_time()
        dataset = packstore.append(dataset, records)
        milliseconds.append(1000 * (time.perf_counter() - start))
        cpu_milliseconds.append(1000 * (time.process_time() - cpu_start))
        if number in STAGES:
            stages.append(
                {
                    "appends": number,
                    "append_cpu": float(np.median(cpu_milliseconds[-10:])),
                    "open_cpu": cpu_of(packstore.open, str(place)),
                    "first_batch_cpu": cpu_of(read_first_batch, str(place)),
                    "bytes": size_of(place),
                    "packs_bytes": dataset.manifest.totals.bytes,
                }
            )
    windows = range(0, appends, WINDOW)
    return {
        "appends": appends,
        "pairs": pairs,
        "milliseconds": [float(np.mean(milliseconds[n : n + WINDOW])) for n in windows],
        "stages": stages,
        "tenth": float(np.median(milliseconds[4:14])),
        "last": float(np.median(milliseconds[-10:])),
        "seconds": sum(milliseconds) / 1000,
        "bytes": size_of(place),
        "shards": len(packstore.open(str(place)).manifest.shards),
        "open_milliseconds": time_to_open(place),
    }


def read_first_batch(url: str, **options: Any) -> None:
    """Open a dataset, and read the first batch of the loader."""
    data = pt.PackedDataset(url, storage_options=options or None)
    next(iter(pt.PackedDataLoader(data)))


def cpu_of(function: Callable[..., object], *arguments: object) -> float:
    """Return the median milliseconds of the processor of three calls."""
    milliseconds = []
    for _ in range(3):
        start = time.process_time()
        function(*arguments)
        milliseconds.append(1000 * (time.process_time() - start))
    return float(np.median(milliseconds))


def count_requests(folder: Path, pairs: int) -> list[dict[str, Any]]:
    """Return the requests of an append, an opening and a first batch on S3."""
    rows = []
    faults = Faults(rate=0.0)
    with serving("s3", folder) as server, faulty(server, faults) as endpoint:
        place = Store("s3", BUCKET, "appends", endpoint)
        options = place.options

        def requests_of(function: Callable[..., Any]) -> tuple[int, Any]:
            before = faults.counts["requests"]
            result = function()
            return faults.counts["requests"] - before, result

        packstore.pack(
            make_pairs(pairs, first=0),
            place.url,
            pack_size=2048,
            storage_options=options,
        )
        for number in range(1, max(STAGES_ON_S3) + 1):
            records = make_pairs(pairs, first=number * pairs)
            append_requests, _ = requests_of(
                lambda records=records: packstore.append(
                    place.url, records, storage_options=options
                )
            )
            if number not in STAGES_ON_S3:
                continue
            open_requests, _ = requests_of(lambda: packstore.open(place.url, options))
            batch_requests, _ = requests_of(
                lambda: read_first_batch(place.url, **options)
            )
            rows.append(
                {
                    "appends": number,
                    "append_requests": append_requests,
                    "open_requests": open_requests,
                    "first_batch_requests": batch_requests,
                }
            )
    return rows


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
        requests = count_requests(work / "server", args.pairs)
    environment = provenance("numpy", "pyarrow", "msgspec")
    result = {
        "environment": environment,
        "grown": [many, few],
        "folded": folded,
        "requests": requests,
    }
    save(args.out, result)
    columns = ("appends", "pairs", "seconds", "bytes", "shards", "open_milliseconds")
    for row in (many, few):
        print(row["appends"], "appends, milliseconds each:", row["milliseconds"])
        print("the tenth:", row["tenth"], "the last:", row["last"])
    show(columns, ([row[name] for name in columns] for row in (many, few)), "growing")
    show(many["stages"][0], (row.values() for row in many["stages"]), "stages")
    show(requests[0], (row.values() for row in requests), "requests on S3")
    show(folded[0], (row.values() for row in folded), "folding")


if __name__ == "__main__":
    main()
