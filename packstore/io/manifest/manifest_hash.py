"""Adds a hash of its own text to a manifest, so that flipped bits are detected."""

from __future__ import annotations

import hashlib

import orjson

from packstore.errors import IntegrityError, quote, sentence

FIELD = "sha256"
_END = b"\n}\n"
_DO = "Restore the file from a copy, or open another version"


def with_hash(text: bytes) -> bytes:
    """Appends its hash as the last field of canonical JSON, which ends like ``_END``."""
    body = text.removesuffix(_END)
    return body + b',\n "%s": "%s"%s' % (FIELD.encode(), _sha256(body), _END)


def without_hash(data: bytes, where: str) -> bytes:
    """Verifies and removes the hash; returns the JSON object, or `data` if it has no hash.

    Raises:
        IntegrityError: the hash does not match, or its field is damaged.
    """
    comma = data.rfind(b",")
    last = _object(b"{" + data[comma + 1 :])
    if len(last) != 1 or comma < 0:
        return data
    [(name, value)] = last.items()
    body = memoryview(data)[:comma]
    matches = isinstance(value, str) and value.encode() == _sha256(body)
    if name != FIELD:
        # One flipped bit in its name would make the hash a field that readers ignore. A value that
        # matches shows that it is not the last field of another writer.
        if matches:
            must = f"the field with the hash of the manifest must be named {FIELD!r}"
            raise IntegrityError(sentence(where, must, quote(name), _DO))
        return data
    if not matches:
        must = f"the text before field {FIELD!r} must have the sha256 that it names"
        raise IntegrityError(sentence(where, must, "another: the file is damaged", _DO))
    return bytes(body) + _END


def _object(text: bytes) -> dict[str, object]:
    """Returns the JSON object in `text`; empty if `text` is anything else."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _sha256(text: bytes | memoryview) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
