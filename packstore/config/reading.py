"""Settings of reading a dataset while training, and of retrying requests to a store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_type_hints

import msgspec

from packstore.config.settings import Settings, kind_of, setting
from packstore.errors import ConfigError, sentence

MOST_EXCESS = 1.1
"""Steps may hold on average so many times `examples_per_step` without a warning."""


def large_steps_warning(
    requested: int, mean: float, largest: int, ranks: int, pack_size: int, longest: int
) -> str:
    """Return a warning if steps hold on average far more than requested; else an empty
    text.

    Smaller ones are not possible: a step ends at the pack that is nearest to the
        request.

    Args:
        requested: `examples_per_step`.
        mean, largest: examples of the steps.
        ranks: number of ranks, each of which takes a pack of every step.
        pack_size, longest: tokens of a pack, and of what must fit into one; 0 if not
            known.
    """
    if mean <= MOST_EXCESS * requested:
        return ""
    rule = f"they should hold about examples_per_step={requested} examples on average"
    found = (
        f"{mean:.1f} on average and {largest} at most, as each rank (of {ranks}) "
        "takes a pack"
    )
    fitting_size = pack_size * requested // largest
    ways = []
    if fitting_size >= max(longest, 2):
        ways.append(f"pack with pack_size={fitting_size} at most")
    if ranks > 1:
        ways.append("use fewer ranks")
    ways.append(f"set examples_per_step={math.ceil(mean)} on purpose")
    remedy = ", or ".join(ways)
    return sentence("optimizer steps", rule, found, remedy[0].upper() + remedy[1:])


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Settings):
    """Settings by which a loader divides an epoch into optimizer steps and batches."""

    LISTED_BY = "BatchConfig"

    packs_per_batch: int | None = setting(
        None, "packs of one batch on one rank; default: 1", low=1
    )
    tokens_per_batch: int | None = setting(
        None, "most tokens of one batch on one rank", low=1
    )
    examples_per_step: int | None = setting(
        None, "mean examples of a step, over all ranks", low=1
    )
    gradient_accumulation_steps: int = setting(
        1, "batches of one optimizer step on one rank", low=1
    )
    balance: bool = setting(
        False, "balance the squared lengths over the ranks of a step"
    )
    drop_last: bool = setting(
        False,
        "leave out the last step of an epoch if it is not full, else it is smaller",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packs_per_batch is not None and self.tokens_per_batch is not None:
            raise ConfigError("give packs_per_batch or tokens_per_batch, not both.")
        if self.examples_per_step is not None and self.gradient_accumulation_steps != 1:
            raise ConfigError(
                "give examples_per_step or gradient_accumulation_steps, not both."
            )

    @property
    def width(self) -> int:
        """Packs of one batch on one rank, without a token budget."""
        return self.packs_per_batch or 1


@dataclass(frozen=True, kw_only=True)
class ReadConfig(Settings):
    """Settings by which a loader fetches row groups, not which packs it yields."""

    on_error: Literal["raise", "quarantine"] = setting(
        "raise",
        "a row group that cannot be read: raise, or take fillers, other packs of "
        "weight 0",
    )
    requests: int = setting(24, "row groups fetched at the same time", low=1)
    read_ahead_bytes: int | None = setting(
        None, "of decoded row groups, about; default: 4 MB, from a store 16 MB", low=0
    )
    cache_dir: str | None = setting(
        None,
        "local folder that caches what is read of shards; default: no cache",
        local=True,
    )

    def ahead(self, local: bool) -> int:
        """Returns the bytes to read ahead, from a local disk or from a store."""
        if self.read_ahead_bytes is not None:
            return self.read_ahead_bytes
        return (4 if local else 16) << 20


CHECK_RETRIES: Mapping[str, Any] = {"retry_attempts": 2, "retry_backoff": 0.2}
"""Storage options of ``packstore.check`` and dry runs, which should not wait for
minutes.
"""


@dataclass(frozen=True, kw_only=True)
class RetryConfig(Settings):
    """Settings of retries after throttling and transient failures: storage options,
    which workers and every command get too, named ``retry_attempts`` and so on.
    """

    attempts: int | None = setting(
        None, "most attempts of one request; default: as `seconds` allow", low=1
    )
    backoff: float = setting(
        0.5, "seconds before the second attempt; doubled before each further", low=0
    )
    longest_wait: float = setting(20.0, "most seconds between two attempts", low=0)
    seconds: float = setting(
        120.0, "after the first attempt at which the last one begins", low=0
    )

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Splits storage options into these settings and the remaining options."""
        found, rest = {}, dict(options)
        for name, hint in get_type_hints(cls).items():
            if (option := f"retry_{name}") in rest:
                value = rest.pop(option)
                try:  # the command line passes numbers as text
                    found[name] = msgspec.convert(value, hint, strict=False)
                except msgspec.ValidationError:
                    text = (
                        f"storage option {option} must be a number; found "
                        f"{kind_of(value)}."
                    )
                    raise ConfigError(text) from None
        return cls(**found), rest
