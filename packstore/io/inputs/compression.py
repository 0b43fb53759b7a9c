"""Streams of input files: hashed as stored, decompressed, and limited in size.

The *stored* bytes of a file may be compressed; its *plain* bytes are decompressed. A
file of some formats is several compressed streams one after another (*members*); their
plain bytes are joined.
"""

from __future__ import annotations

import hashlib
import io
import lzma
from typing import Any

import pyarrow as pa

from packstore.errors import InputError, PackstoreError, sentence

CHUNK_BYTES = 1 << 20
"""Bytes read or copied at once."""

MAX_RATIO = 400
"""Highest allowed ratio of plain to compressed bytes; the first :data:`FREE_BYTES` of
the plain bytes are exempt. Text has a ratio of 3 to 20; a file that fills a disk on
purpose has thousands.
"""

FREE_BYTES = 1 << 28
"""Plain bytes of a file that are allowed at any ratio."""


class HashedStream(io.RawIOBase):
    """A stream that counts and hashes the bytes read from the stream `raw`."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes read."""
        return self.num_bytes

    def readinto(self, buffer: Any) -> int:
        """Fill the start of `buffer`, and return the number of bytes."""
        count = int(self._raw.readinto(buffer))
        self._digest.update(buffer[:count])
        self.num_bytes += count
        return count

    def sha256(self) -> str:
        """Return the hash of the bytes read."""
        return self._digest.hexdigest()


def decompress(
    file: HashedStream, compression: str | None, path: str
) -> io.BufferedReader:
    """Open a buffered stream of a file's plain bytes.

    Args:
        file: the stored bytes.
        compression: ``gzip``, ``zstd``, ``bz2`` or ``xz``; None: the file is plain.
        path: the file's name in errors.

    Raises:
        InputError: while reading, if the file is damaged, or decompresses to too many
            bytes.
    """
    if compression is None:
        return io.BufferedReader(file, CHUNK_BYTES)
    return io.BufferedReader(_DecompressedStream(file, compression, path), CHUNK_BYTES)


class _DecompressedStream(io.RawIOBase):
    """The plain bytes of a compressed file, of all its members."""

    def __init__(self, file: HashedStream, compression: str, path: str) -> None:
        self._file = file
        self._compression = compression
        self._path = path
        self._num_bytes = 0
        self._decompressed: Any
        if compression == "xz":  # pyarrow does not read it
            self._decompressed = _XzStream(file)
        else:
            source = pa.PythonFile(file, mode="r")
            self._decompressed = pa.CompressedInputStream(source, compression)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._num_bytes

    def readinto(self, buffer: Any) -> int:
        try:
            count = int(self._decompressed.readinto(buffer))
        except PackstoreError:
            raise  # the storage failed (also an OSError): the file is not damaged
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise self._damage(error) from error
        self._num_bytes += count
        self._require_plausible_ratio()
        return count

    def _require_plausible_ratio(self) -> None:
        compressed_bytes = self._file.num_bytes
        if self._num_bytes > MAX_RATIO * compressed_bytes + FREE_BYTES:
            raise InputError(
                sentence(
                    self._path,
                    rule=f"must not decompress to more than {MAX_RATIO} times its "
                    "bytes",
                    found=f"{self._num_bytes} bytes out of {compressed_bytes}",
                    remedy="Compress it in smaller steps",
                )
            )

    def _damage(self, error: Exception) -> InputError:
        """Return the error for a file that cannot be decompressed."""
        # pyarrow has no class for it: "Truncated compressed stream".
        is_truncated = isinstance(error, EOFError) or "Truncated" in str(error)
        if is_truncated:
            damage = "an end in the middle of the compressed stream"
        else:
            damage = f"other bytes ({error})"
        return InputError(
            sentence(
                self._path,
                rule=f"must be a complete {self._compression} file",
                found=damage,
                remedy="Check the suffix of its name, or copy it again",
            )
        )


class _XzStream(io.RawIOBase):
    """The plain bytes of an xz file, of all its members.

    Not by ``lzma.LZMAFile``: it stops silently at the padding (zeros) that may stand
    between two members, and at damage behind one.
    """

    def __init__(self, file: HashedStream) -> None:
        self._file = file
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decompressor.eof:
                data = self._start_of_next_member()
                if not data:
                    return 0
                self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._decompressor.needs_input:
                data = self._file.read(CHUNK_BYTES) or b""
                if not data:
                    raise EOFError
            else:
                data = b""  # the decompressor holds input for more plain bytes

            plain = self._decompressor.decompress(data, max_length=len(buffer))
            if plain:
                buffer[: len(plain)] = plain
                return len(plain)

    def _start_of_next_member(self) -> bytes:
        """Return the first bytes of the next member, behind any padding; b"" at the end
        of the file.
        """
        data = self._decompressor.unused_data
        while True:
            data = data.lstrip(b"\0")
            if data:
                return data
            data = self._file.read(CHUNK_BYTES) or b""
            if not data:
                return b""
