"""How much Parquet columns would take when decoded, from the headers of their pages alone.

A page header declares sizes and counts that a decoder believes: some hundred bytes may ask for
gigabytes. So the headers are looked at first. They are Thrift's compact protocol; the numbers of
the fields are those of ``parquet.thrift`` in apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow.parquet as pq

from packstore.errors import IntegrityError, sentence
from packstore.io.thrift import Struct, read_struct

MAX_GROUP_BYTES = 1 << 29
"""Bytes of a row group of a shard, as stored and when decompressed; a larger one is refused."""

MAX_PAGE_BYTES = 1 << 29
"""Bytes of a page of an input file when decompressed."""

MAX_VALUES = 1 << 27
"""Values of a column in a row group of a shard, or in a page of an input file."""

_HEADER_BYTES = 1 << 12  # that are looked at for the header of a page
_DICTIONARY_PAGE = 2
_DATA_HEADERS = (5, 8)  # of a data page, and of one of version 2
_ENCODING = {5: 2, 8: 4}  # number of the field in each
_GROWING = (2, 7, 8)  # encodings that write a long value with few bytes: dictionaries, and deltas


@dataclass(frozen=True, slots=True)
class Page:
    """What a page header declares.

    Attributes:
        header: bytes of the header itself.
        stored: bytes behind it.
        bytes: those when decompressed.
        values: in it, 0 of what is no data page.
        grows: whether its values may take more than its bytes.
    """

    header: int
    stored: int
    bytes: int
    values: int
    grows: bool


def check_group(
    chunks: Sequence[tuple[int, int]], read: Callable[[int, int], bytes], plain: bool = True
) -> None:
    """Looks at the pages of a row group of a shard.

    Args:
        chunks: where each of its columns lies, start and end (exclusive).
        read: bytes `start` to `end` of the file.
        plain: refuses dictionaries and the like.

    Raises:
        IntegrityError: it is larger than the limits, or a header is broken.
    """
    size = 0
    for start, end in chunks:
        values = 0
        for page in _pages(start, end, read):
            size += page.bytes
            values += page.values
            if plain and page.grows:
                raise IntegrityError("its columns must have no dictionary")
            if size > MAX_GROUP_BYTES:
                must = f"must have at most {MAX_GROUP_BYTES} bytes when decompressed"
                raise IntegrityError(f"{must}; its pages declare {size}")
            if values > MAX_VALUES:
                must = f"must have at most {MAX_VALUES} values a column"
                raise IntegrityError(f"{must}; its pages declare {values}")


def check_file(metadata: pq.FileMetaData, data: bytes, where: str) -> None:
    """Looks at the pages of a small file; numbers in it may have dictionaries.

    Raises:
        IntegrityError: as :func:`check_group`; names the file.
    """
    try:
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = [group.column(i) for i in range(group.num_columns)]
            texts = [c for c in columns if c.physical_type.endswith("BYTE_ARRAY")]
            for some in (columns, texts):
                check_group([_range(c) for c in some], lambda a, b: data[a:b], some is texts)
    except IntegrityError as error:
        raise IntegrityError(sentence(where, str(error))) from error


def _range(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = column.data_page_offset
    if column.has_dictionary_page:
        start = min(start, column.dictionary_page_offset)
    return start, start + column.total_compressed_size


def largest_growing_page(file: BinaryIO, size: int) -> int:
    """Looks at the pages of an input file; bytes of the largest one whose values may take more.

    Args:
        file: can be read at random; is left anywhere.
        size: of it.

    Raises:
        IntegrityError: a page is larger than the limits, or footer or header are broken.
    """

    def read(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    largest = 0
    for start, end in _chunks(read, size):
        for page in _pages(start, end, read):
            if page.bytes > MAX_PAGE_BYTES or page.values > MAX_VALUES:
                must = f"a page must have at most {MAX_PAGE_BYTES} bytes and {MAX_VALUES} values"
                raise IntegrityError(f"{must}; one declares {page.bytes} and {page.values}")
            if page.grows:
                largest = max(largest, page.bytes)
    return largest


def _chunks(read: Callable[[int, int], bytes], size: int) -> list[tuple[int, int]]:
    """Where the columns of all row groups lie, by the footer.

    pyarrow tells it as well, but ends the process where a footer is broken in some ways.
    """
    end = read(max(size - 8, 0), size)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or length + 12 > size:
        raise IntegrityError("must end with the footer of a Parquet file")
    found = []
    footer, _ = read_struct(read(size - 8 - length, size - 8))
    for group in footer.structs(4):
        for column in group.structs(1):
            meta = column.struct(3)
            starts = [meta.number(9), *([meta.number(11)] if meta.has(11) else [])]
            start = min((s for s in starts if s > 0), default=0)
            stop = start + meta.number(7)
            if not 0 <= start <= stop <= size:
                raise IntegrityError("its columns must lie in the file")
            found.append((start, stop))
    return found


def _pages(start: int, end: int, read: Callable[[int, int], bytes]) -> list[Page]:
    found = []
    while start < end:
        header, length = read_struct(read(start, min(start + _HEADER_BYTES, end)))
        found.append(page := _page(header, length))
        start += page.header + page.stored
    return found


def _page(header: Struct, length: int) -> Page:
    data = next((n for n in _DATA_HEADERS if header.has(n)), None)
    page = Page(
        header=length,
        stored=header.number(3),
        bytes=header.number(2),
        values=header.struct(data).number(1) if data else 0,
        grows=header.number(1) == _DICTIONARY_PAGE
        or (data is not None and header.struct(data).number(_ENCODING[data]) in _GROWING),
    )
    if min(page.stored, page.bytes, page.values) < 0:
        raise IntegrityError("its page headers must declare sizes")
    return page
