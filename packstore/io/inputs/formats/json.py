"""JSON documents: an array of records, or records one after another (a single one, mostly)."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterator
from typing import BinaryIO

from packstore.errors import InputError, quote, sentence
from packstore.io.inputs import pieces
from packstore.io.inputs.jsontext import describe, loads, not_utf8, too_deep
from packstore.io.inputs.pieces import Format, Piece, ReadOptions

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Cuts between records; the payload is the text of each."""
    items = _items(_Scanner(stream, path, options.block_bytes))
    return pieces.cut(items, options.block_bytes, sys.getsizeof)


def parse(payload: list[bytes], path: str, first: int) -> tuple[range, list[object]]:
    """Parses texts into records."""
    values = [loads(text, f"{path}, item {i}") for i, text in enumerate(payload, first + 1)]
    return range(first, first + len(values)), values


def _items(scanner: _Scanner) -> Iterator[bytes]:
    """Yields the text of every record."""
    if scanner.take("["):
        ended = scanner.take("]")
        while not ended:
            yield scanner.value()
            if not scanner.take(","):
                scanner.expect(scanner.take("]"), "an array must go on with ',' or end with ']'")
                ended = True
        scanner.expect(not scanner.peek(), "nothing must follow the array")
    else:
        scanner.expect(scanner.peek() in "{", "must be an array of records, or one record")
        while scanner.peek():
            yield scanner.value()


class _Scanner:
    """A position in a JSON text; only a window of the text is in memory."""

    def __init__(self, stream: BinaryIO, path: str, chunk_bytes: int) -> None:
        self._stream, self._path, self._chunk_bytes = stream, path, chunk_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at, self._ended = "", 0, False
        self._line, self._line_start = 1, 0  # the line where the window begins, relative to it

    def peek(self) -> str:
        """Returns the next character that is not white space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._fill()

    def take(self, character: str) -> bool:
        """Skips `character` if it is next; returns True if so."""
        found = self.peek() == character
        self._at += found
        return found

    def value(self) -> bytes:
        """Skips one JSON value and returns its text."""
        self.peek()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                # The window may end inside a number, with all but 1 of 1e+5 beyond it or cut.
                if self._ended or end + len("e+5") <= len(self._text):
                    break
            except RecursionError:
                raise too_deep(self._where(self._at)) from None
            except ValueError as error:
                # The value may be cut by the window: load more text before refusing it.
                if self._ended or len(self._text) - self._at > pieces.MAX_RECORD_BYTES:
                    raise self._broken(error) from None
            self._fill()
        text = self._text[self._at : end].encode()
        self._at = end
        return text

    def expect(self, condition: bool, must: str) -> None:
        """Raises :class:`InputError` unless `condition` holds: `must` is violated here."""
        if not condition:
            found = quote(self._text[self._at : self._at + 20]) if self.peek() else "the end"
            do = "Correct the file; records one a line belong into a .jsonl file"
            raise InputError(sentence(self._where(self._at), must, found, do))

    def _fill(self) -> None:
        """Drops the consumed text, and at least doubles the rest."""
        self._line, start = self._place(self._at)
        self._line_start = start - self._at
        self._text, self._at = self._text[self._at :], 0
        data = self._stream.read(max(self._chunk_bytes, len(self._text)))
        self._ended = not data
        try:
            self._text += self._decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            line, _ = self._place(len(self._text))
            raise not_utf8(error, f"{self._path}, line {line} or later") from None

    def _place(self, at: int) -> tuple[int, int]:
        """Returns the line of a position in the window, and where in it the line begins."""
        start = self._text.rfind("\n", 0, at) + 1
        return self._line + self._text.count("\n", 0, at), start or self._line_start

    def _where(self, at: int) -> str:
        line, start = self._place(at)
        return f"{self._path}, line {line}, column {at - start + 1}"

    def _broken(self, error: ValueError) -> InputError:
        at, found = self._at, str(error)
        if isinstance(error, json.JSONDecodeError):
            at, found = error.pos, describe(error)
        must = f"must be valid JSON, of at most {pieces.MAX_RECORD_BYTES:,} bytes a record"
        return InputError(sentence(self._where(at), must, found, "Correct the file"))


JSON = Format(unit="item", read=read, parse=parse)
