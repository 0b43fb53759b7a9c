"""Normalises chat messages of many formats, and splits dialogues that share a prompt."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from packstore.config.packing import RESERVED_VARIABLES
from packstore.errors import quote
from packstore.tokenizer.dialogue.sandbox import as_json
from packstore.tokenizer.dialogue.template import Message, Tools
from packstore.tokenizer.refusals import Refused, wrong_type

T = TypeVar("T")

HH_BEGINNING = re.compile(r"\s*Human:")
"""The beginning of a text dialogue of the Anthropic HH form."""


class TurnHeaders(NamedTuple):
    """Headers of the turns in a text dialogue."""

    user: str
    assistant: str

    def split(self, text: str) -> list[str]:
        """Return the turns of a text, each with its header; joined they are the text."""
        return re.split(f"(?={self.user}|{self.assistant})", text)


HH_HEADERS = TurnHeaders("\n\nHuman:", "\n\nAssistant:")
"""Headers as the Anthropic HH set has them."""

SINGLE_BREAK_HEADERS = TurnHeaders("\nHuman:", "\nAssistant:")
"""Headers as sets that imitate it have them; in a text with `HH_HEADERS` they are plain words."""

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
"""Role in the input -> our role. ``call`` and ``reasoning`` are merged into assistant messages."""

KEPT = ("name", "tool_call_id")
"""Other text fields of a message that templates use."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of reasoning; templates get it under the first two, as in transformers."""

ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names of a call's arguments, as OpenAI, Llama, LangChain and Anthropic write them."""

CALLS = ("tool_calls", "function_call")
"""Names of an assistant's calls: a list, or one call in OpenAI's first form."""

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
"""Names of a flag of a turn -> its values for a turn to learn, and for one to read only."""

MESSAGE_KEYS = frozenset(
    ("role", "from", "content", "value", *KEPT, *REASONING, *CALLS, *LEARNED_FLAGS)
)
"""Every key of a message that is read; others, but for harmless ones, are ``unknown_key``."""

HARMLESS_KEYS = frozenset((
    # Who or what a turn is, and where it stands, which the order of the list says.
    "id", "uuid", "message_id", "msg_id", "parent_id", "turn_id", "turn_identifier",
    "index", "idx", "turn", "turn_index", "turn_idx", "conversation_id", "object",
    # When and by whom. WildChat's turns have the last six.
    "timestamp", "created", "created_at", "create_time", "created_date", "createdAt",
    "updated_at", "updatedAt", "date", "time", "model", "model_name", "model_id", "source",
    "lang", "language", "country", "state", "header", "hashed_ip",
    # Counts and the end of a generation, as Anthropic, OpenAI and vLLM return them; caching.
    "usage", "token_count", "num_tokens", "tokens", "finish_reason", "stop_reason",
    "stop_sequence", "logprobs", "system_fingerprint", "cache_control",
))  # fmt: skip
"""Keys of a message that change neither its text nor whether it is learned: they stay unread."""

PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "reasoning": ("thought", {"text": "value"}),  # LLaMA-Factory
    "thinking": ("thought", {"text": "thinking"}),  # Anthropic, Mistral
    "reasoningContent": ("thought", {"text": "reasoningText"}),  # Bedrock
    "tool_call": ("call", {"json": "value"}),  # LLaMA-Factory
    "tool_use": ("call", {"id": "id", "name": "name", "arguments": "input"}),  # Anthropic
    "toolUse": ("call", {"id": "toolUseId", "name": "name", "arguments": "input"}),  # Bedrock
    "functionCall": ("call", {"name": "name", "arguments": "args"}),  # Google
    "tool_result": ("result", {"tool_call_id": "tool_use_id", "content": "content"}),
    "toolResult": ("result", {"tool_call_id": "toolUseId", "content": "content"}),
    "functionResponse": ("result", {"name": "name", "content": "response"}),
}
"""Type or key of a part of a message -> what it is, and its keys of a message or a call."""

SKIPPED = "_skipped"
"""Key of a normalised message that is not to be learned; templates do not get it."""

OBJECTS = re.compile(r"""\s*\[?\s*\{\s*(["'])\w+\1\s*:""")
"""The beginning of a text that may be messages, written as JSON or as Python."""


def normalize_messages(
    value: Any, unknown: set[str], roles: Mapping[str, str] | None = None
) -> list[Message]:
    """Converts messages to the form that templates expect.

    Accepts ``role`` / ``content`` and ShareGPT's ``from`` / ``value``; content as text or as parts
    of text, reasoning, calls and their results; a tool call or reasoning as a separate message,
    which is merged into its assistant message. A turn with calls only has the record's content, or
    null; arguments that are JSON text stay text. Keys that are not read are added to `unknown`.
    `roles`: further names of roles -> the role that each means, before packstore's own.
    """
    found: list[Message] = []
    reasoning: Message | None = None
    calling = False
    turns = [value] if isinstance(value, dict) else value
    for raw in itertools.chain.from_iterable(map(_spread, turns)):
        role, message = _normalize(raw, unknown, roles)
        if role == "reasoning":
            reasoning, calling = message, False
            continue
        if role == "call":
            calls = _calls(message["content"])
            message = {**message, "role": "assistant", "content": None, "tool_calls": calls}
            if calling:
                _check_alike(found[-1], message)
                found[-1]["tool_calls"] += calls
                continue
        if reasoning is not None:
            if message["role"] != "assistant":
                raise Refused("bad_role", f"reasoning must precede an answer, found {role!r}")
            _check_alike(reasoning, message)
            message["reasoning_content"] = message["thinking"] = reasoning["content"]
            reasoning = None
        found.append(message)
        calling = role == "call"
    if reasoning is not None:
        raise Refused("bad_role", "reasoning must precede an answer, found the end")
    return found


def _spread(raw: Any) -> list[Any]:
    """Splits a message with parts of reasoning, calls or results into messages of one kind each."""
    parts = raw.get("content") if isinstance(raw, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return [raw]
    results: list[Message] = []
    by_kind: dict[str, list[Any]] = {"thought": [], "call": [], "text": []}
    for part in parts:
        kind = part.get("type") or next((key for key in part if key in PARTS and part[key]), "text")
        name, fields = PARTS.get(kind, ("text", {}))
        held = part[kind] if isinstance(part.get(kind), dict) else part
        value = {ours: held[theirs] for ours, theirs in fields.items() if held.get(theirs)}
        if name == "result":
            said = value.get("content", "")
            content = said if isinstance(said, str | list) else as_json(said)
            results.append({"role": "tool", **value, "content": content})
        else:
            by_kind[name].append(value if fields else part)
    if not (results or by_kind["thought"] or by_kind["call"]):
        return [raw]
    rest = {key: value for key, value in raw.items() if key != "content"}
    if by_kind["thought"]:
        if rest.get("role") != "assistant":
            raise Refused("bad_role", f"only the assistant has reasoning, found {quote(raw)}")
        thoughts = [
            {"text": thought} if isinstance(thought, str) else thought
            for part in by_kind["thought"]
            for thought in _as_list(part.get("text"))
        ]
        results.append({**rest, "role": "assistant_reasoning", "content": thoughts})
    if by_kind["call"]:
        calls = [call.pop("json", call) for call in by_kind["call"]]
        rest["tool_calls"] = [_json(c, "a tool call") if isinstance(c, str) else c for c in calls]
    if by_kind["text"] or by_kind["call"]:
        results.append({**rest, "content": by_kind["text"] or None})
    return results


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_alike(one: Message, other: Message) -> None:
    if one.get(SKIPPED) != other.get(SKIPPED):
        raise Refused("wrong_type", f"parts of one turn must agree on {', '.join(LEARNED_FLAGS)}")


def parsed_json(value: object) -> object:
    """Parses JSON text of messages, as in text columns; other values are returned as they are."""
    if not isinstance(value, str) or not (begins := OBJECTS.match(value)):
        return value
    mark = begins[1]
    for names in (("role", "from"), ("content", "value", *CALLS)):
        if not any(f"{mark}{name}{mark}" in value for name in names):
            return value
    if mark == "'":
        remedy = "Write messages to a column by json.dumps"
        raise wrong_type("messages are Python text", value, remedy)
    parsed = _json(value, "messages")
    turns = parsed if isinstance(parsed, list) else [parsed]
    said = all(
        isinstance(turn, dict)
        and not {"role", "from"}.isdisjoint(turn)
        and not {"content", "value", *CALLS}.isdisjoint(turn)
        for turn in turns
    )
    return parsed if said else value  # an answer in JSON may have such keys


def normalize_tools(value: object) -> Tools:
    """Normalises tool descriptions, given as a list or its JSON text; None without tools."""
    if isinstance(value, str):
        value = _json(value, "tools") if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list):
        raise wrong_type("tools must be a list", value)
    return [_tool(tool) for tool in value]


def _tool(tool: Any) -> Any:
    """Parses a tool that is JSON text, and the parts of it that are."""
    if isinstance(tool, str):
        tool = _json(tool, "a tool")
    if not isinstance(tool, dict):
        raise wrong_type("a tool must be an object", tool)
    if "input_schema" in tool:  # Anthropic
        function = {("parameters" if k == "input_schema" else k): v for k, v in tool.items()}
        return {"type": "function", "function": _tool(function)}
    for name in ("function", "parameters", "properties"):
        part = tool.get(name)
        if isinstance(part, str) and part.strip():
            part = _json(part, f"{name} of a tool")
        if isinstance(part, dict):
            tool = {**tool, name: _tool(part) if name != "properties" else part}
    return tool


def normalize_variables(value: object) -> dict[str, Any] | None:
    """Normalises variables of the chat template, given as an object or its JSON text.

    None without variables. Null values count as absent: tables fill missing variables with null.
    """
    if isinstance(value, str):
        value = _json(value, "chat_template_kwargs") if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("chat_template_kwargs must be an object", value)
    for name in value:
        if not isinstance(name, str) or name in RESERVED_VARIABLES:
            raise Refused("wrong_type", f"chat_template_kwargs must not hold {quote(name)}")
    return _without_nulls(value) or None


def without_thinking(said: Any) -> Any:
    """Returns text or messages without reasoning; ids as they are.

    In text it is ``<think>...</think>``, also if the opening tag was in the prompt.
    """
    if isinstance(said, str):
        text = re.sub(r"<think>.*?</think>\s*", "", said, flags=re.DOTALL)
        return text.rpartition("</think>")[2].lstrip() if "</think>" in text else text
    if not isinstance(said, list):
        return said
    return [
        {
            **{key: value for key, value in message.items() if key not in REASONING},
            "content": without_thinking(message["content"]),
        }
        if message["role"] == "assistant"
        else message
        for message in said
    ]


def has_content(message: Message) -> bool:
    """Returns True if a turn has text, calls or reasoning."""
    content = message["content"] or ""
    return bool(content.strip() or message.get("tool_calls") or message.get("reasoning_content"))


def text_arguments(messages: list[Message]) -> Iterator[str]:
    """Yields non-empty arguments of tool calls that are text."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str) and arguments.strip():
                yield arguments


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Applies `change` to every string in a JSON value, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(v, change) for v in value]
    if isinstance(value, dict):
        return {change(key): map_strings(v, change) for key, v in value.items()}
    return value


def _normalize(
    raw: object, unknown: set[str], roles: Mapping[str, str] | None
) -> tuple[str, Message]:
    if not isinstance(raw, dict):
        raise wrong_type("a message must be an object", raw)
    written = raw.get("role")
    if roles:
        raw = _with_role(raw, roles)
        written = raw.get("role")
    if len(raw) == 2 and type(written) is str and type(content := raw.get("content")) is str:
        role = ROLES.get(written)
        if role is not None:  # the most common form
            return role, {"role": role, "content": content}
    unread = raw.keys() - MESSAGE_KEYS - HARMLESS_KEYS
    unknown.update(str(key) for key in unread if not is_empty(raw[key]))
    written = _one_of(raw, ("role", "from"))
    if isinstance(written, list):
        raise Refused("wrong_type", "messages must be a list of objects, found an object of lists")
    role = ROLES.get(written.lower()) if isinstance(written, str) else None
    if written is None:
        remedy = "Give the list of messages itself" if "messages" in raw else ""
        raise Refused("bad_role", f"a message without a role, {quote(raw)}", remedy)
    if role is None:
        meaning = {"roles": {str(written): "assistant"}}
        remedy = "Say what it means ({})"
        raise Refused("bad_role", f"unknown role {quote(written)}", remedy, meaning)
    message: Message = {"role": role}
    thoughts, calls = _one_of(raw, REASONING), _one_of(raw, CALLS)
    if (thoughts or calls) and role != "assistant":
        raise Refused("bad_role", f"only the assistant has reasoning and calls, found {role!r}")
    content = _one_of(raw, ("content", "value"))
    if content is None and not calls and (others := raw.keys() - MESSAGE_KEYS):
        found = f"a message without content, but with {', '.join(sorted(map(repr, others)))}"
        remedy = "Write it as content; several answers to choose from as chosen and rejected"
        raise Refused("wrong_type", found, remedy)
    message["content"] = None if content is None and calls else _text(content, unknown)
    for name in KEPT:
        if raw.get(name) is not None:
            message[name] = _text(raw[name], unknown)
    if thoughts is not None:
        message["reasoning_content"] = message["thinking"] = _text(thoughts, unknown)
    if calls:
        message["tool_calls"] = _calls(calls)
    if not _is_learned(raw, role):
        message[SKIPPED] = True
    return role, message


def _with_role(raw: dict[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """Return a message with its role renamed, if it is one of `roles`."""
    renamed = dict(raw)
    for key in ("role", "from"):
        role = raw.get(key)
        if isinstance(role, str) and role in roles:
            renamed[key] = roles[role]
    return renamed


def _one_of(raw: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The value under one of several names; two that differ are refused."""
    found = [raw[name] for name in names if raw.get(name) is not None]
    if any(value != found[0] for value in found):
        raise Refused("wrong_type", f"a message must have one of {', '.join(names)}; they differ")
    return found[0] if found else None


def _is_learned(raw: dict[str, Any], role: str) -> bool:
    """Returns True unless a flag says that a turn is not to be learned."""
    flags = {name: raw[name] for name in LEARNED_FLAGS if raw.get(name) is not None}
    learned = set()
    for name, value in flags.items():
        learns, reads = LEARNED_FLAGS[name]
        # 1 equals True, but as a mask either may mean that the turn is learned.
        if value not in (learns, reads) or (name == "mask" and type(value) is not bool):
            raise wrong_type(f"{name} of a turn must be {learns} or {reads}", value)
        learned.add(value == learns)
    if len(learned) > 1:
        raise Refused("wrong_type", f"{', '.join(flags)} of a turn must agree")
    if True in learned and role in ("system", "user", "tool"):
        raise Refused("wrong_type", f"only turns of the assistant are learned, found {role!r}")
    return False not in learned


def is_empty(value: object) -> bool:
    """Returns True for null, and for text, a list or an object without anything in it."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def _text(content: object, unknown: set[str]) -> str:
    if isinstance(content, list):
        texts = []
        for part in content:
            names = [n for n in ("text", "value") if isinstance(part, dict) and part.get(n)]
            text = part[names[0]] if names else isinstance(part, dict) and part.get("text")
            if not isinstance(text, str) or len(names) > 1:
                raise wrong_type("a part must be text", part)
            if part.get("type", "text") not in ("text", None):
                raise wrong_type("a part must be of type text", part)
            others = part.keys() - HARMLESS_KEYS - {"type", *(names or ("text",))}
            unknown.update(f"content.{key}" for key in others if not is_empty(part[key]))
            texts.append(text)
        return "".join(texts)
    if isinstance(content, str):
        return content
    raise wrong_type("message content must be text", content)


def _calls(value: object) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, without the nulls that tables add."""
    if isinstance(value, str):
        value = _json(value, "a tool call")
    calls = []
    for raw in value if isinstance(value, list) else [value]:
        described = raw.get("function", raw) if isinstance(raw, dict) else None
        name = described.get("name") if isinstance(described, dict) else None
        if not isinstance(described, dict) or not isinstance(name, str) or not name:
            raise wrong_type("a tool call must name a function", raw)
        given = _one_of(described, ARGUMENTS)
        rest = {key: v for key, v in _without_nulls(described).items() if key not in ARGUMENTS}
        function = {"arguments": {} if given is None else given, **rest}
        call = _without_nulls(raw) if isinstance(raw, dict) and described is not raw else {}
        calls.append({"type": "function", **call, "function": function})
    return calls


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def _json(text: str, noun: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("wrong_type", f"{noun} must be JSON: {error}") from None


def split_messages(dialogues: Sequence[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """Splits off the longest common prefix of messages that all sides follow by the assistant."""
    cut = _common_turns(dialogues, lambda message: bool(message["role"] == "assistant"))
    return dialogues[0][:cut], [dialogue[cut:] for dialogue in dialogues]


def turn_headers(text: object) -> TurnHeaders | None:
    """Return the headers of a text dialogue of the HH form; None for any other value."""
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
    turns = [headers.split(text) for text in texts]
    cut = _common_turns(turns, lambda turn: turn.startswith(headers.assistant))
    size = len("".join(turns[0][:cut])) + len(headers.assistant)
    return texts[0][:size], [text[size:] for text in texts]


def text_as_messages(
    prompt: str, responses: Sequence[str]
) -> tuple[list[Message], list[list[Message]]]:
    """Return text as a turn of the user and one of the assistant, or as its HH headers say."""
    headers = turn_headers(prompt)
    if headers is None:
        answers = [[{"role": "assistant", "content": text}] for text in responses]
        return [{"role": "user", "content": prompt}], answers
    turns = _turns_of("\n\n" + prompt.lstrip(), headers)
    if turns[-1] == {"role": "assistant", "content": ""}:  # the header before the responses
        turns.pop()
    return turns, [_turns_of(headers.assistant + text, headers) for text in responses]


def _turns_of(text: str, headers: TurnHeaders) -> list[Message]:
    """Return the turns of a text dialogue that begins with a header."""
    turns = []
    for part in headers.split(text):
        if part.startswith(headers.user):
            turns.append({"role": "user", "content": part.removeprefix(headers.user).strip()})
        elif part.startswith(headers.assistant):
            answer = part.removeprefix(headers.assistant)
            turns.append({"role": "assistant", "content": answer.strip()})
    return turns


def _common_turns(dialogues: Sequence[Sequence[T]], is_assistant: Callable[[T], bool]) -> int:
    """Number of common turns that all dialogues follow by an assistant turn."""
    shortest = min(len(dialogue) for dialogue in dialogues)
    first = dialogues[0]
    cut = 0
    while cut < shortest - 1 and all(d[cut] == first[cut] for d in dialogues):
        cut += 1
    while cut >= 0 and not all(is_assistant(d[cut]) for d in dialogues):
        cut -= 1
    if cut <= 0:
        raise Refused("no_common_prompt", "the sides share no turn before an answer")
    return cut
