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
    """Cuts after the last line end of every `block_bytes`; only the last line may lack its own."""
    first, begun, chunk = 0, bytearray(), None
    while chunk != b"":
        chunk = stream.read(options.block_bytes)
        end = chunk.rfind(b"\n") + 1
        if end or not chunk:
            payload = bytes(begun + chunk[:end])
            begun.clear()
            if first == 0:
                payload = payload.removeprefix(_BOM)
            lines = payload.split(b"\n")
            if records := sum(not _is_blank(line) for line in lines):
                yield Piece(first, records, payload)
            first += len(lines) - 1
        begun += chunk[end:]
        if len(begun) > pieces.MAX_RECORD_BYTES:
            must = f"a line must be at most {pieces.MAX_RECORD_BYTES:,} bytes long"
            raise InputError(sentence(f"{path}, line {first + 1}", must, "a longer one", _DO))


def parse(payload: bytes, path: str, first: int) -> tuple[list[int], list[object]]:
    """Parses lines into records."""
    lines = payload.split(b"\n")
    numbers = [i for i, line in enumerate(lines, first) if not _is_blank(line)]
    return numbers, [loads(lines[i - first], f"{path}, line {i + 1}", _DO) for i in numbers]


def _is_blank(line: bytes) -> bool:
    return not line or line.isspace()


JSONL = Format(unit="line", read=read, parse=parse)
