"""The one loop that asks again."""

from __future__ import annotations

import contextvars
import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from packstore.config.storage import RetryConfig
from packstore.errors import StorageError

T = TypeVar("T")
log = logging.getLogger("packstore")

_WARN_AFTER = (4, 8)  # attempts: short failures are nobody's business
_jitter = random.Random()  # times of waiting only; the global generator belongs to the training
_retries: contextvars.ContextVar[bool] = contextvars.ContextVar("retries", default=False)


def retrying(
    call: Callable[[], T],
    policy: RetryConfig,
    refusals: int = 1,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Returns what `call` returns; calls it again while its :class:`StorageError` may pass.

    The waits double, times a random factor of 0.5 to 1.5 so that many workers do not come back at
    once; the last attempt begins `policy.seconds` after the first. Inside `call` nothing else asks
    again: patience does not multiply.

    Args:
        call: one request, or several that may be made again together; it names its errors.
        policy: how patiently.
        refusals: attempts at most where the error seldom passes by itself.
        pause: waits so many seconds; True: nobody wants the answer any more.

    Raises:
        StorageError: the store refuses, or still fails after the last attempt; a note counts them.
    """
    if _retries.get():
        return call()
    token, end = _retries.set(True), time.monotonic() + policy.seconds
    try:
        for attempt in itertools.count(1):
            try:
                return call()
            except StorageError as error:
                most = {True: policy.attempts, None: refusals, False: 1}[error.passing]
                left = end - time.monotonic()
                over = left <= 0 or (most is not None and attempt >= most)
                if not over:
                    wait = min(policy.backoff * 2.0 ** min(attempt - 1, 64), policy.longest_wait)
                    wait = min(wait * _jitter.uniform(0.5, 1.5), left)
                    level = logging.WARNING if attempt in _WARN_AFTER else logging.INFO
                    log.log(level, "%s Asking again in %.1f s.", error, wait)
                    over = bool(pause(wait))
                if over:
                    if attempt > 1:
                        error.add_note(f"Tried {attempt} times.")
                    raise
        raise AssertionError
    finally:
        _retries.reset(token)
