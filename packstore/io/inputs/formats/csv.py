"""CSV and TSV with a header line, RFC 4180: cells may be quoted and hold line ends.

Cells are text, exactly as written: a prompt ``007`` stays ``007``. Only in columns that cannot be
text (rewards, scores, messages, token ids, carried numbers) cells are parsed as JSON; there an
empty cell is null, and one that is not JSON stays text.

Python's ``csv`` reads, as it is strict; ``README.md`` compares it with other readers.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

import orjson

from packstore.errors import InputError, sentence
from packstore.io.inputs import pieces
from packstore.io.inputs.jsontext import not_utf8
from packstore.io.inputs.pieces import Format, Piece, ReadOptions

_Rows = tuple[list[str], frozenset[str], list[list[str]]]
"""Names of the columns, those with JSON values, and some rows."""


def read(stream: BinaryIO, path: str, options: ReadOptions, *, delimiter: str) -> Iterator[Piece]:
    """Cuts between rows."""
    # The csv module's limit is global, and its default of 128 KiB a cell is too low for prompts.
    csv.field_size_limit(max(csv.field_size_limit(), pieces.MAX_RECORD_BYTES))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rows = csv.reader(_lines(text, path), delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        pieces.refuse_equal_names(header, f"{path}, line 1")
        for piece in pieces.cut(_checked(rows, len(header), path), options.block_bytes, _size):
            yield piece._replace(payload=(header, options.json_columns, piece.payload))
    except csv.Error as error:
        do = 'Put cells in double quotes, and write a quote inside as ""'
        where = f"{path}, line {rows.line_num}"
        raise InputError(sentence(where, "must be valid CSV", str(error), do)) from None
    except UnicodeDecodeError as error:
        raise not_utf8(error, f"{path}, after line {rows.line_num}") from None
    finally:
        text.detach()  # otherwise it would close the stream


def parse(payload: _Rows, path: str, first: int) -> tuple[range, list[object]]:
    """Parses rows into records."""
    header, typed, rows = payload
    values: list[object] = [
        {n: _value(c) if n in typed else c for n, c in zip(header, row, strict=True)}
        for row in rows
    ]
    return range(first, first + len(rows)), values


def _value(cell: str) -> object:
    try:
        return orjson.loads(cell) if cell else None
    except orjson.JSONDecodeError:
        return cell


def _checked(rows: Iterator[list[str]], cells: int, path: str) -> Iterator[list[str]]:
    """Yields all rows but blank lines; raises if the number of cells is wrong."""
    for number, row in enumerate(filter(None, rows), 1):
        if len(row) != cells:
            must = f"must have {cells} cells, as the header has"
            do = 'Put cells that hold the delimiter, quotes or line ends in double quotes ("")'
            raise InputError(sentence(f"{path}, row {number}", must, str(len(row)), do))
        yield row


def _size(row: list[str]) -> int:
    return sum(map(sys.getsizeof, row))


def _lines(text: io.TextIOWrapper, path: str) -> Iterator[str]:
    """Yields the lines of a file; raises at one that is too long."""
    for number, line in enumerate(iter(partial(text.readline, pieces.MAX_RECORD_BYTES), ""), 1):
        if len(line) == pieces.MAX_RECORD_BYTES:
            must = f"a line must be shorter than {pieces.MAX_RECORD_BYTES:,} characters"
            raise InputError(sentence(f"{path}, line {number}", must, "a longer one"))
        yield line


CSV = Format(unit="row", read=partial(read, delimiter=","), parse=parse)
TSV = Format(unit="row", read=partial(read, delimiter="\t"), parse=parse)
