"""Writes the file of dropped records: a JSON line for each, in input order."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO, Self

from packstore.errors import ConfigError, sentence
from packstore.format.arrays import Sample
from packstore.io.store import temporary_folders as temporary
from packstore.io.store.location import Location
from packstore.io.store.storage_errors import as_storage_errors

_CHUNK = 1 << 20
_NUMBER = re.compile(r"([0-9]+)$")


class RejectsFile:
    """Collects lines in a local file and publishes it once all records were read.

    An existing file is replaced only then, and stays if the job ends before. A context manager.

    Args:
        url: local path or any fsspec URL; None: collect nothing.
        storage_options: options of its fsspec filesystem.
        spill_dir: local folder to collect in; None: the system's.
        inputs: input files of the job; `url` must not be one of them.

    Raises:
        ConfigError: `url` is a folder, or one of `inputs`.
    """

    def __init__(
        self,
        url: str | None,
        storage_options: Mapping[str, Any],
        spill_dir: str | None,
        inputs: Sequence[Location] = (),
    ) -> None:
        self._place = None if url is None else Location(url, storage_options)
        self._folder = ""
        self._file: BinaryIO | None = None
        if self._place is None:
            return
        taken = {_identity(location) for location in inputs}
        if _identity(self._place) in taken or self._place.is_dir():
            must = "rejects must name a file that is no input and no folder"
            raise ConfigError(sentence(self._place.display, must))
        with as_storage_errors("write", spill_dir or "temporary files", {}):
            self._folder = temporary.make(temporary.STAGING, spill_dir)
            self._file = open(os.path.join(self._folder, "rejects"), "w+b")  # noqa: SIM115

    def add_compressed(self, data: bytes) -> None:
        """Adds lines of :class:`CompressedRejects`."""
        inflate = zlib.decompressobj()
        self._write(inflate.decompress(data, _CHUNK))
        while inflate.unconsumed_tail:
            self._write(inflate.decompress(inflate.unconsumed_tail, _CHUNK))

    def publish(self) -> None:
        """Moves or uploads the finished file to its URL, in one step.

        Raises:
            StorageError: no space, no permission, or the store refuses.
        """
        if self._place is None or self._file is None:
            return
        with as_storage_errors("write", self._file.name, {}):
            self._file.flush()
        path = self._place.local_path
        if path is None:
            self._place.put_file(self._file.name, "")
            return
        beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.partial")
        try:
            with as_storage_errors("write", path, {}):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                shutil.copyfile(self._file.name, beside)
                with open(beside, "rb+") as file:
                    os.fsync(file.fileno())
            self._place.put_file(beside, "")
        finally:
            with contextlib.suppress(OSError):
                os.unlink(beside)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._folder:
            temporary.remove(self._folder)

    def _write(self, data: bytes) -> None:
        if self._file is not None and data:
            with as_storage_errors("write", self._file.name, {}):
                self._file.write(data)


class CompressedRejects:
    """Collects the dropped records of a partition in the worker that packs it."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(1)
        self._parts: list[bytes] = []

    def add(self, samples: Sequence[Sample] | None) -> None:
        """Adds the dropped records of a block."""
        if samples:
            self._parts.append(self._deflate.compress(lines_of(samples)))

    def finish(self) -> bytes:
        """Returns all lines, for :meth:`RejectsFile.add_compressed`."""
        return b"".join([*self._parts, self._deflate.flush()])


def lines_of(samples: Iterable[Sample]) -> bytes:
    """Returns a JSON line for each (`place`, `reason` and `detail`), in the order of places."""
    lines = (
        json.dumps({"place": s.where, "reason": s.reason, "detail": s.detail}, ensure_ascii=False)
        for s in sorted(samples, key=_number)
    )
    # A lone surrogate, invalid in UTF-8, becomes its JSON escape.
    return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


def _number(sample: Sample) -> int:
    """Returns the line, row or item of a record; 0 if its place has none."""
    found = _NUMBER.search(sample.where)
    return int(found[1]) if found else 0


def _identity(location: Location) -> str:
    path = location.local_path
    return location.url if path is None else os.path.realpath(path)
