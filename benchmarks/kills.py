"""Kill -9 at many moments of a job that replaces a dataset, on a local disk and on S3.

    python benchmarks/kills.py --moments 50 --out benchmarks/results/kills.json
    python benchmarks/kills.py --places local --moments 6

The acts of an undisturbed run are counted first: what it does on the disk, or the packets that it
sends to the server (SeaweedFS, started here). Then it is killed in the n-th of them. The
moments are drawn from a seed, and those of the commit are among them. After each kill:

1. the dataset that was there is readable, and the current one is whole: the old or the new;
2. the same call resumes: it makes only the unfinished partitions;
3. its manifest and shards are byte for byte those of an undisturbed run;
4. after `packstore clean --delete` nothing is there that no version names, here and in the folder
   for temporary files.

Every run is a process of its own, and is really killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kill_points import be_child, in_child, relay, result_of, watch_disk

import packstore
from packstore.etl.pipeline import pack
from packstore.io.maintain.clean import clean
from packstore.io.store.location import Location

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
SETTINGS: dict[str, Any] = {
    "pack_size": 64,
    "row_group_tokens": 512,
    "shard_tokens": 2000,
    "num_workers": 0,
    "partitions": 4,
}


def records(n: int, first: int) -> list[dict[str, list[int]]]:
    """Records of token ids, which need no tokenizer."""
    return [
        {"prompt": [5, 6, 7], "chosen": [8, 10 + i, 11 + i], "rejected": [9] * (1 + i % 7)}
        for i in range(first, first + n)
    ]


OLD, NEW = records(400, 1000), records(800, 0)


@dataclass(frozen=True)
class Place:
    """The target of a job.

    Attributes:
        url: of the dataset.
        folder: local, for temporary files and logs.
        endpoint: host and port of the server; None on a local disk.
        options: to reach it; the endpoint apart.
    """

    url: str
    folder: Path
    endpoint: tuple[str, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def reached(self, endpoint: tuple[str, int] | None = None) -> dict[str, Any]:
        """The storage options, over another endpoint or its own."""
        found = endpoint or self.endpoint
        return {**self.options, "endpoint_url": "http://{}:{}".format(*found)} if found else {}


def written(place: Place, records: list[dict[str, list[int]]]) -> str:
    """A file of records, the same for all places."""
    path = place.folder.parent / f"{len(records)}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def replace_dataset(place: Place, options: dict[str, Any], watched: Callable[[], None]) -> Any:
    """Runs the job: replaces the old records by the new; returns the shards that it put."""
    tempfile.tempdir = str(place.folder / "tmp")
    put, real = list[str](), Location.put_file

    def noted(self: Location, local_path: str, path: str) -> None:
        real(self, local_path, path)
        put.append(path)

    Location.put_file = noted  # type: ignore[method-assign]
    watched()
    dataset = pack(
        written(place, NEW), place.url, storage_options=options, overwrite=True, **SETTINGS
    )
    return {"put": [p for p in put if p.startswith("data/")], "version": dataset.version}


def run(place: Place, n: int | None, log: Path) -> Any:
    """The job in a process of its own, killed in its n-th act; None if it was."""
    if place.endpoint is None:
        root = str(place.folder.resolve())
        return in_child(lambda: replace_dataset(place, {}, lambda: watch_disk(root, n, log)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = place.reached(("127.0.0.1", listener.getsockname()[1]))
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            be_child(writing, lambda: replace_dataset(place, options, lambda: None))
        os.close(writing)
        middle = os.fork()
        if middle == 0:
            with contextlib.suppress(BaseException):
                relay(listener, place.endpoint, pid, n, log)
            os._exit(0)
    try:
        return result_of(pid, reading)
    finally:
        os.kill(middle, signal.SIGKILL)
        os.waitpid(middle, 0)


def state(place: Place) -> dict[str, Any]:
    """Lists the versions, with their completeness, the manifests, and all files."""
    options = place.reached()
    fs, root = Location(place.url, options)._open()
    files = sorted(path[len(root) + 1 :] for path in fs.find(root))
    manifests = [f for f in files if f.startswith("_packstore/manifest-")]
    versions = [int(f[-11:-5]) for f in manifests]
    opened = [packstore.open(place.url, options, version=v) for v in versions]
    named = {p for d in opened for p in (s.path for s in d.manifest.shards)}
    named |= {d.manifest.pack_index.path for d in opened if d.manifest.pack_index} | {*manifests}
    note = re.compile(r"_packstore/partitions/[0-9a-f]{12}-(\d{5})\.json")
    done = [match[1] for f in files if (match := note.fullmatch(f))]
    return {
        "versions": versions,
        "problems": [p for d in opened for p in d.verify().problems],
        "manifests": [d.manifest.to_json().decode() for d in opened],
        "unnamed": sorted({*files} - named),
        "noted": done,
        "temporary": sorted(os.listdir(place.folder / "tmp")),
    }


def cleaned(place: Place) -> list[str]:
    """Runs clean; returns the leftovers that it still finds after that."""
    spill = str(place.folder / "tmp")
    tempfile.tempdir = spill
    options = place.reached()
    how = {"older_than": 0, "no_writers": True, "spill_dir": spill, "storage_options": options}
    clean(place.url, delete=True, **how)
    left = clean(place.url, **how).leftovers
    return [f"{item.path}: {item.why}" for item in left]


def one_moment(place: Place, n: int, reference: dict[str, Any]) -> dict[str, Any]:
    """Kills a run in its n-th act, and checks everything that must hold then."""
    log = place.folder / "acts"
    log.unlink(missing_ok=True)
    survived = run(place, n, log)
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else [""]
    after = in_child(lambda: state(place))
    again = run(place, None, place.folder / "again")
    then, left, last = in_child(lambda: (state(place), cleaned(place), state(place)))
    committed = 2 in after["versions"]
    left_over = [p for p in reference["put"] if p.split("-p")[1][:5] not in after["noted"]]
    return {
        "moment": n,
        "act": " | ".join(lines[-2:] if lines[-1].startswith("killed") else lines[-1:]),
        "killed": survived is None,
        "committed": committed,
        "finished_before": len(after["noted"]),
        "put_by_rerun": len(again["put"]),
        "old_readable": after["problems"] == [] and after["versions"][0] == 1
        and after["manifests"][0] == reference["old"],
        "resumed": committed or again["put"] == left_over,
        "identical": then["manifests"][-1] == reference["new"] and then["problems"] == [],
        "left_by_kill": len(after["unnamed"]) + len(after["temporary"]),
        "orphans": last["unnamed"] + last["temporary"] + left,
    }  # fmt: skip


def moments(acts: list[str], number: int, seed: int) -> list[int]:
    """Seeded moments of a run; those around the put of the manifest are always among them."""
    shards = [i for i, act in enumerate(acts, 1) if "/data/" in act]
    last = max(i for i in shards if acts[i - 1].startswith(("os.rename", "PUT")))
    near = [i for i, act in enumerate(acts, 1) if "manifest-000002" in act and i > last]
    chosen = {last + 1, *near, *(i + 1 for i in near)}
    chosen = set(sorted(i for i in chosen if i <= len(acts))[: max(2, number // 2)])
    rest = [i for i in range(1, len(acts) + 1) if i not in chosen]
    chosen |= set(random.Random(seed).sample(rest, max(0, min(number - len(chosen), len(rest)))))
    return sorted(chosen)


def kill_all(places: Iterator[Place], number: int, seed: int) -> dict[str, Any]:
    """All moments of one kind of place; each place is a fresh one."""

    def prepared() -> Place:
        place = next(places)
        (place.folder / "tmp").mkdir(parents=True)
        options = place.reached()
        in_child(
            lambda: len(pack(written(place, OLD), place.url, storage_options=options, **SETTINGS))
        )
        return place

    place = prepared()
    done = run(place, None, place.folder / "acts")
    acts = (place.folder / "acts").read_text(encoding="utf-8").splitlines()
    found = in_child(lambda: state(place))
    reference = {**done, "old": found["manifests"][0], "new": found["manifests"][1]}
    shutil.rmtree(place.folder)
    results = []
    for n in moments(acts, number, seed):
        place = prepared()
        results.append(one_moment(place, n, reference))
        shutil.rmtree(place.folder)
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    hit = [r for r in results if r["killed"]]
    return {
        "acts": len(acts),
        "shards": len(reference["put"]),
        "moments": len(results),
        "killed": len(hit),
        "killed_after_commit": sum(r["committed"] for r in hit),
        "partitions_taken_over": sum(r["finished_before"] for r in hit if not r["committed"]),
        "old_readable": sum(r["old_readable"] for r in results),
        "resumed": sum(r["resumed"] for r in results),
        "identical": sum(r["identical"] for r in results),
        "left_by_kills": sum(r["left_by_kill"] for r in results),
        "without_orphans": sum(not r["orphans"] for r in results),
        "runs": results,
    }


def local_places(folder: Path) -> Iterator[Place]:
    for number in range(10**6):
        here = folder / str(number)
        yield Place(str(here / "ds"), here)


def s3_places(folder: Path, endpoint: str) -> Iterator[Place]:
    import aiobotocore.session  # noqa: F401  once, and not in every child
    import s3fs  # noqa: F401
    from server_kinds import BUCKET, KINDS

    kind = KINDS["s3"]
    host, port = endpoint.removeprefix("http://").split(":")
    options = {k: v for k, v in kind.options(endpoint).items() if k != "endpoint_url"}
    for number in range(10**6):
        here = folder / str(number)
        url = f"{kind.url(BUCKET)}/kills-{os.getpid()}-{number}/ds"
        yield Place(url, here, (host, int(port)), options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", nargs="+", default=["local", "s3"], choices=["local", "s3"])
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--endpoint", help="of a SeaweedFS that runs; default: one is started")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(SUPPORT))
    report: dict[str, Any] = {"seed": args.seed, "settings": SETTINGS}
    report["versions"] = {"packstore": packstore.__version__, "python": platform.python_version()}
    started = time.time()
    with (
        tempfile.TemporaryDirectory(prefix="packstore-kills-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        # In this process, so that children find everything loaded.
        (folder / "warm").mkdir()
        warm = Place(str(folder / "warm" / "ds"), folder / "warm" / "ds")
        assert pack(written(warm, OLD), warm.url, **SETTINGS).verify().ok
        if "local" in args.places:
            report["local"] = kill_all(local_places(folder / "local"), args.moments, args.seed)
        if "s3" in args.places:
            endpoint = args.endpoint
            if endpoint is None:
                from stores import serving

                endpoint = stack.enter_context(serving("s3", folder / "server"))
            report["s3"] = kill_all(s3_places(folder / "s3", endpoint), args.moments, args.seed)
    report["minutes"] = round((time.time() - started) / 60, 1)
    text = json.dumps(report, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    for place in args.places:
        print(place, json.dumps({k: v for k, v in report[place].items() if k != "runs"}))
    good = ("killed", "old_readable", "resumed", "identical", "without_orphans")
    whole = all(report[p][k] == report[p]["moments"] for p in args.places for k in good)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
