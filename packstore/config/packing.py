"""The settings of a packing job.

One class per stage, each passed to the layer that needs it; :class:`PackConfig`
combines them, so ``packstore.pack(..., pack_size=8192)`` and ``packstore pack
--pack-size 8192`` take the same names. The command-line flags are derived from the
fields and their ``help``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from packstore.config.reasons import answers_of
from packstore.config.record_fields import SPELLINGS
from packstore.config.settings import Settings, setting
from packstore.errors import ConfigError, UnknownNameError, quote, sentence
from packstore.registry import choice, suggest

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates that come from the records."""

KEYS_PER_TOKEN = 16
"""Default maximum of a pack's keys, by tokens of `pack_size`: memory and time of
attention grow with the keys.
"""

VERDICT_SIDES = ("first", "second", "tie")
ROLE_MEANINGS = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class SizeConfig(Settings):
    """Size of a pack, and layout of the sequences in it."""

    pack_size: int = setting(8192, "maximum tokens per pack", low=2, high=2**31 - 1)
    layout: Literal["auto", "concat", "shared_prefix"] = setting(
        "auto", "auto: shared_prefix if sequences share"
    )
    share_prefixes: Literal["example", "pack"] = setting(
        "example", "where sequences share prefixes"
    )
    pad_to_multiple: int = setting(1, "reserve room to pad to a multiple of N", low=1)
    max_keys: int | None = setting(
        None,
        "maximum keys per pack (default: 16 x pack_size)",
        low=2,
        high=2**31 - 1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share_prefixes == "pack" and self.layout == "concat":
            raise ConfigError(
                sentence(
                    where="setting share_prefixes",
                    rule="it must be `example` with layout concat, which shares none",
                    found=self.share_prefixes,
                    remedy="Set layout to shared_prefix, or share_prefixes to example",
                )
            )

    @property
    def key_limit(self) -> int:
        """Maximum sum of the lengths of the sequences of a pack: the keys of its
        attention.
        """
        if self.max_keys is not None:
            return self.max_keys
        return min(KEYS_PER_TOKEN * self.pack_size, 2**31 - 1)

    def with_layout_of(self, kind: str) -> Self:
        """Return the settings with the layout that `auto` means for a kind.

        Several answers to a prompt share it; the only sequence of ``sft`` shares its
        prompt with others only if the examples of a pack do.

        Args:
            kind: ``preference``, ``sft`` or ``scored``.
        """
        if self.layout != "auto":
            return self
        shares_nothing = kind == "sft" and self.share_prefixes == "example"
        return replace(self, layout="concat" if shares_nothing else "shared_prefix")


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(SizeConfig):
    """Settings of tokenizing: how a record becomes token ids and supervision."""

    kind: Literal["auto", "preference", "sft", "scored"] = setting(
        "auto", "record kind; auto: as the first record"
    )
    fields: Mapping[str, str] = setting(
        dict,
        "column or path of a role (repeatable)",
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
        "verdict that prefers a side, e.g. first=A,second=B",
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
    token_values: Mapping[str, str] = setting(
        dict,
        "field with a number per supervised token (repeatable)",
        metavar="COLUMN=FIELD",
    )
    chat_template: str | None = setting(
        None, "Jinja file or text, `chatml` or `plain`", metavar="TEMPLATE", path=True
    )
    template_variables: Mapping[str, Any] = setting(
        dict,
        "variable of the chat template, as JSON (repeatable)",
        flag="template_variable",
    )
    as_chat: bool | None = setting(
        None, "render plain text as a chat (default: no, and warn)"
    )
    append_eos: bool | None = setting(
        None, "append EOS to responses (default: for plain text)"
    )
    add_bos: bool | None = setting(None, "prepend BOS (default: as the tokenizer says)")
    supervised_turns: Literal["all", "last"] = setting(
        "all", "assistant turns to supervise"
    )
    thinking: Literal["template", "strip"] = setting(
        "template", "reasoning: as rendered, or removed"
    )
    max_length: int | None = setting(
        None, "maximum tokens per sequence (default: pack_size)", low=2
    )
    on: Mapping[str, str] = setting(
        dict,
        "answer to a reason to refuse a record (repeatable)",
        metavar="REASON=ANSWER",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "on", answers_of(self.on))
        self._check_fields()
        self._check_verdict()
        self._check_roles()
        self._check_template_variables()

    def _check_fields(self) -> None:
        for role, column in self.fields.items():
            if role in SPELLINGS:
                continue
            if column in SPELLINGS:
                hint = f" Swap the two: {column}={role}."
            else:
                hint = suggest(role, SPELLINGS)
            raise UnknownNameError(
                f"unknown field {role!r} in `fields`; choose from: "
                f"{', '.join(SPELLINGS)}.{hint}"
            )

    def _check_verdict(self) -> None:
        for side in self.verdict:
            if side not in VERDICT_SIDES:
                raise UnknownNameError(
                    f"unknown side {side!r} in `verdict`; choose from: "
                    f"{', '.join(VERDICT_SIDES)}."
                )
        texts = [verdict_text(value) for _, value in self._verdict_values()]
        if len(set(texts)) < len(texts):
            raise ConfigError(
                "setting verdict must give each value one side; found "
                f"{quote(dict(self.verdict))}."
            )

    def _check_roles(self) -> None:
        for role, meaning in self.roles.items():
            choice(f"setting roles, {role},", meaning, ROLE_MEANINGS)

    def _check_template_variables(self) -> None:
        for name, value in self.template_variables.items():
            where = f"setting template_variables, {name}"
            if name in RESERVED_VARIABLES:
                raise ConfigError(
                    f"{where}, must be left out: it comes from the records."
                )
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{where}, must be a JSON value; found {quote(value)} ({error})."
                ) from error

    def _verdict_values(self) -> Iterator[tuple[str, Any]]:
        """Yield side and value of each verdict; a side may have a list of values."""
        for side, values in self.verdict.items():
            for value in values if isinstance(values, list) else [values]:
                yield side, value

    @property
    def verdicts(self) -> dict[str, str]:
        """Value of a verdict, as text -> first, second or tie."""
        return {verdict_text(value): side for side, value in self._verdict_values()}

    @property
    def sequence_limit(self) -> int:
        """Maximum tokens of one sequence."""
        return min(self.max_length or self.pack_size, self.pack_size)


def verdict_text(value: Any) -> str:
    """Return the value of a verdict as lower-case text, so that 1 equals "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip().casefold()


@dataclass(frozen=True, kw_only=True)
class SelectConfig(Settings):
    """Selection of records: duplicates and validation split."""

    dedup: Literal["none", "pair", "prompt"] = setting(
        "none", "drop repeated records or prompts"
    )
    validation_fraction: float = setting(
        0.0, "fraction of the prompts to hold out", low=0, below=1
    )

    @property
    def selects(self) -> bool:
        """True if some records may be dropped or held out."""
        return self.dedup != "none" or self.validation_fraction > 0


PARTITION_BYTES = 1 << 30
"""Stored bytes of the input files in a partition: tens of thousands of packs, so that
the last one, which is not full, does not matter; and minutes of work, which a killed
job loses.
"""


@dataclass(frozen=True, kw_only=True)
class PlanConfig(SizeConfig):
    """Assignment of examples to packs, and order of the packs."""

    shuffle: bool = setting(True, "shuffle the input and the packs")
    strategy: str = setting("pool", "algorithm; an unknown name lists all")
    seed: int = setting(0, "random seed", low=-(1 << 63), high=(1 << 63) - 1)
    partitions: int | None = setting(
        None, "parts planned separately (default: one per GiB)", low=1
    )


@dataclass(frozen=True, kw_only=True)
class WriteConfig(Settings):
    """Storage of packs in files."""

    format: Literal["parquet", "arrow"] = setting(
        "parquet", "file format of the shards"
    )
    # Readers refuse row groups of more than 512 MiB; a token takes 32 bytes at worst.
    row_group_tokens: int = setting(
        131_072, "tokens per row group, approximately", low=1, high=1 << 24
    )
    shard_tokens: int = setting(1 << 26, "tokens per shard, approximately", low=1)
    overwrite: bool = setting(False, "replace an existing dataset")


@dataclass(frozen=True, kw_only=True)
class WorkConfig(Settings):
    """Settings of reading and tokenizing; none of them changes a byte of the result."""

    engine: str = setting("local", "where the workers run: local or ray")
    num_workers: int | None = setting(
        None, "worker processes (default: by input and cores)", low=0
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(WorkConfig):
    """Settings of a run; none of them changes a byte of the result."""

    max_drop_rate: float = setting(
        0.1, "fail if a larger fraction is dropped", low=0, high=1
    )
    rejects: str | None = setting(
        None,
        "file for dropped records and reasons, as JSON lines",
        metavar="FILE",
        path=True,
    )
    values_out: str | None = setting(
        None,
        "folder of the values of tokens (default: OUT-values)",
        metavar="URL",
        place=True,
    )


@dataclass(frozen=True, kw_only=True)
class PackConfig(TokenizeConfig, SelectConfig, PlanConfig, WriteConfig, RunConfig):
    """All settings of ``packstore.pack``; accepted wherever one of its bases is."""

    LISTED_BY = "`packstore pack --help`"

    @property
    def needing_records(self) -> tuple[str, ...]:
        """Names of changed settings that have no effect on a packed dataset as source.

        Its records are already tokenized.
        """
        defaults = PackConfig()
        # Settings of tokenizing that do have an effect; so does the reason `overlong`
        # in `on`.
        without_records = {*SizeConfig.names(), "kind", "max_length"}
        config = replace(self, on={**self.on, "overlong": defaults.on["overlong"]})
        return tuple(
            name
            for name in TokenizeConfig.names()
            if name not in without_records
            and getattr(config, name) != getattr(defaults, name)
        )

    @staticmethod
    def names_without_records() -> frozenset[str]:
        """Return names of settings that also take effect if the source is a dataset."""
        return frozenset({"max_length", *PlanConfig.names(), *WriteConfig.names()})

    def recorded(self) -> dict[str, Any]:
        """Return the settings that affect bytes of the result, for the manifest."""
        without_effect = {*RunConfig.names(), "overwrite"}
        return {
            name: value
            for name, value in super().recorded().items()
            if name not in without_effect
        }
