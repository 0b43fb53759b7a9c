"""Text formats: JSON lines, JSON documents, CSV and TSV."""

from __future__ import annotations

import codecs
import csv
import io
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
from packstore.io.inputs import pieces
from packstore.io.inputs.pieces import Format, Piece, ReadOptions

_BOM = b"\xef\xbb\xbf"
_LINE_REMEDY = "Correct the line (a file that is one JSON document must be named .json)"
_FILE_REMEDY = "Correct the file; records one a line belong into a .jsonl file"
_INK = np.array([not bytes([byte]).isspace() for byte in range(256)])
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_ONE = ("prompt", "chosen", "rejected", "completion", "response", "text", "messages")
"""Fields of one text, of one list of messages, or of one list of ids."""
_WRAPPERS = ("data", "rows", "records", "examples", "items", "instances")
"""Fields under which a document of one object holds its records; no record has such a
field.
"""


def _read_lines(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Cuts after the last line end of every `block_bytes`; only the last line may lack
    its own.
    """
    first, remainder, chunk = 0, bytearray(), None
    while chunk != b"":
        chunk = stream.read(options.block_bytes)
        end = chunk.rfind(b"\n") + 1
        if end or not chunk:
            payload, remainder = (
                b"".join((remainder, memoryview(chunk)[:end])),
                bytearray(),
            )
            if first == 0:
                payload = payload.removeprefix(_BOM)
            ends, records = _count(payload)
            if records:
                yield Piece(first, records, payload)
            first += ends
        remainder += chunk[end:]
        if len(remainder) > pieces.MAX_RECORD_BYTES:
            rule = f"a line must be at most {pieces.MAX_RECORD_BYTES:,} bytes long"
            raise _refusal(
                f"{path}, line {first + 1}", rule, "a longer one", _LINE_REMEDY
            )


def _count(payload: bytes) -> tuple[int, int]:
    """Returns the numbers of line ends, and of lines that are not blank."""
    data = np.frombuffer(payload, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    begins = np.append(-1, ends)[: None if payload[-1:] != b"\n" else -1] + 1
    if payload and data[begins].min() > ord(" "):  # no line begins with white space
        return len(ends), len(begins)
    lines = np.cumsum(data == ord("\n"), dtype=np.int32)[
        _INK[data]
    ]  # of each other character
    return len(ends), int(np.count_nonzero(np.diff(lines))) + bool(len(lines))


def _parse_lines(
    payload: bytes, path: str, first: int
) -> tuple[list[int], list[object]]:
    lines = payload.split(b"\n")
    numbers = [i for i, line in enumerate(lines, first) if line.strip()]
    values = [_parse_line(lines[number - first]) for number in numbers]
    _refuse_table(values[: not first], path)
    return numbers, values


def _parse_line(line: bytes) -> object:
    """Return the value of a line; a line that is no JSON is left to the setting
    `on`.
    """
    try:
        return _load_json(line, _LINE_REMEDY)
    except _NoJson as error:
        detail = f"{error.place}: {error.found}" if error.place else error.found
        return BrokenLine(detail, error.remedy)


def _read_document(
    stream: BinaryIO, path: str, options: ReadOptions
) -> Iterator[Piece]:
    """Cuts between records; the payload is the text of each."""
    texts = _texts(stream, path, options.block_bytes)
    return pieces.cut(texts, options.block_bytes, sys.getsizeof)


def _parse_document(
    payload: list[bytes], path: str, first: int
) -> tuple[range, list[object]]:
    values = [
        parse_json(text, f"{path}, item {i}")
        for i, text in enumerate(payload, first + 1)
    ]
    _refuse_table(values[: not first], path)
    return range(first, first + len(values)), values


def _texts(stream: BinaryIO, path: str, chunk_bytes: int) -> Iterator[bytes]:
    """Yields the text of each record of an array, or of records one after another, by a
    window.
    """
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    text, start, ended, item, expected = "", 0, False, 1, "begin"

    def refused(rule: str, error: str = "") -> InputError:
        found = error or (
            quote(text[start : start + 20]) if text[start:] else "the end"
        )
        return _refusal(f"{path}, item {item}", rule, found, _FILE_REMEDY)

    while True:
        start = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # matches always
        incomplete = start == len(text)
        end = start + 1
        if not incomplete and expected in ("record", "first or end", "next record"):
            try:
                value, end = _DECODER.raw_decode(text, start)
                # The window may end inside a number, with all but 1 of 1e+5 beyond it
                # or cut.
                incomplete = end + len("e+5") > len(text)
            except RecursionError:
                raise _too_deep(f"{path}, item {item}") from None
            except ValueError as error:
                incomplete = text[start] != "]"
                if incomplete and (
                    ended or len(text) - start > pieces.MAX_RECORD_BYTES
                ):
                    limit = f"{pieces.MAX_RECORD_BYTES:,} bytes a record"
                    rule = f"must be valid JSON, of at most {limit}"
                    raise refused(rule, _described(error)) from None
        if incomplete and not ended:
            data = stream.read(max(chunk_bytes, len(text) - start))
            ended = not data
            try:
                text, start = text[start:] + decode(data, final=ended), 0
            except UnicodeDecodeError as error:
                raise _not_utf8(error, f"{path}, item {item} or later") from None
            continue
        character = text[start : start + 1]
        match expected:
            case "begin" | "next record" if not character:
                return
            case "begin":
                if character not in ("[", "{"):
                    raise refused("must be an array of records, or one record")
                expected = "first or end" if character == "[" else "next record"
                start += character == "["
            case "comma or end":
                if character not in (",", "]"):
                    raise refused("an array must go on with ',' or end with ']'")
                expected, start = (
                    ("record" if character == "," else "nothing"),
                    start + 1,
                )
            case "nothing":
                if character:
                    raise refused("nothing must follow the array")
                return
            case "first or end" if character == "]":
                expected, start = "nothing", start + 1
            case _:
                if end == start + 1 and character in ("]", ""):
                    raise refused("a record must stand here")
                if expected == "next record" and (name := _wrapper(value)):
                    given = f"one object, with the records under {name!r}"
                    remedy = (
                        f"Give the array alone, e.g. jq '.{name}' FILE > RECORDS.json"
                    )
                    rule = "must be an array of records, or one record"
                    raise _refusal(path, rule, given, remedy)
                yield text[start:end].encode()
                item, start = item + 1, end
                expected = (
                    "next record" if expected == "next record" else "comma or end"
                )


def _wrapper(value: object) -> str | None:
    """Returns the field of an object that holds records, which are neither texts nor
    messages.
    """
    for name in _WRAPPERS:
        held = value.get(name) if isinstance(value, dict) else None
        if (
            isinstance(held, list)
            and held
            and all(isinstance(item, dict) for item in held)
        ):
            return (
                None if any(item.keys() & {"role", "from"} for item in held) else name
            )
    return None


def _refuse_table(first: list[object], path: str) -> None:
    """Raises if the first record is a whole table, by column or by index, as pandas
    writes it.
    """
    for value in first:
        if isinstance(value, dict) and (
            value.keys() == {"columns", "index", "data"} or _by(value)
        ):
            remedy = (
                "Write records: in pandas, to_json(FILE, orient='records', lines=True)"
            )
            raise _refusal(
                path, "must be records, one after another", "a whole table", remedy
            )


def _by(table: dict[str, Any]) -> bool:
    held = [value for value in table.values() if value]
    if held and all(isinstance(value, dict) for value in held):
        return all(map(str.isdecimal, table)) or all(
            n.isdecimal() for v in held for n in v
        )
    columns = (
        all(isinstance(value, list) for value in held) and len({*map(len, held)}) == 1
    )
    return columns and any(
        isinstance(table[n][0], str | list) for n in _ONE if table.get(n)
    )


class _NoJson(Exception):
    """Text that is no JSON, or not in UTF-8; `place` inside of it may be empty."""

    def __init__(self, rule: str, found: str, remedy: str, place: str = "") -> None:
        super().__init__(rule, found, remedy, place)
        self.rule = rule
        self.found = found
        self.remedy = remedy
        self.place = place


def parse_json(data: bytes, where: str, remedy: str = "Correct the text") -> object:
    """Return the value of JSON text; accept lone surrogates, NaN and infinities: later
    rules decide. Errors name the place `where`, and end in `remedy`.
    """
    try:
        return _load_json(data, remedy)
    except _NoJson as error:
        if error.place:
            where = f"{where}, {error.place}"
        raise _refusal(where, error.rule, error.found, error.remedy) from None


def _load_json(data: bytes, remedy: str) -> object:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as refusal:
        if "depth limit" in str(refusal):
            raise _NoJson(*_TOO_DEEP) from None
        return _parse_strictly(data, remedy)
    # Cheaper than to see each name, which orjson does not show; texts that quote JSON
    # differ, too.
    if data.count(b'":') != _count_names(value):
        _parse_strictly(data, remedy)
    return value


def _parse_strictly(data: bytes, remedy: str) -> object:
    """Return the value of JSON text, as Python reads it; raise if a name has two
    values.
    """
    try:
        return json.loads(
            data.decode(), object_pairs_hook=partial(_members, remedy=remedy)
        )
    except UnicodeDecodeError as error:
        raise _NoJson(*_not_utf8_parts(error)) from None
    except RecursionError:
        raise _NoJson(*_TOO_DEEP) from None
    except ValueError as error:  # also an integer with more digits than Python converts
        place = (
            f"column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        )
        raise _NoJson("must be valid JSON", _described(error), remedy, place) from None


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


def _members(pairs: list[tuple[str, object]], remedy: str) -> dict[str, object]:
    """Return the members of an object; raise if one name has two values: parsers take
    the last.
    """
    value: dict[str, object] = {}
    for name, member in pairs:
        # As texts: 1, 1.0 and true are equal in Python, and NaN is not equal to itself.
        if name in value and repr(value[name]) != repr(member):
            rule = "an object must name each member once"
            raise _NoJson(rule, f"{quote(name)} with two values", remedy)
        value[name] = member
    return value


def _described(error: ValueError) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    near = error.doc[max(0, error.pos - 10) : error.pos + 20]
    return f"{error.msg} near {quote(near)}" if near else error.msg


def _not_utf8(error: UnicodeDecodeError, where: str) -> InputError:
    return _refusal(where, *_not_utf8_parts(error))


def _not_utf8_parts(error: UnicodeDecodeError) -> tuple[str, str, str]:
    """Return the rule that is broken, what was found, and the remedy."""
    found = f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"
    remedy = "Convert the file to UTF-8"
    if suffix := pieces.suffix_of(error.object):
        found, remedy = (
            f"a compressed file, as {suffix} files are",
            f"End its name in {suffix}",
        )
    return "must be UTF-8", found, remedy


_TOO_DEEP = (
    "JSON must not be nested deeply",
    "more than about 1000 levels",
    "Flatten it",
)
"""Rule, finding and remedy."""


def _too_deep(where: str) -> InputError:
    return _refusal(where, *_TOO_DEEP)


def _refusal(where: str, rule: str, found: str, remedy: str = "") -> InputError:
    return InputError(sentence(where, rule, found, remedy))


def _read_csv(
    stream: BinaryIO, path: str, options: ReadOptions, *, delimiter: str
) -> Iterator[Piece]:
    """Cuts between rows of RFC 4180, by Python's ``csv``, for reasons in
    ``README.md``.
    """
    # The csv module's limit is global, and its default of 128 KiB a cell is too low for
    # prompts.
    csv.field_size_limit(max(csv.field_size_limit(), pieces.MAX_RECORD_BYTES))
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rows = csv.reader(_csv_lines(text, path), delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        pieces.refuse_equal_names(header, f"{path}, line 1")
        whole = _checked(rows, len(header), path)
        for piece in pieces.cut(
            whole, options.block_bytes, lambda row: sum(map(sys.getsizeof, row))
        ):
            yield piece._replace(payload=(header, options.json_columns, piece.payload))
    except csv.Error as error:
        where, remedy = (
            f"{path}, line {rows.line_num}",
            'Quote cells; a quote inside is ""',
        )
        raise _refusal(where, "must be valid CSV", str(error), remedy) from None
    except UnicodeDecodeError as error:
        raise _not_utf8(error, f"{path}, after line {rows.line_num}") from None
    finally:
        text.detach()  # otherwise it would close the stream


def _parse_csv(
    payload: tuple[list[str], frozenset[str], list[list[str]]], path: str, first: int
) -> tuple[range, list[object]]:
    """Parses rows; cells of columns that are not JSON are text: a prompt ``007`` stays
    ``007``.
    """
    names, typed, rows = payload
    values = (
        {n: _value(c) if n in typed else c for n, c in zip(names, row, strict=True)}
        for row in rows
    )
    return range(first, first + len(rows)), list(values)


def _value(cell: str) -> object:
    """Empty is null, and what is no JSON stays text."""
    try:
        return orjson.loads(cell) if cell else None
    except orjson.JSONDecodeError:
        return cell


def _checked(rows: Iterator[list[str]], cells: int, path: str) -> Iterator[list[str]]:
    """Yields all rows but blank lines; raises if the number of cells is wrong."""
    for number, row in enumerate(filter(None, rows), 1):
        if len(row) != cells:
            rule = f"must have {cells} cells, as the header has"
            remedy = (
                "Put cells with the delimiter, quotes or line ends in double quotes"
            )
            raise _refusal(f"{path}, row {number}", rule, str(len(row)), remedy)
        yield row


def _csv_lines(text: io.TextIOWrapper, path: str) -> Iterator[str]:
    """Yields the lines of a file; raises at one that is too long."""
    for number, line in enumerate(
        iter(partial(text.readline, pieces.MAX_RECORD_BYTES), ""), 1
    ):
        if len(line) == pieces.MAX_RECORD_BYTES:
            rule = f"a line must be shorter than {pieces.MAX_RECORD_BYTES:,} characters"
            raise _refusal(f"{path}, line {number}", rule, "a longer one")
        yield line


JSONL = Format(unit="line", read=_read_lines, parse=_parse_lines)
"""One record a line; blank lines are skipped, and counted as lines."""
JSON = Format(unit="item", read=_read_document, parse=_parse_document)
CSV = Format(unit="row", read=partial(_read_csv, delimiter=","), parse=_parse_csv)
TSV = Format(unit="row", read=partial(_read_csv, delimiter="\t"), parse=_parse_csv)
