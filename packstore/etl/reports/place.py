"""Tests a location before a job: listing, reading, writing, committing, and speed.

Finds errors that a job would hit after an hour, with small files that are removed
afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packstore.config import CHECK_RETRIES
from packstore.errors import (
    DatasetExistsError,
    IntegrityError,
    PackstoreError,
    message_with_notes,
    sentence,
)
from packstore.io.dataset.dataset import Dataset, open
from packstore.io.manifest.commit import list_versions, require_exclusive
from packstore.io.store.clients import PACKAGES
from packstore.io.store.location import Location
from packstore.io.store.operations import abort_upload, uploads
from packstore.io.store.storage_errors import EXTRAS, as_storage_errors
from packstore.version import VERSION

TRIAL_BYTES = 16 << 20
"""Bytes written and read to measure speed: two parts of an upload, as one is put at
once.
"""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Of records, a `problem` harms training or drops them, a `remark` may be fine; checks
    without a hit are left out. Of a place, a `problem` stops a job, a `remark` was not
    tried.
    """

    check: str
    level: Literal["ok", "remark", "problem"]
    text: str = (
        ""  # what it means or measured; of a place, with the remedy of a problem
    )
    records: int | None = None  # with a hit; None: not of records
    examples: tuple[str, ...] = ()  # places of a few of them

    @property
    def ok(self) -> bool:
        """True if it is no problem."""
        return self.level != "problem"


def check(
    url: str, *, storage_options: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Tests a location as a job would use it: lists, reads, writes, commits, measures
    speed.

        >>> all(finding.ok for finding in packstore.check("s3://bucket/prefs-8k"))
        True

    Args:
        url: a local folder or an fsspec URL: of a dataset, or for a new one. Files that
            are there are not changed; those of the test are removed.
        storage_options: passed to fsspec's filesystem. They override
            :data:`packstore.config.CHECK_RETRIES`.

    Returns:
        The outcome of each test. The text of a problem ends with the remedy.
    """
    return list(try_place(Location(url, {**CHECK_RETRIES, **(storage_options or {})})))


def try_place(location: Location) -> Iterator[Finding]:
    """Yields the findings of :func:`check`, each as soon as it is known."""
    yield Finding("versions", "ok", _versions(location))
    listed = _outcome("list", lambda: _list(location))
    yield listed
    if not listed.ok:
        yield Finding("read", "remark", "what cannot be listed is not tried further")
        return
    yield from _try_to_read(location)
    if location.url.startswith(("http://", "https://")):
        yield Finding("write", "remark", "not tried: this place can only be read")
    else:
        yield from _try_to_write(location)


def _outcome(check: str, action: Callable[[], str]) -> Finding:
    try:
        return Finding(check, "ok", action())
    except PackstoreError as error:
        return Finding(check, "problem", message_with_notes(error))


def _versions(location: Location) -> str:
    releases = [f"packstore {VERSION}", f"Python {platform.python_version()}"]
    scheme = location.url.partition("://")[0]
    client = (
        "huggingface_hub" if scheme == "hf" else PACKAGES.get(EXTRAS.get(scheme, ""))
    )
    for name in ("fsspec", "pyarrow", client):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            releases += [f"{name} {importlib.metadata.version(name)}"] if name else []
    return ", ".join(releases)


def _list(location: Location) -> str:
    times, files = [], 0
    for _ in range(5):
        began = time.perf_counter()
        files = len(location.files())
        times.append(time.perf_counter() - began)
    return (
        f"{files} files directly in it, {statistics.median(times) * 1000:.0f} ms a "
        "request"
    )


def _try_to_read(location: Location) -> Iterator[Finding]:
    try:
        dataset = (
            open(location.url, location.storage_options)
            if list_versions(location)
            else None
        )
    except PackstoreError as error:
        yield Finding("dataset", "problem", message_with_notes(error))
        return
    if dataset is None:
        yield Finding("dataset", "ok", "none here yet")
        return
    shards = len(dataset.manifest.shards)
    yield Finding("dataset", "ok", f"version {dataset.version}, {shards} shards")
    if shards:
        yield _outcome("first shard", lambda: _read_group(dataset, 0))
        yield _outcome(
            "last shard", lambda: _read_group(dataset, len(dataset.row_groups) - 1)
        )


def _read_group(dataset: Dataset, group: int) -> str:
    began = time.perf_counter()
    packs = dataset.read_packs(group)
    ms = (time.perf_counter() - began) * 1000
    return f"a row group of {len(packs)} packs, checksums right, {ms:.0f} ms"


def _try_to_write(location: Location) -> Iterator[Finding]:
    """Tests permissions, conditional puts, speed, and removal, with two files."""
    small = f".packstore-check-{uuid.uuid4().hex}"
    large, created = f"{small}-large", list[str]()
    folder = location.local_path
    while folder and not os.path.exists(folder):
        created.append(folder)
        folder = os.path.dirname(folder)

    def write() -> str:
        location.create_bytes(small, b"first")
        return "allowed"

    def write_again() -> str:
        require_exclusive(location)
        try:
            location.create_bytes(small, b"second")
        except DatasetExistsError:
            return "only one of two writers can win"
        rule = "must refuse to put a file over one that is there (If-None-Match: *)"
        found = "that it replaced it, so two writers could both commit"
        remedy = "Name another store, or a newer release of it"
        raise IntegrityError(sentence(location.display, rule, found, remedy))

    def clean_up() -> str:
        location.remove(small)
        location.remove(large)
        for upload in uploads(location) or ():
            if upload.path == large:
                abort_upload(location, upload)
        return "nothing is left"

    try:
        written = _outcome("write", write)
        yield written
        if written.ok:
            yield _outcome("commit", write_again)
            yield _outcome("speed", lambda: _measure(location, large))
    finally:
        removed = _outcome("clean up", clean_up)
        for folder in created:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    yield removed


def _measure(location: Location, name: str) -> str:
    data = os.urandom(1 << 20) * (TRIAL_BYTES >> 20)
    with tempfile.TemporaryDirectory(dir=location.local_path, prefix=name) as beside:
        path = os.path.join(beside, "trial")
        with as_storage_errors("write", path, {}):
            Path(path).write_bytes(data)
        began = time.perf_counter()
        location.put_file(path, name)
        put = time.perf_counter() - began
    began = time.perf_counter()
    back = location.read_bytes(name)
    got = time.perf_counter() - began
    if back != data:
        rule = f"must give back the {len(data)} bytes that were written"
        remedy = "Do not use it: it damages what it stores"
        raise IntegrityError(
            sentence(location.display, rule, f"{len(back)} others", remedy)
        )
    mb = len(data) / 1e6
    return (
        f"writes {mb / put:.0f} MB/s, reads {mb / got:.0f} MB/s ({mb:.0f} MB in "
        "one "
        "stream)"
    )
