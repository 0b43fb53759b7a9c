"""The right to write to a place: of several jobs at a time one has it, the others are told.

A lease is a small file ``_packstore/lease-000001.json`` that is created only if its name is free;
the highest number holds. A job that finds one looks whether its holder lives, and takes the next
number if not:

- The holder locks a file of a random name, which the system unlocks when it ends. Who finds the
  file on the same machine knows at once. It lies in a local dataset, else in the folder for
  temporary files.
- Who is on another machine watches whether the holder still writes its heartbeat.

It saves work and keeps jobs from each other's files. What decides is the manifest's number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from typing import Any

import orjson

from packstore.errors import DatasetBusyError, DatasetExistsError, StorageError, sentence
from packstore.io.commit import FOLDER
from packstore.io.faults import guarded
from packstore.io.owned import hold, state
from packstore.io.storage import Location
from packstore.io.upkeep import Found, make_folder, replace_bytes

log = logging.getLogger("packstore")

HEARTBEAT_SECONDS = 10.0
PATIENCE_SECONDS = 35.0
"""A holder whose lock is not here, and that writes no heartbeat for so long, is dead."""

LOCK = ".packstore-lock-"
"""Begins the names of the lock files."""

_ATTEMPTS = 20
_NAME = re.compile(r"lease-([0-9]{6,})\.json")


class Lease:
    """Held from :meth:`acquire` to :meth:`release`.

    Attributes:
        forgotten: the leases of dead holders that were removed.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self.forgotten: list[Found] = []
        self._token, self._number, self._beat = uuid.uuid4().hex, 0, 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = _lock_path(location, self._token)
        with guarded("write", os.path.dirname(self._lock), {}):
            if location.local_path is not None:
                make_folder(os.path.dirname(self._lock))
            self._handle = hold(self._lock)

    @classmethod
    def acquire(cls, location: Location) -> Lease:
        """Takes the right to write; local folders must be there.

        Raises:
            DatasetBusyError: another job has it.
            StorageError: the store refuses.
        """
        lease = cls(location)
        try:
            lease._take()
        except BaseException:
            lease.release()
            raise
        return lease

    def confirm(self) -> None:
        """Raises :class:`DatasetBusyError` if another job took this one for dead."""
        found = _numbers(self._location)
        if found and found[-1] != self._number:
            raise _busy(self._location, _read(self._location, found[-1]) or {})

    def release(self) -> None:
        """Gives it back; never fails."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(HEARTBEAT_SECONDS)
        if self._number:
            with contextlib.suppress(StorageError):
                self._location.remove(_path(self._number))
            self._number = 0
        with contextlib.suppress(OSError):
            os.unlink(self._lock)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _take(self) -> None:
        for _ in range(_ATTEMPTS):
            below = _numbers(self._location)
            other = _read(self._location, below[-1]) if below else None
            if other is not None and _lives(self._location, below[-1], other):
                raise _busy(self._location, other)
            number = below[-1] + 1 if below else 1
            if not self._create(number):
                continue
            self._number = number
            if _numbers(self._location)[-1:] != [number]:  # a slower one chose a name set free
                self._location.remove(_path(number))
                self._number = 0
                continue
            for old in below:
                self.forgotten.append(_forget(self._location, old))
            self._thread = threading.Thread(target=self._keep_alive, daemon=True)
            self._thread.start()
            return
        raise _busy(self._location, {})

    def _create(self, number: int) -> bool:
        try:
            self._location.create_bytes(_path(number), self._text())
        except DatasetExistsError:
            # A put that was sent twice is refused the second time.
            other = _read(self._location, number)
            return other is not None and other.get("token") == self._token
        return True

    def _text(self) -> bytes:
        lock = "" if self._handle is None else os.path.basename(self._lock)
        about = {"token": self._token, "host": socket.gethostname(), "pid": os.getpid()}
        return orjson.dumps({**about, "lock": lock, "beat": self._beat})

    def _keep_alive(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._beat += 1
            try:
                replace_bytes(self._location, _path(self._number), self._text())
            except StorageError as error:
                log.debug("no heartbeat: %s", error)


def holder(location: Location) -> str | None:
    """Who writes there now, for people; None if nobody does, as far as can be told at once."""
    found = _numbers(location)
    about = _read(location, found[-1]) if found else None
    if about is None or _state(location, about) == "free":
        return None
    return _name(about)


def working_here(location: Location) -> str | None:
    """Who writes there now and surely lives, as its lock is held on this machine; for people."""
    found = _numbers(location)
    about = _read(location, found[-1]) if found else None
    return _name(about) if about and _state(location, about) == "held" else None


def _lives(location: Location, number: int, about: dict[str, Any]) -> bool:
    """Whether the holder of a lease does, by its lock, else by its heartbeat."""
    found = _state(location, about)
    if found != "missing":
        return found == "held"
    log.info(
        "%s: %s may still write there; watching for %.0f s",
        *(location.display, _name(about), PATIENCE_SECONDS),
    )
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        time.sleep(min(1.0, PATIENCE_SECONDS / 5))
        now = _read(location, number)
        if now is None:
            return False
        if now != about:
            return True
    return False


def _state(location: Location, about: dict[str, Any]) -> str:
    """``held``, ``free``, or ``missing`` where the lock cannot tell."""
    token = str(about.get("token"))
    if not about.get("lock") or not re.fullmatch(r"[0-9a-f]{32}", token):
        return "missing"
    found = state(_lock_path(location, token))
    if found == "held" or location.local_path is None:
        return found
    # On a disk that machines share, a lock may be known to its own machine alone.
    return "free" if about.get("host") == socket.gethostname() else "missing"


def _forget(location: Location, number: int) -> Found:
    """Removes the lease of a dead holder, and its lock."""
    about = _read(location, number) or {}
    token = str(about.get("token"))
    if re.fullmatch(r"[0-9a-f]{32}", token):
        with contextlib.suppress(OSError):
            os.unlink(_lock_path(location, token))
    location.remove(_path(number))
    return Found(_path(number), len(orjson.dumps(about)), None)


def _lock_path(location: Location, token: str) -> str:
    root = location.local_path
    folder = tempfile.gettempdir() if root is None else os.path.join(root, FOLDER)
    return os.path.join(folder, LOCK + token)


def _path(number: int) -> str:
    return f"{FOLDER}/lease-{number:06d}.json"


def _numbers(location: Location) -> list[int]:
    matches = (_NAME.fullmatch(entry.name) for entry in location.files(FOLDER))
    return sorted(int(m[1]) for m in matches if m)


def _read(location: Location, number: int) -> dict[str, Any] | None:
    """What a lease says, {} if that is not JSON; None if it is gone."""
    try:
        value = orjson.loads(location.read_bytes(_path(number)))
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _name(about: dict[str, Any]) -> str:
    return f"process {about.get('pid', '?')} on {about.get('host', 'an unknown host')}"


def _busy(location: Location, about: dict[str, Any]) -> DatasetBusyError:
    return DatasetBusyError(
        sentence(
            location.display,
            "only one job may write there at a time",
            f"that {_name(about)} is at work" if about else "others at work",
            "Wait for it to end, or name another place",
        )
    )
