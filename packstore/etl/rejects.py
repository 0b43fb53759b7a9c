"""Writes the file of dropped records: a JSON line for each, in input order."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from packstore.errors import ConfigError, sentence
from packstore.format.arrays import Sample
from packstore.io.store.location import Location
from packstore.io.store.staging import BESIDE, Staging
from packstore.io.store.storage_errors import as_storage_errors

_CHUNK = 1 << 20
_NUMBER = re.compile(r"([0-9]+)$")


class RejectsFile:
    """Collects lines in a temporary file and publishes it once all records were read.

    An existing file is replaced only then, and stays if the job ends before. Without a `url` it
    collects nothing. A context manager.
    """

    def __init__(
        self, url: str | None, storage_options: Mapping[str, Any], inputs: Sequence[Location] = ()
    ) -> None:
        self._place = None if url is None else Location(url, storage_options)
        if self._place is not None:
            taken = {_identity(location) for location in inputs}
            if _identity(self._place) in taken or self._place.is_dir():
                must = "rejects must name a file that is no input and no folder"
                raise ConfigError(sentence(self._place.display, must))
        with as_storage_errors("write", tempfile.gettempdir(), {}):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__

    def add_compressed(self, data: bytes) -> None:
        """Adds lines of :class:`CompressedRejects`."""
        inflate = zlib.decompressobj()
        with as_storage_errors("write", tempfile.gettempdir(), {}):
            while data:
                self._file.write(inflate.decompress(data, _CHUNK))
                data = inflate.unconsumed_tail

    def publish(self) -> None:
        """Moves or uploads the finished file to its URL, in one step."""
        if self._place is None:
            return
        with Staging(self._place, BESIDE) as staging:
            with staging.file() as file:
                self._file.seek(0)
                shutil.copyfileobj(self._file, file)
            staging.store(file.name, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class CompressedRejects:
    """Collects the dropped records of a partition in the worker that packs it."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(1)
        self._parts: list[bytes] = []

    def add(self, samples: Sequence[Sample] | None) -> None:
        """Adds the dropped records of a block."""
        if samples:
            self._parts.append(self._deflate.compress(_lines_of(samples)))

    def finish(self) -> bytes:
        """Returns all lines, for :meth:`RejectsFile.add_compressed`."""
        return b"".join([*self._parts, self._deflate.flush()])


def _lines_of(samples: Iterable[Sample]) -> bytes:
    """Returns a JSON line for each (`place`, `reason` and `detail`), in the order of places."""
    lines = (
        json.dumps({"place": s.where, "reason": s.reason, "detail": s.detail}, ensure_ascii=False)
        for s in sorted(samples, key=_number)
    )
    # A lone surrogate, invalid in UTF-8, becomes its JSON escape.
    return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


def _number(sample: Sample) -> int:
    """Returns the line, row or item of a record; 0 if its place has none."""
    match = _NUMBER.search(sample.where)
    return int(match[1]) if match else 0


def _identity(location: Location) -> str:
    path = location.local_path
    return location.url if path is None else os.path.realpath(path)
