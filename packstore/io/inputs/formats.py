"""Input formats: their names and suffixes, and the contract of a reader and a parser.

One process reads a file and cuts it into *pieces* of whole records, which are bytes or
anything else that can be pickled quickly (:attr:`Format.read`). Workers turn a piece
into records, Python values (:attr:`Format.parse`). A *block* (:mod:`.files`) is a piece
together with its file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from packstore.errors import InputError, quote, sentence
from packstore.registry import Registry

MAX_RECORD_BYTES = 64 << 20
"""Maximum length of a record; a longer one means that the file is broken."""


class Piece(NamedTuple):
    """A part of a file: whole records of about `block_bytes`.

    Attributes:
        first: ordinal of the first line, row or item, from 0.
        num_records: number of records.
        payload: the argument of :attr:`Format.parse`.
        share: share of the file in this piece, 0..1; None if the file is read from
            start to end, so that the position in the stream shows it.
    """

    first: int
    num_records: int
    payload: Any
    share: float | None = None


class ReadOptions(NamedTuple):
    """Options of :attr:`Format.read`.

    Attributes:
        block_bytes: approximate bytes of a piece; a longer record is a piece by itself.
        json_columns: columns of CSV files with JSON in their cells, not text.
    """

    block_bytes: int
    json_columns: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Format:
    """Reader and parser of a file format; all functions raise :class:`InputError`.

    Attributes:
        unit: noun for a record's place in a file: `line`, `row` or `item`.
        read: ``(stream, path, options)`` -> pieces up to the end of the stream.
        parse: ``(payload, path, first)`` -> ordinals and values of a piece's records.
        check: ``(stream, path)``: validates the footer before all else is read; None:
            the format has no footer. One with a footer needs a seekable stream.
    """

    unit: str
    read: Callable[[BinaryIO, str, ReadOptions], Iterator[Piece]]
    parse: Callable[[Any, str, int], tuple[Sequence[int], Sequence[object]]]
    check: Callable[[BinaryIO, str], object] | None = None


FORMATS: Registry[Format] = Registry(
    "input format",
    {
        "jsonl": "packstore.io.inputs.json_text:JSONL",
        "json": "packstore.io.inputs.json_text:JSON",
        "csv": "packstore.io.inputs.csv_text:CSV",
        "tsv": "packstore.io.inputs.csv_text:TSV",
        "parquet": "packstore.io.inputs.tables:PARQUET",
        "arrow": "packstore.io.inputs.tables:ARROW",
    },
)

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
"""Suffix of a file name -> its format."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""Last suffix of a file name -> its compression."""

UNSUPPORTED_COMPRESSIONS = frozenset(
    {
        ".7z",
        ".br",
        ".bzip2",
        ".gzip",
        ".lz",
        ".lz4",
        ".lzma",
        ".lzo",
        ".rar",
        ".snappy",
        ".sz",
        ".tar",
        ".z",
        ".zip",
        ".zlib",
        ".zstd",
    }
)
"""Last suffixes of files in compressions that packstore cannot read."""

MAGIC = {
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
}
"""First bytes of a compressed file -> the suffix of such files."""

UNITS = {"<table>": "row", "<iterable>": "item", "<standard input>": "line"}
"""Name of a source without a file, which stands for its path -> unit of its records."""


def format_of(path: str) -> tuple[str | None, str | None]:
    """Return the format and the compression that the suffixes of a path stand for."""
    stem, suffix = os.path.splitext(path.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression is not None:
        suffix = os.path.splitext(stem)[1]
    return SUFFIXES.get(suffix), compression


def has_known_format(path: str) -> bool:
    """Return True if a path ends like a file of records."""
    file_format, _ = format_of(path)
    return file_format is not None


def compressed_suffix(start: bytes) -> str:
    """Return the suffix of compressed files that begin with these bytes, or ""."""
    for magic, suffix in MAGIC.items():
        if start.startswith(magic):
            return suffix
    return ""


def place_of(path: str, ordinal: int) -> str:
    """Return the place of a record, e.g. ``prefs.jsonl, line 7`` for ordinal 6.

    Spelled as by :meth:`packstore.format.arrays.Rows.where`.
    """
    file_format, _ = format_of(path)
    if file_format is None:
        unit = UNITS.get(path, "record")
    else:
        unit = FORMATS.load(file_format).unit
    return f"{path}, {unit} {ordinal + 1}"


def cut_into_pieces(
    records: Iterable[Any], block_bytes: int, size_of: Callable[[Any], int]
) -> Iterator[Piece]:
    """Yield pieces of about `block_bytes`, with lists of records as payloads.

    Args:
        records: records in any form.
        block_bytes: approximate bytes of a piece.
        size_of: returns the bytes of a record.
    """
    first = 0
    batch: list[Any] = []
    batch_bytes = 0
    for record in records:
        batch.append(record)
        batch_bytes += size_of(record)
        if batch_bytes >= block_bytes:
            yield Piece(first=first, num_records=len(batch), payload=batch)
            first += len(batch)
            batch = []
            batch_bytes = 0

    if batch:
        yield Piece(first=first, num_records=len(batch), payload=batch)


def require_distinct_columns(names: Sequence[str], where: str) -> None:
    """Raise :class:`InputError` if two columns have the same name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(
                sentence(
                    where,
                    rule="the names of the columns must differ",
                    found=f"{quote(name)} twice",
                )
            )
