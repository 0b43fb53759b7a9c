"""Parts of an input file, and the formats: functions that read and parse them.

One process reads: :attr:`Format.read` cuts a file into payloads and inspects records as little as
possible. Workers parse: :attr:`Format.parse` turns a payload into records.
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
    """A part of a file, about `block_bytes` of whole records; `first` is the first's ordinal."""

    first: int
    records: int
    payload: Any


def cut(records: Iterable[Any], block_bytes: int, size: Callable[[Any], int]) -> Iterator[Piece]:
    """Cuts records into pieces of about `block_bytes`, whose payloads are lists of records."""
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
    if len(set(names)) != len(names):
        twice = f"{quote(Counter(names).most_common(1)[0][0])} twice"
        raise InputError(sentence(where, "the names of the columns must differ", twice))


class ReadOptions(NamedTuple):
    """Bytes of a piece, which one longer record may exceed; columns whose text is JSON."""

    block_bytes: int
    json_columns: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Format:
    """Reader and parser of a file format; both raise :class:`InputError`.

    `read`: ``(stream, path, options)`` -> pieces, in order, to the end of the stream, which must be
    seekable if `random_access`. `parse`: ``(payload, path, first)`` -> ordinals and values of the
    records of a piece. `unit` of the ordinals: ``line``, ``row`` or ``item``.
    """

    unit: str
    read: Callable[[BinaryIO, str, ReadOptions], Iterator[Piece]]
    parse: Callable[[Any, str, int], tuple[Sequence[int], Sequence[object]]]
    random_access: bool = False


_MODULES = {"text": ("jsonl", "json", "csv", "tsv"), "tables": ("parquet", "arrow")}
FORMATS: Registry[Format] = Registry(
    "input format",
    {
        name: f"packstore.io.inputs.{module}:{name.upper()}"
        for module, names in _MODULES.items()
        for name in names
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


def format_of(path: str) -> tuple[str | None, str | None]:
    """Returns format and compression by the name of a file; None if the name has none."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in COMPRESSIONS:
        return SUFFIXES.get(os.path.splitext(stem)[1]), COMPRESSIONS[suffix]
    return SUFFIXES.get(suffix), None


def place_of(path: str, ordinal: int) -> str:
    """Returns the place of a record, in the form of :meth:`packstore.format.arrays.Rows.where`."""
    form, _ = format_of(path)
    units = {"<table>": "row", "<iterable>": "item"}
    unit = FORMATS.load(form).unit if form else units.get(path, "record")
    return f"{path}, {unit} {ordinal + 1}"
