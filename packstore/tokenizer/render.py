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

_OPENING_TAG = re.compile(r"\s*(<[\w-]+>|\[[\w-]+\])\s?")
"""A tag at the beginning of a text."""


class Rendered(NamedTuple):
    """A record as texts.

    Attributes:
        parsed: the record as it was rendered.
        drafts: the texts of its sequences.
        events: the events to note.
    """

    parsed: Parsed
    drafts: list[Draft]
    events: list[str]


def render_record(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig
) -> Rendered:
    """Return the texts of a record's sequences.

    Tags that the template writes around text which stands in them already are written
    once.

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
    """Return the texts of a record's sequences, and events to note."""
    guard = ""
    text = _text_of(parsed)
    events = _note_foreign_template(text, tokenizer, config)
    is_rendered = _is_rendered(parsed, tokenizer, config)
    if is_rendered:
        events.append("rendered_text")
    else:
        parsed, guard, control_events = _apply_special_tokens(
            parsed, text, tokenizer, config
        )
        events += control_events
    if isinstance(parsed.prompt, str):
        is_literal = config.on["special_tokens"] == "keep" and not is_rendered
        drafts = _draft_text(parsed, "literal" if is_literal else "control")
    else:
        drafts, chat_events = _draft_messages(parsed, tokenizer, config, guard)
        events += chat_events
    drafts, unicode_events = _replace_surrogates(drafts, config)
    if guard:
        _check_separable(drafts, tokenizer)
    return drafts, events + unicode_events


def _draft_text(parsed: Parsed, mode: Mode) -> list[Draft]:
    """Return the sequences of a record of text."""
    prompt: Any = parsed.prompt
    drafts = []
    for response in parsed.responses:
        text = prompt + response
        drafts.append(Draft(text, ((len(prompt), len(text)),), mode))
    return drafts


def _replace_surrogates(
    drafts: list[Draft], config: TokenizeConfig
) -> tuple[list[Draft], list[str]]:
    """Return texts of valid Unicode, and events to note.

    Raises:
        Refused: the job does not replace surrogates (``invalid_unicode``).
    """
    try:
        "".join(draft.text for draft in drafts).encode()
    except UnicodeEncodeError as error:
        if config.on["invalid_unicode"] != "keep":
            detail = f"surrogates not allowed: {error.object[error.start]!a}"
            raise Refused("invalid_unicode", detail) from None
    else:
        return drafts, []
    valid = [draft._replace(text=_SURROGATES.sub("�", draft.text)) for draft in drafts]
    return valid, ["unicode_replaced"]


def is_rendered_prompt(prompt: str, tokenizer: Tokenizer) -> bool:
    """Return True if a text begins as chat templates render dialogues, also of other
    models.
    """
    if beginning_of_template(prompt):
        return True
    return holds(prompt, tokenizer.control_hint) and bool(
        begins_rendered(prompt, tokenizer)
    )


def begins_rendered(text: str, tokenizer: Tokenizer) -> str:
    """Return the control string of the chat template that a rendered text begins with;
    or none.

    Without a template any control string counts.
    """
    match = tokenizer.controls.match(text.lstrip())
    template = tokenizer.template
    if match is None:
        letters = beginning_of_template(text)
        return letters if template is not None and letters in template.source else ""
    control = match[0]
    if template is None or control == tokenizer.bos_token or _writes(template, control):
        return control
    return ""


def _writes(template: ChatTemplate, control: str) -> bool:
    """Return True if a template may write a control string; some make it of a role."""
    if control in template.source:
        return True
    for role in ("user", "system"):
        before, name, after = control.partition(role)
        if name and before in template.source and after in template.source:
            return True
    return False


def _is_rendered(parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig) -> bool:
    """Return True for text that begins as rendered text does, or has EOS behind all
    answers.

    Raises:
        Refused: an answer begins so, too.
    """
    prompt = parsed.prompt
    eos = tokenizer.eos_token
    if not isinstance(prompt, str) or config.on["special_tokens"] != "keep":
        return False
    responses: Any = parsed.responses
    beginning = begins_rendered(prompt, tokenizer)
    if beginning:
        if any(response.lstrip().startswith(beginning) for response in responses):
            remedy = "Leave the text of the prompt out of the answers"
            detail = f"an answer that begins with {beginning!r}, too"
            raise Refused("no_common_prompt", detail, remedy)
        return True
    if not eos or tokenizer.controls.search(prompt):  # a prompt may quote some
        return False
    return all(response.rstrip().endswith(eos) for response in responses)


def _without_tags(messages: Any, text: str) -> list[Message]:
    """Return messages without the tags that stand twice around their contents in a
    rendering.

    Sets for Hermes have results in ``<tool_response>``, which Qwen's templates write
    around them.
    """
    return [_without_tag(message, text) for message in messages]


def _without_tag(message: Message, text: str) -> Message:
    content = (message["content"] or "").rstrip()
    beginning = _OPENING_TAG.match(content)
    if beginning is None:
        return message
    opening_tag = beginning[1]
    closing_tag = f"{opening_tag[0]}/{opening_tag[1:]}"
    if not content.endswith(closing_tag):
        return message
    for before, after in itertools.pairwise(text.split(content.lstrip())):
        if before.rstrip().endswith(opening_tag) and after.lstrip().startswith(
            closing_tag
        ):
            inner = content[beginning.end() :].removesuffix(closing_tag)
            has_trailing_space = inner[-1:].isspace()
            return {**message, "content": inner[:-1] if has_trailing_space else inner}
    return message


def _check_separable(drafts: list[Draft], tokenizer: Tokenizer) -> None:
    """Raise for guarded texts with control strings that this tokenizer cannot encode
    alone.
    """
    names = [
        name for draft in drafts for name in tokenizer.controls.findall(draft.text)
    ]
    if not tokenizer.separable.issuperset(names):
        detail = "this tokenizer cannot encode text beside its control tokens by itself"
        raise Refused("special_tokens", detail)


def _text_of(parsed: Parsed) -> str:
    """Return all text of a record, of messages as JSON."""
    prompt: Any = parsed.prompt
    if isinstance(prompt, str):
        return "\n".join([prompt, *parsed.responses])
    try:
        return as_json([prompt, parsed.responses, parsed.tools, parsed.variables])
    except TypeError as error:  # records made in Python may hold any object
        raise Refused(
            "wrong_type", f"tools and tool calls must be JSON values: {error}"
        ) from error


def _note_foreign_template(
    text: str, tokenizer: Tokenizer, config: TokenizeConfig
) -> list[str]:
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
    """Apply the setting for control strings in a record's own text.

    Returns:
        The record, a guard inserted into its control strings, and events to note.
    """
    match = None
    if tokenizer.control_hint in text:
        match = tokenizer.controls.search(text)
    if match is None:
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
    source = template.source if template else ""
    guard = free_characters(text + source, 1)[0]
    return _insert_guard(parsed, guard, tokenizer), guard, events


def _insert_guard(parsed: Parsed, guard: str, tokenizer: Tokenizer) -> Parsed:
    """Return a record with a guard between all characters of its control strings."""

    def guard_match(match: re.Match[str]) -> str:
        return guard.join(match[0])

    def guard_controls(text: str) -> str:
        return tokenizer.controls.sub(guard_match, text)

    return parsed._replace(
        prompt=map_strings(parsed.prompt, guard_controls),
        responses=map_strings(parsed.responses, guard_controls),
        tools=map_strings(parsed.tools, guard_controls),
        variables=map_strings(parsed.variables, guard_controls),
    )


def _check_variables(variables: Mapping[str, Any], template: ChatTemplate) -> None:
    """Raise for text or lists, such as instructions and tools, that a template does not
    read.
    """
    for name, value in variables.items():
        if not isinstance(value, str | list | dict) or not value:
            continue
        if name in template.source:
            continue
        remedy = "Set a chat_template that reads it, or make turns or tools of it"
        raise Refused(
            "unread_field", f"chat_template_kwargs.{name} {quote(value)}", remedy
        )


def _draft_messages(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig, guard: str
) -> tuple[list[Draft], list[str]]:
    """Return the sequences of a record of messages, and events to note."""
    template = _template_of(parsed, tokenizer, config)
    _check_variables(parsed.variables or {}, template)
    prompt: Any = parsed.prompt
    responses: Any = parsed.responses
    mode: Mode = "guarded" if guard else "control"
    drafts = []
    events = []
    first_side = None
    for response in responses:
        side = Dialogue(template, prompt, response, parsed.tools, config, first_side)
        first_side = first_side or side
        drafts.append(Draft(side.text, side.spans, mode, guard, side.system_end, True))
        events += side.events
    return drafts, events


def _template_of(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig
) -> ChatTemplate:
    """Return the chat template of a record, with its tools and variables.

    Raises:
        TokenizerError: the tokenizer has none.
    """
    template = tokenizer.template
    variables = {**config.template_variables, **(parsed.variables or {})}
    if parsed.tools or variables:
        template = tokenizer.template_for(parsed.tools, variables)
    if template is None:
        rule = "chat messages need a chat template"
        remedy = "Set chat_template: a Jinja file, chatml or plain"
        raise TokenizerError(
            sentence(f"tokenizer {tokenizer.name}", rule, "none", remedy)
        )
    return template
