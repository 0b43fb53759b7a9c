"""Limits of time and memory to render, as chat templates are untrusted code.

Nothing in Python interrupts a call like ``text.rfind(…)`` or bounds its memory; the kernel does, by
ending the process. So dialogues are rendered in worker processes only, whose end fails the job.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from packstore.errors import TokenizerError, sentence

SECONDS = 20.0
"""Processor time to render a record, which mostly takes a millisecond; beyond it the job fails."""
MEMORY = 4 << 30
"""Bytes that a process may map while it renders, beside what it has; beyond them the job fails."""

SIGNAL: int | None = getattr(signal, "SIGVTALRM", None)
"""What ends a process that renders for too long; None: the system has no such limit."""


class NeedsWorkerProcess(Exception):
    """A record is to be rendered, or a partition made, in a process that may not be ended."""


_seconds = 0.0  # of a record in this process, 0: it may not render
_memory = 0


def allow_rendering(seconds: float, memory: int) -> None:
    """Lets this process render from now on, and be ended if a record needs more."""
    global _seconds, _memory
    _seconds, _memory = seconds, memory


def require_worker() -> None:
    """Raises :class:`NeedsWorkerProcess` in a process that may not be ended."""
    if not _seconds:
        raise NeedsWorkerProcess


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limits what runs inside; :func:`restart_clock` begins the time of each record.

    Raises:
        TokenizerError: there was not enough memory.
    """
    require_worker()
    try:
        with _memory_limit(_memory):
            restart_clock()
            yield
    except MemoryError:
        rule = f"it must render a record in {_memory >> 20} MiB of memory"
        raise TokenizerError(sentence("chat template", rule, "no more of it")) from None
    finally:
        _end_after(0)


def restart_clock() -> None:
    """Gives the record that is rendered next its whole time."""
    _end_after(_seconds)


def too_long() -> TokenizerError:
    """The error of a process that :data:`SIGNAL` ended."""
    rule = f"it must render a record within {SECONDS:g} s of processor time"
    return TokenizerError(sentence("chat template", rule, "no end", "Correct its loops"))


def _end_after(seconds: float) -> None:
    """Lets the kernel end this process after so much more processor time; 0: not."""
    if SIGNAL is not None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


@contextlib.contextmanager
def _memory_limit(memory: int) -> Iterator[None]:
    """Limits the memory that this process maps, where the system can."""
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + memory
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [most, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
