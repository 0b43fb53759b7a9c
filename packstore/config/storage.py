"""Settings of retrying requests to a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from packstore.config.checks import setting, validate
from packstore.errors import ConfigError, quote

_PREFIX = "retry_"

CHECK_RETRIES: Mapping[str, Any] = {"retry_attempts": 2, "retry_backoff": 0.2}
"""Storage options of ``packstore.check``, which should not wait for minutes."""


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """Settings of retries after throttling and transient failures.

    Passed among the storage options, as ``retry_attempts`` and so on, so that workers and every
    command get them too.
    """

    attempts: int | None = setting(
        None, "most attempts of one request; default: as many as `seconds` allow"
    )
    backoff: float = setting(
        0.5, "seconds before the second attempt; doubled before each further, times 0.5 to 1.5"
    )
    longest_wait: float = setting(20.0, "most seconds between two attempts, times 0.5 to 1.5")
    seconds: float = setting(120.0, "seconds after the first attempt at which the last one begins")

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Splits storage options into these settings and the remaining options.

        Raises:
            ConfigError: a value is no number, or out of range.
        """
        fields = {_PREFIX + f.name: f for f in dataclasses.fields(cls)}
        given = {
            f.name: _number(name, options[name], f.type)
            for name, f in fields.items()
            if name in options
        }
        return cls(**given), {k: v for k, v in options.items() if k not in fields}


def _number(name: str, value: Any, kind: Any) -> Any:
    """Parses a number that the command line passes as text."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if "int" in kind else float(value)
    except ValueError:
        raise ConfigError(
            f"storage option {name} must be a number; found {quote(value)}."
        ) from None
