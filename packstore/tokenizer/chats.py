"""Renders the messages of a record to text, and finds the supervised turns."""

from __future__ import annotations

from packstore.config import TokenizeConfig
from packstore.errors import TokenizerError, sentence
from packstore.tokenizer.chat.assistant_spans import after_empty_thinking, render_turns
from packstore.tokenizer.chat.messages import says_something, text_arguments
from packstore.tokenizer.chat.shown import (
    is_plain,
    left_out,
    quotes_arguments,
    shows_tools,
)
from packstore.tokenizer.chat.template import ChatTemplate, Message, Tools
from packstore.tokenizer.records.sequences import Draft
from packstore.tokenizer.records.shapes import Parsed
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer


def draft_messages(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig, guard: str
) -> tuple[list[Draft], list[str]]:
    """Renders a record of messages; returns its sequences, and events to note.

    Raises:
        Refused: the template refuses the record, or no turn is supervised.
        TokenizerError: there is no chat template.
    """
    variables = {**config.template_variables, **(parsed.variables or {})}
    template = tokenizer.template_for(parsed.tools, variables)
    if template is None:
        raise TokenizerError(
            sentence(
                f"tokenizer {tokenizer.name}",
                "chat messages need a chat template",
                "none",
                "Set chat_template: a Jinja file, chatml or plain",
            )
        )
    drafts: list[Draft] = []
    events: list[str] = []
    written = template.written_prompt
    prompt = _as_taken(template, list(parsed.prompt))  # type: ignore[arg-type]
    prompts: dict[int, str] = {}
    for response in parsed.responses:
        messages = [*prompt, *_as_taken(template, list(response))]  # type: ignore[arg-type]
        prompts = {n: text for n, text in prompts.items() if n == len(prompt)}
        try:
            text, spans = render_turns(
                template,
                messages,
                len(prompt),
                parsed.tools,
                last_only=config.supervised_turns == "last",
                prompts=prompts,
            )
        except Refused as refused:
            raise _explained(refused, template, messages, parsed.tools, config) from None
        bare = [after_empty_thinking(text, span) for span in spans]
        if bare != spans:
            spans = bare
            events.append("empty_thinking")
        tools = None if drafts else parsed.tools  # checking one side for shown tools suffices
        events += _remarks(template, messages, len(prompt), tools, text, config)
        if written and text.endswith(written):
            events.append("generation_prompt_always")
            if config.append_eos:  # it follows the answer
                text = text.removesuffix(written)
        keeps = config.overlong == "truncate_prompt"
        drafts.append(
            Draft(
                text=text,
                spans=spans,
                mode="guarded" if guard else "control",
                guard=guard,
                system_end=_system_end(template, messages, parsed.tools, text) if keeps else 0,
                from_template=True,
            )
        )
    return drafts, events


def _as_taken(template: ChatTemplate, messages: list[Message]) -> list[Message]:
    """Replaces null content if the template needs text."""
    if not any("tool_calls" in message for message in messages) or template.takes_null:
        return messages
    return [{**m, "content": ""} if m["content"] is None else m for m in messages]


def _explained(
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
        missing = left_out(template, messages, tools, template.render(messages, tools))
    except Refused:
        if any(text_arguments(messages)):
            detail = f"{refused.detail}; arguments that are JSON text may have to be objects"
            return Refused(refused.reason, detail)
        return refused
    return _unrendered(missing) if missing and config.on["unrendered"] != "keep" else refused


def _unrendered(name: str) -> Refused:
    return Refused("unrendered", f"{name} cannot be found in the rendered text")


def _remarks(
    template: ChatTemplate,
    messages: list[Message],
    first: int,
    tools: Tools,
    text: str,
    config: TokenizeConfig,
) -> list[str]:
    """Events to note for a dialogue: empty turns, and parts missing from its rendering.

    Raises:
        Refused: ``empty_turn`` or ``unrendered``, if the settings do not keep such records.
    """
    if not tools and is_plain(template, messages, text):
        return []
    events = []
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    learned = turns[-1:] if config.supervised_turns == "last" else turns
    empty = [i for i in learned if not says_something(messages[i])]
    if empty and any(says_something(messages[i]) for i in turns):
        if config.on["empty_turn"] != "keep":
            raise Refused("empty_turn", f"message {empty[0] + 1} is empty")
        events.append("empty_turn")
    missing = left_out(template, messages, tools, text)
    if missing is None and not shows_tools(template, messages, tools, text):
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
