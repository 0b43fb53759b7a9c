"""Converts a parsed record to texts: template, control strings, and supervised spans."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import TokenizerError, quote, sentence
from packstore.tokenizer.control import free_characters, holds
from packstore.tokenizer.dialogue.dialogue import Dialogue
from packstore.tokenizer.dialogue.messages import has_content, map_strings, without_thinking
from packstore.tokenizer.dialogue.sandbox import as_json
from packstore.tokenizer.dialogue.template import ChatTemplate, Message
from packstore.tokenizer.records.parse import Parsed
from packstore.tokenizer.records.sequences import Draft, Mode
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer

_SURROGATES = re.compile("[\ud800-\udfff]")

_OPENS = re.compile(r"\s*(<[\w-]+>|\[[\w-]+\])\s?")
"""A tag at the beginning of a text."""


def check_responses(parsed: Parsed, config: TokenizeConfig) -> Parsed:
    """Strip thinking if so configured, and refuse empty responses."""
    if config.thinking == "strip":
        prompt: Any = parsed.prompt
        prompt = without_thinking(prompt) if parsed.is_chat else prompt
        responses: Any = [without_thinking(response) for response in parsed.responses]
        parsed = parsed._replace(prompt=prompt, responses=responses)
    if config.on["empty_side"] != "keep":
        for i, response in enumerate(parsed.responses):
            if _is_empty(response):
                raise Refused("empty_side", f"response {i + 1} of {len(parsed.responses)} empty")
    return parsed


def draft_record(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig
) -> tuple[Parsed, list[Draft], list[str]]:
    """Returns a record as it was rendered, the texts of its sequences, and events to note.

    Tags that the template writes around text which stands in them already are written once.
    """
    drafts, events = _draft(parsed, tokenizer, config)
    if parsed.is_chat:
        texts = [draft.text.replace(draft.guard, "") for draft in drafts]
        prompt = _without_tags(parsed.prompt, texts[0])
        responses = [*map(_without_tags, parsed.responses, texts)]
        if [prompt, *responses] != [parsed.prompt, *parsed.responses]:
            parsed = parsed._replace(prompt=prompt, responses=responses)
            drafts, events = _draft(parsed, tokenizer, config)
            events.append("tags_once")
    return parsed, drafts, events


def _draft(
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
    try:
        "".join(draft.text for draft in drafts).encode()
    except UnicodeEncodeError as error:
        if config.on["invalid_unicode"] != "keep":
            found = f"surrogates not allowed: {error.object[error.start]!a}"
            raise Refused("invalid_unicode", found) from None
        drafts = [one._replace(text=_SURROGATES.sub("�", one.text)) for one in drafts]
        events.append("unicode_replaced")
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


def _without_tags(messages: Any, text: str) -> list[Message]:
    """Returns messages without the tags that stand twice around their contents in a rendering.

    Sets for Hermes have results in ``<tool_response>``, which Qwen's templates write around them.
    """
    bare: list[Message] = []
    for message in messages:
        content = (message["content"] or "").rstrip()
        if begins := _OPENS.match(content):
            opens = begins[1]
            closes = f"{opens[0]}/{opens[1:]}"
            if content.endswith(closes) and any(
                before.rstrip().endswith(opens) and after.lstrip().startswith(closes)
                for before, after in itertools.pairwise(text.split(content.lstrip()))
            ):
                inner = content[begins.end() :].removesuffix(closes)
                message = {**message, "content": inner[: len(inner) - inner[-1:].isspace()]}
        bare.append(message)
    return bare


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
    try:
        is_text = isinstance(parsed.prompt, str)
        written = "\n".join([value[0], *value[1]]) if is_text else as_json(value)
    except TypeError as error:  # records made in Python may hold any object
        raise Refused("wrong_type", f"tools and tool calls must be JSON values: {error}") from error
    match = holds(written, tokenizer.control_hint) and tokenizer.controls.search(written)
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
    tools, variables = parsed.tools, {**config.template_variables, **(parsed.variables or {})}
    template = tokenizer.template_for(tools, variables)
    if template is None:
        rule = "chat messages need a chat template"
        remedy = "Set chat_template: a Jinja file, chatml or plain"
        raise TokenizerError(sentence(f"tokenizer {tokenizer.name}", rule, "none", remedy))
    if config.on["unread_field"] != "keep":
        _check_variables(parsed.variables or {}, template)
    prompt: Any = parsed.prompt
    responses: Any = parsed.responses
    sides: list[Dialogue] = []
    for response in responses:
        sides.append(Dialogue(template, prompt, response, tools, config, *sides[:1]))
    mode: Mode = "guarded" if guard else "control"
    drafts = [Draft(one.text, one.spans, mode, guard, one.system_end, True) for one in sides]
    return drafts, [event for one in sides for event in one.events]


def _is_empty(response: Any) -> bool:
    if isinstance(response, str):
        return not response or response.isspace()
    if isinstance(response, np.ndarray):
        return len(response) == 0
    said = [m for m in response if m["role"] == "assistant"]
    return bool(said) and not any(map(has_content, said))
