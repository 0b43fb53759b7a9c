"""Retries requests to stores."""

from __future__ import annotations

import contextvars
import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from packstore.config import RetryConfig
from packstore.errors import StorageError

T = TypeVar("T")
log = logging.getLogger("packstore")

_WARN_AFTER = (4, 8)  # attempts: no warning for short failures
_jitter = (
    random.Random()
)  # for waits only; the global generator belongs to the training
_retries: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "retries", default=False
)


def retrying(
    call: Callable[[], T],
    policy: RetryConfig,
    refusals: int = 1,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Returns the result of `call`; retries while its :class:`StorageError` may pass.

    The waits double, times 0.5 to 1.5 so that many workers do not retry at once; the
    last attempt starts `policy.seconds` after the first. Nested calls do not retry.
    `refusals`: most attempts at errors that rarely pass; `pause` sleeps for so many
    seconds, and returns True to stop.
    """
    if _retries.get():
        return call()
    token, end = _retries.set(True), time.monotonic() + policy.seconds
    try:
        for attempt in itertools.count(1):
            try:
                return call()
            except StorageError as error:
                most = {True: policy.attempts, None: refusals, False: 1}[
                    error.transient
                ]
                left = end - time.monotonic()
                over = left <= 0 or (most is not None and attempt >= most)
                if not over:
                    wait = min(
                        policy.backoff * 2.0 ** min(attempt - 1, 64),
                        policy.longest_wait,
                    )
                    wait = min(wait * _jitter.uniform(0.5, 1.5), left)
                    level = logging.WARNING if attempt in _WARN_AFTER else logging.INFO
                    log.log(level, "%s Retrying in %.1f s.", error, wait)
                    over = bool(pause(wait))
                if over:
                    if attempt > 1:
                        error.add_note(f"Tried {attempt} times.")
                    raise
        raise AssertionError
    finally:
        _retries.reset(token)
