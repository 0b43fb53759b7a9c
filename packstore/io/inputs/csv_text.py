"""Reads CSV and TSV files (RFC 4180) by Python's ``csv``; reasons: ``README.md``.

The first row is the header, with the names of the columns. Cells are text, except in
columns of JSON (numbers, token ids, messages), which workers parse.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, NamedTuple

import orjson

from packstore.io.inputs import formats
from packstore.io.inputs.formats import Format, Piece, ReadOptions
from packstore.io.inputs.json_text import encoding_error, refusal


class _Rows(NamedTuple):
    """The payload of a piece: some rows, and the header that all pieces share.

    Attributes:
        names: names of all columns.
        json_columns: names of the columns of JSON.
        cells: for each row the text of its cells.
    """

    names: list[str]
    json_columns: frozenset[str]
    cells: list[list[str]]


def _read_csv(
    stream: BinaryIO, path: str, options: ReadOptions, *, delimiter: str
) -> Iterator[Piece]:
    """Yield pieces of whole rows."""
    # The csv module's limit is global, and its default of 128 KiB a cell is too low for
    # prompts.
    csv.field_size_limit(max(csv.field_size_limit(), formats.MAX_RECORD_BYTES))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.reader(_read_text_lines(text, path), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        formats.require_distinct_columns(names, f"{path}, line 1")
        rows = _complete_rows(reader, len(names), path)
        for piece in formats.cut_into_pieces(rows, options.block_bytes, _memory_of):
            payload = _Rows(names, options.json_columns, piece.payload)
            yield piece._replace(payload=payload)
    except csv.Error as error:
        raise refusal(
            f"{path}, line {reader.line_num}",
            rule="must be valid CSV",
            found=str(error),
            remedy='Quote cells; a quote inside is ""',
        ) from None
    except UnicodeDecodeError as error:
        raise encoding_error(error, f"{path}, after line {reader.line_num}") from None
    finally:
        text.detach()  # otherwise it would close the stream


def _read_text_lines(text: io.TextIOWrapper, path: str) -> Iterator[str]:
    """Yield the lines of a file; raise at one that is too long, as of no text file."""
    limit = formats.MAX_RECORD_BYTES
    number = 0
    while True:
        number += 1
        line = text.readline(limit)
        if not line:
            return
        if len(line) == limit:
            raise refusal(
                f"{path}, line {number}",
                rule=f"a line must be shorter than {limit:,} characters",
                found="a longer one",
            )
        yield line


def _complete_rows(
    reader: Iterator[list[str]], num_columns: int, path: str
) -> Iterator[list[str]]:
    """Yield all rows but blank lines; raise if the number of cells is wrong."""
    number = 0
    for row in reader:
        if not row:
            continue
        number += 1
        if len(row) != num_columns:
            raise refusal(
                f"{path}, row {number}",
                rule=f"must have {num_columns} cells, as the header has",
                found=str(len(row)),
                remedy="Put cells with the delimiter, quotes or line ends in double "
                "quotes",
            )
        yield row


def _memory_of(row: list[str]) -> int:
    return sum(sys.getsizeof(cell) for cell in row)


def _parse_csv(payload: _Rows, path: str, first: int) -> tuple[range, list[object]]:
    """Return a dict for each row.

    Cells are text: a prompt ``007`` stays ``007``. Only columns of JSON are parsed.
    """
    values: list[object] = []
    for row in payload.cells:
        record: dict[str, object] = {}
        for name, cell in zip(payload.names, row, strict=True):
            is_json = name in payload.json_columns
            record[name] = _json_value(cell) if is_json else cell
        values.append(record)
    return range(first, first + len(values)), values


def _json_value(cell: str) -> object:
    """Return the value of a cell: None if it is empty, its text if it is not JSON."""
    if not cell:
        return None
    try:
        return orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell


CSV = Format(unit="row", read=partial(_read_csv, delimiter=","), parse=_parse_csv)
TSV = Format(unit="row", read=partial(_read_csv, delimiter="\t"), parse=_parse_csv)
