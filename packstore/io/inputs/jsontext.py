"""Parses JSON text."""

from __future__ import annotations

import json

import orjson

from packstore.errors import InputError, quote, sentence


def loads(data: bytes, where: str, do: str = "Correct the text") -> object:
    """Returns the JSON value in `data`.

    Accepts lone surrogates, NaN and infinities: later policies decide about them.

    Args:
        data: UTF-8 text of one JSON value.
        where: its place, for error texts.
        do: the remedy for text that is not JSON.

    Raises:
        InputError: it is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as refusal:
        if "depth limit" in str(refusal):
            raise too_deep(where) from None
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(error, where) from None
    except RecursionError:
        raise too_deep(where) from None
    except json.JSONDecodeError as error:
        place = f"{where}, column {error.colno}"
        raise InputError(sentence(place, "must be valid JSON", describe(error), do)) from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise InputError(sentence(where, "must be valid JSON", str(error), do)) from None


def describe(error: json.JSONDecodeError) -> str:
    """Describes the error, with the text around it."""
    near = error.doc[max(0, error.pos - 10) : error.pos + 20]
    return f"{error.msg} near {quote(near)}" if near else error.msg


def not_utf8(error: UnicodeDecodeError, where: str) -> InputError:
    """Returns the error for bytes that are not UTF-8."""
    found = f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"
    return InputError(sentence(where, "must be UTF-8", found, "Convert the file to UTF-8"))


def too_deep(where: str) -> InputError:
    """Returns the error for values nested too deeply."""
    found = "more than about 1000 levels"
    return InputError(sentence(where, "JSON must not be nested deeply", found, "Flatten it"))
