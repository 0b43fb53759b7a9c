"""Reads JSON lines, and JSON documents: an array of records, or records one after
another.

Of JSON lines, pieces are cut at line ends without parsing, so only workers parse them.
A document has no such places: it is parsed once to find where each record ends, and
again in a worker.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import orjson

from packstore.errors import InputError, quote, sentence
from packstore.format.arrays import BrokenLine
from packstore.io.inputs import formats
from packstore.io.inputs.formats import Format, Piece, ReadOptions

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_REMEDY = "Correct the line (a file that is one JSON document must be named .json)"
_FILE_REMEDY = "Correct the file; records one a line belong into a .jsonl file"

_IS_INK = np.array([not bytes([byte]).isspace() for byte in range(256)])
"""bool `[256]`: False for bytes of white space."""

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()

_CONTENT_FIELDS = (
    "prompt",
    "chosen",
    "rejected",
    "completion",
    "response",
    "text",
    "messages",
)
"""Fields that hold one text, one list of messages, or one list of ids in a record, so
that a list of texts or of lists shows a whole column of a table.
"""

_WRAPPERS = ("data", "rows", "records", "examples", "items", "instances")
"""Fields with the list of records in a document that is one object, as
``{"data": [{…}, {…}]}``. No record has fields of these names.
"""


# JSON lines


def _read_lines(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Yield pieces of whole lines: the stream is read in chunks of `block_bytes`, and a
    piece ends with the last line end of each.

    Only the last line of a file may lack its line end.
    """
    first = 0
    remainder = bytearray()  # the start of a line without its end
    is_at_end = False
    while not is_at_end:
        chunk = stream.read(options.block_bytes)
        is_at_end = not chunk
        end = chunk.rfind(b"\n") + 1
        if end or is_at_end:
            payload = b"".join((remainder, memoryview(chunk)[:end]))
            remainder = bytearray()
            if first == 0:
                payload = payload.removeprefix(_BYTE_ORDER_MARK)
            num_line_ends, num_records = _count_lines(payload)
            if num_records:
                yield Piece(first=first, num_records=num_records, payload=payload)
            first += num_line_ends

        remainder += chunk[end:]
        if len(remainder) > formats.MAX_RECORD_BYTES:
            raise refusal(
                f"{path}, line {first + 1}",
                rule=f"a line must be at most {formats.MAX_RECORD_BYTES:,} bytes long",
                found="a longer one",
                remedy=_LINE_REMEDY,
            )


def _count_lines(payload: bytes) -> tuple[int, int]:
    """Return the number of line ends, and of lines that are not blank."""
    data = np.frombuffer(payload, np.uint8)
    is_line_end = data == ord("\n")
    line_ends = np.flatnonzero(is_line_end)
    line_starts = np.append(0, line_ends + 1)
    if payload.endswith(b"\n"):
        line_starts = line_starts[:-1]

    # A shortcut for most files: no line begins with white space, so none is blank.
    if payload and data[line_starts].min() > ord(" "):
        return len(line_ends), len(line_starts)

    # The line number of each byte that is not white space; count the distinct ones.
    line_numbers = np.cumsum(is_line_end, dtype=np.int32)[_IS_INK[data]]
    if not len(line_numbers):
        return len(line_ends), 0
    return len(line_ends), 1 + int(np.count_nonzero(np.diff(line_numbers)))


def _parse_lines(
    payload: bytes, path: str, first: int
) -> tuple[list[int], list[object]]:
    numbers = []
    values = []
    for number, line in enumerate(payload.split(b"\n"), start=first):
        if line.strip():
            numbers.append(number)
            values.append(_parse_line(line))
    if first == 0 and values:
        _refuse_whole_table(values[0], path)
    return numbers, values


def _parse_line(line: bytes) -> object:
    """Return the value of a line.

    If it is not JSON, that is a :class:`BrokenLine`: the setting `on` decides (reason
    ``not_json``).
    """
    try:
        return _load_json(line, _LINE_REMEDY)
    except _JsonError as error:
        detail = f"{error.place}: {error.found}" if error.place else error.found
        return BrokenLine(detail, error.remedy)


# JSON documents


def _read_document(
    stream: BinaryIO, path: str, options: ReadOptions
) -> Iterator[Piece]:
    """Yield pieces with the texts of records as payloads."""
    texts = _record_texts(_Window(stream, path, options.block_bytes))
    return formats.cut_into_pieces(texts, options.block_bytes, size_of=sys.getsizeof)


def _parse_document(
    payload: list[bytes], path: str, first: int
) -> tuple[range, list[object]]:
    values = [
        parse_json(text, f"{path}, item {number}")
        for number, text in enumerate(payload, start=first + 1)
    ]
    if first == 0 and values:
        _refuse_whole_table(values[0], path)
    return range(first, first + len(values)), values


def _record_texts(window: _Window) -> Iterator[bytes]:
    """Yield the text of each record of a document."""
    character = window.next_character()
    if character == "[":
        yield from _array_items(window)
    elif character == "{":
        yield from _consecutive_records(window)
    elif character:
        raise window.refusal("must be an array of records, or one record")


def _array_items(window: _Window) -> Iterator[bytes]:
    """Yield the records of a document ``[{…}, {…}]``."""
    window.skip_character()
    character = window.next_character()
    if character == "]":
        window.skip_character()
    while character != "]":
        if window.next_character() in ("]", ""):
            raise window.refusal("a record must stand here")
        text, _ = window.take_record()
        yield text

        character = window.next_character()
        if character not in (",", "]"):
            raise window.refusal("an array must go on with ',' or end with ']'")
        window.skip_character()

    if window.next_character():
        raise window.refusal("nothing must follow the array")


def _consecutive_records(window: _Window) -> Iterator[bytes]:
    """Yield the records of a document ``{…} {…}``."""
    while window.next_character():
        if window.next_character() == "]":
            raise window.refusal("a record must stand here")
        text, value = window.take_record()
        _refuse_wrapper(value, window.path)
        yield text


class _Window:
    """A part of a document's text, which grows until it holds the next record.

    Args:
        stream: the document.
        path: its name in messages.
        chunk_bytes: minimum bytes to read at once.
    """

    def __init__(self, stream: BinaryIO, path: str, chunk_bytes: int) -> None:
        self.path = path
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text = ""
        self._start = 0  # position of the first character that is not consumed
        self._is_at_end = False
        self._item = 1  # number of the next record, for messages

    def next_character(self) -> str:
        """Skip white space, and return the next character; "" at the document's end."""
        while True:
            space = _SPACE.match(self._text, self._start)
            assert space is not None  # the pattern matches nothing, too
            self._start = space.end()
            if self._start < len(self._text) or self._is_at_end:
                return self._text[self._start : self._start + 1]
            self._grow()

    def skip_character(self) -> None:
        """Move behind the next character."""
        self._start += 1

    def take_record(self) -> tuple[bytes, object]:
        """Return the text and the value of the record that begins here, and move behind
        it.
        """
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._start)
            except RecursionError:
                raise _nesting_error(f"{self.path}, item {self._item}") from None
            except ValueError as error:
                self._require_more_text(error)
            else:
                # A value at the end of the window may be the start of a longer one: of
                # the number 1e+5, the decoder takes 1 if the window ends at 1, 1e or
                # 1e+. Three more characters show that it is complete.
                is_whole = end + len("e+5") <= len(self._text)
                if is_whole or self._is_at_end:
                    break
            self._grow()

        text = self._text[self._start : end].encode()
        self._start = end
        self._item += 1
        return text, value

    def _require_more_text(self, error: ValueError) -> None:
        """Raise unless the end of the record may still follow in the stream.

        Args:
            error: the error of parsing the text of the window.
        """
        num_characters = len(self._text) - self._start
        if self._is_at_end or num_characters > formats.MAX_RECORD_BYTES:
            limit = f"{formats.MAX_RECORD_BYTES:,} bytes a record"
            rule = f"must be valid JSON, of at most {limit}"
            raise self.refusal(rule, _describe(error)) from None

    def _grow(self) -> None:
        """Read more text: as much again as there is, so that a long record is decoded
        few times.
        """
        remainder = self._text[self._start :]
        data = self._stream.read(max(self._chunk_bytes, len(remainder)))
        self._is_at_end = not data
        try:
            text = self._decode(data, final=self._is_at_end)
        except UnicodeDecodeError as error:
            where = f"{self.path}, item {self._item} or later"
            raise encoding_error(error, where) from None
        self._text = remainder + text
        self._start = 0

    def refusal(self, rule: str, problem: str = "") -> InputError:
        """Return the error for the next record.

        Args:
            rule: the broken rule.
            problem: cause, to be named as found; empty: the next characters.
        """
        if not problem:
            excerpt = self._text[self._start : self._start + 20]
            problem = quote(excerpt) if excerpt else "the end"
        where = f"{self.path}, item {self._item}"
        return refusal(where=where, rule=rule, found=problem, remedy=_FILE_REMEDY)


def _refuse_wrapper(value: object, path: str) -> None:
    """Raise if an object is not a record, but has the records in one of its fields."""
    if not isinstance(value, dict):
        return
    for name in _WRAPPERS:
        if not _is_list_of_objects(value.get(name)):
            continue
        # A record may have its messages under such a name.
        is_dialogue = any(item.keys() & {"role", "from"} for item in value[name])
        if is_dialogue:
            return
        raise refusal(
            path,
            rule="must be an array of records, or one record",
            found=f"one object, with the records under {name!r}",
            remedy=f"Give the array alone, e.g. jq '.{name}' FILE > RECORDS.json",
        )


def _is_list_of_objects(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) for item in value)


def _refuse_whole_table(value: object, path: str) -> None:
    """Raise if the first value is a table by column or index, as pandas writes it."""
    if not isinstance(value, dict):
        return
    # pandas' orient="split"
    is_split_table = value.keys() == {"columns", "index", "data"}
    if is_split_table or _is_table_of_objects(value) or _is_table_of_lists(value):
        raise refusal(
            path,
            rule="must be records, one after another",
            found="a whole table",
            remedy="Write records: in pandas, to_json(FILE, orient='records', "
            "lines=True)",
        )


def _is_table_of_objects(value: dict[str, Any]) -> bool:
    """Return True for ``{"0": {"prompt": …}}`` and ``{"prompt": {"0": …}}``.

    pandas writes these with ``orient="index"`` and ``orient="columns"``, its default.
    """
    members = [member for member in value.values() if member]
    if not members or not all(isinstance(member, dict) for member in members):
        return False
    if all(name.isdecimal() for name in value):
        return True
    return all(name.isdecimal() for member in members for name in member)


def _is_table_of_lists(value: dict[str, Any]) -> bool:
    """Return True for ``{"prompt": ["…", "…"], "chosen": ["…", "…"]}``."""
    columns = [column for column in value.values() if column]
    if not all(isinstance(column, list) for column in columns):
        return False
    if len({len(column) for column in columns}) != 1:
        return False
    # The fields of a record of token ids are lists of equal length, too: of numbers.
    contents = [value[name] for name in _CONTENT_FIELDS if value.get(name)]
    return any(isinstance(column[0], str | list) for column in contents)


# Values


class _JsonError(Exception):
    """Text is not JSON, or not in UTF-8.

    Args:
        rule, found, remedy: parts of the message, see :func:`sentence`.
        place: position in the text, e.g. ``column 7``; empty if it is not known.
    """

    def __init__(self, rule: str, found: str, remedy: str, place: str = "") -> None:
        super().__init__(rule, found, remedy, place)
        self.rule = rule
        self.found = found
        self.remedy = remedy
        self.place = place


def parse_json(data: bytes, where: str, remedy: str = "Correct the text") -> object:
    """Return the value of JSON text.

    Lone surrogates, NaN and infinities, which are no JSON, are accepted, and checked
    when records are read.

    Args:
        data: the text, in UTF-8.
        where: place of the text in messages.
        remedy: remedy in messages.

    Raises:
        InputError: the text is not JSON, or nested too deeply.
    """
    try:
        return _load_json(data, remedy)
    except _JsonError as error:
        if error.place:
            where = f"{where}, {error.place}"
        raise refusal(
            where=where, rule=error.rule, found=error.found, remedy=error.remedy
        ) from None


def _load_json(data: bytes, remedy: str) -> object:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if "depth limit" in str(error):
            raise _nested_too_deeply() from None
        return _parse_strictly(data, remedy)

    # orjson takes the last of repeated names silently. Comparing two counts is cheaper
    # than parsing each text twice. They may differ without a repeated name, if a text
    # quotes JSON or a space precedes a colon: then parsing strictly finds no error.
    if data.count(b'":') != _count_names(value):
        _parse_strictly(data, remedy)
    return value


def _parse_strictly(data: bytes, remedy: str) -> object:
    """Return the value of JSON text by Python's own parser, which is slower.

    It accepts NaN, infinities and lone surrogates.

    Raises:
        _JsonError: the text is not JSON, or an object has two values for one name.
    """
    build_object = partial(_object_of_pairs, remedy=remedy)
    try:
        return json.loads(data.decode(), object_pairs_hook=build_object)
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None
    except RecursionError:
        raise _nested_too_deeply() from None
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        raise _invalid_json(error, remedy, place) from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise _invalid_json(error, remedy) from None


def _count_names(value: object) -> int:
    """Return the number of names in all objects of a JSON value."""
    count = 0
    pending = [value]
    while pending:  # no recursion, as values may be nested deeper than Python calls
        inner = pending.pop()
        if isinstance(inner, dict):
            count += len(inner)
            pending.extend(inner.values())
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict | list):
            pending.extend(inner)  # not the numbers of token ids, one by one
    return count


def _object_of_pairs(pairs: list[tuple[str, object]], remedy: str) -> dict[str, object]:
    """Return the object of these names and values.

    Raises:
        _JsonError: a name has two different values. (Parsers take the last.)
    """
    members: dict[str, object] = {}
    for name, value in pairs:
        # As texts: 1, 1.0 and true are equal in Python, and NaN is not equal to itself.
        if name in members and repr(members[name]) != repr(value):
            raise _JsonError(
                rule="an object must name each member once",
                found=f"{quote(name)} with two values",
                remedy=remedy,
            )
        members[name] = value
    return members


# Errors


def _invalid_json(error: ValueError, remedy: str, place: str = "") -> _JsonError:
    return _JsonError(
        rule="must be valid JSON", found=_describe(error), remedy=remedy, place=place
    )


def _nested_too_deeply() -> _JsonError:
    return _JsonError(
        rule="JSON must not be nested deeply",
        found="more than about 1000 levels",
        remedy="Flatten it",
    )


def _not_utf8(error: UnicodeDecodeError) -> _JsonError:
    suffix = formats.compressed_suffix(error.object)
    if suffix:
        return _JsonError(
            rule="must be UTF-8",
            found=f"a compressed file, as {suffix} files are",
            remedy=f"End its name in {suffix}",
        )
    byte = error.object[error.start]
    return _JsonError(
        rule="must be UTF-8",
        found=f"byte 0x{byte:02x} at byte {error.start + 1}",
        remedy="Convert the file to UTF-8",
    )


def _describe(error: ValueError) -> str:
    """Return the message of an error, with an excerpt of the text around it."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    excerpt = error.doc[max(0, error.pos - 10) : error.pos + 20]
    return f"{error.msg} near {quote(excerpt)}" if excerpt else error.msg


def _nesting_error(where: str) -> InputError:
    cause = _nested_too_deeply()
    return refusal(where=where, rule=cause.rule, found=cause.found, remedy=cause.remedy)


def encoding_error(error: UnicodeDecodeError, where: str) -> InputError:
    """Return the error for a file that is not in UTF-8."""
    cause = _not_utf8(error)
    return refusal(where=where, rule=cause.rule, found=cause.found, remedy=cause.remedy)


def refusal(where: str, rule: str, found: str, remedy: str = "") -> InputError:
    """Return the error for text that breaks a rule."""
    return InputError(sentence(where=where, rule=rule, found=found, remedy=remedy))


JSONL = Format(unit="line", read=_read_lines, parse=_parse_lines)
"""One record a line; blank lines are skipped, and counted as lines."""

JSON = Format(unit="item", read=_read_document, parse=_parse_document)
