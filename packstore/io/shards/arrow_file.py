"""Reads record batches of an Arrow file, each with one read of its byte range.

Arrow would read a file object in its own threads, and a thread that still holds a
Python object when the interpreter exits can abort the process. Here Arrow only gets
bytes in memory.

Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format.
``File.fbs`` declares the footer: a flatbuffers table with a list of record batches,
each a ``Block`` of 24 bytes. ``Message.fbs`` declares the header of a record batch.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from packstore.errors import IntegrityError
from packstore.io.shards.shard import NonconformingFile, ShardInfo, crc32_of

_MAGIC = b"ARROW1"
_TAIL_BYTES = 4 + len(_MAGIC)
"""Bytes behind the footer's table: its length, and the magic word."""

# Positions of fields in flatbuffers tables.
_FOOTER_RECORD_BATCHES = 3  # after version, schema and dictionaries
_MESSAGE_HEADER = 2  # after version and type of the header
_RECORD_BATCH_COMPRESSION = 3  # after length, nodes and buffers


class _Block(NamedTuple):
    """Place of a record batch in a file, in bytes."""

    offset: int
    metadata_bytes: int
    body_bytes: int


_BLOCK = struct.Struct("<qi4xq")  # as it is stored


class ArrowFile:
    """Schema and record batches of an Arrow file, by its verified footer.

    Args:
        footer: bytes of the file from the footer's table on.
        shard: the manifest's entry.
        names: columns to read.

    Raises:
        IntegrityError: a record batch is not in the file.
    """

    def __init__(self, footer: bytes, shard: ShardInfo, names: Sequence[str]) -> None:
        self.names = names
        # Arrow parses the schema from a file without its record batches.
        parsed = pa.ipc.open_file(pa.BufferReader(_MAGIC + b"\0\0" + footer))
        self.schema = parsed.schema
        blocks = _read_blocks(footer[:-_TAIL_BYTES])
        self.num_groups = len(blocks)
        self._ranges: list[tuple[int, int]] = []
        for block in blocks:
            end = block.offset + block.metadata_bytes + block.body_bytes
            if not 0 <= block.offset < end <= shard.bytes:
                raise IntegrityError("its record batches must lie in the file")
            self._ranges.append((block.offset, end))

    def range(self, group: int) -> tuple[int, int]:
        """Return the byte range of a record batch: start, end (exclusive)."""
        return self._ranges[group]

    def batch(self, data: bytes | memoryview) -> pa.RecordBatch:
        """Return the record batch in `data`; its buffers are views of `data`.

        Raises:
            IntegrityError: the bytes are not a record batch.
            NonconformingFile: it is compressed.
        """
        message = pa.ipc.read_message(pa.py_buffer(data))
        if message.type != "record batch":
            raise IntegrityError("its record batches must stand there")
        if _is_compressed(bytes(message.metadata)):
            raise NonconformingFile("its record batches must not be compressed")
        return pa.ipc.read_record_batch(message, self.schema)


def batch_crc32(batch: pa.RecordBatch) -> int:
    """Return the crc32 of a batch: counts of rows and nulls, and buffers."""
    crc = 0
    for column in batch.columns:
        shape = (
            len(column),
            column.null_count,
            len(column.values),
            column.values.null_count,
        )
        crc = crc32_of(repr(shape).encode(), crc)
        for buffer in column.buffers():
            if buffer is not None:
                crc = crc32_of(buffer, crc)
    return crc


def _read_blocks(footer: bytes) -> list[_Block]:
    """Return the places of the record batches, from the footer's table."""
    try:
        field = _field_offset(footer, _u32(footer, 0), _FOOTER_RECORD_BATCHES)
        if field is None:
            return []
        list_offset = field + _u32(footer, field)
        count = _u32(footer, list_offset)
        first = list_offset + 4
        offsets = range(first, first + count * _BLOCK.size, _BLOCK.size)
        return [_Block(*_BLOCK.unpack_from(footer, offset)) for offset in offsets]
    except struct.error as error:
        raise IntegrityError("its footer must list the record batches") from error


def _is_compressed(message: bytes) -> bool:
    """Return True for a compressed record batch, which could decompress to any size."""
    with contextlib.suppress(struct.error):
        field = _field_offset(message, _u32(message, 0), _MESSAGE_HEADER)
        if field is not None:
            header = field + _u32(message, field)
            compression = _field_offset(message, header, _RECORD_BATCH_COMPRESSION)
            return compression is not None
    raise IntegrityError("its record batches must have a header")


# Flatbuffers: a table begins with the distance back to the list of its fields, its
# vtable, which has its own length, the table's length, and the offset of each field.


def _field_offset(data: bytes, table: int, number: int) -> int | None:
    """Return the offset of a table's field; None if the field is absent."""
    vtable = table - _i32(data, table)
    vtable_bytes = _u16(data, vtable)
    entry = 4 + 2 * number
    if vtable_bytes < entry + 2:
        return None
    offset_in_table = _u16(data, vtable + entry)
    return table + offset_in_table if offset_in_table else None


def _u16(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<H", data, offset)[0])


def _i32(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<i", data, offset)[0])


def _u32(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<I", data, offset)[0])
