"""Reads record batches of an Arrow file, each with one read of its byte range.

Arrow would read a file object in its own threads, and a thread that still holds a
Python object when the interpreter exits can abort the process. Here Arrow only gets
bytes in memory.

Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format;
    ``File.fbs``, which
declares the footer: a table whose fourth field lists a ``Block`` of 24 bytes for each
record batch; and ``Message.fbs``.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence

import pyarrow as pa

from packstore.errors import IntegrityError
from packstore.io.shards.shard import ShardInfo, crc32_of

_MAGIC = b"ARROW1"
_TAIL = 4 + len(_MAGIC)  # after the table: its length, and the magic word
_BATCHES = (
    3  # of the fields of the table: version, schema, dictionaries, record batches
)
_HEADER = 2  # of a message: version, type of the header, header, bytes of the body
_COMPRESSION = 3  # of a record batch: rows, nodes, buffers, compression
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of its metadata, bytes of its body


class ArrowFile:
    """Schema and byte ranges from the verified footer of an Arrow file, from its table
    on.
    """

    def __init__(self, footer: bytes, shard: ShardInfo, names: Sequence[str]) -> None:
        self.names = names  # of the columns to read
        # The batches of this file cannot be read, but its schema can.
        self.schema = pa.ipc.open_file(
            pa.BufferReader(_MAGIC + b"\0\0" + footer)
        ).schema
        blocks = _blocks(footer[:-_TAIL])
        self._ranges = [(start, start + head + body) for start, head, body in blocks]
        self.num_groups = len(blocks)
        if any(not 0 <= start < end <= shard.bytes for start, end in self._ranges):
            raise IntegrityError("its record batches must lie in the file")

    def range(self, group: int) -> tuple[int, int]:
        """Returns the byte range of a record batch in the file: start, end
        (exclusive).
        """
        return self._ranges[group]

    def batch(self, data: bytes | memoryview) -> pa.RecordBatch:
        """Returns the record batch in `data`; its buffers are views of `data`."""
        message = pa.ipc.read_message(pa.py_buffer(data))
        if message.type != "record batch" or _is_compressed(bytes(message.metadata)):
            raise IntegrityError(
                "its record batches must stand there, and not be compressed"
            )
        return pa.ipc.read_record_batch(message, self.schema)


def batch_crc32(batch: pa.RecordBatch) -> int:
    """Returns the crc32 of a batch: its counts of rows and nulls, and its buffers."""
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


def _blocks(table: bytes) -> list[tuple[int, int, int]]:
    """Returns offset, metadata bytes and body bytes of each record batch."""
    try:
        place = _field(table, _u32(table, 0), _BATCHES)
        if place is None:
            return []
        start = place + _u32(table, place)
        places = range(
            start + 4, start + 4 + _u32(table, start) * _BLOCK.size, _BLOCK.size
        )
        return [_BLOCK.unpack_from(table, place) for place in places]
    except struct.error as error:
        raise IntegrityError("its footer must list the record batches") from error


def _is_compressed(message: bytes) -> bool:
    """Returns True for a compressed record batch, which could decompress to any
    size.
    """
    with contextlib.suppress(struct.error):
        header = _field(message, _u32(message, 0), _HEADER)
        if header is not None:
            return (
                _field(message, header + _u32(message, header), _COMPRESSION)
                is not None
            )
    raise IntegrityError("its record batches must have a header")


def _u32(table: bytes, place: int) -> int:
    return int(struct.unpack_from("<I", table, place)[0])


def _field(table: bytes, root: int, number: int) -> int | None:
    """Returns the offset of a field of a flatbuffers table; None if the field is
    absent.
    """
    (back,) = struct.unpack_from("<i", table, root)
    known = struct.unpack_from("<H", table, root - back)[
        0
    ]  # bytes of the list of fields
    if known < 6 + 2 * number:
        return None
    (ahead,) = struct.unpack_from("<H", table, root - back + 4 + 2 * number)
    return root + int(ahead) if ahead else None
