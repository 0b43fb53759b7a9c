"""Makes a manifest fit changed files, by the pages in ``schemas/``, as whoever attacks
would.
"""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MANIFEST = "_packstore/manifest-000001.json"


def read_shard(path: Path) -> pa.Table:
    """All packs of a shard, as any reader of Parquet or Arrow sees them."""
    if path.suffix == ".arrow":
        return pa.ipc.open_file(path.read_bytes()).read_all()
    return pq.ParquetFile(path).read()


def shard_bytes(
    table: pa.Table, rows: list[int], file_format: str, **how: Any
) -> bytes:
    """The file of a shard whose row groups have so many packs, as another writer may
    make it.
    """
    sink, parts, at = io.BytesIO(), [], 0
    for n in rows:
        parts.append(table.slice(at, n).combine_chunks())
        at += n
    if file_format == "arrow":
        with pa.ipc.new_file(sink, table.schema, **how) as writer:
            for part in parts:
                writer.write_batch(part.to_batches()[0])
        return sink.getvalue()
    how = {
        "compression": "zstd",
        "use_dictionary": False,
        "write_statistics": False,
        **how,
    }
    with pq.ParquetWriter(sink, table.schema, **how) as writer:
        for part in parts:
            writer.write_table(part)
        if not how.get("store_schema", True):
            writer.add_key_value_metadata(table.schema.metadata)
    return sink.getvalue()


def ranges(data: bytes) -> list[tuple[int, int]]:
    """First and last byte of each row group of a Parquet file."""
    metadata, found = pq.read_metadata(io.BytesIO(data)), []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = [group.column(i) for i in range(group.num_columns)]
        starts = [c.dictionary_page_offset or c.data_page_offset for c in chunks]
        ends = [
            at + c.total_compressed_size for at, c in zip(starts, chunks, strict=True)
        ]
        found.append((min(starts), max(ends)))
    return found


def checksums(data: bytes) -> str:
    """The crc32 of each row group."""
    if data.startswith(b"PAR1"):
        crcs = [zlib.crc32(data[start:end]) for start, end in ranges(data)]
    else:
        file = pa.ipc.open_file(io.BytesIO(data))
        crcs = [_of_batch(file.get_batch(i)) for i in range(file.num_record_batches)]
    return "".join(f"{crc:08x}" for crc in crcs)


def _of_batch(batch: pa.RecordBatch) -> int:
    crc = 0
    for column in batch.columns:
        values = column.values
        crc = zlib.crc32(b"(%d, %d, " % (len(column), column.null_count), crc)
        crc = zlib.crc32(b"%d, %d)" % (len(values), values.null_count), crc)
        for buffer in filter(None, column.buffers()):
            crc = zlib.crc32(buffer, crc)
    return crc


def fit(entry: dict[str, Any], data: bytes) -> None:
    """Makes size and hash of an entry those of `data`; of a shard, those of its footer
    as well.
    """
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if "footer_bytes" in entry:
        magic = 6 if data.endswith(b"ARROW1") else 4
        footer = int.from_bytes(data[-magic - 4 : -magic], "little") + 4 + magic
        sha256 = hashlib.sha256(data[-footer:]).hexdigest()
        entry |= {"footer_bytes": footer, "footer_sha256": sha256}


def sealed(manifest: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with the hash that fits as its last field."""
    manifest.pop("sha256", None)
    body = (
        json.dumps(manifest, indent=1, ensure_ascii=False).encode().removesuffix(b"\n}")
    )
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def replace_shard(folder: Path, data: bytes, crc32: str = "") -> None:
    """Puts another first shard into a dataset without an index: all that its manifest
    tells fits.

    If `crc32` is empty, it is that of the row groups of `data`; counts stay as they
    are.
    """
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest.pop("pack_index", None)
    shard = manifest["shards"][0]
    (folder / shard["path"]).write_bytes(data)
    fit(shard, data)
    shard["row_groups"]["crc32"] = crc32 or checksums(data)
    manifest["totals"]["bytes"] = sum(s["bytes"] for s in manifest["shards"])
    path.write_bytes(sealed(manifest))
