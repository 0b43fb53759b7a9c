"""Parses a record of any accepted shape to prompt, responses and rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from packstore.config import TokenizeConfig
from packstore.config.record_shapes import FORMS, SHAPES, Shape
from packstore.errors import RecordError, quote, sentence
from packstore.format.arrays import Bool, Int32
from packstore.tokenizer.chat.messages import (
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
from packstore.tokenizer.chat.sandbox import as_json
from packstore.tokenizer.chat.template import Message, Tools
from packstore.tokenizer.records.fields import Fields, number
from packstore.tokenizer.records.forms import FITS, is_text, role_at
from packstore.tokenizer.records.named import canonical, shape_of, table
from packstore.tokenizer.records.paths import is_path, missing, parse_path, with_paths
from packstore.tokenizer.records.sequences import (
    as_ids,
    masked_ids,
    supervised_ids,
)
from packstore.tokenizer.refusals import Refused

SYSTEM = ("system", "developer")
"""Roles of turns before the first question."""

SHAPES_OF = {
    (kind, ids): sorted(
        (shape for shape in SHAPES if shape.kind == kind),
        key=lambda shape: ids and not shape.holds_ids,
    )
    for kind in ("scored", "preference", "sft")
    for ids in (False, True)
}
"""The shapes of a kind in order; of records that hold texts and ids, to read the ids."""

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
    is_straight: bool = False  # True: its texts passed all checks, and hold no control string

    @property
    def is_chat(self) -> bool:
        """True if prompt and responses are messages."""
        return isinstance(self.prompt, list)


def detect_kind(record: Any, config: TokenizeConfig, where: str = "the first record") -> str:
    """Returns the kind of the settings, or else of the record's fields."""
    if config.kind != "auto":
        return config.kind
    names = "chosen=NAME --field rejected=NAME"
    if not isinstance(record, dict):
        written = quote(record)
    else:
        record = with_paths(record, config)
        try:
            named = shape_of(record, config)
        except Refused as error:
            raise error.as_error(where) from None
        if named is not None and named.refuse:
            raise RecordError(sentence(where, "packstore must be able to read it", named.refusal))
        if named is not None:
            return named.kind
        fields = Fields(record, config)
        for shape in SHAPES:
            told = any(fields.has(name, shape.holds_ids) for name in shape.tells)
            if told and ("score" not in shape.needs or fields.is_judged()):
                return shape.kind
        texts, chats = fields.free(is_text), fields.free(FITS["chat"])
        if len(chats) == 1 and (not texts or role_at(record[chats[0]], -1) == "assistant"):
            names = f"messages={chats[0]}"
        elif len(texts) == 2 and not chats and not fields.has("prompt"):
            names = "prompt=NAME --field response=NAME"
        forms = (("text", texts), ("messages", chats))
        found = [f"{form} {', '.join(map(repr, free))}" for form, free in forms if free]
        written = "; ".join(found) or f"fields {', '.join(map(repr, record))}"
    must = "it must have chosen and rejected, or messages, or prompt and response, or "
    must += "responses and scores, or input_ids"
    near = table(config.shape).nearest(record) if isinstance(record, dict) else ""
    written += f" ({near})" if near else ""
    raise RecordError(sentence(where, must, written, f"Name the fields (--field {names})"))


def parse_record(
    record: object, kind: str, config: TokenizeConfig, *, ids: bool = False, templated: bool = True
) -> Parsed:
    """Parses a record of a named shape, or with our own field names; see `canonical`."""
    record = canonical(with_paths(record, config), config, kind, templated=templated).record
    return parse_canonical(record, kind, config, ids=ids)


def parse_canonical(
    record: object, kind: str, config: TokenizeConfig, *, ids: bool = False
) -> Parsed:
    """Parses a record with our own field names to prompt, responses and rewards.

    `ids`: of a record that holds texts and their token ids, the ids.
    """
    if not isinstance(record, dict):
        raise Refused("not_an_object", f"a record must be an object, found {quote(record)}")
    fields = Fields(record, config)
    parsed = _parse(fields, _shape(fields, kind, ids))
    if not fields.unknown:
        return parsed
    if config.on["unknown_key"] != "keep":
        found = ", ".join(sorted(fields.unknown))
        remedy = 'Remove it, or set on={"unknown_key": "keep"} to ignore it'
        raise Refused("unknown_key", f"messages with {quote(found)}", remedy)
    return parsed._replace(events=(*parsed.events, "unknown_key"))


def _shape(fields: Fields, kind: str, ids: bool) -> Shape:
    """Returns the first shape that a record matches whole, or refuses it by the nearest."""
    mapped = "prompt" in fields.config.fields and kind == "preference"
    if mapped and not fields.has("prompt"):  # only without a mapping may it be implicit
        raise _missing(fields, "prompt", "text")
    shapes = SHAPES_OF[kind, ids]
    for shape in shapes:
        if next(_differing(fields, shape), None) is None:
            return shape
    differing = [[*_differing(fields, shape)] for shape in shapes]

    def distance(i: int) -> tuple[int, bool, int]:
        absent = not fields.has(differing[i][0], shapes[i].holds_ids)
        return len(differing[i]), absent, -len(shapes[i].needs.keys() - differing[i])

    i = min(range(len(shapes)), key=distance)
    shape, name = shapes[i], differing[i][0]
    form = {**shape.takes, **shape.needs}.get(name, "")
    at, value = fields.find(name, shape.holds_ids)
    if value is None:
        raise _missing(fields, name, form)
    if not form:
        detail = f"{at!r} beside {', '.join(map(repr, shape.needs))}"
        raise Refused("wrong_type", detail, "Leave one of them out")
    text = f"{at} must be {FORMS[form]} (nearest shape: {shape}), found {quote(value)}"
    if near := table(fields.config.shape).nearest(fields.record):
        text += f", or: {near}"
    raise Refused("wrong_type", text)


def _differing(fields: Fields, shape: Shape) -> Iterator[str]:
    """Yields the fields of a record that differ from a shape."""
    ids, matches = shape.holds_ids, True
    for name, form in shape.needs.items():
        try:
            value = fields.find(name, ids)[1]
        except Refused:  # what is no JSON, of which the refusal tells
            value = None
        if value is None or not FITS[form](value):
            matches = False
            yield name
    if not matches:
        return
    for name in shape.without:
        if fields.has(name, ids):
            yield name
    for name, form in shape.takes.items():
        fits = FITS.get(form)
        if fits and (value := fields.find(name, ids)[1]) is not None and not fits(value):
            yield name


def _missing(fields: Fields, name: str, form: str) -> Refused:
    """Returns the refusal of a record that lacks a field, with those that could be meant."""
    names = fields.spellings(name)
    detail = f"no field {names[0]!r} among {', '.join(map(repr, fields.record)) or 'none'}"
    if is_path(names[0]):
        detail = missing(fields.record, parse_path(names[0]))
    elif null := next((n for n in names if n in fields.record), None):
        detail = f"field {null!r} is null"
    if near := table(fields.config.shape).nearest(fields.record):
        detail += f" ({near})"
    # Numbers do not tell whether higher ones are better.
    free = fields.free(FITS[form]) if form not in ("numbers", "labels") else []
    flag = f"--field {name}={free[0] if len(free) == 1 else 'NAME'}"
    remedy = f"Name the field that holds {FORMS[form]} ({flag})"
    if len(free) > 1:
        remedy += f", one of {', '.join(map(repr, free))}"
    return Refused("missing_field", detail, remedy)


def _parse(fields: Fields, shape: Shape) -> Parsed:
    """Parses a record of a shape."""
    ids = shape.holds_ids
    forms = {*shape.needs.values()}
    sides = [name for name in _SIDES if name in shape.needs]
    responses = [fields.get(name, ids) for name in sides]
    if "responses" in shape.needs:
        responses = fields.get("responses", ids)
    prompt: Any = fields.get("prompt", ids) if "prompt" in (*shape.needs, *shape.takes) else None
    rest: dict[str, Any] = {"rewards": [1.0]}
    if "scores" in shape.needs:
        scores = _each(fields, "scores", responses)
        rest["rewards"] = [number(score, "a score") for score in scores]
    elif "score" in shape.needs:
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
        responses[1] = [*responses[0][:-1], {"role": "assistant", "content": responses[1]}]
    if sides == ["messages"]:
        dialogue = _with_system(fields, _turns(fields, responses[0]))
        if prompt:
            _check_begins(_turns(fields, prompt), dialogue)
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
    if "input_ids" in shape.needs:
        whole = as_ids(fields.get("input_ids"), "input_ids")
        if "mask" in shape.needs:
            on = masked_ids(whole, fields.get("mask"))
        else:
            on = supervised_ids(whole, fields.get("labels"), "input_ids")
        return {"prompt": whole[:0], "responses": [whole], "supervised": [on]}
    if "responses" in shape.needs:
        names = [f"response {i + 1}" for i in range(len(responses))]
        labels = _each(fields, "response_labels", responses)
    else:
        names = [name for name in ("response", "chosen", "rejected") if name in shape.needs]
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
        must = f"{name} must be a list of {len(responses)}"
        raise Refused("wrong_type", f"{must}, found {quote(values)}")
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
        _check_begins(begins, shared)
    return shared, rest


def _check_begins(prompt: list[Message], messages: list[Message]) -> None:
    """Refuses a prompt that messages do not begin with, or after their system turn."""
    own = int(messages[0]["role"] in SYSTEM and prompt[:1] != messages[:1])
    beginning = messages[own : own + len(prompt)]
    if [*map(_trimmed, beginning)] != [*map(_trimmed, prompt)]:
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
