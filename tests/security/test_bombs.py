"""Small files that ask for much memory or time: refused by name, in a process that has
little.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forged import MANIFEST, replace_shard
from places import edit_manifest

import packstore
from packstore import open as open_dataset
from packstore.errors import InputError, IntegrityError, StorageError

MB = 1 << 20
READ = """
import sys
from packstore.errors import PackstoreError
from packstore.io.inputs import compression, formats
from packstore.io.shards import parquet as shards
from packstore.io.inputs import tables
from packstore import open as open_dataset
from packstore import pack
import packstore.etl.pipeline, packstore.io.scan

# Smaller than they are, so that the bombs can be.
formats.MAX_RECORD_BYTES = 8 << 20
compression.FREE_BYTES = 4 << 20
tables.BATCH_BYTES = 32 << 20
shards.MAX_GROUP_BYTES = 32 << 20
for path in sys.stdin.read().split():
    try:
        if path.endswith("ds"):
            data = open_dataset(path)
            data.pack_index
            list(data.iter_packs())
        else:
            pack(path, path + "-ds", num_workers=0)
        print("read")
    except PackstoreError as error:
        print(type(error).__name__, error)
"""


def column(values: int, **how: Any) -> bytes:
    """A Parquet file of equal texts."""
    sink = io.BytesIO()
    table = pa.table(
        {"prompt": pa.array(["a" * 1000]).take(pa.array(np.zeros(values, np.int64)))}
    )
    pq.write_table(table, sink, **how)
    return sink.getvalue()


def swollen(data: bytes, page_bytes: int) -> bytes:
    """A Parquet file whose first page header declares more bytes than there are."""
    # In the compact protocol: field 1 (type), then field 2, the size when decompressed.
    start = pq.read_metadata(io.BytesIO(data)).row_group(0).column(0).data_page_offset
    assert data[start : start + 1] == b"\x15"
    at = start + 2
    assert data[at : at + 1] == b"\x15"
    end = at + 1
    while data[end] & 128:
        end += 1
    old = data[at + 1 : end + 1]
    new, value = b"", page_bytes << 1
    while value > 127:
        new += bytes([value & 127 | 128])
        value >>= 7
    new += bytes([value])
    assert len(new) >= len(old)
    # The footer's place is told from the end; the column is found at its old start.
    return data[: at + 1] + new + data[end + 1 :]


INPUTS: dict[str, tuple[str, Any]] = {
    "a page that declares gigabytes": (
        "x.parquet",
        lambda: swollen(
            column(1000, compression="zstd", use_dictionary=False), (1 << 31) - 1
        ),
    ),
    "gzip of a long line": ("x.jsonl.gz", lambda: gzip.compress(b" " * (40 * MB), 9)),
    "gzip of blank lines": ("x.jsonl.gz", lambda: gzip.compress(b"\n" * (40 * MB), 9)),
    "zstd of a long line": ("x.jsonl.zst", lambda: zstd(b" " * (40 * MB))),
    "zstd of blank lines": ("x.jsonl.zst", lambda: zstd(b"\n" * (40 * MB))),
    "zstd as a table": ("x.parquet.zst", lambda: zstd(b"\0" * (40 * MB))),
    "brackets": ("x.jsonl", lambda: b"[" * (8 * MB)),
    "brackets in a document": ("x.json", lambda: b"[" * (8 * MB)),
    "objects in objects": ("x.jsonl", lambda: b'{"a":' * MB),
    "a string that does not end": ("x.json", lambda: b'["' + b"a" * (12 * MB)),
    "a number of many digits": (
        "x.jsonl",
        lambda: b'{"prompt": ' + b"9" * (8 * MB) + b"}",
    ),
    "a cell that does not end": ("x.csv", lambda: b'prompt\n"' + b"a" * (12 * MB)),
    "a line of a table without end": ("x.csv", lambda: b"prompt\n" + b"a," * (6 * MB)),
}


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


LIMITS = {
    "gzip of blank lines": "must not decompress to more than 400 times its bytes",
    "zstd of blank lines": "must not decompress to more than 400 times its bytes",
    "zstd as a table": "must not decompress to more than 400 times its bytes",
    "brackets": "1000 levels",
    "a string that does not end": "item 1: must be valid JSON, of at most 8,388,608 "
    "bytes a record",
    "a cell that does not end": "line 2: a line must be shorter than 8,388,608 "
    "characters",
}


HUGE = b"\xff\xff\xff\x7f"
FOOTERS = {  # name of a file -> its first and last bytes; a terabyte of nothing between
    "a.parquet": (b"PAR1", HUGE + b"PAR1"),
    "file.arrow": (b"ARROW1\0\0", HUGE + b"ARROW1"),
    "stream.arrow": (b"\xff\xff\xff\xff" + HUGE, b""),
    "none.parquet": (b"PAR1", b""),
    "none.arrow": (b"ARROW1\0\0", b""),
}


def test_footers_are_looked_at_before_the_file_is_read(
    cell: Any, tmp_path: Path
) -> None:
    for name, (head, end) in FOOTERS.items():
        with open(tmp_path / name, "wb") as file:
            file.write(head)
            file.truncate(1 << 40)
            file.seek(0, os.SEEK_END)
            file.write(end)
    lines = cell(READ, "\n".join(FOOTERS)).splitlines()
    assert len(lines) == len(FOOTERS)
    for line in lines:
        name = line.removeprefix("InputError ").partition(":")[0]
        assert "none" in name or "67108864" in line


def test_input_files(cell: Any, tmp_path: Path) -> None:
    paths = []
    for number, (file, make) in enumerate(INPUTS.values()):
        paths.append(tmp_path / f"{number}-{file}")
        paths[-1].write_bytes(make())
    found = dict(
        zip(INPUTS, cell(READ, "\n".join(map(str, paths))).splitlines(), strict=True)
    )
    refused = ("InputError", "RecordError")
    assert not {
        name: text for name, text in found.items() if not text.startswith(refused)
    }
    for name, text in LIMITS.items():
        assert text in found[name]


KIT = Path(__file__).parents[2] / "schemas" / "conformance" / "v1"
GOLDEN = KIT / "datasets" / "sft-concat"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "ds")
    return tmp_path / "ds"


def one_group(dataset: Path, **how: Any) -> bytes:
    """The packs of its only shard, in one row group."""
    table = pq.read_table(next((dataset / "data").iterdir())).combine_chunks()
    sink = io.BytesIO()
    how = {
        "compression": "zstd",
        "use_dictionary": False,
        "write_statistics": False,
        **how,
    }
    pq.write_table(table, sink, table.num_rows, **how)
    return sink.getvalue()


def put_shard(dataset: Path, data: bytes) -> None:
    """Puts another shard of one row group in place, with a manifest of which all is a
    lie.
    """

    def into_one_group(manifest: Any) -> None:
        groups = manifest["shards"][0]["row_groups"]
        for name in ("rows", "examples", "tokens"):
            groups[name] = [sum(groups[name])]
        groups["longest"] = [max(groups["longest"])]

    edit_manifest(dataset, into_one_group)
    replace_shard(dataset, data)


def test_a_shard_whose_page_declares_gigabytes(cell: Any, dataset: Path) -> None:
    """pyarrow asks for the memory: where there is that little, it is a named error."""
    good = one_group(dataset)
    put_shard(dataset, good)
    assert cell(READ, str(dataset)) == "read\n"  # so what is refused is the bomb
    put_shard(dataset, swollen(good, (1 << 31) - 1))
    assert cell(READ, str(dataset)).startswith("IntegrityError")


def test_a_shard_that_is_larger_inside(cell: Any, dataset: Path) -> None:
    """Honest headers: real zeros, many MB, in some kB."""
    manifest = open_dataset(str(dataset)).manifest
    rows = manifest.num_packs
    zeros = pa.array(np.zeros(16 * MB, np.int32))
    offsets = pa.array(np.linspace(0, len(zeros), rows + 1).astype(np.int32))
    table = pq.read_table(next((dataset / "data").iterdir())).combine_chunks()
    field = table.schema.field("input_ids")
    table = table.set_column(
        0, field, pa.ListArray.from_arrays(offsets, zeros, type=field.type)
    )
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        rows,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
    )
    assert sink.tell() < MB
    put_shard(dataset, sink.getvalue())
    found = cell(READ, str(dataset))
    assert found.startswith("IntegrityError")
    assert "bytes when decompressed" in found


SIZES = {
    "a footer": lambda m: m["shards"][0].update(
        footer_bytes=m["shards"][0]["bytes"] + (1 << 40)
    ),
    "a shard and its footer": lambda m: (
        m["shards"][0].update(footer_bytes=1 << 40, bytes=1 << 41),
        m["totals"].update(bytes=1 << 41),
    ),
    "a pack index": lambda m: m["pack_index"].update(bytes=1 << 40),
    "rows": lambda m: m["shards"][0]["row_groups"].update(rows=[1 << 40, 1]),
    "too many digits": lambda m: m.update(pack_size=10**30),
    "a size that is no number": lambda m: m["shards"][0].update(bytes=1e300),
}


def test_manifests_that_declare_huge_sizes(
    cell: Any, dataset: Path, tmp_path: Path
) -> None:
    for number, change in enumerate(SIZES.values()):
        copy = tmp_path / f"{number}-ds"
        shutil.copytree(dataset, copy)
        edit_manifest(copy, change)
    paths = [str(tmp_path / f"{number}-ds") for number in range(len(SIZES))]
    found = cell(READ, "\n".join(paths)).splitlines()
    named = ("FormatError", "IntegrityError")
    wrong = {n: t for n, t in zip(SIZES, found, strict=True) if not t.startswith(named)}
    assert not wrong


def test_a_file_that_never_ends_or_never_begins(dataset: Path, tmp_path: Path) -> None:
    """A device or a pipe in the place of a file, also behind a link."""
    (shard,) = open_dataset(str(dataset)).manifest.shards
    (dataset / shard.path).unlink()
    (dataset / shard.path).symlink_to("/dev/zero")
    with pytest.raises(StorageError, match=Path(shard.path).name):
        next(open_dataset(str(dataset)).iter_packs())
    pipe = tmp_path / "x.jsonl"
    os.mkfifo(pipe)
    with pytest.raises((StorageError, InputError)):
        packstore.pack(pipe, tmp_path / "never")
    manifest = dataset / MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(StorageError):
        open_dataset(str(dataset))


def test_a_link_out_of_the_dataset_gives_no_other_bytes(
    dataset: Path, tmp_path: Path
) -> None:
    """It is followed, as downloads are made of links; what it leads to must have the
    hash.
    """
    (shard,) = open_dataset(str(dataset)).manifest.shards
    secret = tmp_path / "secret"
    secret.write_bytes(b"the secret" * 10_000)
    (dataset / shard.path).rename(tmp_path / "blob")
    (dataset / shard.path).symlink_to(secret)
    with pytest.raises(IntegrityError) as caught:
        next(open_dataset(str(dataset)).iter_packs())
    assert "the secret" not in str(caught.value)
    (dataset / shard.path).unlink()
    (dataset / shard.path).symlink_to(tmp_path / "blob")
    assert len(list(open_dataset(str(dataset)).iter_packs()))
