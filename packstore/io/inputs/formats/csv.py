"""CSV and TSV with a header line, RFC 4180: cells may be quoted and hold line ends.

Cells are text, exactly as written: a prompt ``007`` stays ``007``. Only in columns that cannot be
text (rewards, scores, messages, token ids, carried numbers) cells are parsed as JSON; there an
empty cell is null, and one that is not JSON stays text.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import orjson

from packstore.errors import InputError, quote, sentence
from packstore.io.inputs import pieces
from packstore.io.inputs.jsontext import not_utf8
from packstore.io.inputs.pieces import Format, Piece, ReadOptions


@dataclass(frozen=True, slots=True)
class _Cells:
    """Some rows, each with a cell for each name in `header`."""

    header: list[str]
    json_columns: frozenset[str]
    rows: list[list[str]]


def read(stream: BinaryIO, path: str, options: ReadOptions, *, delimiter: str) -> Iterator[Piece]:
    """Cuts between rows."""
    # The csv module's limit is global, and its default of 128 KiB a cell is too low for prompts.
    csv.field_size_limit(max(csv.field_size_limit(), pieces.MAX_RECORD_BYTES))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        rows = csv.reader(_lines(text, path), delimiter=delimiter, strict=True)
        yield from _pieces(rows, path, options)
    finally:
        text.detach()  # otherwise it would close the stream


def _pieces(rows: Iterator[list[str]], path: str, options: ReadOptions) -> Iterator[Piece]:
    first, size = 0, 0
    cells = _Cells(_header(rows, path), options.json_columns, [])
    for row in _rows(rows, cells.header, path):
        cells.rows.append(row)
        size += sum(map(sys.getsizeof, row))
        if size >= options.block_bytes:
            yield Piece(first, len(cells.rows), cells)
            first += len(cells.rows)
            cells, size = _Cells(cells.header, cells.json_columns, []), 0
    if cells.rows:
        yield Piece(first, len(cells.rows), cells)


def parse(payload: _Cells, path: str, first: int) -> tuple[range, list[object]]:
    """Parses rows into records."""
    typed = [name for name in payload.header if name in payload.json_columns]
    values: list[object] = []
    for row in payload.rows:
        record: dict[str, object] = dict(zip(payload.header, row, strict=True))
        for name in typed:
            record[name] = _value(record[name])
        values.append(record)
    return range(first, first + len(values)), values


def _value(cell: object) -> object:
    if not cell:
        return None
    try:
        return orjson.loads(str(cell))
    except orjson.JSONDecodeError:
        return cell


def _header(rows: Iterator[list[str]], path: str) -> list[str]:
    header = next(_checked(rows, path), [])
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        must = "the names of the columns must differ"
        raise InputError(sentence(f"{path}, line 1", must, f"{quote(twice)} twice"))
    return header


def _rows(rows: Iterator[list[str]], header: list[str], path: str) -> Iterator[list[str]]:
    """Yields all rows but blank lines; raises if the number of cells is wrong."""
    for number, row in enumerate(filter(None, _checked(rows, path)), 1):
        if len(row) != len(header):
            must = f"must have {len(header)} cells, as the header has"
            do = 'Put cells that hold the delimiter, quotes or line ends in double quotes ("")'
            raise InputError(sentence(f"{path}, row {number}", must, str(len(row)), do))
        yield row


def _checked(rows: Iterator[list[str]], path: str) -> Iterator[list[str]]:
    """Yields the rows; errors name the line."""
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            where = f"{path}, line {rows.line_num}"  # type: ignore[attr-defined]
            do = 'Put cells in double quotes, and write a quote inside as ""'
            raise InputError(sentence(where, "must be valid CSV", str(error), do)) from None
        except UnicodeDecodeError as error:
            where = f"{path}, after line {rows.line_num}"  # type: ignore[attr-defined]
            raise not_utf8(error, where) from None


def _lines(text: io.TextIOWrapper, path: str) -> Iterator[str]:
    """Yields the lines of a file; raises at one that is too long."""
    for number, line in enumerate(iter(partial(text.readline, pieces.MAX_RECORD_BYTES), ""), 1):
        if len(line) == pieces.MAX_RECORD_BYTES:
            must = f"a line must be shorter than {pieces.MAX_RECORD_BYTES:,} characters"
            raise InputError(sentence(f"{path}, line {number}", must, "a longer one"))
        yield line


CSV = Format(unit="row", read=partial(read, delimiter=","), parse=parse)
TSV = Format(unit="row", read=partial(read, delimiter="\t"), parse=parse)
