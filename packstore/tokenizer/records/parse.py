"""Parses a record of any accepted shape to prompt, responses and rewards."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import quote
from packstore.format.arrays import Bool, Int32
from packstore.tokenizer.dialogue.messages import (
    ASSISTANT,
    HUMAN,
    is_hh,
    normalize_messages,
    normalize_tools,
    normalize_variables,
    split_messages,
    split_texts,
    text_as_messages,
)
from packstore.tokenizer.dialogue.sandbox import as_json
from packstore.tokenizer.dialogue.template import Message, Tools
from packstore.tokenizer.records.fields import Fields, check_mapped, number
from packstore.tokenizer.records.named import canonical
from packstore.tokenizer.records.paths import with_paths
from packstore.tokenizer.records.sequences import as_ids, masked_ids, supervised_ids
from packstore.tokenizer.records.shapes import Shape, table
from packstore.tokenizer.refusals import Refused, wrong_type

SYSTEM = ("system", "developer")
"""Roles of turns before the first question."""

_SIDES = ("messages", "rejected_messages", "response", "chosen", "rejected")

DEFAULT_REWARDS = (1.0, 0.0)
"""Default rewards of chosen and rejected."""


class Parsed(NamedTuple):
    """A parsed record, whose prompt and responses are all text, all messages, or all ids."""

    prompt: str | list[Message] | Int32  # may be empty
    responses: Sequence[str] | Sequence[list[Message]] | Sequence[Int32]
    rewards: Sequence[float]  # one for each response
    fields: tuple[str, ...]  # the record's names of those used: responses, prompt, rewards, others
    scored: bool = False  # True: it has rewards
    tools: Tools = None
    variables: dict[str, Any] | None = None  # of the chat template
    supervised: list[Bool] | None = None  # masks of responses that are ids; None: all tokens
    events: tuple[str, ...] = ()
    shape: str = ""  # packstore's own that it has
    is_plain: bool = False  # True: its texts passed all checks, and hold no control string

    @property
    def is_chat(self) -> bool:
        """True if prompt and responses are messages."""
        return isinstance(self.prompt, list)

    @property
    def questions(self) -> list[str]:
        """The text before the responses, or of each turn of the user."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        turns: Any = itertools.chain(self.prompt, *self.responses) if self.is_chat else ()
        return [turn["content"] or "" for turn in turns if turn["role"] == "user"]

    @property
    def asks_nothing(self) -> bool:
        """True if its questions are empty: a set may hold places for those of another set."""
        asked = self.questions
        return bool(asked) and not any(text.strip().strip("-") for text in asked)


def parse_record(
    record: object, kind: str, config: TokenizeConfig, is_turn: Callable[[str], bool]
) -> Parsed:
    """Parses a record of a named shape, or with our own field names; see `canonical`."""
    given = with_paths(record, config)
    found, _ = canonical(given, config, kind, is_turn)
    return parse_canonical(found, kind, config)


def parse_canonical(
    record: object, kind: str, config: TokenizeConfig, *, ids: bool = False
) -> Parsed:
    """Parses a record with our own field names to prompt, responses and rewards.

    `ids`: of a record that holds texts and their token ids, the ids.
    """
    if not isinstance(record, dict):
        raise Refused("not_an_object", f"a record must be an object, found {quote(record)}")
    fields = Fields(record, config)
    shape = table(config.shape).own_shape(fields, kind, ids)
    parsed = _parse(fields, shape)
    check_mapped(record, fields.roles, config, str(shape))
    if not fields.unknown:
        return parsed
    if config.on["unknown_key"] != "keep":
        found = ", ".join(sorted(fields.unknown))
        remedy = 'Remove it, or set on={"unknown_key": "keep"} to ignore it'
        raise Refused("unknown_key", f"messages with {quote(found)}", remedy)
    return parsed._replace(events=(*parsed.events, "unknown_key"))


def _parse(fields: Fields, shape: Shape) -> Parsed:
    """Parses a record of a shape."""
    ids = shape.holds_ids
    forms = {*shape.entry["fields"].values()}
    sides = [name for name in _SIDES if name in shape.roots]
    responses = [fields.get(name, ids) for name in sides]
    if "responses" in shape.roots:
        responses = fields.get("responses", ids)
    prompt: Any = fields.get("prompt", ids) if "prompt" in shape.known else None
    rest: dict[str, Any] = {"rewards": [1.0], "shape": str(shape)}
    if "scores" in shape.roots:
        scores = _each(fields, "scores", responses)
        rest["rewards"] = [number(score, "a score") for score in scores]
    elif "score" in shape.roots:
        rest["rewards"] = [fields.score()]
    elif shape.kind == "preference":
        given = fields.rewards()
        rest |= {"rewards": [*(given or DEFAULT_REWARDS)], "scored": given is not None}
        if given and given[0] < given[1]:
            rest["events"] = ("reward_reversed",)
    if ids:
        if fields.config.as_chat:
            raise Refused("wrong_type", "as_chat needs text or messages, found token ids")
        ids_of = _ids(fields, shape, prompt, responses)
        return Parsed(**ids_of, fields=(*fields.used,), **rest)
    if forms.isdisjoint(("messages", "turns", "dialogues")):
        if "HH text" in forms:
            prompt, responses = _split(prompt, responses)
        elif any(is_hh(response) and _repeats(prompt, response) for response in responses):
            raise _differs()
        if not fields.config.as_chat:
            return Parsed(prompt, responses, fields=(*fields.used,), **rest)
        prompt, responses = text_as_messages(prompt, responses)
    if "rejected_messages" in sides and isinstance(responses[1], str):
        before = responses[0][:-1] if isinstance(responses[0], list) else []
        responses[1] = [*before, {"role": "assistant", "content": responses[1]}]
    if sides == ["messages"]:
        dialogue = _with_system(fields, _turns(fields, responses[0]))
        if prompt:
            _check_prompt(_turns(fields, prompt), dialogue)
        asked = 0  # number of turns before the answer
        if shape.kind == "scored":
            asked = 1 + max((i for i, m in enumerate(dialogue) if m["role"] == "user"), default=-1)
            if asked == len(dialogue):
                raise Refused("wrong_type", "messages must end with an answer, found a question")
        prompt, responses = dialogue[:asked], [dialogue[asked:]]
    else:
        prompt, responses = _as_dialogue(fields, prompt, responses)
        prompt = _with_system(fields, prompt)
    tools = normalize_tools(fields.get("tools"))
    variables = normalize_variables(fields.get("chat_template_kwargs"))
    used = (*fields.used,)
    return Parsed(prompt, responses, fields=used, tools=tools, variables=variables, **rest)


def _ids(fields: Fields, shape: Shape, prompt: Any, responses: list[Any]) -> dict[str, Any]:
    """Parses ids: prompt, responses, and what is supervised."""
    if "input_ids" in shape.roots:
        whole = as_ids(fields.get("input_ids"), "input_ids")
        if "mask" in shape.roots:
            on = masked_ids(whole, fields.get("mask"))
        else:
            on = supervised_ids(whole, fields.get("labels"), "input_ids")
        return {"prompt": whole[:0], "responses": [whole], "supervised": [on]}
    if "responses" in shape.roots:
        names = [f"response {i + 1}" for i in range(len(responses))]
        labels = _each(fields, "response_labels", responses)
    else:
        names = [name for name in ("response", "chosen", "rejected") if name in shape.roots]
        labels = [fields.get(f"{name}_labels") if name != "response" else None for name in names]
    ids = [as_ids(response, name) for response, name in zip(responses, names, strict=True)]
    supervised = None
    if any(label is not None for label in labels):
        supervised = [*map(supervised_ids, ids, labels, names)]
    prompt = as_ids([] if prompt is None else prompt, "prompt")
    return {"prompt": prompt, "responses": ids, "supervised": supervised}


def _each(fields: Fields, name: str, responses: list[Any]) -> list[Any]:
    """Returns a field that has one value for each response; absent: None for each."""
    values = fields.get(name)
    if values is None:
        return [None] * len(responses)
    if len(values) != len(responses):
        raise wrong_type(f"{name} must be a list of {len(responses)}", values)
    return list(values)


def _split(prompt: str | None, texts: list[str]) -> tuple[str, list[str]]:
    """Splits dialogues of the HH form; a prompt must be their beginning."""
    shared, rest = split_texts(texts)
    if prompt is None or shared.startswith(prompt):
        return shared, rest
    if not all(text.startswith(prompt) for text in texts):
        raise _differs()
    return prompt, [text[len(prompt) :] for text in texts]


def _repeats(prompt: str, response: str) -> bool:
    """Returns True unless a response of the HH form goes on after an empty answer."""
    first = prompt.lstrip().partition(ASSISTANT)[0]
    return not first.startswith(HUMAN.lstrip()) or response.lstrip().startswith(first)


def _turns(fields: Fields, value: Any, role: str = "user") -> list[Message]:
    """Converts text to a turn of a role, and messages to those that templates expect."""
    written = [{"role": role, "content": value}] if isinstance(value, str) else value
    return normalize_messages(written, fields.unknown)


def _as_dialogue(
    fields: Fields, prompt: Any, responses: list[Any]
) -> tuple[list[Message], list[list[Message]]]:
    """Converts all sides to messages: a text prompt becomes a user turn, a response an answer."""
    ends = [_turns(fields, response, "assistant") for response in responses]
    begins = [] if prompt is None else _turns(fields, prompt)
    asking = any(end[0]["role"] in (*SYSTEM, "user") for end in ends)
    if begins and not asking:
        asked = (begins[-1]["content"] or "").strip()  # else an answer that quotes a dialogue
        if any(is_hh(response) and asked in response for response in responses):
            raise _differs()
        return begins, ends
    if not asking:
        at = fields.find("messages")[0] if fields.has("messages") else "NAME"
        remedy = f"Name the turns before the answers (--field prompt={at})"
        raise Refused("missing_field", "answers without a prompt", remedy)
    shared, rest = split_messages(ends)
    if prompt:
        _check_prompt(begins, shared)
    return shared, rest


def _check_prompt(prompt: list[Message], messages: list[Message]) -> None:
    """Refuses a prompt that is neither the beginning of messages, also after their system turn,
    nor their last question.
    """
    own = int(messages[0]["role"] in SYSTEM and prompt[:1] != messages[:1])
    parts = messages[own : own + len(prompt)], messages[-1:]
    if not any([*map(_trimmed, part)] == [*map(_trimmed, prompt)] for part in parts):
        raise _differs()


def _trimmed(message: Message) -> Message:
    return {**message, "content": (message["content"] or "").strip()}


def _differs() -> Refused:
    remedy = "Leave the prompt out, or the turns before the answers"
    return Refused("no_common_prompt", "what follows the prompt does not begin with it", remedy)


def _with_system(fields: Fields, messages: list[Message]) -> list[Message]:
    """Prepends the text of the field `system`, unless there is a system turn."""
    text = fields.find("system")[1]
    if text is None or text == "":
        return messages
    if messages and messages[0]["role"] in SYSTEM:
        if messages[0]["content"] == text:
            fields.get("system")
        return messages
    if not isinstance(text, str):
        raise wrong_type("system must be text", text)
    return [{"role": "system", "content": fields.get("system")}, *messages]


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
