"""Local files behind a slow fsspec filesystem: 20 ms a request, 100 MB/s a stream.

    python benchmarks/slow_store.py DATASET     first batch and rate, here and behind the slow store

The waits are real (the thread that asks sleeps), requests and bytes are counted. Importing this
module registers the protocol ``slow``: ``slow:///data/set`` is the local folder ``/data/set``.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class SlowStore(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """Local files, for reading only, with the delays of an object store.

    Args:
        latency: seconds of every request.
        bandwidth: bytes a second of every stream.
    """

    protocol = "slow"
    cachable = True
    root_marker = "/"

    def __init__(self, latency: float = 0.02, bandwidth: float = 100e6, **options: Any) -> None:
        super().__init__(**options)
        self.latency, self.bandwidth = latency, bandwidth
        self._files = LocalFileSystem()
        self._lock = threading.Lock()
        self.requests = self.bytes = 0

    def reset(self) -> None:
        """Counts from 0 again."""
        with self._lock:
            self.requests = self.bytes = 0

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The files of a folder."""
        self._answer(0)
        found: list[Any] = self._files.ls(self._strip_protocol(path), detail=detail)
        return found

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size and type of a file."""
        self._answer(0)
        found: dict[str, Any] = self._files.info(self._strip_protocol(path))
        return found

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Bytes `start` to `end` of a file: one request."""
        data: bytes = self._files.cat_file(self._strip_protocol(path), start, end)
        self._answer(len(data))
        return data

    def _answer(self, size: int) -> None:
        with self._lock:
            self.requests += 1
            self.bytes += size
        time.sleep(self.latency + size / self.bandwidth)


fsspec.register_implementation("slow", SlowStore, clobber=True)


def measure(url: str, batches: int) -> dict[str, float]:
    """Figures of reading `batches` batches of 8 packs, from a process that has read nothing yet."""
    from packstore.torch import PackedDataLoader, PackedDataset

    store = fsspec.filesystem("slow") if url.startswith("slow") else None
    if store is not None:
        store.reset()
    start = time.perf_counter()
    loader = PackedDataLoader(PackedDataset(url), packs_per_batch=8)
    opened = time.perf_counter()
    found = iter(loader)
    next(found)
    first = time.perf_counter()
    figures = {"open_s": opened - start, "first_batch_s": first - opened}
    if store is not None:
        figures |= {"first_requests": store.requests, "first_megabytes": store.bytes / 1e6}
    tokens = packs = 0
    for _, batch in zip(range(batches), found, strict=False):
        tokens, packs = tokens + batch.num_tokens, packs + batch.num_packs
    seconds = time.perf_counter() - first
    return {**figures, "packs_per_s": packs / seconds, "tokens_per_s": tokens / seconds}


def compare(dataset: str, batches: int, runs: int) -> dict[str, Any]:
    """Here and behind the slow store, interleaved; the best of each figure."""
    import packstore.torch  # noqa: F401  (imports are not part of the first batch)

    path = Path(dataset).resolve()
    urls = {"local": str(path), "slow": f"slow://{path}"}
    measure(urls["local"], batches)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
    for _ in range(runs):
        for name, url in urls.items():
            found[name].append(measure(url, batches))
    best: dict[str, Any] = {
        name: {
            key: (max if key.endswith("per_s") else min)(run[key] for run in each)
            for key in each[0]
        }
        for name, each in found.items()
    }
    best["share_of_local_rate"] = best["slow"]["packs_per_s"] / best["local"]["packs_per_s"]
    return best


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="local folder of a dataset")
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="100 batches, one run")
    args = parser.parse_args()
    batches, runs = (100, 1) if args.quick else (args.batches, args.runs)
    print(json.dumps(compare(args.dataset, batches, runs), indent=1))


if __name__ == "__main__":
    main()
