"""The settings of a packing job.

One class per stage, each passed to the layer that needs it; :class:`PackConfig`
combines them, so ``packstore.pack(..., pack_size=8192)`` and ``packstore pack
--pack-size 8192`` take the same names. The command-line flags are derived from the
fields and their ``help``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from packstore.config.reasons import answers_of
from packstore.config.record_fields import SPELLINGS
from packstore.config.settings import Settings, setting
from packstore.errors import ConfigError, UnknownNameError, quote
from packstore.registry import meant

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates that come from the records."""


@dataclass(frozen=True, kw_only=True)
class SizeConfig(Settings):
    """Size of a pack, and layout of the sequences in it."""

    pack_size: int = setting(8192, "most tokens of a pack", low=2, high=2**31 - 1)
    layout: Literal["concat", "shared_prefix"] = setting(
        "concat", "sequences whole, or prompts once"
    )
    pad_to_multiple: int = setting(1, "room to pad sequences to a multiple of N", low=1)


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(SizeConfig):
    """Settings by which a record becomes token ids and supervision."""

    kind: Literal["auto", "preference", "sft", "scored"] = setting(
        "auto", "kind of records; auto: of the first"
    )
    fields: Mapping[str, str] = setting(
        dict,
        "column or path for a role (repeatable)",
        flag="field",
        metavar="ROLE=NAME",
    )
    form: str | None = setting(
        None, "record form, or `none` (default: detect)", metavar="NAME"
    )
    adapter: str | None = setting(
        None, "function that reads a record", metavar="MODULE:FUNCTION", place=True
    )
    ignore: tuple[str, ...] = setting(
        (), "column or path to treat as absent (repeatable)", metavar="NAME"
    )
    verdict: Mapping[str, Any] = setting(
        dict,
        "first=VALUE,second=VALUE,tie=VALUE of the verdict",
        metavar="SIDE=VALUE",
        splits=True,
    )
    roles: Mapping[str, str] = setting(
        dict,
        "meaning of a message role (repeatable)",
        flag="role",
        metavar="ROLE=MEANING",
    )
    carry: tuple[str, ...] = setting(
        (), "scalar field to keep as a column (repeatable)", metavar="NAME[:TYPE]"
    )
    chat_template: str | None = setting(
        None, "Jinja file or text, chatml or plain", metavar="TEMPLATE"
    )
    template_variables: Mapping[str, Any] = setting(
        dict, "for the chat template, as JSON (repeatable)", flag="template_variable"
    )
    as_chat: bool | None = setting(
        None, "text becomes user and assistant turns; default: warn"
    )
    append_eos: bool | None = setting(
        None, "end responses with EOS; default: of plain text"
    )
    add_bos: bool | None = setting(
        None, "begin with BOS; default: as the tokenizer says"
    )
    supervised_turns: Literal["all", "last"] = setting(
        "all", "of the assistant in the response"
    )
    thinking: Literal["template", "strip"] = setting(
        "template", "reasoning as rendered, or removed"
    )
    max_length: int | None = setting(
        None, "most tokens of a sequence; default: pack_size", low=2
    )
    on: Mapping[str, str] = setting(
        dict, "answer to a reason to refuse (repeatable)", metavar="REASON=ANSWER"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "on", answers_of(self.on))
        self._check_fields()
        self._check_verdict()
        self._check_roles()
        for name, value in self.template_variables.items():
            where = f"setting template_variables, {name}"
            if name in RESERVED_VARIABLES:
                raise ConfigError(
                    f"{where}, must be left out: it comes from the records."
                )
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                text = f"must be a JSON value; found {quote(value)} ({error})"
                raise ConfigError(f"{where}, {text}.") from error

    def _check_fields(self) -> None:
        for role, column in self.fields.items():
            if role in SPELLINGS:
                continue
            text = (
                f"unknown field {role!r} in `fields`; choose from: "
                f"{', '.join(SPELLINGS)}."
            )
            hint = (
                f" Swap the two: {column}={role}."
                if column in SPELLINGS
                else meant(role, SPELLINGS)
            )
            raise UnknownNameError(text + hint)

    def _check_verdict(self) -> None:
        sides = ("first", "second", "tie")
        for side in self.verdict:
            if side not in sides:
                text = (
                    f"unknown side {side!r} in `verdict`; choose from: "
                    f"{', '.join(sides)}."
                )
                raise UnknownNameError(text)
        values = [
            value for listed in self.verdict.values() for value in _as_list(listed)
        ]
        written = [verdict_text(value) for value in values]
        if len(set(written)) < len(written):
            text = "setting verdict must give each value one side"
            raise ConfigError(f"{text}; found {quote(dict(self.verdict))}.")

    def _check_roles(self) -> None:
        meanings = ("system", "user", "assistant", "tool")
        for role, meaning in self.roles.items():
            if meaning not in meanings:
                text = f"setting roles, {role}, must be one of: {', '.join(meanings)}"
                raise ConfigError(f"{text}; found {quote(meaning)}.")

    @property
    def verdicts(self) -> dict[str, str]:
        """Value of a verdict, as text -> first, second or tie."""
        return {
            verdict_text(value): side
            for side, listed in self.verdict.items()
            for value in _as_list(listed)
        }

    @property
    def sequence_limit(self) -> int:
        """Most tokens of one sequence."""
        return min(self.max_length or self.pack_size, self.pack_size)


def verdict_text(value: Any) -> str:
    """Return the value of a verdict as text in small letters, so that 1 equals "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip().casefold()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True, kw_only=True)
class SelectConfig(Settings):
    """Selection of records: duplicates and validation split."""

    dedup: Literal["none", "pair", "prompt"] = setting(
        "none", "drop repeated records or prompts"
    )
    validation_fraction: float = setting(
        0.0, "of the prompts, held out", low=0, below=1
    )

    @property
    def selects(self) -> bool:
        """True if some records may be dropped or held out."""
        return self.dedup != "none" or self.validation_fraction > 0


PARTITION_BYTES = 1 << 30
"""Bytes of the input files, as they are stored, in a partition: tens of thousands of
packs, so that the last one, which stays open, does not count; and minutes of work,
which a killed job loses.
"""


@dataclass(frozen=True, kw_only=True)
class PlanConfig(SizeConfig):
    """Assignment of examples to packs, and order of the packs."""

    shuffle: bool = setting(True, "mix the whole input, and the packs")
    strategy: str = setting("pool", "packer; a wrong name lists all")
    seed: int = setting(0, "of every random choice", low=-(1 << 63), high=(1 << 63) - 1)
    partitions: int | None = setting(
        None, "parts planned apart; default: one per GiB", low=1
    )


@dataclass(frozen=True, kw_only=True)
class WriteConfig(Settings):
    """Storage of packs in files."""

    format: Literal["parquet", "arrow"] = setting(
        "parquet", "file format of the shards"
    )
    labels: Literal["plain", "spans"] = setting(
        "plain", "a column, or spans at half the size"
    )
    # Readers refuse row groups of more than 512 MiB; a token takes 32 bytes at worst.
    row_group_tokens: int = setting(
        131_072, "about, of a row group", low=1, high=1 << 24
    )
    shard_tokens: int = setting(1 << 26, "about, of a shard", low=1)
    overwrite: bool = setting(False, "replace an existing dataset")


@dataclass(frozen=True, kw_only=True)
class WorkConfig(Settings):
    """Settings of reading and tokenizing; none of them changes a byte of the result."""

    engine: str = setting("local", "that runs the workers: local, ray")
    num_workers: int | None = setting(
        None, "processes; default: by the input and the cores", low=0
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(WorkConfig):
    """Settings of the job; none of them changes a byte of the result."""

    max_drop_rate: float = setting(
        0.1, "fail if more is dropped, 0 to 1", low=0, high=1
    )
    rejects: str | None = setting(
        None, "JSON lines of dropped records, with the reason", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class PackConfig(TokenizeConfig, SelectConfig, PlanConfig, WriteConfig, RunConfig):
    """All settings of ``packstore.pack``; accepted wherever one of its bases is."""

    LISTED_BY = "`packstore pack --help`"

    @property
    def needing_records(self) -> tuple[str, ...]:
        """Returns the names of changed settings that take effect only when
        tokenizing.
        """
        kept = {*SizeConfig.names(), "kind", "max_length"}
        usual, names = (
            PackConfig(),
            [n for n in TokenizeConfig.names() if n not in kept],
        )
        mine = replace(self, on={**self.on, "overlong": usual.on["overlong"]})
        return tuple(
            name for name in names if getattr(mine, name) != getattr(usual, name)
        )

    @staticmethod
    def names_without_records() -> frozenset[str]:
        """Return the names of settings that also take effect when a dataset is packed
        again.
        """
        names = {*SelectConfig.names(), *PlanConfig.names(), *WriteConfig.names()}
        return frozenset({"max_length", *names})

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that affect the bytes of the result, as JSON for the
        manifest.
        """
        skip = {*RunConfig.names(), "overwrite"}
        return {
            name: value
            for name, value in super().recorded().items()
            if name not in skip
        }
