"""The settings of a packing job.

One class per stage, each passed to the layer that needs it; :class:`PackConfig` combines them, so
``packstore.pack(..., pack_size=8192)`` and ``packstore pack --pack-size 8192`` take the same names.
The command-line flags are derived from the fields and their ``help``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packstore.config.fields import FIELD_NAMES
from packstore.config.reasons import answers_of
from packstore.config.settings import Settings, setting
from packstore.errors import ConfigError, UnknownNameError, quote

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates that come from the records."""


@dataclass(frozen=True, kw_only=True)
class SizeConfig(Settings):
    """Size of a pack, and layout of the sequences in it."""

    pack_size: int = setting(8192, "most tokens of a pack", low=2)
    layout: Literal["concat", "shared_prefix"] = setting(
        "concat", "layout of an example's sequences in a pack: each whole, or a prompt stored once"
    )
    pad_to_multiple: int = setting(
        1,
        "reserve space to pad each sequence to a multiple of this many tokens at load, as context "
        "parallelism requires; nothing is padded on disk",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(SizeConfig):
    """Settings by which a record becomes token ids and supervision."""

    kind: Literal["auto", "preference", "sft", "ranked"] = setting(
        "auto", "kind of the records; auto: decided by the fields of the first record"
    )
    fields: Mapping[str, str] = setting(
        dict,
        "field names of the input, e.g. prompt=question (repeatable)",
        flag="field",
        metavar="FIELD=NAME",
    )
    carry: tuple[str, ...] = setting(
        (),
        "a scalar field to keep as a column of the examples, with a type of string, int64, "
        "float64, bool (repeatable)",
        metavar="NAME[:TYPE]",
    )
    chat_template: str | None = setting(
        None,
        "for chat messages: a Jinja file or text, or chatml, plain; default: the tokenizer's",
        metavar="TEMPLATE",
    )
    template_variables: Mapping[str, Any] = setting(
        dict,
        "variables of the chat template, values as JSON, e.g. enable_thinking=false (repeatable); "
        "chat_template_kwargs of a record takes precedence",
        flag="template_variable",
    )
    append_eos: bool | None = setting(
        None, "end each response with EOS; default: for plain text, not where a template ends turns"
    )
    add_bos: bool | None = setting(
        None, "begin each sequence with BOS (never twice); default: as the tokenizer file says"
    )
    supervised_turns: Literal["all", "last"] = setting(
        "all", "supervised assistant turns of the response"
    )
    thinking: Literal["template", "strip"] = setting(
        "template", "reasoning of assistant turns: as the template renders it, or removed first"
    )
    max_length: int | None = setting(None, "most tokens of one sequence; default: pack_size", low=2)
    overlong: Literal["drop", "error", "truncate_prompt", "truncate_response"] = setting(
        "drop", "records that do not fit max_length or pack_size"
    )
    on: Mapping[str, str] = setting(
        dict, "answer to a reason for refusing records (repeatable)", metavar="REASON=ANSWER"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "on", answers_of(self.on))
        self._check_variables()
        for name in self.fields:
            if name not in FIELD_NAMES:
                raise UnknownNameError(
                    f"unknown field {name!r} in `fields`; choose from: {', '.join(FIELD_NAMES)}."
                )

    def _check_variables(self) -> None:
        for name, value in self.template_variables.items():
            if name in RESERVED_VARIABLES:
                raise ConfigError(
                    f"setting template_variables must leave {name} out: it comes from the records."
                )
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"setting template_variables must hold JSON values; found {quote(value)} as "
                    f"{name} ({error})."
                ) from error

    @property
    def sequence_limit(self) -> int:
        """Most tokens of one sequence."""
        return min(self.max_length or self.pack_size, self.pack_size)


@dataclass(frozen=True, kw_only=True)
class SelectConfig(Settings):
    """Selection of records: duplicates and validation split."""

    dedup: Literal["none", "pair", "prompt"] = setting(
        "none", "drop records that repeat an earlier one, or an earlier prompt"
    )
    validation_fraction: float = setting(
        0.0,
        "fraction of the prompts held out: writes OUT/train and OUT/validation, with no prompt in "
        "both",
        low=0,
        below=1,
    )

    @property
    def selects(self) -> bool:
        """True if some records may be dropped or held out."""
        return self.dedup != "none" or self.validation_fraction > 0


PARTITION_BYTES = 1 << 30
"""Bytes of the input files, as they are stored, in a partition: tens of thousands of packs, so that
the last one, which stays open, does not count; and minutes of work, which a killed job loses."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig(SizeConfig):
    """Assignment of examples to packs, and order of the packs."""

    shuffle: bool = setting(
        True,
        "plan the examples in random order, so that a pack holds examples from all of the input, "
        "and shuffle the packs; otherwise packs hold neighbours, in input order",
    )
    strategy: str = setting(
        "pool",
        "packing strategy: pool, first_fit_decreasing, first_fit_shuffle, sequential, none",
    )
    seed: int = setting(0, "source of every random choice", low=-(1 << 63), high=(1 << 63) - 1)
    partitions: int | None = setting(
        None,
        "number of parts of the input that are planned and written separately, and that a rerun "
        "takes over; the result depends on it, but not on the workers or the engine; default: one "
        "for each GiB of the input files, as they are stored",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class WriteConfig(Settings):
    """Storage of packs in files."""

    format: Literal["parquet", "arrow"] = setting("parquet", "file format of the shards")
    labels: Literal["plain", "spans"] = setting(
        "plain", "store labels as a plain column for any reader, or as spans at half the size"
    )
    # Readers refuse row groups of more than 512 MiB; a token takes 32 bytes at worst.
    row_group_tokens: int = setting(
        131_072, "approximate tokens of a row group", low=1, high=1 << 24
    )
    shard_tokens: int = setting(
        1 << 26, "approximate tokens of a shard: 100 to 200 MB of Parquet, 540 MB of Arrow", low=1
    )
    overwrite: bool = setting(False, "replace an existing dataset")


@dataclass(frozen=True, kw_only=True)
class WorkConfig(Settings):
    """Settings of reading and tokenizing; none of them changes a byte of the result."""

    engine: str = setting("local", "engine that runs the workers: local, ray")
    num_workers: int | None = setting(
        None,
        "processes that tokenize; default: one per core, if chats take seconds",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(WorkConfig):
    """Settings of the job; none of them changes a byte of the result."""

    max_drop_rate: float = setting(
        0.1, "fail if a larger fraction of records is dropped (0 to 1)", low=0, high=1
    )
    rejects: str | None = setting(
        None,
        "file or URL to which each dropped record is written: place, reason, detail, as JSON lines",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class PackConfig(TokenizeConfig, SelectConfig, PlanConfig, WriteConfig, RunConfig):
    """All settings of ``packstore.pack``; accepted wherever one of its bases is."""

    LISTED_BY = "`packstore pack --help`"

    @property
    def needing_records(self) -> tuple[str, ...]:
        """Returns the names of changed settings that take effect only when tokenizing."""
        kept = {*SizeConfig.names(), "kind", "max_length", "overlong"}
        usual = PackConfig()
        names = (name for name in TokenizeConfig.names() if name not in kept)
        return tuple(name for name in names if getattr(self, name) != getattr(usual, name))

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that affect the bytes of the result, as JSON for the manifest."""
        skip = {*RunConfig.names(), "overwrite"}
        return {name: value for name, value in super().recorded().items() if name not in skip}
