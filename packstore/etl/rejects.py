"""Writes the file of dropped records (setting `rejects`): a JSON line for each.

Lines are in the order of the input. They are compressed block by block, so that the
notes of partitions can hold them.
"""

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
    """Collects lines in a temporary file, and publishes them once all records are read.

    A context manager, which removes the temporary file.

    Args:
        url: file to replace; None: nothing is published.
        storage_options: passed to its fsspec filesystem.
        inputs: files of the job, none of which may be replaced.

    Raises:
        ConfigError: `url` is an input or a folder.
    """

    def __init__(
        self,
        url: str | None,
        storage_options: Mapping[str, Any],
        inputs: Sequence[Location] = (),
    ) -> None:
        self._target = None
        if url is not None:
            self._target = Location(url, storage_options)
            input_places = {real_place(location) for location in inputs}
            if real_place(self._target) in input_places or self._target.is_dir():
                rule = "rejects must name a file that is no input and no folder"
                raise ConfigError(sentence(self._target.display, rule))
        with as_storage_errors("write", tempfile.gettempdir(), {}):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__

    def add_compressed(self, data: bytes) -> None:
        """Add the lines of some blocks, as :func:`compress_rejects` returns them,
        joined.
        """
        folder = tempfile.gettempdir()
        with (
            as_storage_errors("write", folder, {}),
            gzip.open(io.BytesIO(data)) as lines,
        ):
            shutil.copyfileobj(lines, self._file)

    def publish(self) -> None:
        """Move or upload the finished file to its URL, in one step."""
        if self._target is None:
            return
        with Staging(self._target, BESIDE) as staging:
            with staging.file() as file:
                self._file.seek(0)
                shutil.copyfileobj(self._file, file)
            staging.store(file.name, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def compress_rejects(samples: Iterable[Sample]) -> bytes:
    """Return a JSON line for each dropped record, in input order, compressed by gzip.

    For example ``{"place": "prefs.jsonl, line 7", "reason": "overlong", "detail":
    "9000 tokens"}``.

    Args:
        samples: the dropped records of one block.
    """
    lines = []
    for sample in sorted(samples, key=_ordinal):
        reject = {
            "place": sample.where,
            "reason": sample.reason,
            "detail": sample.detail,
        }
        lines.append(json.dumps(reject, ensure_ascii=False) + "\n")
    # A lone surrogate, invalid in UTF-8, becomes its JSON escape.
    text = "".join(lines).encode(errors="backslashreplace")
    return gzip.compress(text, compresslevel=1)


def _ordinal(sample: Sample) -> int:
    """Return the number of a record's line, row or item; 0 if its place has none."""
    match = re.search(r"([0-9]+)$", sample.where)
    return int(match[1]) if match else 0


def real_place(location: Location) -> str:
    """Return the same text for all names of one place, such as links to a folder."""
    path = location.local_path
    return location.url if path is None else os.path.realpath(path)
