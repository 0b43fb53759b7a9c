"""Tells one process of one machine from every other, also after its number was given again.

Works where the kernel has ``/proc``; elsewhere nothing can be told, and ages have to do.
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
    """A process, as another one on its machine finds it again.

    Attributes:
        machine: hash of the ids of machine, boot and process namespace; empty if they are unknown.
        pid: its number.
        started: ticks from the boot to its start.
    """

    machine: str
    pid: int
    started: str

    @property
    def is_of_this_machine(self) -> bool:
        """Whether it runs, or ran, on this machine since it was booted."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def lives(self) -> bool:
        """Whether it still runs; False if it is of another machine, where nothing can be told."""
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
    """The process that asks."""
    return Process(_machine(), os.getpid(), _started(os.getpid()))


@functools.cache
def _machine() -> str:
    try:
        ids = [Path(part).read_text().strip() for part in _PARTS] + [os.readlink(_NAMESPACE)]
    except OSError:
        return ""
    # Only its hash may leave the machine: so asks systemd of those who use the id.
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()[:32]


def _started(pid: int) -> str:
    """Empty if there is no such process, or it has ended and only waits for its parent."""
    with contextlib.suppress(OSError):
        # The name of the program, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return fields[19].decode()
    return ""
