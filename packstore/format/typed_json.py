"""JSON as typed values: msgspec checks types, and errors name the path of the field."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Hashable, Mapping
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np

from packstore.errors import FormatError, UnsupportedFormatError, quote, sentence
from packstore.format.arrays import Int64

TOP = 2**63 - 1
"""Largest int64."""

# Numbers with the ranges that msgspec checks.
Count = Annotated[int, msgspec.Meta(ge=0, le=TOP)]
Int31 = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=TOP)]
Whole = Annotated[int, msgspec.Meta(ge=-TOP - 1, le=TOP)]
Real = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Checksums = np.ndarray[Any, np.dtype[np.uint32]]
"""uint32 `[G]`; in JSON a text of 8 hexadecimal digits each.

Spelled out, as aliases of ``numpy.typing`` do not compare as equal.
"""

UPGRADE = "Upgrade packstore to read this dataset"
"""Remedy for a dataset of a later release."""

T = TypeVar("T")
_CHECKSUMS = re.compile(r"([0-9a-f]{8})*")
_WORD_OF_TYPE = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "object": "a JSON object",
    "array": "a list",
}


def decode(data: bytes, kind: type[T], where: str) -> T:
    """Decode JSON text to a dataclass or struct; ignore fields that the type lacks.

    Raises:
        FormatError: the text is not valid JSON, or a value is not of its type.
    """
    try:
        if not data.isascii():
            data.decode()  # msgspec does not check UTF-8 in unknown fields
        try:
            return cast(T, _decoder(cast(Hashable, kind)).decode(data))
        except msgspec.ValidationError as error:
            raise _type_error(error, msgspec.json.decode(data), where) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            sentence(where, rule="must be valid JSON", found=str(error))
        ) from error


def convert(value: object, kind: type[T], where: str) -> T:
    """Convert plain values to type `kind`; raise like :func:`decode`."""
    try:
        return msgspec.convert(value, kind, dec_hook=_array)
    except msgspec.ValidationError as error:
        raise _type_error(error, value, where) from error


def require(ok: bool, where: str, rule: str, values: Mapping[str, object]) -> None:
    """Raise :class:`FormatError` unless `ok`; the text quotes `values`, by name."""
    if not ok:
        listed = ", ".join(f"{name} {value}" for name, value in values.items())
        raise FormatError(sentence(where, rule=rule, found=listed))


def require_equal(where: str, rule: str, **values: object) -> None:
    """Raise :class:`FormatError` unless all `values` are equal."""
    require(len(set(values.values())) <= 1, where, rule, values)


def require_known(where: str, noun: str, choices: Collection[str], value: str) -> None:
    """Raise :class:`UnsupportedFormatError` unless `value` is one of the choices of
    this release.
    """
    if value in choices:
        return
    raise UnsupportedFormatError(
        sentence(
            where,
            rule=f"{noun} must be one of: {', '.join(choices)}",
            found=quote(value),
            remedy=UPGRADE,
        )
    )


@functools.cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_array)


def _array(kind: object, value: Any) -> Int64 | Checksums:
    """Convert a JSON value to a numpy array; msgspec adds the path to a ValueError."""
    if kind == Checksums:
        return _checksums(value)
    if not _is_list_of_counts(value):
        raise ValueError("Expected a list of whole numbers of at least 0")
    return np.array(value, np.int64)


def _checksums(value: Any) -> Checksums:
    if not isinstance(value, str) or not _CHECKSUMS.fullmatch(value):
        raise ValueError("Expected 8 hexadecimal digits for each")
    return np.frombuffer(bytes.fromhex(value), ">u4").astype(np.uint32)


def _is_list_of_counts(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    # A bool is an int for isinstance, and for numpy. Python is faster than numpy here,
    # as most lists are short.
    if len(value) == 1:  # of most small shards
        (number,) = value
        return type(number) is int and 0 <= number <= TOP
    types = {type(number) for number in value}
    return types <= {int} and 0 <= min(value, default=0) <= max(value, default=0) <= TOP


def _type_error(error: msgspec.ValidationError, value: Any, where: str) -> FormatError:
    """Return msgspec's error as FormatError, with the value at its path."""
    text, _, path = str(error).removesuffix("`").partition(" - at `$")
    # The path ends where msgspec does not name the key of a mapping.
    path = path.partition("[...]")[0].lstrip(".")
    if path:
        where = f"{where}, field {path}"

    absent_field = re.fullmatch("Object missing required field `(.*)`", text)
    if absent_field is not None:
        rule = f"must have a field {absent_field[1]!r}"
        return FormatError(sentence(where, rule=rule, found="none"))

    actual = quote(_value_at(path, value), 200)
    return FormatError(sentence(where, rule=_rule(text), found=actual))


def _value_at(path: str, value: Any) -> Any:
    """Return the value at a path such as ``shards[3].rows``, or as near as exists."""
    for step in re.findall(r"\w+", path):
        try:
            value = value[int(step) if isinstance(value, list | tuple) else step]
        except (LookupError, TypeError, ValueError):
            return value  # msgspec names a field by another name
    return value


def _rule(text: str) -> str:
    """Return msgspec's expectation in the words of packstore's errors."""
    rule = re.sub(", got .*", "", text).replace("Expected ", "must be ")
    for type_name, word in _WORD_OF_TYPE.items():
        rule = rule.replace(f"`{type_name}`", word)
    rule = re.sub("`([^`]*)`", r"\1", rule)
    return re.sub("a text matching .*", "64 hexadecimal digits in lower case", rule)
