"""From a record of any accepted shape to prompt, responses and rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import RecordError, quote, sentence
from packstore.records import IGNORE_INDEX, Bool, Int32
from packstore.tokenizer.implicit import split_messages, split_texts
from packstore.tokenizer.messages import normalize_messages, normalize_tools
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.template import Message, Tools

SPELLINGS: dict[str, tuple[str, ...]] = {
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "messages": ("messages", "conversations"),
    "response": ("response", "completion"),
}
"""Names of fields that have more than one, where the settings name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A record made uniform. Prompt and responses are all text, all messages, or all ids.

    Attributes:
        prompt: text (may be empty), messages (may be none), or ids.
        responses: K of the same.
        rewards: one per response.
        tools: descriptions for the chat template.
        supervised: of responses that are ids, which of them are; None: all.
    """

    prompt: str | list[Message] | Int32
    responses: list[str] | list[list[Message]] | list[Int32]
    rewards: list[float]
    tools: Tools = None
    supervised: list[Bool] | None = None


class Fields:
    """Looks fields up by their canonical names; null counts as absent."""

    def __init__(self, record: Mapping[str, Any], config: TokenizeConfig) -> None:
        self._record = record
        self._names = config.fields

    def get(self, name: str) -> Any:
        """The value, or None."""
        mapped = self._names.get(name)
        for spelling in (mapped,) if mapped else SPELLINGS.get(name, (name,)):
            if self._record.get(spelling) is not None:
                return self._record[spelling]
        return None

    def need(self, name: str) -> Any:
        """The value.

        Raises:
            Refused: ``missing_field``.
        """
        value = self.get(name)
        if value is None:
            written = self._names.get(name, name)
            there = ", ".join(repr(k) for k in self._record) or "none"
            raise Refused("missing_field", f"no field {written!r} among {there}")
        return value


def detect_kind(record: object, config: TokenizeConfig, where: str = "the first record") -> str:
    """The kind of dataset that a record belongs to, unless the settings say it.

    Raises:
        RecordError: the record has the fields of no kind.
    """
    if config.kind != "auto":
        return config.kind
    if isinstance(record, dict):
        fields = Fields(record, config)
        if fields.get("responses") is not None:
            return "ranked"
        if fields.get("chosen") is not None or fields.get("rejected") is not None:
            return "dpo"
        if any(fields.get(name) is not None for name in ("messages", "response", "input_ids")):
            return "sft"
    found = f"fields {', '.join(map(repr, record))}" if isinstance(record, dict) else quote(record)
    must = "it must have chosen and rejected, or messages, or responses and scores, or input_ids"
    do = "Name the fields with `fields`, e.g. chosen=better rejected=worse"
    raise RecordError(sentence(where, must, found, do))


def parse_record(record: object, kind: str, config: TokenizeConfig) -> Parsed:
    """Prompt, responses and rewards of a record.

    Raises:
        Refused: it is not of a shape of this kind.
    """
    if not isinstance(record, dict):
        raise Refused("not_an_object", f"a record must be an object, found {quote(record)}")
    if kind == "dpo" and not config.fields and (plain := _plain_pair(record)):
        return plain
    fields = Fields(record, config)
    if kind == "sft":
        return _parse_sft(fields)
    if kind == "ranked":
        prompt, responses = fields.need("prompt"), fields.need("responses")
        scores = fields.need("scores")
        if not isinstance(responses, list) or len(responses) < 2:
            raise Refused(
                "wrong_type", f"responses must be a list of at least 2, {_size(responses)}"
            )
        if not isinstance(scores, list) or len(scores) != len(responses):
            raise Refused("wrong_type", f"scores must be {len(responses)} numbers, {_size(scores)}")
        rewards = [_number(score, "a score") for score in scores]
        labels = fields.get("response_labels") or [None] * len(responses)
        if not isinstance(labels, list) or len(labels) != len(responses):
            must = f"response_labels must be {len(responses)} lists"
            raise Refused("wrong_type", f"{must}, {_size(labels)}")
    else:
        prompt, responses = fields.get("prompt"), [fields.need("chosen"), fields.need("rejected")]
        labels = [fields.get("chosen_labels"), fields.get("rejected_labels")]
        rewards = [
            _number(default if (r := fields.get(name)) is None else r, name)
            for name, default in (("chosen_reward", 1.0), ("rejected_reward", 0.0))
        ]
    return _assemble(fields, prompt, responses, rewards, labels)


def _plain_pair(record: Mapping[str, Any]) -> Parsed | None:
    """The commonest shape of all in fewer steps: three texts, and no rewards."""
    prompt, chosen, rejected = record.get("prompt"), record.get("chosen"), record.get("rejected")
    if not (isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str)):
        return None
    if record.get("chosen_reward") is not None or record.get("rejected_reward") is not None:
        return None
    return Parsed(prompt=prompt, responses=[chosen, rejected], rewards=[1.0, 0.0])


def _parse_sft(fields: Fields) -> Parsed:
    if fields.get("input_ids") is not None:
        ids = _ids(fields.get("input_ids"))
        return Parsed(
            prompt=np.empty(0, np.int32),
            responses=[ids],
            rewards=[1.0],
            supervised=[_supervised(ids, fields.need("labels"))],
        )
    if fields.get("messages") is None and fields.get("response") is not None:
        return _assemble(fields, fields.need("prompt"), [fields.get("response")], [1.0])
    messages = normalize_messages(fields.need("messages"))
    tools = normalize_tools(fields.get("tools"))
    return Parsed(prompt=[], responses=[messages], rewards=[1.0], tools=tools)


def _assemble(
    fields: Fields,
    prompt: Any,
    responses: list[Any],
    rewards: list[float],
    labels: Sequence[Any] = (),
) -> Parsed:
    sides = [s for s in (prompt, *responses) if s is not None]
    if all(_holds(s, int) for s in sides):
        first, *ids = [_ids(s) for s in (fields.need("prompt"), *responses)]
        supervised = None
        if any(own is not None for own in labels):
            supervised = [_supervised(x, own) for x, own in zip(ids, labels, strict=True)]
        return Parsed(prompt=first, responses=ids, rewards=rewards, supervised=supervised)
    if all(isinstance(s, str) for s in sides):
        if prompt is None:
            prompt, responses = split_texts(responses)
        return Parsed(prompt=prompt, responses=responses, rewards=rewards)
    if not all(isinstance(s, str | dict) or _holds(s, dict) for s in sides):
        wrong = next(s for s in sides if not isinstance(s, str))
        must = "prompt and responses must be text, messages, or ids throughout"
        raise Refused("wrong_type", f"{must}, found {quote(wrong)}")
    begin, ends = _as_dialogue(prompt, responses)
    tools = normalize_tools(fields.get("tools"))
    return Parsed(prompt=begin, responses=ends, rewards=rewards, tools=tools)


def _as_dialogue(prompt: Any, responses: list[Any]) -> tuple[list[Message], list[list[Message]]]:
    """All sides as messages: text is a user's as prompt, the assistant's as response."""
    ends = [
        normalize_messages([{"role": "assistant", "content": r}] if isinstance(r, str) else r)
        for r in responses
    ]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    whole = all(end[0]["role"] in ("system", "developer", "user") for end in ends)
    if prompt is None or whole:
        return split_messages(ends)
    return normalize_messages(prompt), ends


def _holds(value: object, kind: type) -> bool:
    """Whether `value` is a list that is empty or begins with a `kind`."""
    return isinstance(value, list) and (not value or type(value[0]) is kind)


def _ids(value: object, *, labels: bool = False) -> Int32:
    low = IGNORE_INDEX if labels else 0
    if value == []:
        return np.empty(0, np.int32)
    try:
        array = np.asarray(value if isinstance(value, list) else None)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.ndim != 1 or array.dtype.kind != "i" or np.any((array < low) | (array >= 1 << 31)):
        raise Refused("wrong_type", f"ids must be a list of whole numbers, found {quote(value)}")
    return array.astype(np.int32)


def _supervised(ids: Int32, labels: object) -> Bool:
    """Which ids are supervised, by their labels; None: all."""
    if labels is None:
        return np.ones(len(ids), np.bool_)
    told = _ids(labels, labels=True)
    if len(ids) != len(told) or np.any((told != ids) & (told != IGNORE_INDEX)):
        raise Refused("wrong_type", "each label must be the id at its place, or -100")
    on: Bool = told != IGNORE_INDEX
    return on


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused("wrong_type", f"{name} must be a finite number, found {quote(value)}")
    return float(value)


def _size(value: object) -> str:
    return f"found {len(value)}" if isinstance(value, list) else f"found {quote(value)}"
