"""Flips bits of the files of a small dataset, and checks that every reader raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from forged import ranges
from same import same

from packstore import Dataset, open
from packstore.errors import PackstoreError
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
        read: opens the dataset and reads what the file is for; what it returns is
            compared.
    """

    name: str
    path: Path
    start: int
    stop: int
    read: Callable[[], object]


def regions(data: Dataset, side_url: str | None = None) -> Iterator[Region]:
    """All of a local dataset, and of a side dataset."""
    root = Path(data.url)
    for number, shard in enumerate(data.manifest.shards):
        first = int(np.searchsorted(data.row_groups.shard, number))
        yield from _shard_regions(
            data.url, root / shard.path, first, shard.footer_bytes
        )
    if (info := data.manifest.pack_index) is not None:
        yield _whole(
            "pack index", root / info.path, lambda: [open(data.url).pack_index]
        )
    path = root / "_packstore" / f"manifest-{data.version:06d}.json"
    yield _whole("manifest", path, lambda: open(data.url).manifest.to_json())
    if side_url is not None:
        side, folder = open_side(side_url), Path(side_url)
        for entry in side.manifest.shards:
            read = lambda: list(open_side(side_url).iter_batches())  # noqa: E731
            yield _whole("side data", folder / entry.path, read)
        path = folder / "_packstore" / f"side-{side.version:06d}.json"
        yield _whole(
            "side manifest", path, lambda: open_side(side_url).manifest.to_json()
        )


def flip(region: Region, step: int, kept: int = 5) -> tuple[Counter[str], list[str]]:
    """Flips every `step`-th bit; counts what raised, what gave the same, and what did
    not.

    Returns:
        the counts ``raised``, ``same`` and ``silent`` (other values, and no error) and
        ``unnamed`` (an error that is none of packstore's); and some of the last two.
    """
    whole, expected = region.path.read_bytes(), region.read()
    counts, wrong = Counter[str](), list[str]()
    for bit in range(8 * region.start, 8 * region.stop, step):
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        region.path.write_bytes(spoiled)
        try:
            found = region.read()
            kind, told = ("same" if same(found, expected) else "silent"), ""
        except PackstoreError:
            kind = "raised"
        except Exception as error:
            kind, told = "unnamed", repr(error)
        counts[kind] += 1
        if kind in ("silent", "unnamed") and len(wrong) < kept:
            wrong.append(f"{region.name}, {region.path.name}, bit {bit}: {kind} {told}")
    region.path.write_bytes(whole)
    return counts, wrong


def _shard_regions(url: str, path: Path, first: int, footer: int) -> Iterator[Region]:
    def region(name: str, start: int, stop: int, group: int) -> Region:
        return Region(
            name, path, start, stop, lambda: [open(url).read_packs(first + group)]
        )

    at, size, group = 0, path.stat().st_size, 0
    for group, (start, stop) in enumerate(_ranges(path)):
        yield region("padding", at, start, group)
        yield region("row group", start, stop, group)
        at = stop
    yield region("padding", at, size - footer, group)
    yield region("footer", size - footer, size, 0)


def _ranges(path: Path) -> list[tuple[int, int]]:
    """Finds row groups: column chunks, or record batches with their framing."""
    if path.suffix == ".parquet":
        return ranges(path.read_bytes())
    source = pa.py_buffer(path.read_bytes())
    file = pa.ipc.open_file(source)
    ends = [8]
    for number in range(file.num_record_batches):
        columns = file.get_batch(number).columns
        buffers = [b for column in columns for b in column.buffers() if b is not None]
        ends.append(max(b.address + b.size for b in buffers) - source.address)
    return list(pairwise(ends))


def _whole(name: str, path: Path, read: Callable[[], object]) -> Region:
    return Region(name, path, 0, path.stat().st_size, read)
