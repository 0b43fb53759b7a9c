"""Settings of reading a dataset while training, and of retrying requests to a store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_type_hints

import msgspec

from packstore.config.settings import Settings, kind_of, setting
from packstore.errors import ConfigError, sentence

DEFAULT_EXAMPLES_PER_STEP = 64
"""Examples per optimizer step of `train` and `estimate`, unless a setting says how many
packs or batches make a step.
"""

MAX_EXCESS = 1.1
"""Steps may hold on average this many times `examples_per_step` without a warning."""


def large_steps_warning(
    requested: int, mean: float, largest: int, ranks: int, pack_size: int, longest: int
) -> str:
    """Return a warning if steps hold far more examples than requested, else "".

    A step has at least one pack on each rank, so with many examples per pack smaller
    steps are not possible.

    Args:
        requested: `examples_per_step`.
        mean: mean examples per step.
        largest: examples of the largest step.
        ranks: number of ranks; each takes at least a pack of every step.
        pack_size: tokens per pack.
        longest: tokens of the longest example, which a pack must hold; 0: unknown.
    """
    if mean <= MAX_EXCESS * requested:
        return ""

    remedies = []
    # Examples per step grow in proportion to the size of a pack.
    fitting_size = pack_size * requested // largest
    if fitting_size >= max(longest, 2):
        remedies.append(f"pack with pack_size={fitting_size} at most")
    if ranks > 1:
        remedies.append("use fewer ranks")
    remedies.append(f"set examples_per_step={math.ceil(mean)} on purpose")
    remedy = ", or ".join(remedies)

    return sentence(
        "optimizer steps",
        rule=f"should hold about examples_per_step={requested} examples on average",
        found=f"{mean:.1f} on average and {largest} at most, as each rank (of {ranks}) "
        "takes a pack",
        remedy=remedy[0].upper() + remedy[1:],
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Settings):
    """Settings of a loader: how an epoch divides into optimizer steps and batches."""

    LISTED_BY = "BatchConfig"

    packs_per_batch: int | None = setting(
        None, "packs per batch on a rank (default: 1)", low=1
    )
    tokens_per_batch: int | None = setting(
        None, "maximum tokens per batch on a rank", low=1
    )
    examples_per_step: int | None = setting(
        None, "mean examples per step, over all ranks", low=1
    )
    gradient_accumulation_steps: int = setting(
        1, "batches per optimizer step on a rank", low=1
    )
    balance: bool = setting(
        False, "balance the cost of attention over the ranks of a step"
    )
    drop_last: bool = setting(
        False, "leave out the last step of an epoch if it is smaller"
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
        """Packs of one batch on one rank, unless `tokens_per_batch` is set."""
        return self.packs_per_batch or 1


@dataclass(frozen=True, kw_only=True)
class ReadConfig(Settings):
    """Settings of a loader: how it fetches row groups; the packs stay the same."""

    on_error: Literal["raise", "quarantine"] = setting(
        "raise",
        "on a row group that cannot be read: raise, or take filler packs of weight 0",
    )
    requests: int = setting(24, "row groups fetched at the same time", low=1)
    read_ahead_bytes: int | None = setting(
        None,
        "bytes of decoded row groups, about (default: 4 MB, from a store 16 MB)",
        low=0,
    )
    cache_dir: str | None = setting(
        None,
        "local folder that caches the bytes read of shards (default: no cache)",
        local=True,
    )

    def ahead(self, local: bool) -> int:
        """Return the bytes to read ahead.

        Args:
            local: the dataset is on a local disk, not in a store.
        """
        if self.read_ahead_bytes is not None:
            return self.read_ahead_bytes
        return (4 if local else 16) << 20


CHECK_RETRIES: Mapping[str, Any] = {"retry_attempts": 2, "retry_backoff": 0.2}
"""Storage options of ``packstore.check`` and dry runs, which should not wait for
minutes.
"""


@dataclass(frozen=True, kw_only=True)
class RetryConfig(Settings):
    """Settings of retries after throttling and transient failures.

    Users give them among the storage options, as ``retry_attempts``, ``retry_backoff``
    and so on, because these reach every worker and every command.
    """

    attempts: int | None = setting(
        None,
        "maximum attempts of a request (default: as many as `seconds` allow)",
        low=1,
    )
    backoff: float = setting(
        0.5, "seconds before the second attempt; doubles with each attempt", low=0
    )
    longest_wait: float = setting(20.0, "maximum seconds between attempts", low=0)
    seconds: float = setting(
        120.0, "seconds from the first attempt to the start of the last", low=0
    )

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Split storage options into these settings and the options of the store."""
        settings = {}
        store_options = dict(options)
        for name, hint in get_type_hints(cls).items():
            option = f"retry_{name}"
            if option not in store_options:
                continue
            value = store_options.pop(option)
            try:  # the command line passes numbers as text
                settings[name] = msgspec.convert(value, hint, strict=False)
            except msgspec.ValidationError:
                raise ConfigError(
                    f"storage option {option} must be a number; found {kind_of(value)}."
                ) from None
        return cls(**settings), store_options
