"""The settings of reading a dataset while training: what is a batch, and how far to read ahead."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from packstore.config.checks import setting, unknown, validate
from packstore.errors import ConfigError, UnknownNameError, quote


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a loader cuts an epoch into optimizer steps and batches."""

    packs_per_batch: int | None = setting(None, "packs of one batch on one rank; default: 1")
    tokens_per_batch: int | None = setting(None, "tokens of one batch on one rank at most")
    pairs_per_step: int | None = setting(
        None, "examples of one optimizer step at most, over all its batches and all ranks"
    )
    accumulation: int = setting(1, "batches of one optimizer step on one rank")
    balance: bool = setting(False, "even out the squared lengths over the ranks of a step")
    largest_first: bool = setting(False, "begin each step with its largest batch")
    tail: Literal["drop", "pad", "repeat", "uneven"] | None = setting(
        None, "what becomes of packs that make no whole step; default: drop, or pad to evaluate"
    )
    mode: Literal["train", "eval"] = setting("train", "eval: every pack once, none dropped")

    def __post_init__(self) -> None:
        validate(self)
        if self.packs_per_batch is not None and self.tokens_per_batch is not None:
            raise ConfigError("give packs_per_batch or tokens_per_batch, not both.")
        if self.pairs_per_step is not None and self.accumulation != 1:
            raise ConfigError(
                "pairs_per_step decides how many batches a step has; omit accumulation."
            )
        if self.mode == "eval" and self.tail not in (None, "pad"):
            raise ConfigError(
                f"mode 'eval' neither drops nor repeats; found tail {quote(self.tail)}."
            )

    @property
    def at_end(self) -> Literal["drop", "pad", "repeat", "uneven"]:
        """The tail policy that holds."""
        return self.tail or ("pad" if self.mode == "eval" else "drop")

    @property
    def width(self) -> int:
        """Packs of one batch on one rank, where tokens do not decide it."""
        return self.packs_per_batch or 1

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """The defaults with `settings` over them.

        Raises:
            UnknownNameError: a setting that does not exist.
            ConfigError: a value of the wrong type or out of range, or two that exclude each other.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for name in settings:
            if name not in known:
                raise UnknownNameError(unknown(name, known, "BatchConfig"))
        return cls(**settings)

    def changed(self) -> dict[str, Any]:
        """The settings that are not the default, as JSON values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            f.name: values[f.name] for f in dataclasses.fields(self) if values[f.name] != f.default
        }


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """How a loader fetches row groups. None of these changes what is in a batch that is given."""

    on_error: Literal["raise", "refetch", "quarantine"] = setting(
        "refetch",
        "a row group that cannot be read: raise at once, ask again first, or ask again and then "
        "put packs of weight 0 in its place",
    )
    attempts: int | None = setting(
        None,
        "how often a row group is asked for at most; default: 4 times, and where the store "
        "throttles, restarts or cannot be reached as often as `seconds` allow",
    )
    backoff: float = setting(
        0.25, "seconds before the second attempt; doubled before each further, up to 20"
    )
    seconds: float = setting(120.0, "the last attempt begins so long after the first")
    requests: int = setting(24, "row groups that are fetched and decoded at a time")
    read_ahead_bytes: int | None = setting(
        None,
        "decoded bytes of row groups that are fetched before they are wanted, about; default: 4 MB "
        "from a local disk, 16 MB from a store",
    )
    cache_dir: str | None = setting(
        None, "local folder that keeps what is read of shards; default: nothing is kept"
    )
    cache_bytes: int = setting(
        64 << 30, "bytes that it may take at most; what was not used longest goes first"
    )

    def ahead(self, local: bool) -> int:
        """Bytes to read ahead, on a local disk or from a store."""
        if self.read_ahead_bytes is not None:
            return self.read_ahead_bytes
        return (4 if local else 16) << 20

    def __post_init__(self) -> None:
        validate(self)
