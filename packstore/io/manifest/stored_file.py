"""Small files that a manifest names by size and hash, and that are read at once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from packstore.errors import (
    FormatError,
    IntegrityError,
    PackstoreError,
    quote,
    sentence,
)
from packstore.format.typed_json import Count, Sha256
from packstore.io.store.location import Location

_REMEDY = "The file was damaged or replaced: copy it again"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """The manifest's entry of a file; `path` is relative to the dataset."""

    path: str
    bytes: Count
    sha256: Sha256

    @classmethod
    def of(cls, local_path: str, prefix: str, suffix: str, **more: Any) -> Self:
        """Hashes a finished local file, whose path becomes `prefix`, some of the hash,
        `suffix`.
        """
        with open(local_path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            path = f"{prefix}-{sha256[:16]}{suffix}"
            return cls(path=path, bytes=file.tell(), sha256=sha256, **more)


def read_stored(location: Location, file: StoredFile) -> bytes:
    """Reads a file below `location`; raises IntegrityError for another size or hash."""
    _compare(
        location, file, "bytes", location.size(file.path)
    )  # a manifest may name any size
    data = location.read_bytes(file.path)
    _compare(location, file, "sha256", hashlib.sha256(data).hexdigest())
    return data


def check_stored(location: Location, file: StoredFile) -> None:
    """Raises like :func:`read_stored`, with a file of any size."""
    _compare(location, file, "bytes", location.size(file.path))
    with location.open_read(file.path) as stored:
        _compare(
            location, file, "sha256", hashlib.file_digest(stored, "sha256").hexdigest()
        )


def _compare(location: Location, file: StoredFile, name: str, found: int | str) -> None:
    if (recorded := getattr(file, name)) != found:
        where, rule = (
            location.join(file.path).display,
            f"must have {name} {quote(recorded, 80)}",
        )
        rule += ", as the manifest says"
        raise IntegrityError(sentence(where, rule, quote(found, 80), _REMEDY))


_COMMON = (
    OSError,
    ValueError,
    ArithmeticError,
    LookupError,
    SystemError,
    MemoryError,
    EOFError,
)
DECODER_ERRORS: tuple[type[Exception], ...] = (pa.ArrowException, *_COMMON)
"""Exceptions that decoders raise for damaged bytes."""


@contextlib.contextmanager
def decoding(where: str, remedy: str = _REMEDY) -> Iterator[None]:
    """Turns errors of decoders in this context into an :class:`IntegrityError` at
    `where`.
    """
    try:
        yield
    except FormatError as error:
        if where in str(error):
            raise
        raise IntegrityError(sentence(where, str(error), remedy=remedy)) from error
    except PackstoreError:
        raise
    except DECODER_ERRORS as error:
        rule = "its bytes must be those that were written"
        raise IntegrityError(sentence(where, rule, str(error), remedy)) from error
