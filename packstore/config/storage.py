"""How patiently a store is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from packstore.config.checks import setting, validate
from packstore.errors import ConfigError, quote

_PREFIX = "retry_"


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """When a store that throttles or fails for the moment is asked again.

    Given among the storage options, as ``retry_attempts`` and so on, so that it goes wherever they
    go: into workers, over the command line, into every command.
    """

    attempts: int | None = setting(
        None, "how often one request is made at most; default: as often as `seconds` allow"
    )
    backoff: float = setting(
        0.5, "seconds before the second attempt; doubled before each further, times 0.5 to 1.5"
    )
    longest_wait: float = setting(20.0, "seconds between two attempts at most, times 0.5 to 1.5")
    seconds: float = setting(120.0, "the last attempt begins so long after the first")

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """These settings among storage options, and the options that are left.

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
    """A number that may have come as text, from the command line."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if "int" in kind else float(value)
    except ValueError:
        raise ConfigError(
            f"storage option {name} must be a number; found {quote(value)}."
        ) from None
