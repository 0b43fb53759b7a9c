"""Parts of an input file, and the formats: one process reads and cuts, workers
parse.
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
    """A part of a file, about `block_bytes` of whole records; `first` is the first's
    ordinal.
    """

    first: int
    records: int
    payload: Any
    share: float | None = None  # of a file that is not read from begin to end


def cut(
    records: Iterable[Any], block_bytes: int, size: Callable[[Any], int]
) -> Iterator[Piece]:
    """Cuts records into pieces of about `block_bytes`, whose payloads are lists of
    records.
    """
    first, held, total = 0, [], 0
    for record in records:
        held.append(record)
        total += size(record)
        if total >= block_bytes:
            yield Piece(first, len(held), held)
            first, held, total = first + len(held), [], 0
    if held:
        yield Piece(first, len(held), held)


def refuse_equal_names(names: Sequence[str], where: str) -> None:
    """Raises :class:`InputError` if two columns have one name."""
    for name, count in Counter(names).items():
        if count > 1:
            rule = "the names of the columns must differ"
            raise InputError(sentence(where, rule, f"{quote(name)} twice"))


class ReadOptions(NamedTuple):
    """Bytes of a piece, which one longer record may exceed; columns whose text
    is JSON.
    """

    block_bytes: int
    json_columns: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Format:
    """Reader and parser of a file format; all raise :class:`InputError`.

    `read` ``(stream, path, options)`` yields pieces to the end of the stream; `parse`
    ``(payload, path, first)`` returns ordinals and values of a piece. If there is a
    `check` ``(stream, path)`` of the footer, made before the rest is read, the stream
    must be seekable.
    """

    unit: str
    read: Callable[[BinaryIO, str, ReadOptions], Iterator[Piece]]
    parse: Callable[[Any, str, int], tuple[Sequence[int], Sequence[object]]]
    check: Callable[[BinaryIO, str], object] | None = None


_TEXT = {"jsonl": ".jsonl .ndjson", "json": ".json", "csv": ".csv", "tsv": ".tsv"}
_TABLES = {"parquet": ".parquet .pq", "arrow": ".arrow .feather .ipc"}
_MODULES = dict.fromkeys(_TEXT, "text") | dict.fromkeys(_TABLES, "tables")
FORMATS: Registry[Format] = Registry(
    "input format",
    {
        name: f"packstore.io.inputs.{where}:{name.upper()}"
        for name, where in _MODULES.items()
    },
)

SUFFIXES = {
    s: name for name, suffixes in (_TEXT | _TABLES).items() for s in suffixes.split()
}
"""Suffix of a file name -> its format."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""Last suffix of a file name -> its compression."""

NOT_READ = (
    ".7z .br .bzip2 .gzip .lz .lz4 .lzma .lzo .rar .snappy .sz .tar .z .zip .zlib .zstd"
)
"""Last suffixes of files in other compressions."""

MAGIC = {
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
}
"""First bytes of a compressed file -> the suffix of such files."""

UNITS = {"<table>": "row", "<iterable>": "item", "<standard input>": "line"}
"""Path of records that are in no file -> the unit of their ordinals."""


def format_of(path: str) -> tuple[str | None, str | None]:
    """Returns format and compression by the name of a file; None if the name
    has none.
    """
    stem, suffix = os.path.splitext(path.lower())
    compression = COMPRESSIONS.get(suffix)
    return SUFFIXES.get(
        os.path.splitext(stem)[1] if compression else suffix
    ), compression


def suffix_of(start: bytes) -> str:
    """Returns the suffix of compressed files that start so; empty for others."""
    return next(
        (suffix for magic, suffix in MAGIC.items() if start.startswith(magic)), ""
    )


def place_of(path: str, ordinal: int) -> str:
    """Returns the place of a record, in the form of
    :meth:`packstore.format.arrays.Rows.where`.
    """
    form, _ = format_of(path)
    unit = FORMATS.load(form).unit if form else UNITS.get(path, "record")
    return f"{path}, {unit} {ordinal + 1}"
