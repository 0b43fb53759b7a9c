"""Repeats a signal that was to end the training, if Python lost it.

The handlers of Ctrl-C and of the command line raise an exception. Python ignores an
exception that is raised while an object is finalized, such as in the ``finally`` of a
generator or in the callback of a weak reference. On a busy machine that is where the
signals of the end of an epoch arrive, and the training would go on.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback

Handler = Callable[[int, FrameType | None], Any]

_SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class SignalRepeater(TrainerCallback):  # type: ignore[misc]
    """Calls the handler of a signal again at the next step if its exception was lost.

    Only an exception is repeated: a handler that returns has done its work.
    """

    def __init__(self) -> None:
        self._raise_again: Callable[[], Any] | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the handlers written in Python; outside the main thread, none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        handlers: dict[int, Handler] = {}
        for name in _SIGNAL_NAMES:
            number = getattr(signal, name, None)
            if number is None:  # Windows has no SIGHUP
                continue
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
        for number, handler in handlers.items():
            signal.signal(number, functools.partial(self._handle, handler))
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _handle(self, handler: Handler, number: int, frame: FrameType | None) -> Any:
        try:
            return handler(number, frame)
        except BaseException:
            self._raise_again = functools.partial(handler, number, frame)
            raise

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Raise the exception of a signal that arrived before and was lost."""
        if self._raise_again is not None:
            self._raise_again()

    on_prediction_step = on_step_begin
