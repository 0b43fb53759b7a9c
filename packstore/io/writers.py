"""Markers of the jobs that write to a place: they warn people early, and nothing rests on them.

A job puts ``_packstore/writers/<random>.json`` when it begins, and removes it however it ends.
Which of several jobs wins is decided by the number of the manifest alone
(:mod:`packstore.io.commit`), so a store may refuse a marker, and one may be wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import orjson

from packstore.errors import PackstoreError, quote
from packstore.io.commit import FOLDER
from packstore.io.process import Process, this_process
from packstore.io.storage import Location
from packstore.io.upkeep import list_folder

log = logging.getLogger("packstore")

WRITERS = f"{FOLDER}/writers"

YOUNG_SECONDS = 3600.0
"""The job of an older marker has ended, unless it is seen to run."""


class Writer(NamedTuple):
    """A job that writes to a place, or may do so."""

    path: str
    call: str
    process: Process

    @property
    def text(self) -> str:
        """For people."""
        where = "this machine" if self.process.is_of_this_machine else "another machine"
        return f"{quote(self.call, 16)}, process {self.process.pid} of {where}"


@contextlib.contextmanager
def marked(location: Location, call: str) -> Iterator[str]:
    """A context with a marker of this job, whose path it gives; warns of other jobs.

    Args:
        location: the dataset.
        call: what the job does, such as ``pack``.

    Raises:
        StorageError: nothing can be written there, not only no marker.
    """
    path = f"{WRITERS}/{uuid.uuid4().hex}.json"
    try:
        location.create_bytes(path, orjson.dumps({"call": call, **this_process()._asdict()}))
    except PackstoreError as error:
        log.debug("no marker: %s", error)
        _require_writable(location)
    try:
        for other in writers(location, besides=path)[:1]:
            log.warning(
                "%s: another job may be writing here (%s); the one that commits last will be "
                "refused",
                *(location.display, other.text),
            )
        yield path
    finally:
        with contextlib.suppress(PackstoreError):
            location.remove(path)
        if location.local_path is not None:
            with contextlib.suppress(OSError):  # another job's marker is in it
                os.rmdir(os.path.join(location.local_path, WRITERS))


def _require_writable(location: Location) -> None:
    """Tells now what the job would find out when it has read and tokenized everything."""
    path = f"{FOLDER}/.packstore-{uuid.uuid4().hex}"
    location.create_bytes(path, b"")
    location.remove(path)


def writers(location: Location, besides: str = "") -> list[Writer]:
    """The jobs that may be writing there now: seen to run, or of a young marker.

    Args:
        location: the dataset.
        besides: path of a marker that does not count.
    """
    found = []
    with contextlib.suppress(PackstoreError):
        for file in list_folder(location, WRITERS):
            if file.path == besides or not file.path.endswith(".json"):
                continue
            writer = _read(location, file.path)
            if writer is None:
                continue
            young = file.age is not None and file.age < YOUNG_SECONDS
            if writer.process.lives or (young and not writer.process.is_of_this_machine):
                found.append(writer)
    return found


def _read(location: Location, path: str) -> Writer | None:
    """None if its job has just ended; one that cannot be read may be of any job."""
    try:
        told = orjson.loads(location.read_bytes(path))
        process = Process(str(told["machine"]), int(told["pid"]), str(told["started"]))
        return Writer(path, str(told["call"]), process)
    except PackstoreError:
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return Writer(path, "", Process("", 0, ""))
