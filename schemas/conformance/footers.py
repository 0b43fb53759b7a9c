"""Changes footers of Parquet files, which no writer here can make as a case needs them.

A footer is a structure of Thrift's compact protocol. Numbers are zigzag varints, and a
field is told by how far its number is from that of the field before it.
"""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq

PLAIN, RLE, BIT_PACKED = b"\x00", b"\x06", b"\x08"


def varint(n: int) -> bytes:
    """A whole number."""
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def i64(distance: int, n: int) -> bytes:
    """A field of 64 bits, and its distance from the field before."""
    return bytes([distance << 4 | 6]) + varint(2 * n)


def split(data: bytes) -> tuple[bytes, bytes]:
    """Cut a file into the bytes before its footer, and the footer itself, without its
    length and the magic word.
    """
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data[:start], data[start:-8]


def join(before: bytes, footer: bytes) -> bytes:
    """The file of :func:`split`."""
    return before + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def gap(data: bytes) -> bytes:
    """The same Parquet file, with a byte between its last two column chunks."""
    group = pq.read_metadata(pa.BufferReader(data)).row_group(0)
    at = group.column(group.num_columns - 1).data_page_offset
    before, footer = split(data)
    old, new = i64(2, at), i64(2, at + 1)
    assert footer.count(old) == 1
    return join(before[:at] + b"\0" + before[at:], footer.replace(old, new))


def with_sizes(
    data: bytes, *, num_values: int | None = None, num_bytes: int | None = None
) -> bytes:
    """The same file, whose footer tells other sizes of its first column chunk.

    Args:
        data: the file.
        num_values: the number of its values; None: the right one.
        num_bytes: its bytes when decompressed; None: the right ones.
    """
    chunk = pq.read_metadata(pa.BufferReader(data)).row_group(0).column(0)
    values, size = chunk.num_values, chunk.total_uncompressed_size
    behind = i64(1, chunk.total_compressed_size) + i64(2, chunk.data_page_offset)
    old = i64(1, values) + i64(1, size) + behind
    new = i64(1, num_values or values) + i64(1, num_bytes or size) + behind
    before, footer = split(data)
    assert footer.count(old) == 1
    return join(before, footer.replace(old, new))


def with_bit_packed_levels(data: bytes) -> bytes:
    """The same file, whose footer lists BIT_PACKED in place of RLE as an encoding.

    Either is that of levels, as the values are PLAIN.
    """
    before, footer = split(data)
    # A list of two 32-bit numbers, and the head of the list of names behind it.
    encodings = re.compile(rb"\x19\x25(?:\x00\x06|\x06\x00)(?=\x19[\x18\x38])")
    changed, count = encodings.subn(lambda m: m[0].replace(RLE, BIT_PACKED), footer)
    assert count > 0
    return join(before, changed)
