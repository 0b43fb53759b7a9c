"""Hostile datasets by the hundred thousand, through everything that reads packs.

    nice -n 15 python tests/fuzz/values.py [--cases 100000] [--seconds 3600] [--first 0]

Each case of ``tests/support/hostile_values.py`` is read by `ALWAYS`, and by some of `OTHERS` in
turn, in child processes whose freed memory is filled (``MALLOC_PERTURB_``), whose heap is checked,
and which may take 1 GiB more than they begin with. Counted are crashes (the process dies), cases
that hang, errors that are none of packstore's, and the most memory that a process took. What is
wrong is printed with the number of its case; the counts are added to
``benchmarks/results/hostile.json``. One case: ``--first N --cases 1 --all``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import mmap
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

MEMORY = 1 << 30
HANG_S, START_S = 120, 900
"""Seconds that one case may take, and the start of a process, which packs the seeds."""

CHUNK = 2000
"""Cases of a process."""
STATE = struct.Struct("<qqqq")
"""Case that is being read, datasets that all readers accepted, readings, refusals."""


def readers(folder: str, number: int, every: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """All that reads packs, or that part whose turn it is; what is written goes to `folder`."""
    always = (packs, verified, loaded)
    others = (
        by_tokens,
        with_side,
        lambda url, n: export("nemo", url, n),
        lambda url, n: export("megatron", url, n),
        packed_anew,
        appended,
        concatenated,
        shown,
        inspected,
        sizes,
        arrow,
        side_rows,
    )
    turns = range(len(others)) if every else (number % len(others), number * 7 % len(others))
    if number % 3 == 0:
        turns = (*turns, 1)  # side data is changed more often than it would be read
    for read in (*always, *(others[t] for t in sorted(set(turns)))):
        name = getattr(read, "__name__", "")
        label = name if name != "<lambda>" else "export"
        yield label, lambda read=read: read(folder, number)


def opened(url: str) -> Any:
    from packstore.io.dataset.dataset import open as open_dataset

    return open_dataset(url)


def packs(url: str, number: int) -> None:
    for _ in opened(url).iter_packs():
        pass


def verified(url: str, number: int) -> None:
    opened(url).verify(jobs=1)


def arrow(url: str, number: int) -> None:
    for batch in opened(url).iter_batches():
        batch.validate(full=True)


def sizes(url: str, number: int) -> None:
    _ = opened(url).pack_index


def dataset(url: str, **how: Any) -> Any:
    import packstore.torch as pt
    from packstore.config import ReadConfig

    return pt.PackedDataset(url, reading=ReadConfig(on_error="raise"), **how)


def run(data: Any, number: int, **how: Any) -> None:
    """An epoch, and the inputs of a model."""
    import packstore.torch as pt
    from packstore.errors import PackstoreError

    styles = ("hf", "flash", "padded")
    for place, batch in enumerate(pt.PackedDataLoader(data, tail="pad", **how)):
        _ = batch.weights, batch.target_index, batch.segment_ids, batch.layout
        with contextlib.suppress(PackstoreError):
            batch.model_inputs(styles[(number + place) % 3])


def loaded(url: str, number: int) -> None:
    run(dataset(url), number)


def by_tokens(url: str, number: int) -> None:
    run(dataset(url, shuffle=False), number, tokens_per_batch=80)


def with_side(url: str, number: int) -> None:
    run(dataset(url, side=[f"{url}/side"]), number)


def side_rows(url: str, number: int) -> None:
    from packstore.io.side.side import open_side

    for batch in open_side(f"{url}/side").iter_batches():
        batch.to_pydict()


def export(form: str, url: str, number: int) -> None:
    from packstore.exchange import export

    export(form, url, f"{url}-{form}")


def packed_anew(url: str, number: int) -> None:
    import packstore

    packstore.pack(url, f"{url}-anew", pack_size=48, max_drop_rate=1.0, num_workers=0)


def appended(url: str, number: int) -> None:
    import packstore

    more = [{"prompt": [5], "chosen": [8, 9], "rejected": [7]}]
    packstore.append(url, more, num_workers=0).verify(jobs=1)


def concatenated(url: str, number: int) -> None:
    import packstore

    packstore.concat([url, url], f"{url}-twice").verify(jobs=1)


def command(*words: str) -> None:
    from packstore.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(list(words))
    found = out.getvalue()
    assert status in (0, 1, 2), f"status {status}"
    assert "Traceback" not in found, found[-1000:]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", found), "a control character is printed"


def shown(url: str, number: int) -> None:
    command("show", url, "--pack", "0", "--count", "2", "--ids")


def inspected(url: str, number: int) -> None:
    command("inspect" if number % 2 else "stats", url)


def child(first: int, last: int, every: bool, state_path: str) -> None:
    """Reads cases, telling in a mapped file which one it is at."""
    import hostile_values

    import packstore.torch
    from packstore.errors import PackstoreError

    logging.disable()
    warnings.simplefilter("ignore")
    for number in range(len(hostile_values.COMBINATIONS)):
        hostile_values.seed(number)
    packstore.torch.PackedDataset  # noqa: B018  what it maps does not count
    limit(MEMORY)
    with open(state_path, "r+b") as file:
        state = mmap.mmap(file.fileno(), STATE.size)
    accepted = readings = refused = 0
    for number in range(first, last):
        STATE.pack_into(state, 0, number, accepted, readings, refused)
        with tempfile.TemporaryDirectory(prefix="hostile-") as parent:
            folder, whole = Path(parent, "ds"), True
            done = hostile_values.make(number, folder)
            for name, read in readers(str(folder), number, every):
                readings += 1
                try:
                    read()
                except PackstoreError:
                    refused += 1
                    whole = False
                except BaseException as error:
                    whole = False
                    place = "".join(traceback.format_exception(error))[-1500:]
                    told = {"case": number, "by": name, "change": done, "error": repr(error)[:300]}
                    print(json.dumps({**told, "trace": place}), flush=True)
            accepted += whole
    STATE.pack_into(state, 0, last, accepted, readings, refused)
    print(json.dumps({"peak": peak()}), flush=True)


def sound() -> dict[str, Any]:
    """Reads every seed as it was packed."""
    import hostile_values

    from packstore.errors import PackstoreError

    logging.disable()
    refused = list[str]()
    for number in range(len(hostile_values.COMBINATIONS)):
        name, files = hostile_values.seed(number)
        with tempfile.TemporaryDirectory(prefix="hostile-") as parent:
            for path, data in files.items():
                there = Path(parent, "ds", path)
                there.parent.mkdir(parents=True, exist_ok=True)
                there.write_bytes(data)
            for name_of, read in readers(f"{parent}/ds", number, True):
                try:
                    read()
                except PackstoreError as error:
                    # Not every format holds every kind, and what is appended are pairs.
                    if name_of not in ("export", "appended"):
                        refused.append(f"{name}, {name_of}: {error}")
    return {"datasets": len(hostile_values.COMBINATIONS), "refused": refused}


def limit(room: int) -> None:
    """From now on the process may take so many more bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    used = int(status.split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak() -> int:
    """Most resident memory since `limit`, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def fuzz(first: int, cases: int, every: bool, folder: str) -> tuple[Counter[str], list[Any]]:
    """Runs the cases from `first` on, in as many processes as it takes; returns the outcomes."""
    counts, problems = Counter[str](), list[Any]()
    at, last = first, first + cases
    while at < last:
        found, told = one_process(at, last, every, folder)
        counts.update({k: v for k, v in found.items() if k not in ("next", "peak_mb")})
        counts["peak_mb"] = max(counts["peak_mb"], found["peak_mb"])
        problems += told
        at = found["next"]
    return counts, problems


def one_process(
    first: int, last: int, every: bool, folder: str
) -> tuple[dict[str, int], list[Any]]:
    state_path, out, errors = (Path(folder, name) for name in ("state", "out", "err"))
    state_path.write_bytes(STATE.pack(first - 1, 0, 0, 0))
    surroundings = {
        **os.environ,
        "MALLOC_PERTURB_": "165",
        "MALLOC_CHECK_": "3",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",
    }
    words = ["--child", str(first), str(last), str(int(every)), str(state_path)]
    with open(out, "wb") as stdout, open(errors, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, *words], stdout=stdout, stderr=stderr, env=surroundings
        )
        at, since, hung, top = -1, time.monotonic(), False, 0
        while process.poll() is None:
            time.sleep(0.2)
            now = STATE.unpack(state_path.read_bytes())[0]
            if now != at:
                at, since = now, time.monotonic()
            elif time.monotonic() - since > (HANG_S if at >= first else START_S):
                hung = True
                process.kill()
                process.wait()
    at, accepted, readings, refused = STATE.unpack(state_path.read_bytes())
    at, problems = max(at, first), []
    for line in out.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        if "peak" in told:
            top = told["peak"] >> 20
        else:
            problems.append(told)
            print(json.dumps(told), flush=True)
    counts = {"datasets": at - first, "accepted": accepted, "readings": readings}
    counts |= {"refusals": refused, "unnamed": len(problems), "peak_mb": top, "next": at}
    if at < last:
        kind = "hung" if hung else "crashed"
        text = errors.read_text(encoding="utf-8", errors="replace")
        told = {"case": at, "kind": kind, "status": process.returncode, "trace": text[-3000:]}
        problems.append(told)
        print(json.dumps(told), flush=True)
        counts |= {kind: 1, "datasets": at - first + 1, "next": at + 1}
    return counts, problems


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", sys.argv[5])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--all", action="store_true", help="every reader reads every case")
    parser.add_argument("--sound", action="store_true", help="the datasets before the changes")
    parser.add_argument("--out", type=Path, help="JSON to which the counts are added")
    args = parser.parse_args()
    if args.sound:
        found = sound()
        print(json.dumps(found))
        return 1 if found["refused"] else 0
    began, total, problems = time.monotonic(), Counter[str](), list[Any]()
    at, last = args.first, args.first + args.cases
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        while at < last and time.monotonic() - began < args.seconds:
            counts, told = fuzz(at, min(CHUNK, last - at), args.all, folder)
            most = max(total["peak_mb"], counts["peak_mb"])
            total.update(counts)
            total["peak_mb"] = most
            problems += told
            at += min(CHUNK, last - at)
            seconds = round(time.monotonic() - began, 1)
            print(at, json.dumps({**total, "seconds": seconds}), flush=True)
            if args.out:
                keep(args.out, args.first, {**total, "seconds": seconds}, problems)
    return 1 if problems else 0


def keep(out: Path, first: int, counts: dict[str, Any], problems: list[Any]) -> None:
    """Writes the counts of this call beside those of others."""
    import pyarrow

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []
    runs = [r for r in runs if r["first"] != first]
    run = {"first": first, "commit": commit, "pyarrow": pyarrow.__version__, **counts}
    runs.append({**run, "problems": [{**p, "trace": p["trace"][-600:]} for p in problems[:20]]})
    out.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
