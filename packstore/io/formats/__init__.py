"""File formats of the input: one small file each, one line in :data:`FORMATS`.

One process reads: :attr:`Format.read` cuts a file into payloads without looking into the records
more than it must. Workers parse: :attr:`Format.parse` turns a payload into records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from packstore.registry import Registry

MAX_RECORD_BYTES = 64 << 20
"""A longer record is taken for a broken file."""


class Piece(NamedTuple):
    """A stretch of a file: at least one whole record, and about `block_bytes` at most.

    Attributes:
        first: ordinal of its first line, row or item in the file, from 0.
        records: how many records it holds.
        payload: what `parse` takes; picklable.
    """

    first: int
    records: int
    payload: Any


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What formats need to know to read.

    Attributes:
        block_bytes: bytes of a piece; one longer record makes a longer piece.
        json_columns: in formats whose cells are text alone, the columns that hold JSON values.
    """

    block_bytes: int
    json_columns: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Format:
    """How files of one format are read. Both functions raise :class:`InputError`.

    Attributes:
        unit: what an ordinal counts: ``line``, ``row`` or ``item``.
        read: ``(stream, path, options)`` -> pieces, in order; the path is for error texts. Reads a
            stream to its very end, so that all of it is hashed.
        parse: ``(payload, path, first)`` -> ordinals and values of the records of a piece.
        random_access: whether `stream` must be seekable.
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
