"""The hash that a manifest carries of itself, so that no flipped bit of it is believed."""

from __future__ import annotations

import hashlib
import re

import orjson

from packstore.errors import IntegrityError, quote, sentence

FIELD = "sha256"
_END = b"\n}\n"
_HASH = re.compile(r"[0-9a-f]{64}")
_DO = "Restore the file from a copy, or open another version"


def seal(text: bytes) -> bytes:
    """Canonical JSON of an object with the hash of it as its last field.

    Args:
        text: ends with a newline, a closing brace and a newline.
    """
    body = text.removesuffix(_END)
    return body + b',\n "%s": "%s"%s' % (FIELD.encode(), _sha256(body), _END)


def unsealed(data: bytes, where: str) -> bytes:
    """The JSON object in `data` without its hash; `data` as it is where it has none.

    Args:
        data: the text of a manifest.
        where: its place, for error texts.

    Raises:
        IntegrityError: the rest of the text has another hash, or the field that holds it is
            damaged.
    """
    comma = data.rfind(b",")
    last = _object(b"{" + data[comma + 1 :])
    if len(last) != 1 or comma < 0:
        return data
    [(name, value)] = last.items()
    body = memoryview(data)[:comma]
    if name != FIELD:
        # One flipped bit in the name would make it a field that readers ignore. A hash that fits
        # tells it from a last field of another writer.
        if isinstance(value, str) and value.encode() == _sha256(body):
            must = f"the field with the hash of the manifest must be named {FIELD!r}"
            raise IntegrityError(sentence(where, must, quote(name), _DO))
        return data
    if not isinstance(value, str) or not _HASH.fullmatch(value) or value.encode() != _sha256(body):
        must = f"the text before field {FIELD!r} must have the sha256 that it names"
        raise IntegrityError(sentence(where, must, "another: the file is damaged", _DO))
    return bytes(body) + _END


def _object(text: bytes) -> dict[str, object]:
    """The JSON object in `text`; none: it is something else."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _sha256(text: bytes | memoryview) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
