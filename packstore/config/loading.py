"""Settings of reading a dataset while training: batching and read-ahead."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from packstore.config.checks import setting, unknown, validate
from packstore.errors import ConfigError, UnknownNameError, quote


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Settings by which a loader divides an epoch into optimizer steps and batches."""

    packs_per_batch: int | None = setting(None, "packs of one batch on one rank; default: 1")
    tokens_per_batch: int | None = setting(None, "most tokens of one batch on one rank")
    examples_per_step: int | None = setting(
        None, "most examples of one optimizer step, over all its batches and all ranks"
    )
    accumulation: int = setting(1, "batches of one optimizer step on one rank")
    balance: bool = setting(False, "balance the squared lengths over the ranks of a step")
    largest_first: bool = setting(False, "begin each step with its largest batch")
    tail: Literal["drop", "pad", "repeat", "uneven"] | None = setting(
        None, "how to end an epoch inside a step; default: drop, or pad with mode eval"
    )
    mode: Literal["train", "eval"] = setting("train", "eval: every pack once, none dropped")

    def __post_init__(self) -> None:
        validate(self)
        if self.packs_per_batch is not None and self.tokens_per_batch is not None:
            raise ConfigError("give packs_per_batch or tokens_per_batch, not both.")
        if self.examples_per_step is not None and self.accumulation != 1:
            raise ConfigError(
                "examples_per_step decides how many batches a step has; omit accumulation."
            )
        if self.mode == "eval" and self.tail not in (None, "pad"):
            raise ConfigError(
                f"mode 'eval' neither drops nor repeats; found tail {quote(self.tail)}."
            )

    @property
    def at_end(self) -> Literal["drop", "pad", "repeat", "uneven"]:
        """The tail policy in effect."""
        return self.tail or ("pad" if self.mode == "eval" else "drop")

    @property
    def width(self) -> int:
        """Packs of one batch on one rank, without a token budget."""
        return self.packs_per_batch or 1

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Returns the defaults overridden by `settings`.

        Raises:
            UnknownNameError: a setting does not exist.
            ConfigError: a value has the wrong type or is out of range, or two exclude each other.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for name in settings:
            if name not in known:
                raise UnknownNameError(unknown(name, known, "BatchConfig"))
        return cls(**settings)

    def changed(self) -> dict[str, Any]:
        """Returns the settings that differ from their default, as JSON values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            f.name: values[f.name] for f in dataclasses.fields(self) if values[f.name] != f.default
        }


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """Settings by which a loader fetches row groups; none of them changes a batch."""

    on_error: Literal["raise", "refetch", "quarantine"] = setting(
        "refetch",
        "a row group that cannot be read: raise at once, retry first, or retry and then replace "
        "its packs by others of weight 0",
    )
    attempts: int | None = setting(
        None,
        "most attempts to read a row group; default: 4, and if the store throttles, restarts or "
        "cannot be reached as many as `seconds` allow",
    )
    backoff: float = setting(
        0.25, "seconds before the second attempt; doubled before each further, up to 20"
    )
    seconds: float = setting(120.0, "seconds after the first attempt at which the last one begins")
    requests: int = setting(24, "row groups fetched and decoded at the same time")
    read_ahead_bytes: int | None = setting(
        None,
        "approximate bytes of decoded row groups to read ahead; default: 4 MB from a local disk, "
        "16 MB from a store",
    )
    cache_dir: str | None = setting(
        None, "local folder that caches what is read of shards; default: no cache"
    )

    def ahead(self, local: bool) -> int:
        """Returns the bytes to read ahead, from a local disk or from a store."""
        if self.read_ahead_bytes is not None:
            return self.read_ahead_bytes
        return (4 if local else 16) << 20

    def __post_init__(self) -> None:
        validate(self)
