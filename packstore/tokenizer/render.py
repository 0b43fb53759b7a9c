"""Renders a parsed record as text, ready to be encoded.

Messages pass through the chat template. Control strings (``<|im_end|>``) that the
record itself holds are refused, or become control ids or plain text, as the setting
``special_tokens`` decides.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

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
"""A tag at the beginning of a text, with one white space after it."""


class Rendered(NamedTuple):
    """A rendered record.

    Attributes:
        parsed: the record, without tags that the chat template writes itself.
        drafts: one for each response: the text of prompt and response.
        events: the events to note.
    """

    parsed: Parsed
    drafts: list[Draft]
    events: list[str]


def render_record(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig
) -> Rendered:
    """Render a record.

    A message may bring the tags that the template writes around it, such as
    ``<tool_response>``. They are then removed from the message, and the record is
    rendered again.

    Raises:
        Refused: for a reason of :data:`packstore.config.REASONS`.
    """
    drafts, events = _draft(parsed, tokenizer, config)
    if not parsed.is_chat:
        return Rendered(parsed, drafts, events)

    texts = [_unguarded_text(draft) for draft in drafts]
    prompt = _without_tags(parsed.prompt, texts[0])  # every text holds the prompt
    responses = [
        _without_tags(response, text)
        for response, text in zip(parsed.responses, texts, strict=True)
    ]
    if prompt == parsed.prompt and responses == list(parsed.responses):
        return Rendered(parsed, drafts, events)

    parsed = parsed._replace(prompt=prompt, responses=responses)
    drafts, events = _draft(parsed, tokenizer, config)
    return Rendered(parsed, drafts, [*events, "tags_once"])


def _draft(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig
) -> tuple[list[Draft], list[str]]:
    """Return the drafts of a record's sequences, and events to note."""
    record_text = _text_of(parsed)
    events = _note_foreign_template(record_text, tokenizer, config)
    guard = ""
    is_rendered = _is_rendered(parsed, tokenizer, config)
    if is_rendered:
        events.append("rendered_text")
    else:
        parsed, guard, control_events = _apply_special_tokens(
            parsed, record_text, tokenizer, config
        )
        events += control_events

    if parsed.is_chat:
        drafts, chat_events = _draft_messages(parsed, tokenizer, config, guard)
        events += chat_events
    else:
        # "keep" keeps a record with control strings: they are plain text.
        is_literal = config.on["special_tokens"] == "keep" and not is_rendered
        drafts = _draft_text(parsed, "literal" if is_literal else "control")

    drafts, unicode_events = _replace_surrogates(drafts, config)
    if guard:
        _check_separable(drafts, tokenizer)
    return drafts, events + unicode_events


def _draft_text(parsed: Parsed, mode: Mode) -> list[Draft]:
    """Return the drafts of a record of text."""
    prompt = cast(str, parsed.prompt)
    responses = cast(Sequence[str], parsed.responses)
    drafts = []
    for response in responses:
        text = prompt + response
        response_span = (len(prompt), len(text))
        drafts.append(Draft(text=text, spans=(response_span,), mode=mode))
    return drafts


def _replace_surrogates(
    drafts: list[Draft], config: TokenizeConfig
) -> tuple[list[Draft], list[str]]:
    """Return drafts of valid Unicode, and events to note.

    Raises:
        Refused: a text holds surrogates, and the job does not keep such records
            (``invalid_unicode``).
    """
    try:
        "".join(draft.text for draft in drafts).encode()
    except UnicodeEncodeError as error:
        if config.on["invalid_unicode"] != "keep":
            detail = f"surrogates not allowed: {error.object[error.start]!a}"
            raise Refused("invalid_unicode", detail) from None
    else:
        return drafts, []

    # "keep" keeps the record, not its surrogates: UTF-8 has none.
    valid = [draft._replace(text=_SURROGATES.sub("�", draft.text)) for draft in drafts]
    return valid, ["unicode_replaced"]


def is_rendered_prompt(prompt: str, tokenizer: Tokenizer) -> bool:
    """Return True if a prompt begins like a dialogue rendered by a chat template, of
    this model or of another.
    """
    if beginning_of_template(prompt):
        return True
    if not holds(prompt, tokenizer.control_hint):  # faster than the pattern
        return False
    return bool(_control_at_beginning(prompt, tokenizer))


def _control_at_beginning(text: str, tokenizer: Tokenizer) -> str:
    """Return the control string at the beginning of a rendered text, or an empty text.

    The chat template must write it; without a template any control string counts.
    """
    match = tokenizer.controls.match(text.lstrip())
    template = tokenizer.template
    if match is None:
        # A template may write control strings that are plain text to its tokenizer.
        beginning = beginning_of_template(text)
        is_written = template is not None and beginning in template.source
        return beginning if is_written else ""

    control = match[0]
    if template is None or control == tokenizer.bos_token or _writes(template, control):
        return control
    return ""


def _writes(template: ChatTemplate, control: str) -> bool:
    """Return True if a template may write a control string.

    Some build it around the role: ``'<|' + message.role + '|>'``.
    """
    if control in template.source:
        return True
    for role in ("user", "system"):
        before, name, after = control.partition(role)
        if name and before in template.source and after in template.source:
            return True
    return False


def _is_rendered(parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig) -> bool:
    """Return True for text that a chat template has rendered.

    Its prompt begins with a control string of the template, or all its responses end
    with EOS.

    Raises:
        Refused: a response begins with the same control string as the prompt.
    """
    prompt = parsed.prompt
    if not isinstance(prompt, str):
        return False
    # With other settings, control strings of any text become ids, or are refused.
    if config.on["special_tokens"] != "keep":
        return False

    responses = cast(Sequence[str], parsed.responses)
    beginning = _control_at_beginning(prompt, tokenizer)
    if beginning:
        if any(response.lstrip().startswith(beginning) for response in responses):
            remedy = "Leave the text of the prompt out of the answers"
            detail = f"an answer that begins with {beginning!r}, too"
            raise Refused("no_common_prompt", detail, remedy)
        return True

    # Control strings further inside a prompt are quotations: it is plain text.
    if tokenizer.controls.search(prompt):
        return False
    eos = tokenizer.eos_token
    if not eos:
        return False
    return all(response.rstrip().endswith(eos) for response in responses)


def _unguarded_text(draft: Draft) -> str:
    """Return the text of a draft without the guard (see :func:`_insert_guard`)."""
    return draft.text.replace(draft.guard, "")


def _without_tags(messages: Any, text: str) -> list[Message]:
    """Return messages without tags around their contents that the template wrote again.

    Datasets for Hermes, for example, bring tool results in ``<tool_response>``, and
    Qwen's templates write it around them.

    Args:
        messages: the prompt or a response.
        text: the rendered dialogue.
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

    # Neighbouring parts are the text before and after one occurrence of the content.
    for before, after in itertools.pairwise(text.split(content.lstrip())):
        has_opening_tag = before.rstrip().endswith(opening_tag)
        has_closing_tag = after.lstrip().startswith(closing_tag)
        if has_opening_tag and has_closing_tag:
            # One white space inside each tag goes with it: the template writes its own.
            inner = content[beginning.end() :].removesuffix(closing_tag)
            has_trailing_space = inner[-1:].isspace()
            return {**message, "content": inner[:-1] if has_trailing_space else inner}
    return message


def _check_separable(drafts: list[Draft], tokenizer: Tokenizer) -> None:
    """Raise if the tokenizer cannot encode control strings apart from the text around
    them, as guarded texts require.
    """
    names = [
        name for draft in drafts for name in tokenizer.controls.findall(draft.text)
    ]
    if not tokenizer.separable.issuperset(names):
        detail = "this tokenizer cannot encode text beside its control tokens by itself"
        raise Refused("special_tokens", detail)


def _text_of(parsed: Parsed) -> str:
    """Return all text of a record: of a record of messages, its JSON."""
    if isinstance(parsed.prompt, str):
        responses = cast(Sequence[str], parsed.responses)
        return "\n".join([parsed.prompt, *responses])
    values = [parsed.prompt, parsed.responses, parsed.tools, parsed.variables]
    try:
        return as_json(values)
    except TypeError as error:  # records made in Python may hold any object
        raise Refused(
            "wrong_type", f"tools and tool calls must be JSON values: {error}"
        ) from error


def _note_foreign_template(
    record_text: str, tokenizer: Tokenizer, config: TokenizeConfig
) -> list[str]:
    """Return an event if a text holds control strings of another model's chat template.

    Raises:
        Refused: the job refuses control strings in text (``special_tokens``).
    """
    for pattern in tokenizer.foreign_controls:
        match = pattern.search(record_text)
        if match is None:
            continue
        if config.on["special_tokens"] in ("drop", "error"):
            detail = f"the text holds {match[0]!r}, of another model's chat template"
            raise Refused("special_tokens", detail)
        return ["foreign_template"]
    return []


def _apply_special_tokens(
    parsed: Parsed, record_text: str, tokenizer: Tokenizer, config: TokenizeConfig
) -> tuple[Parsed, str, list[str]]:
    """Apply the setting ``special_tokens`` to control strings in a record.

    Returns:
        The record, the guard inserted into its control strings (see
        :func:`_insert_guard`) or an empty text, and events to note.
    """
    match = None
    if holds(record_text, tokenizer.control_hint):
        match = tokenizer.controls.search(record_text)
    if match is None:
        return parsed, "", []

    setting = config.on["special_tokens"]
    if setting in ("drop", "error"):
        raise Refused("special_tokens", f"the text holds {match[0]!r}")
    if setting == "control":
        return parsed, "", ["special_tokens_control"]

    events = ["special_tokens_literal"]
    if not parsed.is_chat:
        return parsed, "", events  # all of the text is literal
    template = tokenizer.template_for(parsed.tools, {})  # variables change no source
    source = template.source if template else ""
    guard = free_characters(record_text + source, 1)[0]
    return _insert_guard(parsed, guard, tokenizer), guard, events


def _insert_guard(parsed: Parsed, guard: str, tokenizer: Tokenizer) -> Parsed:
    """Return a record with a guard between all characters of its control strings.

    The guard is a character that occurs in neither record nor template. In the rendered
    text it marks control strings of the record, which are encoded as plain text; the
    template's become control ids. The encoder removes it.
    """

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
    """Raise if a template does not read a variable with text, a list or an object, such
    as instructions or tools.
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
    """Return the drafts of a record of messages, and events to note."""
    template = _template_of(parsed, tokenizer, config)
    _check_variables(parsed.variables or {}, template)
    prompt = cast(list[Message], parsed.prompt)
    responses = cast(Sequence[list[Message]], parsed.responses)
    mode: Mode = "guarded" if guard else "control"

    drafts = []
    events = []
    first_dialogue = None
    for response in responses:
        dialogue = Dialogue(
            template,
            prompt,
            response,
            parsed.tools,
            config,
            first_side=first_dialogue,
        )
        first_dialogue = first_dialogue or dialogue
        draft = Draft(
            text=dialogue.text,
            spans=dialogue.spans,
            mode=mode,
            guard=guard,
            system_end=dialogue.system_end,
            from_template=True,
        )
        drafts.append(draft)
        events += dialogue.events
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
        remedy = "Set chat_template (--chat-template): a Jinja file, chatml or plain"
        raise TokenizerError(
            sentence(f"tokenizer {tokenizer.name}", rule, "none", remedy)
        )
    return template
