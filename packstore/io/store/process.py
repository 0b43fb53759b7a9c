"""Identifies a process across machines, even after its pid was reused.

Needs ``/proc``; without it processes are unknown, and only the age of their files counts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

_PARTS = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/pid"


class Process(NamedTuple):
    """A process: `machine` is a hash of the ids of machine, boot and process namespace, empty if
    unknown; `started` is in ticks since the boot.
    """

    machine: str
    pid: int
    started: str

    @property
    def is_of_this_machine(self) -> bool:
        """True for a process of this machine since its last boot."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def lives(self) -> bool:
        """True if it still runs; False for a process of another machine, which is unknown."""
        if not self.is_of_this_machine or self.pid < 1:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            return True
        return _started(self.pid) == self.started


def this_process() -> Process:
    """Returns the identity of this process."""
    return Process(_machine(), os.getpid(), _started(os.getpid()))


@functools.cache
def _machine() -> str:
    try:
        ids = [Path(part).read_text().strip() for part in _PARTS] + [os.readlink(_NAMESPACE)]
    except OSError:
        return ""
    # machine-id(5) of systemd: only a hash of the id may leave the machine.
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()[:32]


def _started(pid: int) -> str:
    """Returns the start of a process in ticks; empty if it does not exist, or is a zombie."""
    with contextlib.suppress(OSError):
        # The name of the program, in parentheses, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return fields[19].decode()
    return ""
