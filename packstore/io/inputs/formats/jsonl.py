"""JSON lines: one record a line; blank lines are skipped, and counted as lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from packstore.errors import InputError, sentence
from packstore.io.inputs import pieces
from packstore.io.inputs.jsontext import loads
from packstore.io.inputs.pieces import Format, Piece, ReadOptions

_BOM = b"\xef\xbb\xbf"
_DO = "Correct the line; a file that is one JSON document must be named .json"


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Cuts after the last line end of every `block_bytes`."""
    first = 0
    for payload in _cut(stream, path, options.block_bytes):
        lines = payload.split(b"\n")
        records = sum(not _is_blank(line) for line in lines)
        if records:
            yield Piece(first, records, payload)
        first += len(lines) - 1


def parse(payload: bytes, path: str, first: int) -> tuple[list[int], list[object]]:
    """Parses lines into records."""
    lines = payload.split(b"\n")
    numbers = [i for i, line in enumerate(lines, first) if not _is_blank(line)]
    return numbers, [loads(lines[i - first], f"{path}, line {i + 1}", _DO) for i in numbers]


def _is_blank(line: bytes) -> bool:
    return not line or line.isspace()


def _cut(stream: BinaryIO, path: str, block_bytes: int) -> Iterator[bytes]:
    """Yields runs of whole lines; only the last may lack its line end."""
    begun: list[bytes] = []
    lines = 0
    chunk = stream.read(block_bytes).removeprefix(_BOM)
    while chunk:
        end = chunk.rfind(b"\n") + 1
        if end:
            payload = b"".join([*begun, chunk[:end]])
            lines += payload.count(b"\n")
            begun = []
            yield payload
        begun.append(chunk[end:])
        if sum(map(len, begun)) > pieces.MAX_RECORD_BYTES:
            must = f"a line must be at most {pieces.MAX_RECORD_BYTES:,} bytes long"
            raise InputError(sentence(f"{path}, line {lines + 1}", must, "a longer one", _DO))
        chunk = stream.read(block_bytes)
    if rest := b"".join(begun):
        yield rest


JSONL = Format(unit="line", read=read, parse=parse)
