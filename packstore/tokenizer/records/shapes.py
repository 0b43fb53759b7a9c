"""Parses a record of any accepted shape to prompt, responses and rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import RecordError, quote, sentence
from packstore.format.arrays import Bool, Int32
from packstore.tokenizer.chat.messages import (
    is_hh,
    normalize_messages,
    normalize_tools,
    normalize_variables,
    parsed_json,
    split_messages,
    split_texts,
)
from packstore.tokenizer.chat.sandbox import as_json
from packstore.tokenizer.chat.template import Message, Tools
from packstore.tokenizer.records.fields import Fields, number
from packstore.tokenizer.records.sequences import (
    as_ids,
    holds_ids,
    masked_ids,
    supervised_ids,
    unwrapped,
)
from packstore.tokenizer.refusals import Refused

_TELLING = {
    "ranked": ("responses",),
    "preference": ("chosen", "rejected"),
    "sft": ("messages", "response", "input_ids"),
}
"""Kind -> fields that tell it, in this order."""

DEFAULT_REWARDS = (1.0, 0.0)
"""Default rewards of chosen and rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A parsed record, whose prompt and responses are all text, all messages, or all ids.

    Attributes:
        prompt: text (may be empty), messages (may be none), or ids.
        responses: K responses of the same type.
        rewards: one reward per response.
        tools: tool descriptions for the chat template.
        variables: the record's variables of the chat template.
        supervised: supervision masks of responses that are ids; None: all tokens.
        fields: the record's names of the fields used.
        scored: True if the record has rewards.
        events: events to note.
    """

    prompt: str | list[Message] | Int32
    responses: list[str] | list[list[Message]] | list[Int32]
    rewards: list[float]
    tools: Tools = None
    variables: dict[str, Any] | None = None
    supervised: list[Bool] | None = None
    fields: Collection[str]
    scored: bool = False
    events: tuple[str, ...] = ()


def detect_kind(record: object, config: TokenizeConfig, where: str = "the first record") -> str:
    """Returns the kind of the settings, or else of the record's fields."""
    if config.kind != "auto":
        return config.kind
    flags = "--field chosen=better --field rejected=worse, for example"
    written = quote(record)
    if isinstance(record, dict):
        fields = Fields(record, config)
        for kind, names in _TELLING.items():
            if any(fields.get(name) is not None for name in names):
                return kind
        flags = _proposed(fields) or flags
        written = f"fields {', '.join(map(repr, record))}"
    must = "it must have chosen and rejected, or messages, or responses and scores, or input_ids"
    raise RecordError(sentence(where, must, written, f"Name the fields: {flags}"))


def _proposed(fields: Fields) -> str:
    """Flags that would probably map the fields of a record of no kind, by their names."""
    for names in (("chosen", "rejected"), ("messages",), ("responses", "scores"), ("response",)):
        if likely := [(n, fields.likely(n)) for n in names if fields.likely(n)]:
            likely += [("prompt", p)] if (p := fields.likely("prompt")) else []
            return " ".join(f"--field {name}={field}" for name, field in sorted(likely))
    return ""


def parse_record(record: object, kind: str, config: TokenizeConfig) -> Parsed:
    """Parses a record to prompt, responses and rewards."""
    if not isinstance(record, dict):
        raise Refused("not_an_object", f"a record must be an object, found {quote(record)}")
    parsers = {"preference": _parse_pair, "sft": _parse_sft, "ranked": _parse_ranked}
    fields = Fields(record, config)
    parsed = parsers[kind](fields)
    if not fields.unknown:
        return parsed
    if config.on["unknown_key"] != "keep":
        found = ", ".join(sorted(fields.unknown))
        remedy = 'Remove it, or set on={"unknown_key": "keep"} to ignore it'
        raise Refused("unknown_key", f"messages with {quote(found)}", remedy)
    return replace(parsed, events=(*parsed.events, "unknown_key"))


def _parse_ranked(fields: Fields) -> Parsed:
    prompt = fields.need("prompt")
    responses, scores = _values(fields.need("responses")), _values(fields.need("scores"))
    if not isinstance(responses, list) or len(responses) < 2:
        must = "responses must be a list of at least 2"
        raise Refused("wrong_type", f"{must}, found {quote(responses)}")
    labels = _values(fields.get("response_labels")) or [None] * len(responses)
    for name, values in (("scores", scores), ("response_labels", labels)):
        if not isinstance(values, list) or len(values) != len(responses):
            must = f"{name} must be a list of {len(responses)}"
            raise Refused("wrong_type", f"{must}, found {quote(values)}")
    rewards = [number(score, "a score") for score in scores]
    return _assemble(fields, prompt, responses, rewards, labels)


def _parse_pair(fields: Fields) -> Parsed:
    # A mapped prompt is required; only without a mapping may it be implicit.
    prompt = fields.need("prompt") if "prompt" in fields.config.fields else fields.get("prompt")
    sides = [fields.need("chosen"), fields.need("rejected")]
    labels = [fields.get("chosen_labels"), fields.get("rejected_labels")]
    rewards = fields.rewards()
    parsed = _assemble(fields, prompt, sides, list(rewards or DEFAULT_REWARDS), labels)
    if rewards is None:
        return parsed
    events = ("reward_reversed",) if rewards[0] < rewards[1] else ()
    return replace(parsed, scored=True, events=events)


def _parse_sft(fields: Fields) -> Parsed:
    if (written := fields.get("input_ids")) is not None:
        ids, labels = as_ids(written, "input_ids"), fields.get("labels")
        mask = fields.get("mask") if labels is None else None
        if labels is mask is None:
            raise fields.missing("labels")
        on = supervised_ids(ids, labels, "input_ids") if mask is None else masked_ids(ids, mask)
        whole: Any = {"prompt": ids[:0], "responses": [ids], "supervised": [on]}
        return Parsed(**whole, rewards=[1.0], fields=fields.used)
    if (messages := fields.get("messages")) is None:
        if (response := fields.get("response")) is None:
            raise fields.missing("messages")
        return _assemble(fields, fields.need("prompt"), [response], [1.0])
    return Parsed(
        prompt=[],
        responses=[_with_system(fields, normalize_messages(parsed_json(messages), fields.unknown))],
        rewards=[1.0],
        tools=normalize_tools(fields.get("tools")),
        variables=normalize_variables(fields.get("chat_template_kwargs")),
        fields=fields.used,
    )


def _with_system(fields: Fields, messages: list[Message]) -> list[Message]:
    """Prepends the text of the field `system`, unless there is a system turn."""
    used = fields.used.copy()
    text = fields.get("system")
    if text is None or text == "":
        return messages
    if not isinstance(text, str):
        raise Refused("wrong_type", f"system must be text, found {quote(text)}")
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != text:
            fields.used = used
        return messages
    return [{"role": "system", "content": text}, *messages]


def _assemble(
    fields: Fields,
    prompt: Any,
    responses: list[Any],
    rewards: list[float],
    labels: Sequence[Any] = (),
) -> Parsed:
    prompt, responses = parsed_json(prompt), [*map(parsed_json, responses)]
    sides = [s for s in (prompt, *responses) if s is not None]
    tools: Tools = None
    variables = supervised = None
    if all(map(holds_ids, sides)):
        first, *names = _names(responses)
        ids = [as_ids(side, name) for side, name in zip(responses, names, strict=True)]
        if prompt is None:  # whole sequences, divided by their labels
            if any(label is None for label in labels):
                refused = fields.missing("prompt")
                refused.remedy += ", or add the labels of whole sequences"
                raise refused
            prompt = []
        if any(label is not None for label in labels):
            supervised = list(map(supervised_ids, ids, labels, names))
        prompt, responses = as_ids(prompt, first), ids
    elif all(isinstance(s, str) for s in sides):
        if prompt is None:
            prompt, responses = _split(fields, responses)
    else:
        _check_messages(prompt, responses)
        prompt, responses = _as_dialogue(fields, prompt, responses)
        prompt = _with_system(fields, prompt)
        tools = normalize_tools(fields.get("tools"))
        variables = normalize_variables(fields.get("chat_template_kwargs"))
    return Parsed(
        prompt=prompt,
        responses=responses,
        rewards=rewards,
        tools=tools,
        variables=variables,
        supervised=supervised,
        fields=fields.used,
    )


def _split(fields: Fields, texts: list[str]) -> tuple[str, list[str]]:
    """Splits two whole texts into their common prompt and the rest of each side."""
    if not is_hh(texts):
        refused = fields.missing("prompt")
        if fields.likely("prompt") is None:
            refused.remedy = "Name the field that holds it (--field prompt=NAME)"
        raise refused
    return split_texts(texts)


def _check_messages(prompt: Any, responses: list[Any]) -> None:
    """Refuses sides that are neither text nor messages."""
    sides = dict(zip(_names(responses), (prompt, *responses), strict=True))
    forms = {name: _form(side) for name, side in sides.items() if side is not None}
    if set(forms.values()) <= {"text", "messages"}:
        return
    found = ", ".join(f"{name} {form}" for name, form in forms.items())
    if wrong := next((name for name, form in forms.items() if form is None), None):
        found = f"{wrong} {quote(sides[wrong])}"
    must = "prompt and responses must be text, messages, or ids throughout"
    raise Refused("wrong_type", f"{must}, found {found}")


def _form(side: object) -> str | None:
    if isinstance(side, str):
        return "text"
    if isinstance(side, dict) or (isinstance(side, list) and type((side or [{}])[0]) is dict):
        return "messages"
    return "ids" if holds_ids(side) else None


def _names(responses: list[Any]) -> list[str]:
    """Names of the prompt and of each response, for error texts."""
    sides = {1: ["response"], 2: ["chosen", "rejected"]}
    numbered = [f"response {i + 1}" for i in range(len(responses))]
    return ["prompt", *sides.get(len(responses), numbered)]


def _as_dialogue(
    fields: Fields, prompt: Any, responses: list[Any]
) -> tuple[list[Message], list[list[Message]]]:
    """Converts all sides to messages: a text prompt becomes a user turn, a response an answer."""

    def messages(value: Any, role: str) -> list[Message]:
        written = [{"role": role, "content": value}] if isinstance(value, str) else value
        return normalize_messages(written, fields.unknown)

    ends = [messages(response, "assistant") for response in responses]
    begins = [] if prompt is None else messages(prompt, "user")
    asking = [end[0]["role"] in ("system", "developer", "user") for end in ends]
    if begins and not any(asking):
        return begins, ends
    shared, rest = split_messages(ends)
    # A text prompt is often the question alone, where the sides begin with a system turn.
    skip = int(shared[0]["role"] in ("system", "developer") and begins[:1] != shared[:1])
    if begins and shared[skip : skip + len(begins)] != begins:
        remedy = "Leave the prompt out, or the turns before the answers"
        raise Refused("no_common_prompt", "the sides do not begin with the prompt", remedy)
    return shared, rest


def _values(value: Any) -> Any:
    """Returns an array as a list, with tensors as arrays; other values as they are."""
    return [*map(unwrapped, value)] if isinstance(value, list | np.ndarray) else value


def prompt_key(parsed: Parsed) -> int:
    """Returns a 64-bit hash of the prompt.

    It hashes text, not ids, which at the end of a prompt may depend on what follows. The prompt of
    a dialogue without a separate one ends before its first answer; without an answer, the whole
    record is the prompt.
    """
    whole = [parsed.prompt, *parsed.responses, parsed.tools]
    if parsed.variables:
        whole.append(parsed.variables)
    prompt: Any = parsed.prompt
    if len(prompt) == 0 and isinstance(prompt, list):
        first: Any = parsed.responses[0]
        roles = [message["role"] for message in first]
        prompt = first[: roles.index("assistant")] if "assistant" in roles else []
    return _hash([prompt, parsed.tools] if len(prompt) else whole)


def _hash(parts: list[Any]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            kind, data = b"i", part.tobytes()
        elif isinstance(part, str):
            kind, data = b"t", part.encode(errors="surrogatepass")
        else:
            text = as_json(part, sort_keys=True)
            kind, data = b"m", text.encode(errors="surrogatepass")
        digest.update(b"%b%d:" % (kind, len(data)))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")
