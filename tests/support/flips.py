"""Flips bits of the files of a small dataset, and checks that every reader raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore import Dataset
from packstore.errors import PackstoreError
from packstore.format import Packs, PackSizes
from packstore.io.dataset.pack_index import PackIndex
from packstore.io.dataset.reader import ShardReader
from packstore.io.manifest.commit import without_hash
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.side_manifest import SideManifest
from packstore.io.shards.parquet import byte_range
from packstore.torch import open_side


@dataclass(frozen=True)
class Region:
    """Bytes of a file, and their reader.

    Attributes:
        name: ``row group``, ``footer``, ``pack index``, ``manifest``, ``side data`` or
            ``side manifest``; ``padding`` is what lies between them and means nothing.
        path: of the file.
        start: first byte.
        stop: byte behind the last one.
        read: reads the file out of other bytes of it; what it returns is compared.
    """

    name: str
    path: Path
    start: int
    stop: int
    read: Callable[[bytes], object]


def regions(data: Dataset, side_url: str | None = None) -> Iterator[Region]:
    """All of a local dataset, and of a side dataset."""
    root = Path(data.url)
    for number, shard in enumerate(data.manifest.shards):
        yield from _shard_regions(data, number, root / shard.path)
    if (info := data.manifest.pack_index) is not None:
        path = root / info.path
        yield Region("pack index", path, 0, info.bytes, lambda new: _index(data, new, path))
    path = root / "_packstore" / f"manifest-{data.version:06d}.json"
    yield _whole("manifest", path, lambda new: Manifest.from_json(without_hash(new, "m"), "m"))
    if side_url is not None:
        side, folder = open_side(side_url), Path(side_url)
        for entry in side.manifest.shards:
            yield _whole("side data", folder / entry.path, lambda new, e=entry: _side(side, e, new))
        path = folder / "_packstore" / f"side-{side.version:06d}.json"
        yield _whole(
            "side manifest", path, lambda n: SideManifest.from_json(without_hash(n, "m"), "m")
        )


def flip(region: Region, step: int, kept: int = 5) -> tuple[Counter[str], list[str]]:
    """Flips every `step`-th bit; counts what raised, what gave the same, and what did not.

    Returns:
        the counts ``raised``, ``same`` and ``silent`` (other values, and no error) and ``unnamed``
        (an error that is none of packstore's); and some of the last two.
    """
    whole = region.path.read_bytes()
    expected = region.read(whole)
    counts, wrong = Counter[str](), list[str]()
    for bit in range(8 * region.start, 8 * region.stop, step):
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        try:
            found = region.read(bytes(spoiled))
            kind, told = ("same" if _same(found, expected) else "silent"), ""
        except PackstoreError:
            kind = "raised"
        except Exception as error:
            kind, told = "unnamed", repr(error)
        counts[kind] += 1
        if kind in ("silent", "unnamed") and len(wrong) < kept:
            wrong.append(f"{region.name}, {region.path.name}, bit {bit}: {kind} {told}")
    return counts, wrong


def _shard_regions(data: Dataset, number: int, path: Path) -> Iterator[Region]:
    shard = data.manifest.shards[number]

    def region(name: str, start: int, stop: int, group: int) -> Region:
        def read(new: bytes) -> list[Packs]:
            return [ShardReader(data.location, data.manifest, shard, new).read_packs(group)]

        return Region(name, path, start, stop, read)

    at, first, group = 0, shard.bytes - shard.footer_bytes, 0
    for group, (start, stop) in enumerate(_ranges(path)):
        yield region("padding", at, start, group)
        yield region("row group", start, stop, group)
        at = stop
    yield region("padding", at, first, group)
    yield region("footer", first, shard.bytes, 0)


def _ranges(path: Path) -> list[tuple[int, int]]:
    """Finds row groups: column chunks, or record batches with their framing."""
    if path.suffix == ".parquet":
        metadata, size = pq.read_metadata(path), path.stat().st_size
        return [byte_range(metadata.row_group(i), size) for i in range(metadata.num_row_groups)]
    source = pa.py_buffer(path.read_bytes())
    file = pa.ipc.open_file(source)
    ends = [8]
    for number in range(file.num_record_batches):
        columns = file.get_batch(number).columns
        buffers = [b for column in columns for b in column.buffers() if b is not None]
        ends.append(max(b.address + b.size for b in buffers) - source.address)
    return list(pairwise(ends))


def _whole(name: str, path: Path, read: Callable[[bytes], object]) -> Region:
    return Region(name, path, 0, path.stat().st_size, read)


def _index(data: Dataset, new: bytes, path: Path) -> list[PackSizes]:
    info: Any = data.manifest.pack_index
    index = _with(path, new, lambda: PackIndex(data.location, data.manifest, info))
    return [index.shard(number) for number in range(len(data.manifest.shards))]


def _side(side: Any, entry: Any, new: bytes) -> list[Any]:
    own = type(side)(side.location, replace(side.manifest, shards=(entry,)), side.version)
    return _with(Path(side.url) / entry.path, new, lambda: list(own.iter_batches()))


def _with(path: Path, new: bytes, read: Callable[[], Any]) -> Any:
    """Returns the result of reading a file with changed bytes."""
    whole = path.read_bytes()
    if new == whole:
        return read()
    try:
        path.write_bytes(new)
        return read()
    finally:
        path.write_bytes(whole)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, np.ndarray):
        return bool(a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes())
    if isinstance(a, Manifest | SideManifest):
        return a.to_json() == b.to_json()
    if isinstance(a, Packs | PackSizes):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in fields(type(a)))
    return bool(a.equals(b) if isinstance(a, pa.RecordBatch) else a == b)
