"""Renders dialogues in a process of its own, as chat templates are untrusted code.

Nothing in Python interrupts a call like ``text.rfind(…)`` or bounds its memory; the kernel does, by
ending the process. One such process serves this one, for all jobs, a block of records at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from packstore.config import TokenizeConfig
from packstore.errors import PackstoreError, TokenizerError, sentence
from packstore.tokenizer.chat.template import Message
from packstore.tokenizer.records.sequences import Draft
from packstore.tokenizer.records.shapes import Parsed
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.rendered import draft_record
from packstore.tokenizer.tokenizer import Tokenizer

SECONDS = 20.0
"""Processor time to render a record, which mostly takes a millisecond; beyond it the job fails."""
MEMORY = 4 << 30
"""Bytes that the process may map beside what it has at its start; beyond them the job fails."""

_ENDED = (EOFError, OSError, pickle.UnpicklingError)
"""What reading from a process raises that has ended, perhaps amid an answer."""

Drafted = tuple[list[Draft], list[str]]
"""The texts of a record's sequences, and events to note."""


class Renderer:
    """Drafts dialogues with a tokenizer's chat template. Picklable."""

    def __init__(self, tokenizer: Tokenizer, config: TokenizeConfig) -> None:
        self._stage = pickle.dumps((tokenizer.without_engine(), config))

    def __call__(self, records: Sequence[Parsed]) -> list[Drafted | Refused]:
        """Returns what :func:`draft_record` returns or refuses, of each record.

        Raises:
            TokenizerError: the template needs too much time or memory, or is none.
        """
        global _process
        written = [(x.prompt, x.responses, x.tools, x.variables) for x in records]
        try:
            block = marshal.dumps(written)  # three times as fast as pickle
        except ValueError:  # tables may hold any type
            block = marshal.dumps([_plain(record) for record in written])
        with _lock:
            _process = _process or _Process()
            try:
                drafted: list[Any] = _process.ask(self._stage, block)
            except BaseException:  # also Ctrl-C, after which its answer is not awaited
                _process.close()
                _process = None
                raise
        return [
            Refused(*one) if len(one) == 3 else ([Draft(*draft) for draft in one[0]], one[1])
            for one in drafted
        ]


def render(messages: list[Message], tokenizer: Tokenizer, config: TokenizeConfig) -> str:
    """Returns the text of a dialogue, or raises :class:`Refused`."""
    talk = Parsed(prompt=[], responses=[messages], rewards=[1.0], fields=())
    (drafted,) = Renderer(tokenizer, config)([talk])
    if isinstance(drafted, Refused):
        raise drafted
    return drafted[0][0].text


def _plain(record: tuple[Any, ...]) -> tuple[Any, ...]:
    """The record, or the parts of its refusal."""
    try:
        marshal.dumps(record)
    except ValueError:
        return Refused("wrong_type", "tools and tool calls must be JSON values").args
    return record


class _Process:
    """The process, from the side of its user."""

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from packstore.tokenizer import renderer; "
            f"renderer.serve({SECONDS}, {MEMORY})"
        )
        # In a session of its own, as Ctrl-C is for this process, whose end ends the other.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._stage = b""

    def ask(self, stage: bytes, block: bytes) -> list[Any]:
        """Returns the answer for a block, or raises the error that it is."""
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            pickle.dump((b"" if stage is self._stage else stage, block), pipe)
            pipe.flush()
            self._stage = stage
            answer = pickle.load(answers)
        except _ENDED as error:
            raise self.death() from error
        if isinstance(answer, Exception):
            raise answer
        drafted: list[Any] = marshal.loads(answer)
        return drafted

    def death(self) -> PackstoreError:
        """The error of a process that ended."""
        code = self._process.wait()
        if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
            must = f"it must render a record within {SECONDS:g} s of processor time"
            return TokenizerError(sentence("chat template", must, "no end", "Correct its loops"))
        return PackstoreError(
            f"the process that renders chats died (out of memory, or killed; exit code {code}); "
            "nothing was written. Run again with fewer workers, or look at the chat template."
        )

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        with self._process:
            pass


_process: _Process | None = None
_lock = threading.Lock()


@atexit.register
def _close() -> None:
    if _process is not None:
        _process.close()


def _forget() -> None:
    """In a fork: the process serves the parent."""
    global _process, _lock
    _process, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def serve(seconds: float, memory: int) -> None:
    """Runs in the process: drafts blocks of records until the pipe is closed."""
    answers, stage = os.fdopen(os.dup(1), "wb"), None
    os.dup2(2, 1)  # what prints must not print among the answers
    _limit(memory)
    with contextlib.suppress(*_ENDED):
        while True:
            written, block = pickle.load(sys.stdin.buffer)
            answer: bytes | Exception
            try:
                stage = pickle.loads(written) if written else stage
                drafted, armed = [], 0.0
                for record in marshal.loads(block):
                    if time.monotonic() - armed > seconds / 20:  # a call costs as much as a loop
                        armed = time.monotonic()
                        _end_after(seconds)
                    drafted.append(_drafted(record, stage))
                _end_after(0)
                answer = marshal.dumps(drafted)
            except MemoryError:
                must = f"it must render a record in {memory >> 20} MiB of memory"
                answer = TokenizerError(sentence("chat template", must, "no more of it"))
            except Exception as error:
                answer = error
            answers.write(pickle.dumps(answer))
            answers.flush()


def _drafted(record: Any, stage: Any) -> tuple[Any, ...]:
    """The plain values of the drafts and events of a record, or of its refusal."""
    if len(record) == 3:
        return tuple(record)
    prompt, responses, tools, variables = record
    parsed = Parsed(
        prompt=prompt, responses=responses, tools=tools, variables=variables, rewards=[], fields=()
    )
    try:
        drafts, events = draft_record(parsed, *stage)
        return [tuple(draft) for draft in drafts], events
    except Refused as refused:
        return refused.args


def _end_after(seconds: float) -> None:
    """Lets the kernel end this process after so much more processor time; 0: not."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit(memory: int) -> None:
    """Limits the memory of this process, where the system can."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + memory
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (least, hard))
