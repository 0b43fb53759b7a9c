"""A worker process, which applies work to items: the side that it works for, and its own.

Questions and answers are pickles, in pipes of its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

from packstore.errors import PackstoreError
from packstore.tokenizer.chat import limits

ITEM_SECONDS = 900
"""Processor time of a worker process for an item, which mostly takes less than a second; beyond it
the job fails."""

ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
}
"""Environment of a worker process: there is one per core, so threads inside would only contend."""

_ENDED = (EOFError, OSError, pickle.UnpicklingError)
"""What a pipe raises whose other process has ended, perhaps amid an answer."""


class WorkerProcess:
    """A worker process: a function of an item, once it has loaded the work."""

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from packstore.etl.engines import _worker; "
            f"_worker.serve({limits.SECONDS}, {limits.MEMORY})"
        )
        self._error: BaseException | None = None
        self.is_idle = False
        try:
            # Not by multiprocessing: its forks break numba's OpenMP layer, s3fs and obstore, and
            # what it spawns runs a user's script again. Ctrl-C is for this process only.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,
            )
        except OSError as error:
            raise PackstoreError(f"a worker process cannot be started: {error}") from error

    @property
    def is_alive(self) -> bool:
        """True unless the process has ended."""
        return self._process.poll() is None

    def load(self, work: Callable[[Any], Any] | None) -> None:
        """Sends the work, and waits until it is loaded; an error is raised for the next item."""
        self._error = None
        try:
            self._answer(work, True)
        except BaseException as error:
            self._error = error

    def __call__(self, item: Any) -> Any:
        """Returns the result of an item."""
        if self._error is not None:
            raise self._error
        return self._answer(item, False)

    def _answer(self, item: Any, is_work: bool) -> Any:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        self.is_idle = False  # until there is a whole answer
        try:
            _send(questions, (is_work, item))
            succeeded, result = _receive(answers)
        except _ENDED as error:
            raise self._death_error() from error
        self.is_idle = True
        if not succeeded:
            raise result
        return result

    def _death_error(self) -> PackstoreError:
        code = self._process.wait()
        cause, remedy = f"exit code {code}; its own error is above", "Run again"
        with contextlib.suppress(ValueError):
            cause = f"killed by {signal.Signals(-code).name}"
            remedy = "Run again with a smaller --num-workers, in case memory ran out"
        if limits.SIGNAL is not None and code == -limits.SIGNAL:
            return limits.too_long()
        if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
            cause = f"more than {ITEM_SECONDS} s of processor time for one block"
            remedy = "Look for a slow regular expression in the tokenizer"
        return PackstoreError(f"a worker process died ({cause}); nothing was committed. {remedy}.")

    def end(self) -> None:
        """Asks the process to end, and to remove its files before."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends the process, whatever it does; it has two seconds to remove its files."""
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._process.kill()
        with contextlib.suppress(OSError), self._process:
            pass


def serve(seconds: float, memory: int) -> None:
    """Runs in a worker process: receives the work, then items, until the parent ends.

    A record may take so many seconds of processor time and bytes of memory to render.
    """
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed must not end up among the answers
    limits.allow_rendering(seconds, memory)
    signal.signal(signal.SIGTERM, _end)
    work: Any = None
    with contextlib.suppress(*_ENDED):
        while True:
            item = result = answer = None  # frees the previous ones
            try:
                is_work, item = _receive(questions)
                if is_work:
                    work, result = item, None
                    gc.unfreeze()
                    getattr(work, "load", lambda: None)()
                    gc.freeze()  # what is loaded is not searched for garbage again and again
                else:
                    if hasattr(signal, "setitimer"):
                        signal.setitimer(signal.ITIMER_PROF, ITEM_SECONDS)
                    result = work(item)
                answer = True, result
            except Exception as error:
                answer = False, _picklable(error)
            _send(answers, answer)  # fails if there was no item: the parent has ended


def _end(*_: Any) -> None:
    """Ends this process, so that it removes its temporary files; a second request changes nothing.

    The interpreter would otherwise report it on stderr as an exception ignored at exit.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _picklable(error: Exception) -> Exception:
    """Returns the error, or one with its text if it does not survive a pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PackstoreError(f"{type(error).__name__}: {error}")
    return error


def _send(pipe: IO[bytes], value: object) -> None:
    """Sends a value, its arrays beside its pickle: what cannot be read is received whole, too."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    pickle.dump((data, buffers), pipe, 5)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """Receives what :func:`_send` sent."""
    data, buffers = pickle.load(pipe)
    return pickle.loads(data, buffers=buffers)
