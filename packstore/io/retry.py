"""Asking a store again: when that may help, and never for longer than the settings say."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from packstore.config.storage import RetryConfig
from packstore.errors import PackstoreError
from packstore.io.causes import is_passing
from packstore.io.faults import storage_error
from packstore.io.redact import Secrets

T = TypeVar("T")
log = logging.getLogger("packstore")

_jitter = random.Random()  # times of waiting only; the global generator belongs to the training
_once: contextvars.ContextVar[bool] = contextvars.ContextVar("asked_once", default=False)


@contextlib.contextmanager
def asked_once() -> Iterator[None]:
    """A context in which nothing is asked again, because the caller does that itself."""
    token = _once.set(True)
    try:
        yield
    finally:
        _once.reset(token)


def ask(
    call: Callable[[], T], verb: str, url: str, options: Mapping[str, Any], config: RetryConfig
) -> T:
    """What `call` returns; it is called again after throttling and errors that pass.

    The waits double, are spread by a random factor of 0.5 to 1.5 (so that many workers do not come
    back at once), and are bounded in number and in time.

    Args:
        call: one request, or several that may be made again together.
        verb: what it does, for the error: ``read``, ``write``, ``list`` or ``remove``.
        url: to what.
        options: the storage options, whose secrets must not be told.
        config: how patiently.

    Raises:
        StorageError: the store refuses, or still fails after the last attempt.
    """
    end, attempt = time.monotonic() + config.seconds, 0
    while True:
        attempt += 1
        try:
            return call()
        except PackstoreError:
            raise
        except Exception as error:
            named = storage_error(error, verb, url, options, attempt)
            wait = min(config.backoff * 2 ** (attempt - 1), config.longest_wait)
            wait *= _jitter.uniform(0.5, 1.5)
            late = attempt >= config.attempts or time.monotonic() + wait > end
            if late or _once.get() or not is_passing(error):
                raise named from Secrets(url, options).hide_in(error)
            log.info("%s Asking again in %.1f s.", named, wait)
        time.sleep(wait)
