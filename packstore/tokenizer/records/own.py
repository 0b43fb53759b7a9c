"""Reads records under packstore's own field names, or under the names that the setting
`fields` maps them to.
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
"""Roles of text or messages; messages may be written as JSON text."""

REWARD_ROLES = frozenset(("chosen_reward", "rejected_reward", "margin"))
"""Roles of the rewards of a pair, or of their difference."""

OTHER_REWARD = {"chosen_reward": "rejected_reward", "rejected_reward": "chosen_reward"}
"""Reward of each side -> the reward of the other side, without which it is refused."""

PAIR_ROLES = frozenset(("chosen", "rejected", "rejected_messages", *VERDICT_ROLES))
"""Roles that only pairs have."""

LIST_ROLES = frozenset(("responses", "scores", "response_labels"))
"""Roles with one value for each response."""

PLAIN_TYPES = frozenset((list, dict, int, float, bool))
"""Builtin types, which need no conversion from another library."""

_MAX_PLANS = 1000
"""Sets of columns that are remembered: field names may be data that differ in each
record.
"""


class OwnFields:
    """The fields of one record by role; null counts as absent.

    Attributes:
        values: role -> value, converted: tensors are arrays, and JSON text of messages
            is a list.
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
        values: dict[str, Any] = {}
        columns: dict[str, str] = {}
        for role, spellings in self._plan(tuple(record)):
            for name in spellings:
                if name in record:
                    value = record[name]
                else:
                    value = follow(record, self._paths[name])
                if value is None or self._has_other_meaning(role, name, value):
                    continue
                values[role] = _convert(role, value)
                columns[role] = name
                break
        return OwnFields(values, columns)

    def _plan(self, names: tuple[str, ...]) -> list[tuple[str, list[str]]]:
        """Return the roles that a record with these columns may have, each with the
        columns that may hold it.
        """
        plan = self._plans.get(names)
        if plan is None:
            plan = self._make_plan(names)
            if len(self._plans) < _MAX_PLANS:
                self._plans[names] = plan
        return plan

    def _make_plan(self, names: tuple[str, ...]) -> list[tuple[str, list[str]]]:
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

        A column that `fields` maps to another role may also hold this one if this is
        text or messages, such as the prompt. All other roles, such as a score, take
        only columns that are not mapped.
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

    def _has_other_meaning(self, role: str, name: str, value: Any) -> bool:
        """Return True if a column only has the name of a reward, such as a
        `chosen_rating` in words.

        A column with the first name of a reward, or mapped to it, is always the reward,
        and refused later unless it holds a number.
        """
        if role not in REWARD_ROLES or role in self._mapped:
            return False
        is_first_name = name == SPELLINGS[role][0]
        return not is_first_name and number_of(unwrapped(value)) is None

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
    """Convert a tensor to an array, and JSON text of messages to a list, also inside a
    list of responses.
    """
    if type(value) is str:
        return parsed_json(value) if role in TURN_ROLES else value
    if type(value) not in PLAIN_TYPES:
        value = unwrapped(value)
    if role in LIST_ROLES and isinstance(value, list | np.ndarray):
        return [parsed_json(unwrapped(item)) for item in value]
    return value


def own_kind(fields: OwnFields) -> str | None:
    """Return the kind of dataset that a record's fields are for, or None."""
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
        # A prompt that is not mapped may be the beginning of the messages instead.
        if "prompt" in self._names.mapped and not fields.has("prompt"):
            raise Refused("missing_field", self._names.missing_part(record, "prompt"))
        if self._kind == "preference":
            return self._read_pair(record, fields)
        if self._kind == "scored":
            return self._read_answers(record, fields)
        return self._read_chat(record, fields)

    def _read_pair(
        self, record: Mapping[str, Any], fields: OwnFields
    ) -> tuple[Reading, dict[str, str]]:
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
            rejected = _rejected_dialogue(chosen, fields.get("rejected_messages"))
            roles = ["prompt", "messages", "rejected_messages"]
        else:
            raise self._missing_fields(record, fields, ("chosen", "rejected"))
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
        return pair, _of_roles(fields.columns, roles)

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
            raise Refused(
                "one_reward",
                f"{column!r} alone, and nothing for {role}",
                "Name the field of the other side ({}), or leave it out ({})",
                {"fields": {role: "NAME"}},
                {"ignore": [column]},
            )
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
            # The setting is missing, so each record would be refused.
            raise Stop(
                rule,
                f"{self._names.mapped['verdict']} = {quote(verdict)}",
                remedy,
                settings,
            )
        raise wrong_type(rule, verdict, remedy, settings)

    def _sides_named(self, verdict: str) -> list[str]:
        """Return each of first, second and tie that a text names; usually one."""
        folded = verdict.strip().casefold()
        if folded == "tie":
            return ["tie"]
        mapped = self._names.mapped
        names_of_sides = side_names(mapped["first"], mapped["second"])
        return [side for side, names in names_of_sides.items() if folded in names]

    def _read_answers(
        self, record: Mapping[str, Any], fields: OwnFields
    ) -> tuple[Reading, dict[str, str]]:
        roles = ["prompt", "system", "tools", "chat_template_kwargs"]
        common = {role: fields.get(role) for role in roles}
        if fields.has("responses"):
            if not fields.has("scores"):
                raise self._missing_fields(record, fields, ("scores",))
            answers = Answers(
                responses=fields.get("responses"),
                scores=fields.get("scores"),
                response_labels=fields.get("response_labels"),
                **common,
            )
            roles += ["responses", "scores", "response_labels"]
            return answers, _of_roles(fields.columns, roles)

        if not fields.has("score"):
            raise self._missing_fields(record, fields, ("score",))
        score = score_of(fields.get("score"), fields.columns["score"])
        for role in ("response", "messages"):
            if fields.has(role):
                answers = Answers(
                    responses=[fields.get(role)], scores=[score], **common
                )
                return answers, _of_roles(fields.columns, [*roles, role, "score"])
        raise self._missing_fields(
            record, fields, ("messages",), ("prompt", "response")
        )

    def _read_chat(
        self, record: Mapping[str, Any], fields: OwnFields
    ) -> tuple[Reading, dict[str, str]]:
        if fields.has("input_ids"):
            return self._read_ids(record, fields)

        roles = ["prompt", "system", "tools", "chat_template_kwargs"]
        common = {role: fields.get(role) for role in roles}
        if fields.has("response"):
            if not fields.has("prompt"):
                raise self._missing_fields(record, fields, ("prompt",))
            chat = Chat(response=fields.get("response"), **common)
            return chat, _of_roles(fields.columns, [*roles, "response"])
        if fields.has("messages"):
            chat = Chat(messages=fields.get("messages"), **common)
            return chat, _of_roles(fields.columns, [*roles, "messages"])
        raise self._missing_fields(
            record, fields, ("messages",), ("prompt", "response")
        )

    def _read_ids(
        self, record: Mapping[str, Any], fields: OwnFields
    ) -> tuple[Reading, dict[str, str]]:
        """Return a sequence of token ids with its labels, or else with its mask."""
        for role in ("labels", "mask"):
            if fields.get(role) is not None:
                supervision = {role: fields.get(role)}
                chat = Chat(input_ids=fields.get("input_ids"), **supervision)
                return chat, _of_roles(fields.columns, ["input_ids", role])
        raise self._missing_fields(record, fields, ("labels",), ("mask",))

    def _missing_fields(
        self,
        record: Mapping[str, Any],
        fields: OwnFields,
        *choices: tuple[str, ...],
    ) -> Refused:
        """Return the refusal of a record that lacks roles of its kind.

        Args:
            record: the record.
            fields: its fields by role.
            choices: sets of roles; a record of this kind needs those of one set.
        """
        missing_roles = [
            [role for role in roles if not fields.has(role)] for roles in choices
        ]
        for roles in missing_roles:
            for role in roles:
                if role in self._names.mapped:
                    return Refused(
                        "missing_field", self._names.missing_part(record, role)
                    )

        needs = ", or ".join(" and ".join(roles) for roles in missing_roles)
        columns = ", ".join(quote(name, 40) for name in record) or "none"
        detail = f"a record of kind {self._kind} needs {needs}, found fields {columns}"
        settings = [{"fields": dict.fromkeys(roles, "NAME")} for roles in missing_roles]
        places = ", or ".join(["{}"] * len(settings))
        return Refused(
            "missing_field", detail, f"Say which field holds them ({places})", *settings
        )


def _of_roles(columns: Mapping[str, str], roles: Collection[str]) -> dict[str, str]:
    """Return the columns of these roles, if the record has them."""
    return {role: columns[role] for role in roles if role in columns}


def _rejected_dialogue(chosen: Any, rejected: Any) -> Any:
    """Return the rejected side as a dialogue.

    A rejected text stands for the chosen dialogue with this text as its last answer.
    """
    if not isinstance(rejected, str):
        return rejected
    earlier_messages = chosen[:-1] if isinstance(chosen, list) else []
    return [*earlier_messages, {"role": "assistant", "content": rejected}]


def number_of(value: Any) -> float | None:
    """Return a number, or the number that a text is; None for anything else."""
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
