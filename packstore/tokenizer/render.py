"""Renders parsed records as texts: template, control strings, and supervised spans."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from packstore.config import TokenizeConfig
from packstore.errors import TokenizerError, quote, sentence
from packstore.tokenizer.control import beginning_of_template, free_characters, holds
from packstore.tokenizer.dialogue.dialogue import Dialogue
from packstore.tokenizer.dialogue.messages import map_strings
from packstore.tokenizer.dialogue.template import ChatTemplate, Message, as_json
from packstore.tokenizer.records.parsed import Parsed
from packstore.tokenizer.records.sequences import Draft, Mode
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer

_SURROGATES = re.compile("[\ud800-\udfff]")

_OPENS = re.compile(r"\s*(<[\w-]+>|\[[\w-]+\])\s?")
"""A tag at the beginning of a text."""


class Rendered(NamedTuple):
    """A record as texts.

    Attributes:
        parsed: the record as it was rendered.
        drafts: the texts of its sequences.
        events: what is to be noted.
    """

    parsed: Parsed
    drafts: list[Draft]
    events: list[str]


def render_record(parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig) -> Rendered:
    """Return the texts of a record's sequences.

    Tags that the template writes around text which stands in them already are written once.

    Raises:
        Refused: for a reason of :data:`packstore.config.REASONS`.
    """
    drafts, events = _draft(parsed, tokenizer, config)
    if not parsed.is_chat:
        return Rendered(parsed, drafts, events)
    texts = [draft.text.replace(draft.guard, "") for draft in drafts]
    prompt = _without_tags(parsed.prompt, texts[0])
    responses = [
        _without_tags(response, text)
        for response, text in zip(parsed.responses, texts, strict=True)
    ]
    if [prompt, *responses] == [parsed.prompt, *parsed.responses]:
        return Rendered(parsed, drafts, events)
    parsed = parsed._replace(prompt=prompt, responses=responses)
    drafts, events = _draft(parsed, tokenizer, config)
    return Rendered(parsed, drafts, [*events, "tags_once"])


def _draft(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig
) -> tuple[list[Draft], list[str]]:
    """Returns the texts of a record's sequences, and events to note."""
    guard = ""
    text = _text_of(parsed)
    events = _note_foreign_template(text, tokenizer, config)
    is_rendered = _is_rendered(parsed, tokenizer, config)
    if is_rendered:
        events.append("rendered_text")
    else:
        parsed, guard, noted = _apply_special_tokens(parsed, text, tokenizer, config)
        events += noted
    prompt = parsed.prompt
    if isinstance(prompt, str):
        is_literal = config.on["special_tokens"] == "keep" and not is_rendered
        mode: Mode = "literal" if is_literal else "control"
        texts = [prompt + response for response in parsed.responses]  # type: ignore[operator]
        drafts = [Draft(text, ((len(prompt), len(text)),), mode) for text in texts]
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


def is_rendered_prompt(prompt: str, tokenizer: Tokenizer) -> bool:
    """Return True if a text begins as chat templates render dialogues, also of other models."""
    if beginning_of_template(prompt):
        return True
    return holds(prompt, tokenizer.control_hint) and bool(begins_rendered(prompt, tokenizer))


def begins_rendered(text: str, tokenizer: Tokenizer) -> str:
    """Returns the control string of the chat template that a rendered text begins with; or none.

    Without a template any control string counts. Some templates make them of roles.
    """
    template = tokenizer.template
    found = tokenizer.controls.match(text.lstrip())
    if not found:
        begins = beginning_of_template(text)
        return begins if template is not None and begins in template.source else ""
    begins = found[0]
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


def _text_of(parsed: Parsed) -> str:
    """Return all text of a record, of messages as JSON."""
    prompt: Any = parsed.prompt
    if isinstance(prompt, str):
        return "\n".join([prompt, *parsed.responses])  # type: ignore[list-item]
    try:
        return as_json([prompt, parsed.responses, parsed.tools, parsed.variables])
    except TypeError as error:  # records made in Python may hold any object
        raise Refused("wrong_type", f"tools and tool calls must be JSON values: {error}") from error


def _note_foreign_template(text: str, tokenizer: Tokenizer, config: TokenizeConfig) -> list[str]:
    """Return an event if a text holds control strings of another model's chat template.

    Raises:
        Refused: the job refuses control strings in text (``special_tokens``).
    """
    for pattern in tokenizer.foreign_controls:
        match = pattern.search(text)
        if match is None:
            continue
        if config.on["special_tokens"] in ("drop", "error"):
            detail = f"the text holds {match[0]!r}, of another model's chat template"
            raise Refused("special_tokens", detail)
        return ["foreign_template"]
    return []


def _apply_special_tokens(
    parsed: Parsed, text: str, tokenizer: Tokenizer, config: TokenizeConfig
) -> tuple[Parsed, str, list[str]]:
    """Answers control strings in the record's own text; returns a guard inserted into them."""
    match = None
    if tokenizer.control_hint in text:
        match = tokenizer.controls.search(text)
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
    [guard] = free_characters(text + (template.source if template else ""), 1)

    def protect(text: str) -> str:
        return tokenizer.controls.sub(lambda match: guard.join(match[0]), text)

    value: list[Any] = [parsed.prompt, parsed.responses, parsed.tools, parsed.variables]
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
    template = tokenizer.template
    if tools or variables:
        template = tokenizer.template_for(tools, variables)
    if template is None:
        rule = "chat messages need a chat template"
        remedy = "Set chat_template: a Jinja file, chatml or plain"
        raise TokenizerError(sentence(f"tokenizer {tokenizer.name}", rule, "none", remedy))
    _check_variables(parsed.variables or {}, template)
    prompt: Any = parsed.prompt
    responses: Any = parsed.responses
    sides: list[Dialogue] = []
    for response in responses:
        sides.append(Dialogue(template, prompt, response, tools, config, *sides[:1]))
    mode: Mode = "guarded" if guard else "control"
    drafts = [Draft(one.text, one.spans, mode, guard, one.system_end, True) for one in sides]
    return drafts, [event for one in sides for event in one.events]
