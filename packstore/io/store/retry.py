"""Retries requests to stores."""

from __future__ import annotations

import contextvars
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from packstore.config import RetryConfig
from packstore.errors import StorageError

T = TypeVar("T")
log = logging.getLogger("packstore")

_WARNED_ATTEMPTS = (4, 8)  # no warning for short failures, two for long ones
_jitter = random.Random()  # does not advance the random numbers of a training
_is_retrying: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_retrying", default=False
)


def retrying(
    call: Callable[[], T],
    policy: RetryConfig,
    max_refusals: int = 1,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Return the result of `call`, repeating it after errors that a retry may cure.

    The waits double, times 0.5 to 1.5 so that many workers do not retry at once. No
    attempt starts later than `policy.seconds` after the first. A call inside another
    one is not repeated: the outer one is.

    Args:
        call: a request.
        policy: limits of attempts and waits.
        max_refusals: maximum attempts at an error that a retry seldom cures
            (`transient` is None), such as a refused permission.
        pause: waits for this number of seconds; if it returns True, as an `Event.wait`
            that is set, there is no further attempt.

    Raises:
        StorageError: the error of the last attempt.
    """
    if _is_retrying.get():
        return call()

    end = time.monotonic() + policy.seconds
    token = _is_retrying.set(True)
    attempt = 1
    try:
        while True:
            try:
                return call()
            except StorageError as error:
                may_retry = _may_retry(error, attempt, policy, max_refusals, end)
                if may_retry and _wait(error, attempt, policy, end, pause):
                    attempt += 1
                    continue
                if attempt > 1:
                    error.add_note(f"Tried {attempt} times.")
                raise
    finally:
        _is_retrying.reset(token)


def _may_retry(
    error: StorageError,
    attempt: int,
    policy: RetryConfig,
    max_refusals: int,
    end: float,
) -> bool:
    """Return True if a retry may cure the error, and attempts and time remain."""
    if time.monotonic() >= end:
        return False
    if error.transient is False:
        return False
    max_attempts = policy.attempts if error.transient else max_refusals
    return max_attempts is None or attempt < max_attempts


def _wait(
    error: StorageError,
    attempt: int,
    policy: RetryConfig,
    end: float,
    pause: Callable[[float], object],
) -> bool:
    """Log the error and wait; return False if `pause` stops the attempts."""
    seconds = _wait_seconds(attempt, policy, end)
    level = logging.WARNING if attempt in _WARNED_ATTEMPTS else logging.INFO
    log.log(level, "%s Retrying in %.1f s.", error, seconds)
    return not pause(seconds)


def _wait_seconds(attempt: int, policy: RetryConfig, end: float) -> float:
    doublings = min(attempt - 1, 64)  # a larger power would overflow a float
    wait = min(policy.backoff * 2.0**doublings, policy.longest_wait)
    wait *= _jitter.uniform(0.5, 1.5)
    remaining_seconds = max(0.0, end - time.monotonic())
    return min(wait, remaining_seconds)
