"""File formats of the input: a module and a line in :data:`FORMATS` for each.

One process reads: :attr:`Format.read` cuts a file into payloads and inspects records as little as
possible. Workers parse: :attr:`Format.parse` turns a payload into records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from packstore.registry import Registry

MAX_RECORD_BYTES = 64 << 20
"""Maximum length of a record; a longer one means that the file is broken."""


class Piece(NamedTuple):
    """A part of a file: at least one whole record, and at most about `block_bytes`.

    Attributes:
        first: ordinal of its first line, row or item in the file, from 0.
        records: number of records.
        payload: the argument of `parse`; picklable.
    """

    first: int
    records: int
    payload: Any


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of :attr:`Format.read`.

    Attributes:
        block_bytes: bytes of a piece; a longer record makes a longer piece.
        json_columns: columns with JSON values, in formats whose cells are text.
    """

    block_bytes: int
    json_columns: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Format:
    """Reader and parser of a file format. Both functions raise :class:`InputError`.

    Attributes:
        unit: unit of ordinals: ``line``, ``row`` or ``item``.
        read: ``(stream, path, options)`` -> pieces, in order; the path is for error texts. Reads
            the stream to its end, so that all of it is hashed.
        parse: ``(payload, path, first)`` -> ordinals and values of the records of a piece.
        random_access: True if `stream` must be seekable.
    """

    unit: str
    read: Callable[[BinaryIO, str, ReadOptions], Iterator[Piece]]
    parse: Callable[[Any, str, int], tuple[Sequence[int], Sequence[object]]]
    random_access: bool = False


FORMATS: Registry[Format] = Registry(
    "input format",
    {
        "jsonl": "packstore.io.formats.jsonl:JSONL",
        "json": "packstore.io.formats.json:JSON",
        "parquet": "packstore.io.formats.parquet:PARQUET",
        "arrow": "packstore.io.formats.arrow:ARROW",
        "csv": "packstore.io.formats.csv:CSV",
        "tsv": "packstore.io.formats.csv:TSV",
    },
)

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
}
"""Suffix of a file name -> its format."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Last suffix of a file name -> its compression."""
