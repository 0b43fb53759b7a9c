"""Byte streams of input files: hashed, decompressed, and seekable if needed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from packstore.errors import InputError, PackstoreError, sentence
from packstore.io.store.storage_errors import as_storage_errors

CHUNK = 1 << 20
"""Bytes read or copied at once."""

MAX_RATIO, FREE_BYTES = 400, 1 << 28
"""Limit of decompressed bytes: `MAX_RATIO` times the compressed ones, plus `FREE_BYTES`. Text has
a ratio of 3 to 20."""


class HashedStream(io.RawIOBase):
    """Counts and hashes the bytes read from `raw`."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self.bytes = 0

    @property
    def sha256(self) -> str:
        """Hash of the bytes read so far, hexadecimal."""
        return self._hash.hexdigest()

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the start of `buffer`; returns how much."""
        count = self._raw.readinto(buffer)  # type: ignore[attr-defined]
        self._hash.update(buffer[:count])
        self.bytes += count
        return int(count)


class _Decompressed(io.RawIOBase):
    """The plain bytes of a compressed stream, of all its concatenated members."""

    def __init__(self, raw: HashedStream, compression: str, path: str) -> None:
        self._raw, self._compression, self._path, self._given = raw, compression, path, 0
        self._stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the start of `buffer`; returns how much."""
        try:
            count = int(self._stream.readinto(buffer))
        except PackstoreError:
            raise
        except OSError as error:
            rule = f"must be a complete {self._compression} file"
            other, remedy = (
                f"other bytes ({error})",
                "Check the suffix of its name, or copy it again",
            )
            if "Truncated" in str(error):
                other, remedy = "an end in the middle of the compressed stream", "Copy it again"
            raise InputError(sentence(self._path, rule, other, remedy)) from error
        self._given += count
        if self._given > MAX_RATIO * self._raw.bytes + FREE_BYTES:
            rule = f"must not decompress to more than {MAX_RATIO} times its bytes"
            ratio = f"{self._given} bytes out of {self._raw.bytes}"
            raise InputError(sentence(self._path, rule, ratio, "Compress it in smaller steps"))
        return count


def decompressed(raw: HashedStream, compression: str | None, path: str) -> io.BufferedReader:
    """Opens a buffered stream of the plain bytes; broken ones raise :class:`InputError`."""
    plain = raw if compression is None else _Decompressed(raw, compression, path)
    return io.BufferedReader(plain, CHUNK)


@contextlib.contextmanager
def staged(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Copies `stream` to a temporary file, which is seekable."""
    with tempfile.TemporaryFile() as copy:
        with as_storage_errors("write", tempfile.gettempdir(), {}):
            shutil.copyfileobj(stream, copy, CHUNK)
            copy.seek(0)
        yield copy
