"""Reads records under packstore's own field names, or the names that `fields` maps them
to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from packstore.config.packing import verdict_text
from packstore.config.record_fields import (
    ID_ROLES,
    SPELLINGS,
    VERDICT_ROLES,
    id_spellings,
)
from packstore.errors import quote
from packstore.tokenizer.dialogue.messages import parsed_json
from packstore.tokenizer.records.judgements import fold_word
from packstore.tokenizer.records.paths import (
    Path,
    describe_missing,
    follow,
    is_path,
    parse_path,
)
from packstore.tokenizer.records.reading import Answers, Chat, Pair, Reading
from packstore.tokenizer.records.sequences import unwrapped
from packstore.tokenizer.records.siblings import side_names
from packstore.tokenizer.records.types import LABEL_SCORES, is_number, is_score
from packstore.tokenizer.refusals import Refused, Stop, wrong_type

TURN_ROLES = frozenset(
    ("prompt", "chosen", "rejected", "messages", "rejected_messages", "response")
)
"""Roles of text or messages; messages may stand as JSON text."""

REWARD_ROLES = frozenset(("chosen_reward", "rejected_reward", "margin"))
"""Roles of numbers that stand beside a pair."""

OTHER_REWARD = {"chosen_reward": "rejected_reward", "rejected_reward": "chosen_reward"}
"""Reward of each side -> the reward that must stand beside it."""

PAIR_ROLES = frozenset(("chosen", "rejected", "rejected_messages", *VERDICT_ROLES))
"""Roles that only pairs have."""

LIST_ROLES = frozenset(("responses", "scores", "response_labels"))
"""Roles with one value for each response."""

PLAIN_TYPES = frozenset((list, dict, int, float, bool))
"""Types of values that are no tensors or scalars of other libraries."""


class OwnFields:
    """The fields of one record by role; null counts as absent.

    Attributes:
        values: role -> value; a tensor is an array, JSON text of messages a list.
        columns: role -> the name or path of the column that holds it.
    """

    __slots__ = ("columns", "values")

    def __init__(self, values: dict[str, Any], columns: dict[str, str]) -> None:
        self.values = values
        self.columns = columns

    def has(self, *roles: str) -> bool:
        """Return True if the record has all of these roles."""
        return self.values.keys() >= {*roles}

    def get(self, role: str) -> Any:
        """Return the value of a role, or None."""
        return self.values.get(role)


class OwnNames:
    """Finds the fields of records by role, for one job.

    Args:
        mapped: role -> the column name, or path, that the setting `fields` maps it to.
        prefers_ids: whether token ids go before text where a record has both.
    """

    def __init__(self, mapped: Mapping[str, str], prefers_ids: bool = False) -> None:
        self._mapped = dict(mapped)
        self._prefers_ids = prefers_ids
        self._paths = {
            name: parse_path(name) for name in mapped.values() if is_path(name)
        }
        self._plans: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}

    def find(self, record: Mapping[str, Any]) -> OwnFields:
        """Return the fields of a record."""
        names = tuple(record)
        plan = self._plans.get(names)
        if plan is None:
            plan = self._plan(names)
            if (
                len(self._plans) < 1000
            ):  # field names may be data that differ in each record
                self._plans[names] = plan
        values: dict[str, Any] = {}
        columns: dict[str, str] = {}
        for role, spellings in plan:
            for name in spellings:
                value = (
                    record[name]
                    if name in record
                    else follow(record, self._paths[name])
                )
                if value is None:
                    continue
                if role in REWARD_ROLES and self._is_no_reward(role, name, value):
                    continue
                if type(value) is not str:
                    value = _convert(role, value)
                elif role in TURN_ROLES and value.lstrip()[:1] in ("[", "{"):
                    value = parsed_json(value)
                values[role] = value
                columns[role] = name
                break
        return OwnFields(values, columns)

    def _plan(self, names: tuple[str, ...]) -> list[tuple[str, list[str]]]:
        """Return the roles that a record with these columns may have, with their
        columns.
        """
        plan = []
        for role in SPELLINGS:
            spellings = [
                name
                for name in self._spellings(role)
                if name in names or name in self._paths
            ]
            if spellings:
                plan.append((role, spellings))
        return plan

    def _spellings(self, role: str) -> Sequence[str]:
        """Return the columns that may hold a role, in order of precedence.

        A column that is mapped to another role may be text here as well, such as a
        prompt, but it judges no answer.
        """
        if role in self._mapped:
            return (self._mapped[role],)
        spellings = SPELLINGS[role]
        if role in ID_ROLES:
            ids = id_spellings(role)
            spellings = (*ids, *spellings) if self._prefers_ids else (*spellings, *ids)
        if role in TURN_ROLES:
            return spellings
        return [name for name in spellings if name not in self._mapped.values()]

    def _is_no_reward(self, role: str, name: str, value: Any) -> bool:
        """Return True for a synonym of a reward that holds no number, so that it means
        another.

        The first name of a reward, or the mapped one, must hold a number.
        """
        is_synonym = role not in self._mapped and name != SPELLINGS[role][0]
        return is_synonym and number_of(unwrapped(value)) is None

    def missing_part(self, record: Mapping[str, Any], role: str) -> str:
        """Return the part of a mapped path that a record lacks."""
        name = self._mapped[role]
        path: Path = self._paths.get(name, (name,))
        return describe_missing(record, path)

    @property
    def mapped(self) -> Mapping[str, str]:
        """Role -> the column name, or path, that the setting `fields` maps it to."""
        return self._mapped


def _convert(role: str, value: Any) -> Any:
    """Return a tensor as an array; of a list of responses also JSON text of messages as
    lists.
    """
    if type(value) not in PLAIN_TYPES:
        value = unwrapped(value)
    if role in LIST_ROLES and isinstance(value, list | np.ndarray):
        return [parsed_json(unwrapped(item)) for item in value]
    return value


def own_kind(fields: OwnFields) -> str | None:
    """Return the kind that a record's own field names speak for, or None."""
    if fields.has("responses"):
        return "scored"
    if not PAIR_ROLES.isdisjoint(fields.values):
        return "preference"
    is_answer = fields.has("response") or fields.has("messages")
    if is_answer and fields.has("score") and is_score(fields.get("score")):
        return "scored"
    if is_answer or fields.has("input_ids"):
        return "sft"
    return None


class OwnReader:
    """Reads records under own field names.

    Args:
        names: finds fields by role.
        kind: preference, scored or sft.
        verdicts: value of a verdict, as text -> first, second or tie.
    """

    def __init__(self, names: OwnNames, kind: str, verdicts: Mapping[str, str]) -> None:
        self._names = names
        self._kind = kind
        self._verdicts = verdicts

    def read(self, record: Mapping[str, Any]) -> tuple[Reading, dict[str, str]]:
        """Return the reading of a record, and the columns it was read from, by role.

        Raises:
            Refused: it lacks a field (``missing_field``), a reward stands on one side
                alone (``one_reward``), two answers are a tie (``tie``), or a value is
                of the wrong type.
        """
        fields = self._names.find(record)
        for role in self._names.mapped.keys() & {"prompt"}:
            if not fields.has(role):  # only without a mapping may it be implicit
                raise Refused("missing_field", self._names.missing_part(record, role))
        if self._kind == "preference":
            return self._read_pair(record, fields)
        if self._kind == "scored":
            return self._read_answers(fields)
        return self._read_chat(fields)

    def _read_pair(
        self, record: Mapping[str, Any], fields: OwnFields
    ) -> tuple[Reading, dict[str, str]]:
        columns = fields.columns
        if fields.has("first") or fields.has("second"):
            return self._read_verdict(record, fields)
        if fields.has("chosen", "rejected"):
            prompt = fields.get("prompt")
            chosen = fields.get("chosen")
            rejected = fields.get("rejected")
            roles = ["prompt", "chosen", "rejected"]
        elif fields.has("messages", "rejected_messages") and not fields.has("chosen"):
            prompt = fields.get("prompt")
            chosen = fields.get("messages")
            rejected = _with_dialogue(chosen, fields.get("rejected_messages"))
            roles = ["prompt", "messages", "rejected_messages"]
        else:
            raise self._missing_roles(record, fields, "chosen", "rejected")
        pair = Pair(
            prompt,
            chosen,
            rejected,
            system=fields.get("system"),
            tools=fields.get("tools"),
            chat_template_kwargs=fields.get("chat_template_kwargs"),
            chosen_labels=fields.get("chosen_labels"),
            rejected_labels=fields.get("rejected_labels"),
            **self._rewards(fields),
        )
        roles += ["chosen_reward", "rejected_reward", "margin", "system", "tools"]
        roles += ["chat_template_kwargs", "chosen_labels", "rejected_labels"]
        return pair, _of_roles(columns, roles)

    def _rewards(self, fields: OwnFields) -> dict[str, Any]:
        """Return the rewards of both sides, or nothing.

        Raises:
            Refused: only one side has a reward (``one_reward``).
        """
        rewards = {
            role: fields.values[role] for role in REWARD_ROLES if role in fields.values
        }
        for role, other_role in OTHER_REWARD.items():
            if role in rewards or other_role not in rewards:
                continue
            column = fields.columns[other_role]
            detail = f"{column!r} alone, and nothing for {role}"
            remedy = "Name the field of the other side ({}), or leave it out ({})"
            settings = ({"fields": {role: "NAME"}}, {"ignore": [column]})
            raise Refused("one_reward", detail, remedy, *settings)
        return rewards

    def _read_verdict(
        self, record: Mapping[str, Any], fields: OwnFields
    ) -> tuple[Reading, dict[str, str]]:
        """Return a pair of two mapped answers by their verdict."""
        for role in VERDICT_ROLES:
            if not fields.has(role):
                detail = (
                    f"first, second and verdict belong together, and there is no {role}"
                )
                if role in self._names.mapped:
                    detail = self._names.missing_part(record, role)
                settings = {"fields": {role: "NAME"}}
                raise Refused("missing_field", detail, "Name it ({})", settings)
        side = self._side_of(fields.get("verdict"))
        if side == "tie":
            raise Refused("tie", f"verdict {quote(fields.get('verdict'))}")
        chosen = "first" if side == "first" else "second"
        rejected = "second" if side == "first" else "first"
        pair = Pair(
            fields.get("prompt"),
            fields.get(chosen),
            fields.get(rejected),
            system=fields.get("system"),
            tools=fields.get("tools"),
            chat_template_kwargs=fields.get("chat_template_kwargs"),
        )
        roles = [*VERDICT_ROLES, "prompt", "system", "tools", "chat_template_kwargs"]
        return pair, _of_roles(fields.columns, roles)

    def _side_of(self, verdict: Any) -> str:
        """Return first, second or tie for a verdict.

        Raises:
            Refused: it is none of the listed values, and does not name a side
                (``wrong_type``).
        """
        text = verdict_text(verdict)
        if text in self._verdicts:
            return self._verdicts[text]
        if isinstance(verdict, str):
            sides = self._sides_named(verdict)
            if len(sides) == 1:
                return sides[0]
        rule = "a verdict must name a side, or be listed"
        remedy = "List its values ({})"
        settings = {"verdict": dict.fromkeys(("first", "second", "tie"), "VALUE")}
        if not self._verdicts:
            raise Stop(
                rule,
                f"{self._names.mapped['verdict']} = {quote(verdict)}",
                remedy,
                settings,
            )
        raise wrong_type(rule, verdict, remedy, settings)

    def _sides_named(self, verdict: str) -> list[str]:
        """Return the sides that a text names; there should be one."""
        folded = verdict.strip().casefold()
        if folded == "tie":
            return ["tie"]
        sides = []
        columns = {side: self._names.mapped[side] for side in ("first", "second")}
        for side, names in side_names(columns["first"], columns["second"]).items():
            if folded in names:
                sides.append(side)
        return sides

    def _read_answers(self, fields: OwnFields) -> tuple[Reading, dict[str, str]]:
        common = {
            "system": fields.get("system"),
            "tools": fields.get("tools"),
            "chat_template_kwargs": fields.get("chat_template_kwargs"),
        }
        roles = ["prompt", "system", "tools", "chat_template_kwargs"]
        if fields.has("responses"):
            if not fields.has("scores"):
                raise self._missing_roles(None, fields, "scores")
            answers = Answers(
                fields.get("prompt"),
                fields.get("responses"),
                fields.get("scores"),
                response_labels=fields.get("response_labels"),
                **common,
            )
            roles += ["responses", "scores", "response_labels"]
            return answers, _of_roles(fields.columns, roles)
        if not fields.has("score"):
            raise self._missing_roles(None, fields, "score")
        score = score_of(fields.get("score"), fields.columns["score"])
        if fields.has("response"):
            answers = Answers(
                fields.get("prompt"), [fields.get("response")], [score], **common
            )
            return answers, _of_roles(fields.columns, [*roles, "response", "score"])
        if fields.has("messages"):
            answers = Answers(
                fields.get("prompt"), [fields.get("messages")], [score], **common
            )
            return answers, _of_roles(fields.columns, [*roles, "messages", "score"])
        raise self._missing_roles(None, fields, "response")

    def _read_chat(self, fields: OwnFields) -> tuple[Reading, dict[str, str]]:
        columns = fields.columns
        if fields.has("input_ids"):
            chat = Chat(
                input_ids=fields.get("input_ids"),
                labels=fields.get("labels"),
                mask=fields.get("mask") if not fields.has("labels") else None,
            )
            if chat.labels is None and chat.mask is None:
                raise self._missing_roles(None, fields, "labels")
            supervision = "labels" if chat.labels is not None else "mask"
            return chat, _of_roles(columns, ["input_ids", supervision])
        roles = ["prompt", "system", "tools", "chat_template_kwargs"]
        common = {role: fields.get(role) for role in roles}
        if fields.has("response"):
            if not fields.has("prompt"):
                raise self._missing_roles(None, fields, "prompt")
            chat = Chat(response=fields.get("response"), **common)
            return chat, _of_roles(columns, [*roles, "response"])
        if fields.has("messages"):
            chat = Chat(messages=fields.get("messages"), **common)
            return chat, _of_roles(columns, [*roles, "messages"])
        raise self._missing_roles(None, fields, "messages", "response")

    def _missing_roles(
        self, record: Mapping[str, Any] | None, fields: OwnFields, *roles: str
    ) -> Refused:
        """Return the refusal of a record that lacks all or some of these roles."""
        absent = [role for role in roles if not fields.has(role)]
        for role in absent:
            if role in self._names.mapped and record is not None:
                return Refused("missing_field", self._names.missing_part(record, role))
        columns = (
            ", ".join(repr(name) for name in fields.columns.values())
            or "none of its names"
        )
        detail = (
            f"a record of kind {self._kind} needs {' and '.join(absent)}, found "
            f"{columns}"
        )
        settings = {"fields": dict.fromkeys(absent, "NAME")}
        return Refused("missing_field", detail, "Name the field ({})", settings)


def _of_roles(columns: Mapping[str, str], roles: Collection[str]) -> dict[str, str]:
    return {role: columns[role] for role in roles if role in columns}


def _with_dialogue(messages: Any, rejected: Any) -> Any:
    """Return rejected text in place of the last answer of a dialogue; messages as they
    are.
    """
    if not isinstance(rejected, str):
        return rejected
    before = messages[:-1] if isinstance(messages, list) else []
    return [*before, {"role": "assistant", "content": rejected}]


def number_of(value: Any) -> float | None:
    """Return a number, which text may spell in full; None for anything else."""
    if is_number(value):
        return value  # type: ignore[no-any-return]
    if not isinstance(value, str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def score_of(value: Any, name: str) -> float:
    """Return the score of an answer: a number, or a label that calls it good (1) or bad
    (0).

    Raises:
        Refused: it is something else (``wrong_type``).
    """
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and fold_word(value) in LABEL_SCORES:
        return LABEL_SCORES[fold_word(value)]
    number = number_of(value)
    if number is None:
        raise wrong_type(
            f"{name} must be a number, or a label such as good or bad", value
        )
    return number
