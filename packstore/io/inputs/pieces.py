"""Parts of an input file, and the functions of a format that read and parse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

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
