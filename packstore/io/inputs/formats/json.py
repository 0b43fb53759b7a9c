"""JSON documents: an array of records, or records one after another (a single one, mostly)."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from typing import BinaryIO, NoReturn

from packstore.errors import InputError, quote, sentence
from packstore.io.inputs import pieces
from packstore.io.inputs.jsontext import describe, loads, not_utf8, too_deep
from packstore.io.inputs.pieces import Format, Piece, ReadOptions

_SPACE = " \t\n\r"


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Cuts between records; the payload is the text of each."""
    first, size = 0, 0
    texts: list[bytes] = []
    for text in _items(_Scanner(stream, path, options.block_bytes)):
        texts.append(text)
        size += sys.getsizeof(text)
        if size >= options.block_bytes:
            yield Piece(first, len(texts), texts)
            first, size, texts = first + len(texts), 0, []
    if texts:
        yield Piece(first, len(texts), texts)


def parse(payload: list[bytes], path: str, first: int) -> tuple[range, list[object]]:
    """Parses texts into records."""
    ordinals = range(first, first + len(payload))
    values = [
        loads(text, f"{path}, item {i + 1}") for i, text in zip(ordinals, payload, strict=True)
    ]
    return ordinals, values


def _items(scanner: _Scanner) -> Iterator[bytes]:
    """Yields the text of every record."""
    opening = scanner.peek()
    if opening == "{":
        while scanner.peek():
            yield scanner.value()
    elif opening == "[":
        scanner.skip()
        if scanner.peek() != "]":
            yield scanner.value()
        while (separator := scanner.peek()) == ",":
            scanner.skip()
            yield scanner.value()
        if separator != "]":
            scanner.refuse("an array must go on with ',' or end with ']'")
        scanner.skip()
        if scanner.peek():
            scanner.refuse("nothing must follow the array")
    elif opening:
        scanner.refuse("must be an array of records, or one record")


class _Scanner:
    """A position in a JSON text; only a window of the text is in memory."""

    def __init__(self, stream: BinaryIO, path: str, chunk_bytes: int) -> None:
        self._stream, self._path, self._chunk_bytes = stream, path, chunk_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._raw_decode = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False
        self._lines, self._columns = 0, 0

    def peek(self) -> str:
        """Returns the next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def skip(self) -> None:
        """Skips one character."""
        self._at += 1

    def value(self) -> bytes:
        """Skips one JSON value and returns its text."""
        self.peek()
        while True:
            try:
                _, end = self._raw_decode(self._text, self._at)
            except RecursionError:
                raise too_deep(self._where(self._at)) from None
            except ValueError as error:
                # The value may be cut by the window: load more text before refusing it.
                if self._ended or len(self._text) - self._at > pieces.MAX_RECORD_BYTES:
                    raise self._broken(error) from None
            else:
                # The window may end inside a number, with all but 1 of 1e+5 beyond it or cut.
                if end + len("e+5") <= len(self._text) or self._ended:
                    break
            self._fill()
        text = self._text[self._at : end].encode()
        self._at = end
        return text

    def refuse(self, must: str) -> NoReturn:
        """Raises :class:`InputError`: `must` is violated at this position."""
        found = quote(self._text[self._at : self._at + 20]) if self.peek() else "the end"
        do = "Correct the file; records one a line belong into a .jsonl file"
        raise InputError(sentence(self._where(self._at), must, found, do))

    def _fill(self) -> None:
        """Drops the consumed text, and at least doubles the rest."""
        lines = self._text.count("\n", 0, self._at)
        start = self._text.rfind("\n", 0, self._at) + 1 if lines else -self._columns
        self._lines, self._columns = self._lines + lines, self._at - start
        self._text, self._at = self._text[self._at :], 0
        data = self._stream.read(max(self._chunk_bytes, len(self._text)))
        self._ended = not data
        try:
            self._text += self._decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            where = f"{self._path}, line {self._lines + self._text.count(chr(10)) + 1} or later"
            raise not_utf8(error, where) from None

    def _where(self, at: int) -> str:
        lines = self._text.count("\n", 0, at)
        start = self._text.rfind("\n", 0, at) + 1 if lines else -self._columns
        return f"{self._path}, line {self._lines + lines + 1}, column {at - start + 1}"

    def _broken(self, error: ValueError) -> InputError:
        at, found = self._at, str(error)
        if isinstance(error, json.JSONDecodeError):
            at, found = error.pos, describe(error)
        must = f"must be valid JSON, of at most {pieces.MAX_RECORD_BYTES:,} bytes a record"
        return InputError(sentence(self._where(at), must, found, "Correct the file"))


JSON = Format(unit="item", read=read, parse=parse)
