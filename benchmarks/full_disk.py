"""Replaces a dataset on a disk that fills up after n pages or files, and checks what remains.

    python benchmarks/full_disk.py [--points 60] [--out benchmarks/results/full_disk.json]

The disk is a tmpfs of 4 MB in a mount namespace of its own. For 0, 1, 2, … free pages, then as many
free inodes, a job replaces a dataset there: with hard links, without them, and without them and
without a rename that replaces nothing. After each:

1. the job has committed, or failed with a named error that tells the place;
2. the newest version opens and verifies, and so does the one that was there before;
3. with room again, the same call commits the bytes of an undisturbed run;
4. `packstore clean` leaves nothing that no version names, here and among temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kill_points import in_child

import packstore
from packstore.errors import PackstoreError
from packstore.etl.pipeline import pack
from packstore.io.maintain.clean import clean
from packstore.io.store import local

SETTINGS: dict[str, Any] = {
    "pack_size": 64,
    "row_group_tokens": 256,
    "shard_tokens": 2000,
    "num_workers": 0,
}
DISKS = ("hard links", "no hard links", "neither links nor renames")
BYTES, INODES, PAGE = 4 << 20, 400, 4096


def records(n: int, first: int) -> list[dict[str, list[int]]]:
    """Records of token ids, whose shards take a page or two each."""
    return [
        {"prompt": [5, 6, 7], "chosen": [8, 10 + i, 11 + 7 * i % 90], "rejected": [9] * (1 + i % 7)}
        for i in range(first, first + n)
    ]


OLD, NEW = records(40, 5000), records(900, 0)


def fill(disk: Path, what: str, left: int) -> None:
    """Leaves room for so many pages, or files."""
    folder = disk / "filler"
    folder.mkdir()
    if what == "pages":
        with open(folder / "bytes", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(PAGE))
        size = (folder / "bytes").stat().st_size
        os.truncate(folder / "bytes", max(size - left * PAGE, 0))
        return
    made = []
    with contextlib.suppress(OSError):
        while True:
            made.append(folder / str(len(made)))
            made[-1].touch()
    for path in made[-1 - left : -1]:
        path.unlink()


def without(disk: str) -> None:
    """Disables what the tested disk does not have (hard links, renames) in this process."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if disk != DISKS[0]:
        os.link = refused
    if disk == DISKS[2]:
        local._rename_new = lambda *_: False  # type: ignore[attr-defined]


def job(url: str, disk: str) -> dict[str, Any]:
    """Replaces the dataset; tells how that ended."""
    without(disk)
    try:
        return {"fingerprint": pack(NEW, url, overwrite=True, **SETTINGS).manifest.fingerprint}
    except PackstoreError as error:
        return {"named": Path(url).name in str(error), "text": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {"named": False, "text": repr(error)}


def state(url: str) -> dict[str, Any]:
    """The newest version, and what is wrong with any."""
    newest = packstore.open(url)
    versions = range(1, newest.version + 1)
    problems = [p for v in versions for p in packstore.open(url, version=v).verify().problems]
    prints = [packstore.open(url, version=v).manifest.fingerprint for v in versions]
    return {"version": newest.version, "problems": problems, "fingerprints": prints}


def point(disk: Path, kind: str, what: str, left: int, expected: list[str]) -> dict[str, Any]:
    """One job on a disk that fills up."""
    url, tmp = str(disk / "ds"), str(disk.parent / "tmp")
    tempfile.tempdir = tmp
    in_child(lambda: len(pack(OLD, url, **SETTINGS)))
    fill(disk, what, left)
    first = in_child(lambda: job(url, kind))
    try:
        after = in_child(lambda: state(url))
    except RuntimeError as error:
        after = {"version": 0, "problems": [str(error)[-300:]], "fingerprints": []}
    shutil.rmtree(disk / "filler")
    again = in_child(lambda: job(url, kind))

    def cleaned() -> list[str]:
        how: dict[str, Any] = {"older_than": 0, "no_writers": True, "spill_dir": tmp}
        clean(url, delete=True, **how)
        found = packstore.open(url)
        versions = [packstore.open(url, version=v) for v in range(1, found.version + 1)]
        named = {f"_packstore/manifest-{v.version:06d}.json" for v in versions}
        named |= {s.path for v in versions for s in v.manifest.shards}
        named |= {v.manifest.pack_index.path for v in versions if v.manifest.pack_index}
        files = (p.relative_to(url).as_posix() for p in Path(url).rglob("*") if p.is_file())
        return sorted(set(files) - named) + os.listdir(tmp)

    left_over = in_child(cleaned)
    last = in_child(lambda: state(url))
    committed = "fingerprint" in first
    found = {
        "disk": kind,
        "free": f"{left} {what}",
        "committed": committed,
        "error": first.get("text", ""),
        "named": committed or first["named"],
        "old_whole": after["fingerprints"][:1] == expected[:1] and not after["problems"],
        "same_bytes": again.get("fingerprint") == expected[1] and not last["problems"],
        "left": left_over,
    }
    shutil.rmtree(url)
    return {**found, "right": all(found[k] for k in ("named", "old_whole", "same_bytes"))
            and not left_over}  # fmt: skip


def run_all(points: int, disks: list[str]) -> dict[str, Any]:
    """All points, on a disk that is mounted already."""
    folder = Path(os.environ["FULL_DISK"])
    disk = folder / "disk"
    (folder / "tmp").mkdir()
    tempfile.tempdir = str(folder / "tmp")
    # In this process, so that children find everything loaded.
    places = {str(folder / "old"): OLD, str(folder / "new"): NEW}
    undisturbed = [pack(r, url, **SETTINGS).manifest.fingerprint for url, r in places.items()]
    assert packstore.open(str(folder / "new")).verify().ok
    found = [
        point(disk, kind, what, left, undisturbed)
        for kind in disks
        for what in ("pages", "inodes")
        for left in range(points)
    ]
    wrong = [f for f in found if not f["right"]]
    by_disk = {
        kind: dict(Counter("right" if f["right"] else "wrong" for f in found if f["disk"] == kind))
        for kind in disks
    }
    ended = Counter("committed" if f["committed"] else f["error"].split(":")[0] for f in found)
    return {"points": len(found), "by_disk": by_disk, "ended": dict(ended), "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=60, help="pages, and inodes, of each disk")
    parser.add_argument("--disks", nargs="+", choices=DISKS, default=list(DISKS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if "FULL_DISK" in os.environ:
        print(json.dumps(run_all(args.points, args.disks)))
        return 0
    with tempfile.TemporaryDirectory(prefix="full-disk-") as name:
        (disk := Path(name, "disk")).mkdir()
        script = f'mount -t tmpfs -o size={BYTES},nr_inodes={INODES} none "{disk}" && exec "$@"'
        unshare = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",))]
        command = [sys.executable, "-W", "ignore", __file__, "--points", str(args.points)]
        command += ["--disks", *args.disks]
        began = time.monotonic()
        done = subprocess.run(
            [*unshare, "sh", "-c", script, "sh", *command],
            stdout=subprocess.PIPE,
            encoding="utf-8",
            check=True,
            env={**os.environ, "FULL_DISK": name},
        )
    found = {**json.loads(done.stdout), "seconds": round(time.monotonic() - began, 1)}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
