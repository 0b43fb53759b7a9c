"""Markers of running jobs, which only warn early of concurrent writers.

A job writes ``_packstore/writers/<random>.json`` when it starts, and removes it when it ends. The
number of the manifest alone decides which of several jobs commits
(:mod:`packstore.io.manifest.commit`), so a missing or wrong marker does no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from packstore.errors import PackstoreError, quote
from packstore.io.manifest.commit import FOLDER
from packstore.io.store.location import Location
from packstore.io.store.operations import list_folder, remove_empty

log = logging.getLogger("packstore")

WRITERS = f"{FOLDER}/writers"

YOUNG_SECONDS = 3600.0
"""Age from which on the job of a marker counts as ended, unless its process is seen running."""


class Writer(msgspec.Struct):
    """A job that is, or may be, writing to a location.

    Attributes:
        call: kind of the job.
        machine: hash of the boot and the process namespace; empty if unknown (without ``/proc``).
        pid: of its process.
        started: ticks from the boot to the start of the process, as a pid may be reused.
    """

    call: str
    machine: str = ""
    pid: int = 0
    started: str = ""

    @property
    def is_of_this_machine(self) -> bool:
        """True for a process of this machine since its last boot."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def lives(self) -> bool:
        """True if it still runs; False for a process of another machine, which is unknown."""
        return self.is_of_this_machine and self.started == _started(self.pid) != ""

    @property
    def text(self) -> str:
        """Returns a description for messages."""
        where = "this machine" if self.is_of_this_machine else "another machine"
        return f"{quote(self.call, 16)}, process {self.pid} of {where}"


@contextlib.contextmanager
def writer_marker(location: Location, call: str) -> Iterator[None]:
    """Writes a marker for the context; warns of other jobs. Raises if nothing can be written."""
    path = f"{WRITERS}/{uuid.uuid4().hex}.json"
    marker = Writer(call, _machine(), os.getpid(), _started(os.getpid()))
    try:
        location.create_bytes(path, msgspec.json.encode(marker))
    except PackstoreError as error:
        log.debug("no marker: %s", error)
        trial = f"{FOLDER}/.packstore-{uuid.uuid4().hex}"
        location.create_bytes(trial, b"")  # raises now, not after tokenizing everything
        location.remove(trial)
    try:
        for other in writers(location, besides=path)[:1]:
            said = "another job may be writing here (%s); the one that commits last will be refused"
            log.warning("%s: " + said, location.display, other.text)
        yield
    finally:
        with contextlib.suppress(PackstoreError):
            location.remove(path)
        remove_empty(location, WRITERS)


def writers(location: Location, besides: str = "") -> list[Writer]:
    """Lists the jobs that run or have a young marker there, but not the one at `besides`."""
    found = []
    with contextlib.suppress(PackstoreError):
        for file in list_folder(location, WRITERS):
            if file.path == besides or not file.path.endswith(".json"):
                continue
            try:
                writer = msgspec.json.decode(location.read_bytes(file.path), type=Writer)
            except msgspec.DecodeError:
                writer = Writer("")  # may be of any job
            except PackstoreError:
                continue  # its job has just ended
            young = file.age is not None and file.age < YOUNG_SECONDS
            if writer.lives or (young and not writer.is_of_this_machine):
                found.append(writer)
    return found


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        # Only a hash of the ids may leave the machine.
        return hashlib.sha256((boot + os.readlink("/proc/self/ns/pid")).encode()).hexdigest()[:32]
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Returns the start of a process in ticks; empty if it does not exist, or is a zombie."""
    with contextlib.suppress(OSError):
        # The name of the program, in parentheses, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return fields[19].decode()
    return ""
