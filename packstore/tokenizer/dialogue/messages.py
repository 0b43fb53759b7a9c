"""Chat messages of many formats in one form, and dialogues split into a prompt and its
answers.

The form is OpenAI's, which chat templates expect: ``role`` and ``content``, and for the
assistant ``tool_calls`` and ``reasoning_content``. Dialogues may also be one text with
headers of turns, as in Anthropic's HH set ("\\n\\nHuman: …\\n\\nAssistant: …").
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from packstore.config.packing import RESERVED_VARIABLES
from packstore.errors import quote
from packstore.tokenizer.dialogue.template import Message, Tools, as_json
from packstore.tokenizer.refusals import Refused, wrong_type

T = TypeVar("T")

HH_BEGINNING = re.compile(r"\s*Human:")
"""The beginning of a text dialogue of the Anthropic HH form."""


class TurnHeaders(NamedTuple):
    """Headers of the turns in a text dialogue."""

    user: str
    assistant: str

    def split(self, text: str) -> list[str]:
        """Return the turns of a text, each with its header; joined they are the
        text.
        """
        return re.split(f"(?={self.user}|{self.assistant})", text)


HH_HEADERS = TurnHeaders("\n\nHuman:", "\n\nAssistant:")
"""Headers as the Anthropic HH set has them."""

SINGLE_BREAK_HEADERS = TurnHeaders("\nHuman:", "\nAssistant:")
"""Headers as sets that imitate it have them; in a text with `HH_HEADERS` they are plain
words.
"""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "environment": "tool",
    "function": "tool",
    "assistant_tool_call": "call",
    "function_call": "call",
    "tool_call": "call",
    "assistant_reasoning": "reasoning",
}
"""Role in the input -> our role. ``call`` and ``reasoning`` are merged into assistant
messages.
"""

OTHER_TEXTS = ("name", "tool_call_id")
"""Other text fields of a message that templates use."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of reasoning; templates get it under the first two, as in transformers."""

ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names of a call's arguments, as OpenAI, Llama, LangChain and Anthropic write them."""

CALLS = ("tool_calls", "function_call")
"""Names of an assistant's calls: a list, or one call in OpenAI's first form."""

ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value")
"""Names of role and content, as OpenAI and ShareGPT write them."""

LEARNED_FLAGS: dict[str, tuple[object, object]] = {
    "weight": (1, 0),  # OpenAI
    "loss_weight": (1, 0),  # LLaMA-Factory
    "train": (True, False),  # axolotl
    "training": (True, False),
    "loss": (True, False),  # ms-swift
    "loss_mask": (1, 0),  # slime, SkyRL
    "trainable": (True, False),
    "mask": (False, True),
}
"""Names of a flag of a turn -> its value if the turn is learned, and its value if it is
not, and only read as a part of the prompt.
"""

MESSAGE_KEYS = frozenset(
    ROLE_KEYS + CONTENT_KEYS + OTHER_TEXTS + REASONING + CALLS + tuple(LEARNED_FLAGS)
)
"""Every key of a message that is read; others, but for harmless ones, are
``unknown_key``.
"""

HARMLESS_KEYS = frozenset((
    # Names of a turn, and its place, which is also that in the list.
    "id", "uuid", "message_id", "msg_id", "parent_id", "turn_id", "turn_identifier",
    "index", "idx", "turn", "turn_index", "turn_idx", "conversation_id", "object",
    # Time, author and place. WildChat's turns have the last six.
    "timestamp", "created", "created_at", "create_time", "created_date", "createdAt",
    "updated_at", "updatedAt", "date", "time", "ts", "model", "model_name", "model_id",
    "source", "lang", "language", "country", "state", "header", "hashed_ip",
    # Counts and the end of a generation, as Anthropic, OpenAI and vLLM return them;
    # caching.
    "usage", "token_count", "num_tokens", "tokens", "finish_reason", "stop_reason",
    "stop_sequence", "logprobs", "system_fingerprint", "cache_control",
))  # fmt: skip
"""Keys of a message that change neither its text nor whether it is learned: they stay
unread.
"""


class PartType(NamedTuple):
    """A type of parts that a content may have beside text."""

    kind: str  # thought, call or result
    # key that a message or call gets -> the key in the part that has its value
    fields: dict[str, str]


PARTS = {
    "reasoning": PartType("thought", {"text": "value"}),  # LLaMA-Factory
    "thinking": PartType("thought", {"text": "thinking"}),  # Anthropic, Mistral
    "reasoningContent": PartType("thought", {"text": "reasoningText"}),  # Bedrock
    "tool_call": PartType("call", {"json": "value"}),  # LLaMA-Factory
    "tool_use": PartType(  # Anthropic
        "call", {"id": "id", "name": "name", "arguments": "input"}
    ),
    "toolUse": PartType(  # Bedrock
        "call", {"id": "toolUseId", "name": "name", "arguments": "input"}
    ),
    "functionCall": PartType("call", {"name": "name", "arguments": "args"}),  # Google
    "tool_result": PartType(
        "result", {"tool_call_id": "tool_use_id", "content": "content"}
    ),
    "toolResult": PartType(
        "result", {"tool_call_id": "toolUseId", "content": "content"}
    ),
    "functionResponse": PartType("result", {"name": "name", "content": "response"}),
}
"""Type or key of a part -> how to read it."""

SKIPPED = "_skipped"
"""Key of a normalised message that is not to be learned; templates do not get it."""

OBJECTS = re.compile(r"""\s*\[?\s*\{\s*(["'])\w+\1\s*:""")
"""The beginning of a text that may be messages, written as JSON or as Python."""


# A list of messages.


def normalize_messages(
    value: Any, unknown: set[str], roles: Mapping[str, str] | None = None
) -> list[Message]:
    """Convert messages to the form that templates expect.

    Accepts ``role`` / ``content`` and ShareGPT's ``from`` / ``value``; content as text
    or as parts of text, reasoning, calls and their results; a tool call or reasoning as
    a separate message, which is merged into its assistant message. A turn with nothing
    but calls has the record's content, or null; arguments that are JSON text stay text.

    Args:
        value: a message, or a list of messages.
        unknown: the keys that are not read are added to it.
        roles: name of a role in the record -> role that it means; these go before
            `ROLES`.

    Raises:
        Refused: for a role or a value out of place (``bad_role``, ``wrong_type``).
    """
    turns = [value] if isinstance(value, dict) else value
    merged = _MergedMessages()
    for turn in turns:
        for message in _split_parts(turn):
            merged.add(*_normalize(message, unknown, roles))
    return merged.finish()


class _MergedMessages:
    """Messages, with reasoning and calls that stand apart merged into their answers."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning: Message | None = None  # of the next answer
        self._ends_with_call = False

    def add(self, role: str, message: Message) -> None:
        """Add a message; `role`: its own, or ``reasoning`` or ``call``."""
        if role == "reasoning":
            self._reasoning = message
            self._ends_with_call = False
            return
        if role == "call":
            message = _as_answer(message)
            if self._ends_with_call:
                self._extend_calls(message)
                return
        if self._reasoning is not None:
            self._add_reasoning(role, message)
        self._messages.append(message)
        self._ends_with_call = role == "call"

    def finish(self) -> list[Message]:
        """Return the messages."""
        if self._reasoning is not None:
            raise Refused("bad_role", "reasoning must precede an answer, found the end")
        return self._messages

    def _extend_calls(self, message: Message) -> None:
        """Add parallel calls to the last message."""
        last = self._messages[-1]
        _require_same_flag(last, message)
        last["tool_calls"] += message["tool_calls"]

    def _add_reasoning(self, role: str, message: Message) -> None:
        """Add the reasoning before a message to it."""
        assert self._reasoning is not None
        if message["role"] != "assistant":
            raise Refused(
                "bad_role", f"reasoning must precede an answer, found {role!r}"
            )
        _require_same_flag(self._reasoning, message)
        message["reasoning_content"] = self._reasoning["content"]
        message["thinking"] = self._reasoning["content"]
        self._reasoning = None


def _as_answer(call: Message) -> Message:
    """Return an answer of calls only."""
    calls = _parse_calls(call["content"])
    return {**call, "role": "assistant", "content": None, "tool_calls": calls}


def _require_same_flag(message: Message, next_message: Message) -> None:
    """Raise if one of two messages of a turn is to be learned and the other is not."""
    if message.get(SKIPPED) != next_message.get(SKIPPED):
        raise Refused(
            "wrong_type", f"parts of one turn must agree on {', '.join(LEARNED_FLAGS)}"
        )


# Parts of a message.


def _split_parts(raw: Any) -> list[Any]:
    """Split a message with parts of reasoning, calls or results into messages of one
    kind each.
    """
    parts = _parts_of(raw)
    if not parts:
        return [raw]
    by_kind: dict[str, list[Any]] = {
        "thought": [],
        "call": [],
        "result": [],
        "text": [],
    }
    for part in parts:
        kind, value = _read_part(part)
        by_kind[kind].append(value)
    if len(by_kind["text"]) == len(parts):
        return [raw]
    fields = {key: value for key, value in raw.items() if key != "content"}
    messages = by_kind["result"]
    if by_kind["thought"]:
        if fields.get("role") != "assistant":
            raise Refused(
                "bad_role", f"only the assistant has reasoning, found {quote(raw)}"
            )
        thoughts = [
            text for thought in by_kind["thought"] for text in _thought_texts(thought)
        ]
        messages.append({**fields, "role": "assistant_reasoning", "content": thoughts})
    if by_kind["call"]:
        fields["tool_calls"] = [_call_of_part(call) for call in by_kind["call"]]
    if by_kind["call"] or by_kind["text"]:
        messages.append({**fields, "content": by_kind["text"] or None})
    return messages


def _parts_of(raw: Any) -> list[dict[str, Any]]:
    """Return the parts of a message's content; none unless it is a list of objects."""
    if not isinstance(raw, dict):
        return []
    parts = raw.get("content")
    if not isinstance(parts, list):
        return []
    if all(isinstance(part, dict) for part in parts):
        return parts
    return []


def _read_part(part: dict[str, Any]) -> tuple[str, Any]:
    """Return the kind of a part, and its value: a message of a result, a call, thoughts
    or text.
    """
    name = part.get("type") or _first_part_key(part)
    if not isinstance(name, str) or name not in PARTS:
        return "text", part
    part_type = PARTS[name]
    source = part[name] if isinstance(part.get(name), dict) else part
    fields = part_type.fields.items()
    value = {
        key: source[source_key] for key, source_key in fields if source.get(source_key)
    }
    if part_type.kind != "result":
        return part_type.kind, value
    content = value.get("content", "")
    if not isinstance(content, str | list):
        content = as_json(content)
    return "result", {"role": "tool", **value, "content": content}


def _first_part_key(part: dict[str, Any]) -> str | None:
    """Return the key that is the type of a part, as Bedrock and Google write it."""
    for key, value in part.items():
        if key in PARTS and value:
            return key
    return None


def _thought_texts(thought: dict[str, Any]) -> list[Any]:
    """Return the parts of text of a thought, which may be a list of them."""
    texts = thought.get("text")
    if not isinstance(texts, list):
        texts = [texts]
    return [{"text": text} if isinstance(text, str) else text for text in texts]


def _call_of_part(call: dict[str, Any]) -> Any:
    value = call.get("json", call)
    return _parse_json(value, "a tool call") if isinstance(value, str) else value


# One message.


def _normalize(
    raw: object, unknown: set[str], roles: Mapping[str, str] | None
) -> tuple[str, Message]:
    """Return a message in the form that templates expect, and its role of `ROLES`."""
    if not isinstance(raw, dict):
        raise wrong_type("a message must be an object", raw)
    if roles:
        raw = _with_role(raw, roles)
    if _is_common(raw):
        role = ROLES[raw["role"]]
        return role, {"role": role, "content": raw["content"]}
    unread = raw.keys() - MESSAGE_KEYS - HARMLESS_KEYS
    unknown.update(str(key) for key in unread if not is_empty(raw[key]))
    role = _role_of(raw)
    message: Message = {"role": role}
    thoughts = _one_of(raw, REASONING)
    calls = _one_of(raw, CALLS)
    if (thoughts or calls) and role != "assistant":
        raise Refused(
            "bad_role", f"only the assistant has reasoning and calls, found {role!r}"
        )
    message["content"] = _content_of(raw, unknown, may_be_null=bool(calls))
    for name in OTHER_TEXTS:
        if raw.get(name) is not None:
            message[name] = _text(raw[name], unknown)
    if thoughts is not None:
        message["reasoning_content"] = message["thinking"] = _text(thoughts, unknown)
    if calls:
        message["tool_calls"] = _parse_calls(calls)
    if not _is_learned(raw, role):
        message[SKIPPED] = True
    return role, message


def _is_common(raw: dict[str, Any]) -> bool:
    """Return True for a message of the most common form: a known role, and text."""
    if len(raw) != 2 or type(raw.get("content")) is not str:
        return False
    role = raw.get("role")
    return type(role) is str and role in ROLES


def _with_role(raw: dict[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """Return a message with its role renamed, if it is one of `roles`."""
    renamed = dict(raw)
    for key in ROLE_KEYS:
        role = raw.get(key)
        if isinstance(role, str) and role in roles:
            renamed[key] = roles[role]
    return renamed


def _role_of(raw: dict[str, Any]) -> str:
    """Return the role of a message, a value of `ROLES`.

    Raises:
        Refused: it has none, or an unknown one.
    """
    name = _one_of(raw, ROLE_KEYS)
    if isinstance(name, list):
        raise Refused(
            "wrong_type", "messages must be a list of objects, found an object of lists"
        )
    if name is None:
        remedy = "Give the list of messages itself" if "messages" in raw else ""
        raise Refused("bad_role", f"a message without a role, {quote(raw)}", remedy)
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        meaning = {"roles": {str(name): "assistant"}}
        remedy = "Say what it means ({})"
        raise Refused("bad_role", f"unknown role {quote(name)}", remedy, meaning)
    return role


def _content_of(
    raw: dict[str, Any], unknown: set[str], *, may_be_null: bool
) -> str | None:
    """Return the text of a message.

    Raises:
        Refused: it has none, or another type.
    """
    content = _one_of(raw, CONTENT_KEYS)
    if content is None:
        if may_be_null:
            return None
        other_keys = raw.keys() - MESSAGE_KEYS
        if other_keys:
            names = ", ".join(sorted(repr(key) for key in other_keys))
            remedy = (
                "Write it as content; several answers to choose from as chosen "
                "and rejected"
            )
            detail = f"a message without content, but with {names}"
            raise Refused("wrong_type", detail, remedy)
    return _text(content, unknown)


def _one_of(raw: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the value under one of several names; None without one.

    Raises:
        Refused: two names have different values.
    """
    values = [raw[name] for name in names if raw.get(name) is not None]
    if not values:
        return None
    if any(value != values[0] for value in values):
        raise Refused(
            "wrong_type", f"a message must have one of {', '.join(names)}; they differ"
        )
    return values[0]


def _is_learned(raw: dict[str, Any], role: str) -> bool:
    """Return True unless a flag of a turn excludes it from learning."""
    flags = {name: raw[name] for name in LEARNED_FLAGS if raw.get(name) is not None}
    answers = {_read_flag(name, value) for name, value in flags.items()}
    if len(answers) > 1:
        raise Refused("wrong_type", f"{', '.join(flags)} of a turn must agree")
    if True in answers and role in ("system", "user", "tool"):
        raise Refused(
            "wrong_type", f"only turns of the assistant are learned, found {role!r}"
        )
    return False not in answers


def _read_flag(name: str, value: object) -> bool:
    """Return True if a flag means that its turn is learned."""
    if_learned, if_not = LEARNED_FLAGS[name]
    # A mask of 1 may mean that a turn is learned, or that it is masked; but 1 == True.
    is_ambiguous = name == "mask" and type(value) is not bool
    if is_ambiguous or value not in (if_learned, if_not):
        raise wrong_type(f"{name} of a turn must be {if_learned} or {if_not}", value)
    return value == if_learned


def _text(content: object, unknown: set[str]) -> str:
    """Return a content of text, or of parts of text, as text."""
    if isinstance(content, list):
        return "".join([_text_of_part(part, unknown) for part in content])
    if isinstance(content, str):
        return content
    raise wrong_type("message content must be text", content)


def _text_of_part(part: Any, unknown: set[str]) -> str:
    if not isinstance(part, dict):
        raise wrong_type("a part must be text", part)
    names = [name for name in ("text", "value") if part.get(name)] or ["text"]
    text = part.get(names[0])
    if not isinstance(text, str) or len(names) > 1:
        raise wrong_type("a part must be text", part)
    if part.get("type", "text") not in ("text", None):
        raise wrong_type("a part must be of type text", part)
    unread = part.keys() - HARMLESS_KEYS - {"type", names[0]}
    unknown.update(f"content.{key}" for key in unread if not is_empty(part[key]))
    return text


def _parse_calls(value: object) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form, without the nulls that tables add."""
    if isinstance(value, str):
        value = _parse_json(value, "a tool call")
    if not isinstance(value, list):
        value = [value]
    return [_parse_call(call) for call in value]


def _parse_call(raw: Any) -> dict[str, Any]:
    described = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(described, dict):
        raise wrong_type("a tool call must name a function", raw)
    name = described.get("name")
    if not isinstance(name, str) or not name:
        raise wrong_type("a tool call must name a function", raw)
    arguments = _one_of(described, ARGUMENTS)
    function = {"arguments": {} if arguments is None else arguments}
    for key, value in _without_nulls(described).items():
        if key not in ARGUMENTS:
            function[key] = value
    call = _without_nulls(raw) if described is not raw else {}
    return {"type": "function", **call, "function": function}


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def is_empty(value: object) -> bool:
    """Return True for null, and for text, a list or an object without anything
    in it.
    """
    return value is None or (isinstance(value, str | list | dict) and not value)


# Values beside messages, and JSON text.


def parsed_json(value: object) -> object:
    """Return messages that are JSON text, as in text columns, parsed; other values
    unchanged.
    """
    if not isinstance(value, str):
        return value
    beginning = OBJECTS.match(value)
    if beginning is None:
        return value
    quote_mark = beginning[1]
    for names in (ROLE_KEYS, CONTENT_KEYS + CALLS):
        if not any(f"{quote_mark}{name}{quote_mark}" in value for name in names):
            return value
    if quote_mark == "'":
        remedy = "Write messages to a column by json.dumps"
        raise wrong_type("messages are Python text", value, remedy)
    parsed = _parse_json(value, "messages")
    turns = parsed if isinstance(parsed, list) else [parsed]
    # An answer in JSON may have such keys: it stays text.
    return parsed if all(_is_turn(turn) for turn in turns) else value


def _is_turn(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    keys = value.keys()
    return not keys.isdisjoint(ROLE_KEYS) and not keys.isdisjoint(CONTENT_KEYS + CALLS)


def normalize_tools(value: object) -> Tools:
    """Return descriptions of tools, from a list or its JSON text; None without
    tools.
    """
    value = _parse_if_text(value, "tools")
    if not value:
        return None
    if not isinstance(value, list):
        raise wrong_type("tools must be a list", value)
    return [_parse_tool(tool) for tool in value]


def _parse_tool(tool: Any) -> Any:
    """Return a tool, parsed where it or a part of it is JSON text."""
    if isinstance(tool, str):
        tool = _parse_json(tool, "a tool")
    if not isinstance(tool, dict):
        raise wrong_type("a tool must be an object", tool)
    if "input_schema" in tool:
        return {"type": "function", "function": _parse_tool(_rename_schema(tool))}
    parsed = dict(tool)
    for name in ("function", "parameters", "properties"):
        part = _parse_if_text(tool.get(name), f"{name} of a tool")
        if isinstance(part, dict):
            parsed[name] = part
    for name in ("function", "parameters"):
        if isinstance(parsed.get(name), dict):
            parsed[name] = _parse_tool(parsed[name])
    return parsed


def _rename_schema(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function of Anthropic's form in OpenAI's, its keys in the same order."""
    new_names = {"input_schema": "parameters"}
    return {new_names.get(key, key): value for key, value in function.items()}


def normalize_variables(value: object) -> dict[str, Any] | None:
    """Return variables of the chat template, from an object or its JSON text.

    None without variables. Null values count as absent: tables fill missing variables
    with null.
    """
    value = _parse_if_text(value, "chat_template_kwargs")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("chat_template_kwargs must be an object", value)
    for name in value:
        if not isinstance(name, str) or name in RESERVED_VARIABLES:
            raise Refused(
                "wrong_type", f"chat_template_kwargs must not hold {quote(name)}"
            )
    return _without_nulls(value) or None


def _parse_if_text(value: object, noun: str) -> Any:
    """Return a value, parsed if it is JSON text; None for blank text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    return _parse_json(value, noun)


def _parse_json(text: str, noun: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("wrong_type", f"{noun} must be JSON: {error}") from None


# Normalised messages.


def has_content(message: Message) -> bool:
    """Return True if a turn has text, calls or reasoning."""
    content = message["content"] or ""
    return bool(
        content.strip() or message.get("tool_calls") or message.get("reasoning_content")
    )


def text_arguments(messages: list[Message]) -> Iterator[str]:
    """Yield non-empty arguments of tool calls that are text."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str) and arguments.strip():
                yield arguments


def without_thinking(response: Any) -> Any:
    """Return text or messages without reasoning; ids as they are."""
    if isinstance(response, str):
        return _text_without_thinking(response)
    if isinstance(response, list):
        return [_message_without_thinking(message) for message in response]
    return response


def _text_without_thinking(text: str) -> str:
    """Return text without ``<think>...</think>``, also if the opening tag was in the
    prompt.
    """
    text = re.sub(r"<think>.*?</think>\s*", "", text, flags=re.DOTALL)
    if "</think>" not in text:
        return text
    return text.rpartition("</think>")[2].lstrip()


def _message_without_thinking(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    fields = {key: value for key, value in message.items() if key not in REASONING}
    return {**fields, "content": without_thinking(message["content"])}


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string in a JSON value, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return value


# Dialogues split into a prompt and its answers.


def split_messages(
    dialogues: Sequence[list[Message]],
) -> tuple[list[Message], list[list[Message]]]:
    """Split dialogues into their common prompt and the remaining messages of each.

    The prompt is their longest common beginning after which each goes on with a message
    of the assistant.
    """
    cut = _common_turns(dialogues, _is_answer)
    return dialogues[0][:cut], [dialogue[cut:] for dialogue in dialogues]


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def turn_headers(text: object) -> TurnHeaders | None:
    """Return the headers of a text dialogue of the HH form; None for any other
    value.
    """
    if not isinstance(text, str) or not HH_BEGINNING.match(text):
        return None
    for headers in (HH_HEADERS, SINGLE_BREAK_HEADERS):
        if headers.assistant in text:
            return headers
    return None


def is_hh(text: object) -> bool:
    """Return True for a text dialogue of the Anthropic HH form."""
    return turn_headers(text) is not None


def split_texts(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Split text dialogues into their common prompt and the remaining text of each."""
    headers = HH_HEADERS
    if any(turn_headers(text) is SINGLE_BREAK_HEADERS for text in texts):
        headers = SINGLE_BREAK_HEADERS

    def is_answer(turn: str) -> bool:
        return turn.startswith(headers.assistant)

    turns = [headers.split(text) for text in texts]
    cut = _common_turns(turns, is_answer)
    size = len("".join(turns[0][:cut])) + len(headers.assistant)
    return texts[0][:size], [text[size:] for text in texts]


def text_as_messages(
    prompt: str, responses: Sequence[str]
) -> tuple[list[Message], list[list[Message]]]:
    """Return text as a turn of the user and one of the assistant, or by its HH
    headers.
    """
    headers = turn_headers(prompt)
    if headers is None:
        answers = [[{"role": "assistant", "content": text}] for text in responses]
        return [{"role": "user", "content": prompt}], answers
    turns = _turns_of("\n\n" + prompt.lstrip(), headers)
    # The prompt ends with the header of the responses: a turn without text.
    if turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return turns, [_turns_of(headers.assistant + text, headers) for text in responses]


def _turns_of(text: str, headers: TurnHeaders) -> list[Message]:
    """Return the turns of a text dialogue that begins with a header."""
    turns = []
    for part in headers.split(text):
        if part.startswith(headers.user):
            turns.append(
                {"role": "user", "content": part.removeprefix(headers.user).strip()}
            )
        elif part.startswith(headers.assistant):
            answer = part.removeprefix(headers.assistant)
            turns.append({"role": "assistant", "content": answer.strip()})
    return turns


def _common_turns(
    dialogues: Sequence[Sequence[T]], is_assistant: Callable[[T], bool]
) -> int:
    """Return the number of turns of the common prompt: the same in all dialogues, and
    followed by an assistant turn in each.
    """
    shortest = min(len(dialogue) for dialogue in dialogues)
    cut = 0
    # The last turn of the shortest dialogue is never in the prompt: it is an answer.
    while cut < shortest - 1 and _are_equal([dialogue[cut] for dialogue in dialogues]):
        cut += 1
    # Back to a place where all go on with an answer.
    while cut > 0:
        if all(is_assistant(dialogue[cut]) for dialogue in dialogues):
            return cut
        cut -= 1
    raise Refused("no_common_prompt", "the sides share no turn before an answer")


def _are_equal(turns: Sequence[object]) -> bool:
    return all(turn == turns[0] for turn in turns)
