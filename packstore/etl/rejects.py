"""Writes the file of dropped records: a JSON line for each, in input order."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from packstore.errors import ConfigError, sentence
from packstore.io.store.location import Location
from packstore.io.store.staging import BESIDE, Staging
from packstore.io.store.storage_errors import as_storage_errors
from packstore.tokenizer.tally import Sample


class RejectsFile:
    """Collects lines in a temporary file, which replaces that at `url`, if any, once
    all records are read. A context manager.
    """

    def __init__(
        self,
        url: str | None,
        storage_options: Mapping[str, Any],
        inputs: Sequence[Location] = (),
    ) -> None:
        self._place = None if url is None else Location(url, storage_options)
        if self._place is not None:
            taken = {identity(location) for location in inputs}
            if identity(self._place) in taken or self._place.is_dir():
                rule = "rejects must name a file that is no input and no folder"
                raise ConfigError(sentence(self._place.display, rule))
        with as_storage_errors("write", tempfile.gettempdir(), {}):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__

    def add_compressed(self, data: bytes) -> None:
        """Adds the lines of some blocks, as :func:`compressed` returns them, joined."""
        folder = tempfile.gettempdir()
        with (
            as_storage_errors("write", folder, {}),
            gzip.open(io.BytesIO(data)) as lines,
        ):
            shutil.copyfileobj(lines, self._file)

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


def compressed(samples: Iterable[Sample]) -> bytes:
    """Returns a JSON line for each (`place`, `reason`, `detail`), in the order of
    places.
    """
    lines = (
        json.dumps(
            {"place": s.where, "reason": s.reason, "detail": s.detail},
            ensure_ascii=False,
        )
        for s in sorted(samples, key=_ordinal)
    )
    # A lone surrogate, invalid in UTF-8, becomes its JSON escape.
    text = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
    return gzip.compress(text, 1)


def _ordinal(sample: Sample) -> int:
    """Returns the line, row or item of a record; 0 if its place has none."""
    match = re.search(r"([0-9]+)$", sample.where)
    return int(match[1]) if match else 0


def identity(location: Location) -> str:
    """Returns what two names of one place have in common."""
    path = location.local_path
    return location.url if path is None else os.path.realpath(path)
