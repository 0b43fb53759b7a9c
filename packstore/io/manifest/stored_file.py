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
from packstore.io.shards.shard import NonconformingFile
from packstore.io.store.location import Location

_REMEDY = "The file was damaged or replaced: copy it again"
_WRITER_REMEDY = (
    "The file is as it was written: mend its writer, or pack the data with packstore"
)

DECODER_ERRORS: tuple[type[Exception], ...] = (
    pa.ArrowException,
    OSError,
    ValueError,
    ArithmeticError,
    LookupError,
    SystemError,
    MemoryError,
    EOFError,
)
"""Exceptions that decoders raise for damaged bytes."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """The manifest's entry of a file; `path` is relative to the dataset."""

    path: str
    bytes: Count
    sha256: Sha256

    @classmethod
    def of(cls, local_path: str, prefix: str, suffix: str, **fields: Any) -> Self:
        """Return the entry of a finished local file.

        Args:
            local_path: the file to hash.
            prefix: of its path in the dataset, before 16 digits of the hash.
            suffix: of its path in the dataset, after them.
            fields: further fields of a subclass.
        """
        with open(local_path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            num_bytes = file.tell()
        path = f"{prefix}-{sha256[:16]}{suffix}"
        return cls(path=path, bytes=num_bytes, sha256=sha256, **fields)


def read_stored(location: Location, file: StoredFile) -> bytes:
    """Read a file below `location`; raise IntegrityError for another size or hash."""
    _require_size(location, file)  # first: a manifest may name a file of any size
    data = location.read_bytes(file.path)
    _require_sha256(location, file, hashlib.sha256(data).hexdigest())
    return data


def check_stored(location: Location, file: StoredFile) -> None:
    """Raise like :func:`read_stored`, without holding the file in memory."""
    _require_size(location, file)
    with location.open_read(file.path) as stream:
        digest = hashlib.file_digest(stream, "sha256")
    _require_sha256(location, file, digest.hexdigest())


def _require_size(location: Location, file: StoredFile) -> None:
    size = location.size(file.path)
    if size != file.bytes:
        raise _mismatch(location, file, "bytes", recorded=file.bytes, actual=size)


def _require_sha256(location: Location, file: StoredFile, sha256: str) -> None:
    if sha256 != file.sha256:
        raise _mismatch(location, file, "sha256", recorded=file.sha256, actual=sha256)


def _mismatch(
    location: Location, file: StoredFile, name: str, recorded: object, actual: object
) -> IntegrityError:
    """Return the error for a file that is not the one of the manifest."""
    text = sentence(
        where=location.join(file.path).display,
        rule=f"must have {name} {quote(recorded, 80)}, as the manifest says",
        found=quote(actual, 80),
        remedy=_REMEDY,
    )
    return IntegrityError(text)


@contextlib.contextmanager
def decoding(where: str, remedy: str = _REMEDY) -> Iterator[None]:
    """Turn errors of decoders in this context into an IntegrityError at `where`.

    Args:
        where: the file, for messages.
        remedy: for a file that was damaged; that of a nonconforming one is another.
    """
    try:
        yield
    except NonconformingFile as error:
        text = sentence(where, rule=str(error), remedy=_WRITER_REMEDY)
        raise IntegrityError(text) from error
    except FormatError as error:
        names_the_place = where in str(error)
        if names_the_place:
            raise
        raise IntegrityError(sentence(where, str(error), remedy=remedy)) from error
    except PackstoreError:
        raise
    except DECODER_ERRORS as error:
        text = sentence(
            where=where,
            rule="its bytes must be as they were written",
            found=str(error),
            remedy=remedy,
        )
        raise IntegrityError(text) from error
