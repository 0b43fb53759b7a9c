"""Decodes JSON to typed values; msgspec checks types, and errors name the path of the
field.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Hashable, Mapping
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np

from packstore.errors import FormatError, UnsupportedFormatError, quote, sentence
from packstore.format.arrays import Int64

TOP = 2**63 - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=TOP)]
Int31 = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=TOP)]
Whole = Annotated[int, msgspec.Meta(ge=-TOP - 1, le=TOP)]
Real = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Checksums = np.ndarray[Any, np.dtype[np.uint32]]
"""uint32 `[G]`; in JSON a text of 8 hexadecimal digits each. (A numpy alias would not
compare.)
"""

UPGRADE = "Upgrade packstore to read this dataset"
"""What to do about a dataset of a later release."""

T = TypeVar("T")
_HEX = re.compile(r"([0-9a-f]{8})*")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "object": "a JSON object",
    "array": "a list",
}


def decode(data: bytes, kind: type[T], where: str) -> T:
    """Decodes JSON text to a dataclass or struct; ignores fields that the type
    lacks.
    """
    try:
        if not data.isascii():
            data.decode()  # msgspec does not check UTF-8 in unknown fields
        try:
            return cast(T, _decoder(cast(Hashable, kind)).decode(data))
        except msgspec.ValidationError as error:
            raise _refusal(error, msgspec.json.decode(data), where) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(sentence(where, "must be valid JSON", str(error))) from error


def convert(value: object, kind: type[T], where: str) -> T:
    """Converts plain values to type `kind`; raises like :func:`decode`."""
    try:
        return msgspec.convert(value, kind, dec_hook=_array)
    except msgspec.ValidationError as error:
        raise _refusal(error, value, where) from error


def require(ok: bool, where: str, rule: str, values: Mapping[str, object]) -> None:
    """Raises :class:`FormatError` unless `ok`; the text names `values` as what was
    found.
    """
    if not ok:
        found = ", ".join(f"{name} {value}" for name, value in values.items())
        raise FormatError(sentence(where, rule, found))


def require_equal(where: str, rule: str, **values: object) -> None:
    """Raises :class:`FormatError` unless all `values` are equal."""
    require(len(set(values.values())) <= 1, where, rule, values)


def require_known(where: str, noun: str, known: Collection[str], value: str) -> None:
    """Raises :class:`UnsupportedFormatError` unless this release knows a value of an
    open list.
    """
    if value not in known:
        rule = f"{noun} must be one of: {', '.join(known)}"
        raise UnsupportedFormatError(sentence(where, rule, quote(value), UPGRADE))


@functools.cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_array)


def _array(kind: object, value: Any) -> Int64 | Checksums:
    """Converts a JSON value to a numpy array; msgspec adds the path to a ValueError."""
    if kind == Checksums:
        if not isinstance(value, str) or not _HEX.fullmatch(value):
            raise ValueError("Expected 8 hexadecimal digits for each")
        return np.frombuffer(bytes.fromhex(value), ">u4").astype(np.uint32)
    try:
        column = np.array(value) if value else np.empty(0, np.int64)
    except ValueError:  # lists of several lengths
        column = np.empty(0, object)
    numbers = isinstance(value, list) and column.dtype == np.int64 and column.ndim == 1
    numbers = numbers and bool not in {*map(type, value)}  # numpy takes it for a number
    if not numbers or min(value, default=0) < 0:  # faster than numpy for short lists
        raise ValueError("Expected a list of whole numbers of at least 0")
    return column


def _refusal(error: msgspec.ValidationError, value: Any, where: str) -> FormatError:
    """Returns the :class:`FormatError` for msgspec's error, with the value found at its
    path.
    """
    text, _, path = str(error).removesuffix("`").partition(" - at `$")
    path = path.partition("[...]")[0].lstrip(
        "."
    )  # msgspec does not name keys of mappings
    where = f"{where}, field {path}" if path else where
    with contextlib.suppress(
        LookupError, TypeError, ValueError
    ):  # another field of this name
        for step in re.findall(r"\w+", path):
            value = value[int(step) if isinstance(value, list | tuple) else step]
    if missing := re.fullmatch("Object missing required field `(.*)`", text):
        return FormatError(sentence(where, f"must have a field {missing[1]!r}", "none"))
    rule = re.sub(", got .*", "", text).replace("Expected ", "must be ")
    rule = re.sub("`([^`]*)`", lambda m: _WORDS.get(m[1], m[1]), rule)
    rule = re.sub("a text matching .*", "64 hexadecimal digits in lower case", rule)
    return FormatError(sentence(where, rule, quote(value, 200)))
