"""Row groups decoded page by page: as our writer leaves them, and several times faster.

A general reader of Parquet builds lists out of levels value by value. A shard of ours has one page
for each column of a row group, lists without nulls and without empty ones, plain values: so the
values are a view of the page once that is decompressed, and only where lists begin is looked up in
the levels. Whatever looks otherwise is left to the general reader.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packstore.io.pages import MAX_GROUP_BYTES, MAX_VALUES
from packstore.records import Int64

Flat = tuple[Any, Int64]
"""Values of a list column, and int64 `[P + 1]`, where the list of each row starts in them."""

_VARINT = rb"[\x80-\xff]{0,4}[\x00-\x7f]"
_HEADER = re.compile(
    # A data page of the first version, of so many bytes, unpacked and packed; its crc32, if any;
    # so many values, plain, levels as runs; statistics of nothing.
    rb"\x15\x00\x15(%b)\x15(%b)(?:\x15%b\x1c|\x2c)\x15(%b)\x15\x00\x15\x06\x15\x06(?:\x1c\x00)?\x00\x00"
    % (_VARINT, _VARINT, _VARINT, _VARINT),
    re.DOTALL,
)
_DTYPES = {pa.int32(): "i4", pa.int64(): "i8", pa.float32(): "f4", pa.float64(): "f8"}
_ZEROS = [tuple(bit for bit in range(8) if not byte >> bit & 1) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class PageReader:
    """Decodes the row groups of a shard.

    Attributes:
        columns: name and type of each column, in the order of the file.
        codec: of its pages; None: they are not compressed.
    """

    columns: Sequence[tuple[str, np.dtype[Any]]]
    codec: pa.Codec | None

    @classmethod
    def of(cls, metadata: pq.FileMetaData, schema: pa.Schema) -> Self | None:
        """The reader of a shard; None if it holds what only the general reader can read."""
        types = [_DTYPES.get(field.type.value_type) for field in schema]
        if not metadata.num_row_groups or None in types:
            return None
        group = metadata.row_group(0)
        codecs = {group.column(i).compression for i in range(group.num_columns)}
        if not codecs <= {"ZSTD"} and not codecs <= {"UNCOMPRESSED"}:
            return None
        columns = [(n, np.dtype(t)) for n, t in zip(schema.names, types, strict=True)]
        return cls(columns, pa.Codec("zstd") if codecs == {"ZSTD"} else None)

    def read(self, data: bytes, rows: int) -> dict[str, Flat] | None:
        """The columns of a row group out of its bytes; None if they are for the general reader.

        Args:
            data: the bytes.
            rows: that it has, by the manifest; decides how much memory it takes at most.

        Raises:
            pyarrow.ArrowException, OSError: a page cannot be decompressed.
        """
        found: dict[str, Flat] = {}
        known: dict[bytes, Int64] = {}
        at, size, buffer = 0, 0, pa.py_buffer(data)
        for name, dtype in self.columns:
            header = _HEADER.match(data, at)
            if header is None:
                return None
            unpacked, packed, values = map(_signed, header.groups())
            at = header.end() + packed
            size += unpacked
            if min(packed, unpacked, values) < 1 or size > MAX_GROUP_BYTES or values > MAX_VALUES:
                return None
            page = buffer.slice(header.end(), packed)
            if self.codec is not None:
                page = self.codec.decompress(page, unpacked)
            flat = _flat(memoryview(page), (values, rows), dtype, known)
            if flat is None:
                return None
            found[name] = flat
        return found if at == len(data) else None


def _flat(
    page: memoryview, numbers: tuple[int, int], dtype: np.dtype[Any], known: dict[bytes, Int64]
) -> Flat | None:
    """A page: where lists go on, which values are there (all), and the values."""
    values, rows = numbers
    first = 4 + int.from_bytes(page[:4], "little")
    second = first + 4 + int.from_bytes(page[first : first + 4], "little")
    if bytes(page[first + 4 : second]) != _varint(values << 1) + b"\x01":
        return None
    if len(page) != second + values * dtype.itemsize:
        return None
    levels = bytes(page[4:first])
    starts = known.get(levels)
    if starts is None:
        try:
            starts = known[levels] = _starts(levels, values, rows)
        except IndexError:  # they end too early, or begin too many lists
            return None
    if starts[0] or starts[-1] != values:
        return None
    return np.frombuffer(page, dtype, values, second), starts


def _starts(levels: bytes, values: int, rows: int) -> Int64:
    """Where the level is 0, of levels 0 and 1 in runs and in groups of eight; and their number."""
    starts: list[int] = []
    at = place = 0
    end = len(levels)
    while at < end:
        if len(starts) > rows + 7:
            raise IndexError
        header, shift = levels[at], 7
        at += 1
        if header > 127:
            header &= 127
            while levels[at - 1] > 127:
                header |= (levels[at] & 127) << shift
                at, shift = at + 1, shift + 7
        if header & 1:
            stop = at + (header >> 1)
            if stop > at + 64:  # more than any writer puts together
                raise IndexError
            for byte in levels[at:stop]:
                for bit in _ZEROS[byte]:
                    starts.append(place + bit)
                place += 8
            at = stop
        else:
            if not levels[at]:
                if header >> 1 > rows:
                    raise IndexError
                starts += range(place, place + (header >> 1))
            place += header >> 1
            at += 1
    while starts and starts[-1] >= values:  # the last group of eight is filled up
        starts.pop()
    starts.append(min(place, values))
    return np.array(starts, np.int64)


def _signed(varint: bytes) -> int:
    """A number as Thrift's compact protocol has it: zigzag, seven bits a byte."""
    value = 0
    for i, byte in enumerate(varint):
        value |= (byte & 127) << 7 * i
    return (value >> 1) ^ -(value & 1)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
