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
_jitter = random.Random()  # the global generator belongs to the training
_is_retrying: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_retrying", default=False
)


def retrying(
    call: Callable[[], T],
    policy: RetryConfig,
    refusals: int = 1,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Return the result of `call`; repeat it while its StorageError may pass.

    The waits double, times 0.5 to 1.5 so that many workers do not retry at once; the
    last attempt starts `policy.seconds` after the first. Nested calls do not retry.

    Args:
        call: a request.
        policy: limits of attempts and waits.
        refusals: maximum attempts at errors that rarely pass.
        pause: sleeps for some seconds; may return True to stop.

    Raises:
        StorageError: the error of the last attempt.
    """
    if _is_retrying.get():
        return call()

    end = time.monotonic() + policy.seconds
    token = _is_retrying.set(True)
    try:
        for attempt in itertools.count(1):
            try:
                return call()
            except StorageError as error:
                should_stop = not _may_repeat(error, attempt, policy, refusals, end)
                if not should_stop:
                    wait = _wait_seconds(attempt, policy, end)
                    level = logging.WARNING if attempt in _WARN_AFTER else logging.INFO
                    log.log(level, "%s Retrying in %.1f s.", error, wait)
                    should_stop = bool(pause(wait))
                if should_stop:
                    if attempt > 1:
                        error.add_note(f"Tried {attempt} times.")
                    raise
        raise AssertionError
    finally:
        _is_retrying.reset(token)


def _may_repeat(
    error: StorageError, attempt: int, policy: RetryConfig, refusals: int, end: float
) -> bool:
    """Return True if the error may pass, and attempts and time remain."""
    if time.monotonic() >= end:
        return False
    if error.transient is True:
        max_attempts = policy.attempts
    elif error.transient is None:
        max_attempts = refusals
    else:
        max_attempts = 1
    return max_attempts is None or attempt < max_attempts


def _wait_seconds(attempt: int, policy: RetryConfig, end: float) -> float:
    doublings = min(attempt - 1, 64)  # a larger power would overflow a float
    wait = min(policy.backoff * 2.0**doublings, policy.longest_wait)
    wait *= _jitter.uniform(0.5, 1.5)
    remaining_seconds = max(0.0, end - time.monotonic())
    return min(wait, remaining_seconds)
