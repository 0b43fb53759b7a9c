"""Converts a parsed record to texts: template, control strings, and supervised spans."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import TokenizerError, quote, sentence
from packstore.tokenizer.chat.assistant_spans import (
    after_empty_thinking,
    find_missing_part,
    is_plain,
    quotes_arguments,
    render_turns,
    shows_tools,
)
from packstore.tokenizer.chat.messages import (
    SKIPPED,
    has_content,
    map_strings,
    strip_thinking,
    text_arguments,
    without_thinking,
)
from packstore.tokenizer.chat.sandbox import as_json
from packstore.tokenizer.chat.template import ChatTemplate, Message, Tools
from packstore.tokenizer.control import free_characters, holds
from packstore.tokenizer.records.parse import Parsed
from packstore.tokenizer.records.sequences import Draft, Mode
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer

_SURROGATES = re.compile("[\ud800-\udfff]")


def check_responses(parsed: Parsed, config: TokenizeConfig) -> Parsed:
    """Strips thinking if so configured, and refuses empty and identical responses."""
    if config.thinking == "strip":
        parts: list[Any] = [parsed.prompt, *parsed.responses]
        for i, part in enumerate(parts):
            if isinstance(part, list):
                parts[i] = without_thinking(part)
            elif isinstance(part, str) and i:
                parts[i] = strip_thinking(part)
        parsed = parsed._replace(prompt=parts[0], responses=parts[1:])
    if config.on["empty_side"] != "keep":
        for i, response in enumerate(parsed.responses):
            if _is_empty(response):
                raise Refused("empty_side", f"response {i + 1} of {len(parsed.responses)}")
    first, *others = parsed.responses
    alike = others and all(_is_same(first, other) for other in others)
    if alike and config.on["identical_sides"] != "keep":
        raise Refused("identical_sides", "all responses are alike")
    return parsed


def draft_record(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig
) -> tuple[list[Draft], list[str]]:
    """Returns the texts of a record's sequences, and events to note."""
    guard = ""
    events: list[str] = []
    rendered = not parsed.is_plain and _is_rendered(parsed, tokenizer, config)
    if rendered:
        events = ["rendered_text"]
    elif not parsed.is_plain:
        parsed, guard, events = _apply_special_tokens(parsed, tokenizer, config)
    prompt = parsed.prompt
    if isinstance(prompt, str):
        literal = config.on["special_tokens"] == "keep" and not rendered
        mode: Mode = "literal" if literal else "control"
        texts = [prompt + response for response in parsed.responses]  # type: ignore[operator]
        drafts = [Draft(text, ((len(prompt), len(text)),), mode) for text in texts]
        if parsed.is_plain:
            return drafts, events
    else:
        drafts, noted = _draft_messages(parsed, tokenizer, config, guard)
        events += noted
    for i, draft in enumerate(drafts):
        if not draft.text.isascii():
            drafts[i] = _check_unicode(draft, config, events)
    if guard:
        _check_separable(drafts, tokenizer)
    return drafts, events


def begins_rendered(text: str, tokenizer: Tokenizer) -> str:
    """Returns the control string of the chat template that a rendered text begins with; or none.

    Without a template any control string counts. Some templates make them of roles.
    """
    if not (found := tokenizer.controls.match(text.lstrip())):
        return ""
    begins, template = found[0], tokenizer.template
    if template is None or begins in template.source or begins == tokenizer.bos_token:
        return begins
    parts = [begins.split(role) for role in ("user", "system") if role in begins]
    return begins if any(all(p in template.source for p in of) for of in parts) else ""


def _is_rendered(parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig) -> bool:
    """Returns True for text that begins as rendered text does, or whose answers all end with EOS.

    Raises:
        Refused: such an answer begins so, too.
    """
    prompt, eos = parsed.prompt, tokenizer.eos_token
    if not isinstance(prompt, str) or config.on["special_tokens"] != "keep":
        return False
    responses: Any = parsed.responses
    begins = begins_rendered(prompt, tokenizer)
    if begins and any(response.lstrip().startswith(begins) for response in responses):
        remedy = "Leave what the prompt says out of the answers"
        raise Refused("no_common_prompt", f"an answer that begins with {begins!r}, too", remedy)
    if begins or not eos or tokenizer.controls.search(prompt):  # a prompt may quote some
        return bool(begins)
    return all(response.rstrip().endswith(eos) for response in responses)


def _check_separable(drafts: list[Draft], tokenizer: Tokenizer) -> None:
    """Refuses guarded texts whose control strings this tokenizer cannot encode by themselves."""
    names = [name for draft in drafts for name in tokenizer.controls.findall(draft.text)]
    if not tokenizer.separable.issuperset(names):
        detail = "this tokenizer cannot encode text beside its control tokens by itself"
        raise Refused("special_tokens", detail)


def _apply_special_tokens(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig
) -> tuple[Parsed, str, list[str]]:
    """Answers control strings in the record's own text; returns a guard inserted into them."""
    value: list[Any] = [parsed.prompt, parsed.responses, parsed.tools, parsed.variables]
    if _is_harmless(parsed, tokenizer.control_hint):
        return parsed, "", []
    try:
        is_text = isinstance(parsed.prompt, str)
        written = "\n".join([value[0], *value[1]]) if is_text else as_json(value)
    except TypeError as error:  # records made in Python may hold any object
        raise Refused("wrong_type", f"tools and tool calls must be JSON values: {error}") from error
    match = tokenizer.controls.search(written)
    if not match:
        return parsed, "", []
    answer = config.on["special_tokens"]
    if answer in ("drop", "error"):
        raise Refused("special_tokens", f"the text holds {match[0]!r}")
    if answer == "control":
        return parsed, "", ["special_tokens_control"]
    events = ["special_tokens_literal"]
    if isinstance(parsed.prompt, str):
        return parsed, "", events
    template = tokenizer.template_for(parsed.tools, {})
    [guard] = free_characters(written + (template.source if template else ""), 1)

    def protect(text: str) -> str:
        return tokenizer.controls.sub(lambda match: guard.join(match[0]), text)

    prompt, responses, tools, variables = map_strings(value, protect)
    parsed = parsed._replace(prompt=prompt, responses=responses, tools=tools, variables=variables)
    return parsed, guard, events


def _is_harmless(parsed: Parsed, hint: str) -> bool:
    """Returns True if a record is plain text throughout and certainly holds no control string.

    JSON around messages cannot form one, as its brackets differ from those of control strings.
    """
    if isinstance(parsed.prompt, str):
        return not any(holds(text, hint) for text in (parsed.prompt, *parsed.responses))
    if parsed.tools or parsed.variables or not hint.startswith("<"):
        return False
    for message in itertools.chain(parsed.prompt, *parsed.responses):
        content = message["content"]
        if type(content) is str and len(message) == 2:  # roles are those of ROLES
            if hint in content:
                return False
            continue
        for value in message.values():
            if not isinstance(value, str) or hint in value:
                return False
    return True


def _check_variables(variables: Mapping[str, Any], template: ChatTemplate) -> None:
    """Refuses text or lists, such as instructions and tools, that a template does not read."""
    for name, value in variables.items():
        if isinstance(value, str | list | dict) and value and name not in template.source:
            remedy = "Set a chat_template that reads it, or make turns or tools of it"
            raise Refused("unread_field", f"chat_template_kwargs.{name} {quote(value)}", remedy)


def _draft_messages(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig, guard: str
) -> tuple[list[Draft], list[str]]:
    """Renders a record of messages; returns its sequences, and events to note."""
    variables = {**config.template_variables, **(parsed.variables or {})}
    template = tokenizer.template_for(parsed.tools, variables)
    if template is None:
        rule = "chat messages need a chat template"
        remedy = "Set chat_template: a Jinja file, chatml or plain"
        raise TokenizerError(sentence(f"tokenizer {tokenizer.name}", rule, "none", remedy))
    if config.on["unread_field"] != "keep":
        _check_variables(parsed.variables or {}, template)
    drafts: list[Draft] = []
    events: list[str] = []
    written = template.written_prompt
    prompt = _template_messages(template, list(parsed.prompt))  # type: ignore[arg-type]
    prompts: dict[int, str] = {}
    for response in parsed.responses:
        messages = [*prompt, *_template_messages(template, list(response))]  # type: ignore[arg-type]
        turns = [i for i, m in enumerate(response, len(prompt)) if m["role"] == "assistant"]
        learned = turns[-1:] if config.supervised_turns == "last" else turns
        learned = [i for i in learned if SKIPPED not in response[i - len(prompt)]]
        prompts = {n: text for n, text in prompts.items() if n == len(prompt)}
        empty = _empty_turns(response, messages, learned, config)
        render = partial(render_turns, template, messages, len(prompt), parsed.tools)
        try:
            try:
                text, spans = render(learned=learned, prompts=prompts)
            except Refused:
                if not empty:
                    raise
                # A template may hide where a turn without words is: it is only read.
                learned = [i for i in learned if i not in empty]
                text, spans = render(learned=learned, prompts={})
        except Refused as refused:
            raise _refusal_with_cause(refused, template, messages, parsed.tools, config) from None
        events += ["empty_turn"] * bool(empty)
        bare = [after_empty_thinking(text, span) for span in spans]
        if bare != spans:
            spans = bare
            events.append("empty_thinking")
        checked = [] if _is_empty(response) else learned
        events += _check_rendering(
            template, messages, checked, parsed.tools, text, config, is_first=not drafts
        )
        if written and text.endswith(written):
            events.append("generation_prompt_always")
            if config.append_eos:  # it follows the answer
                text = text.removesuffix(written)
        keeps = config.on["overlong"] == "truncate_prompt"
        system_end = _system_end(template, messages, parsed.tools, text) if keeps else 0
        drafts.append(
            Draft(text, spans, "guarded" if guard else "control", guard, system_end, True)
        )
    return drafts, events


def _empty_turns(
    response: Any, messages: list[Message], learned: list[int], config: TokenizeConfig
) -> list[int]:
    """Returns the turns to learn that are empty, unless all are; refuses them by the settings."""
    empty = [i for i in learned if not has_content(messages[i])]
    if not empty or _is_empty(response):
        return []
    if config.on["empty_turn"] != "keep":
        raise Refused("empty_turn", f"message {empty[0] + 1} is empty")
    return empty


def _template_messages(template: ChatTemplate, messages: list[Message]) -> list[Message]:
    """Removes packstore's own marks, and replaces null content if the template needs text."""
    if all(len(message) == 2 for message in messages):
        return messages
    messages = [{k: v for k, v in m.items() if k != SKIPPED} for m in messages]
    if not any("tool_calls" in message for message in messages) or template.takes_null:
        return messages
    return [{**m, "content": ""} if m["content"] is None else m for m in messages]


def _refusal_with_cause(
    refused: Refused,
    template: ChatTemplate,
    messages: list[Message],
    tools: Tools,
    config: TokenizeConfig,
) -> Refused:
    """Names the cause of a refusal: a turn that is not found may not have been rendered."""
    if refused.reason != "template_refused":
        return refused
    try:
        missing = find_missing_part(template, messages, tools, template.render(messages, tools))
    except Refused:
        if any(text_arguments(messages)):
            detail = f"{refused.detail}; arguments that are JSON text may have to be objects"
            return Refused(refused.reason, detail)
        return refused
    return _unrendered(missing) if missing and config.on["unrendered"] != "keep" else refused


def _unrendered(name: str) -> Refused:
    return Refused("unrendered", f"{name} cannot be found in the rendered text")


def _check_rendering(
    template: ChatTemplate,
    messages: list[Message],
    learned: list[int],
    tools: Tools,
    text: str,
    config: TokenizeConfig,
    *,
    is_first: bool,
) -> list[str]:
    """Events to note for a dialogue: parts missing from its rendering.

    Refuses the record instead if the settings do not keep it. That the tools are shown is only
    checked for the first side.
    """
    if not (tools and is_first) and is_plain(template, messages, text):
        return []
    events = []
    missing = find_missing_part(template, messages, tools, text)
    if missing is None and is_first and not shows_tools(template, messages, tools, text):
        missing = "the tools"
    if missing is not None:
        if config.on["unrendered"] != "keep":
            raise _unrendered(missing)
        events.append("unrendered")
    if quotes_arguments(messages, text):
        events.append("arguments_quoted")
    thoughts = [messages[i].get("reasoning_content") or "" for i in learned]
    if any(thought.strip() not in text for thought in thoughts):
        events.append("reasoning_unrendered")
    return events


def _system_end(template: ChatTemplate, messages: list[Message], tools: Tools, text: str) -> int:
    if messages[0]["role"] not in ("system", "developer"):
        return 0
    try:
        system = template.render(messages[:1], tools).removesuffix(template.written_prompt)
    except Refused:  # many templates raise for a dialogue without a user turn
        return 0
    return len(system) if text.startswith(system) else 0


def _check_unicode(draft: Draft, config: TokenizeConfig, events: list[str]) -> Draft:
    if not (surrogate := _surrogate(draft.text)):
        return draft
    if config.on["invalid_unicode"] != "keep":
        raise Refused("invalid_unicode", f"surrogates not allowed: {surrogate!a}")
    if "unicode_replaced" not in events:
        events.append("unicode_replaced")
    return draft._replace(text=_SURROGATES.sub("�", draft.text))


def _surrogate(text: str) -> str:
    """The first lone surrogate of a text; empty: it is valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""


def _is_same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b) if _is_ids(a) else a == b)


def _is_ids(value: object) -> bool:
    return isinstance(value, np.ndarray)


def _is_empty(response: Any) -> bool:
    if isinstance(response, str):
        return not response or response.isspace()
    if _is_ids(response):
        return len(response) == 0
    said = [m for m in response if m["role"] == "assistant"]
    return bool(said) and not any(map(has_content, said))
