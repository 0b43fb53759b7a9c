"""Tests a location before a job: listing, reading, writing, committing, and speed.

A *location* is a folder or URL for datasets. The tests write two small files there, and
remove them. They find errors that a job would otherwise hit after an hour. The result
of each is a :class:`Finding`; lint has findings about records, too.
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
from functools import partial
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
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.manifest.commit import (
    list_splits,
    newest_version,
    require_exclusive,
)
from packstore.io.store.clients import PACKAGES
from packstore.io.store.location import Location
from packstore.io.store.operations import abort_upload, uploads
from packstore.io.store.storage_errors import EXTRAS, as_storage_errors
from packstore.version import VERSION

TRIAL_BYTES = 16 << 20
"""Bytes written and read to measure speed: enough for an upload in two parts, as
shards are uploaded.
"""

LISTINGS = 5
"""Number of listings that are timed; the median is reported."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, of records or of a location.

    Attributes:
        check: name of the check.
        level: for records, a ``problem`` harms training or drops records, and a
            ``remark`` may be fine; a check that flags no record has no finding. For a
            location, a ``problem`` stops a job, and a ``remark`` was not tried.
        text: meaning of the check, or a measurement; a problem of a location ends with
            the remedy.
        records: number of flagged records; None: the check is not of records.
        examples: places of a few flagged records.
    """

    check: str
    level: Literal["ok", "remark", "problem"]
    text: str = ""
    records: int | None = None
    examples: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if it is no problem."""
        return self.level != "problem"


def check(
    url: str, *, storage_options: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Test a location as a job would use it: list, read, write, commit, measure speed.

        >>> all(finding.ok for finding in packstore.check("s3://bucket/prefs-8k"))
        True

    Args:
        url: a local folder or an fsspec URL: of a dataset, or for a new one. Existing
            files are not changed, and the files of the test are removed.
        storage_options: passed to fsspec's filesystem. They override
            :data:`packstore.config.CHECK_RETRIES`.

    Returns:
        The outcome of each test. The text of a problem ends with the remedy.
    """
    return list(try_place(Location(url, {**CHECK_RETRIES, **(storage_options or {})})))


def try_place(location: Location) -> Iterator[Finding]:
    """Yield the findings of :func:`check`, each as soon as it is known."""
    yield Finding("versions", "ok", _describe_versions(location))
    listing = _outcome_of("list", partial(_time_listing, location))
    yield listing
    if not listing.ok:
        yield Finding("read", "remark", "what cannot be listed is not tried further")
        return
    yield from _try_to_read(location)
    if location.url.startswith(("http://", "https://")):
        yield Finding("write", "remark", "not tried: this place can only be read")
    else:
        yield from _try_to_write(location)


def _outcome_of(check: str, action: Callable[[], str]) -> Finding:
    """Return the text that `action` returns, or the problem that it meets."""
    try:
        return Finding(check, "ok", action())
    except PackstoreError as error:
        return Finding(check, "problem", message_with_notes(error))


def _describe_versions(location: Location) -> str:
    """Return the versions of packstore, Python, and the libraries of the store."""
    scheme = location.url.partition("://")[0]
    packages = ["fsspec", "pyarrow"]
    if scheme == "hf":
        packages.append("huggingface_hub")
    elif EXTRAS.get(scheme) in PACKAGES:
        packages.append(PACKAGES[EXTRAS[scheme]])

    releases = [f"packstore {VERSION}", f"Python {platform.python_version()}"]
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            releases.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(releases)


def _time_listing(location: Location) -> str:
    """Time a listing of the location, without its folders."""
    seconds = []
    num_files = 0
    for _ in range(LISTINGS):
        start = time.perf_counter()
        num_files = len(location.files())
        seconds.append(time.perf_counter() - start)
    milliseconds = 1000 * statistics.median(seconds)
    return f"{num_files} files directly in it, {milliseconds:.0f} ms a request"


def _try_to_read(location: Location) -> Iterator[Finding]:
    """Yield findings about the dataset at the location, or its splits, if any."""
    try:
        places = [location] if newest_version(location) else list_splits(location)
    except PackstoreError as error:
        yield Finding("dataset", "problem", message_with_notes(error))
        return
    if not places:
        yield Finding("dataset", "ok", "none here yet")
    for place in places:
        yield from _try_to_read_dataset(place, is_split=place is not location)


def _try_to_read_dataset(location: Location, is_split: bool) -> Iterator[Finding]:
    """Yield findings about a dataset and its first and last shard."""
    try:
        dataset = open_dataset(location.url, location.storage_options)
    except PackstoreError as error:
        yield Finding("dataset", "problem", message_with_notes(error))
        return
    num_shards = len(dataset.manifest.shards)
    text = f"version {dataset.version}, {num_shards} shards"
    if is_split:
        text += f", of {dataset.url}"
    yield Finding("dataset", "ok", text)
    if num_shards:
        last_group = len(dataset.row_groups) - 1
        yield _outcome_of("first shard", partial(_read_row_group, dataset, 0))
        yield _outcome_of("last shard", partial(_read_row_group, dataset, last_group))


def _read_row_group(dataset: Dataset, group: int) -> str:
    """Time reading a row group; raises if its checksums are wrong."""
    start = time.perf_counter()
    packs = dataset.read_packs(group)
    milliseconds = 1000 * (time.perf_counter() - start)
    return f"a row group of {len(packs)} packs, checksums right, {milliseconds:.0f} ms"


def _try_to_write(location: Location) -> Iterator[Finding]:
    """Test permissions, conditional puts, speed, and removal, with two files.

    A conditional put writes a file only if there is none of its name; a commit needs
    it.
    """
    small_file = f".packstore-check-{uuid.uuid4().hex}"
    large_file = f"{small_file}-large"
    new_folders = _absent_folders(location.local_path)
    try:
        writing = _outcome_of("write", partial(_write, location, small_file))
        yield writing
        if writing.ok:
            yield _outcome_of("commit", partial(_write_again, location, small_file))
            yield _outcome_of("speed", partial(_measure_speed, location, large_file))
    finally:
        clean_up = partial(_clean_up, location, small_file, large_file)
        removal = _outcome_of("clean up", clean_up)
        for folder in new_folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    yield removal


def _absent_folders(path: str | None) -> list[str]:
    """Return the folders that writing a file into `path` creates, innermost first.

    They are removed after the test.
    """
    folders = []
    while path and not os.path.exists(path):
        folders.append(path)
        path = os.path.dirname(path)
    return folders


def _write(location: Location, name: str) -> str:
    """Create a file."""
    location.create_bytes(name, b"first")
    return "allowed"


def _write_again(location: Location, name: str) -> str:
    """Check that the store refuses to replace the file that :func:`_write` created.

    Raises:
        IntegrityError: the store replaced it.
    """
    require_exclusive(location)
    try:
        location.create_bytes(name, b"second")
    except DatasetExistsError:
        return "only one of two writers can win"
    raise IntegrityError(
        sentence(
            where=location.display,
            rule="must refuse to put a file over one that is there (If-None-Match: *)",
            found="that it replaced it, so two writers could both commit",
            remedy="Name another store, or a newer release of it",
        )
    )


def _measure_speed(location: Location, name: str) -> str:
    """Write and read a file of :data:`TRIAL_BYTES`.

    Raises:
        IntegrityError: other bytes were read.
    """
    data = os.urandom(1 << 20) * (TRIAL_BYTES >> 20)  # copies of 1 MB, quick to make
    with tempfile.TemporaryDirectory(dir=location.local_path, prefix=name) as folder:
        path = os.path.join(folder, "trial")
        with as_storage_errors("write", path, {}):
            Path(path).write_bytes(data)
        start = time.perf_counter()
        location.put_file(path, name)
        write_seconds = time.perf_counter() - start

    start = time.perf_counter()
    data_read = location.read_bytes(name)
    read_seconds = time.perf_counter() - start
    if data_read != data:
        raise IntegrityError(
            sentence(
                where=location.display,
                rule=f"must give back the {len(data)} bytes that were written",
                found=f"{len(data_read)} others",
                remedy="Do not use it: it damages what it stores",
            )
        )
    megabytes = len(data) / 1e6
    return (
        f"writes {megabytes / write_seconds:.0f} MB/s, "
        f"reads {megabytes / read_seconds:.0f} MB/s ({megabytes:.0f} MB in one stream)"
    )


def _clean_up(location: Location, small_file: str, large_file: str) -> str:
    """Remove the files of the test, and an upload that was not completed."""
    location.remove(small_file)
    location.remove(large_file)
    for upload in uploads(location) or ():
        if upload.path == large_file:
            abort_upload(location, upload)
    return "nothing is left"
